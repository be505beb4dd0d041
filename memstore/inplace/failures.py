"""The same failure of the training function again and again: a bug, which no restart repairs. Pure."""

from __future__ import annotations

import traceback
from collections import defaultdict

import msgspec

REPEATS = 3


class Failure(msgspec.Struct, frozen=True):
    """An exception that left the training function on some rank and is no loss of another one.

    Attributes:
        run: Of the worker group that the rank belonged to.
        generation: In that run.
        rank: Whose function raised.
        step: The newest step that this rank had put or restored; None if there was none.
        kind: The exception's class, and the line that raised it.
        text: The traceback.
    """

    run: str
    generation: int
    rank: int
    step: int | None
    kind: str
    text: str


def failure_of(error: BaseException, *, run: str, generation: int, rank: int, step: int | None) -> Failure:
    """Return what an exception says of a rank's failure."""
    raised = traceback.extract_tb(error.__traceback__)[-1:]
    where = f"{raised[0].filename}:{raised[0].lineno}" if raised else "?"
    text = "".join(traceback.format_exception(error)).encode("utf-8", "backslashreplace").decode()
    return Failure(run, generation, rank, step, f"{type(error).__qualname__} in {where}", text)


class Failures:
    """All failures of a job, over its worker groups."""

    def __init__(self) -> None:
        self._generations: dict[tuple[int | None, str], set[tuple[str, int]]] = defaultdict(set)

    def is_hopeless(self, failure: Failure) -> bool:
        """Take a failure; return whether it has come in REPEATS generations at one step. Ranks of one count once."""
        generations = self._generations[failure.step, failure.kind]
        generations.add((failure.run, failure.generation))
        return len(generations) >= REPEATS
