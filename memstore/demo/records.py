"""What the ranks saw, one line of JSON each, written as it happens: a killed process keeps what it wrote.

The demo's hosts are on one machine, so one folder serves them all. The store has no part in this file: the
checks must not believe the program they check.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Joined:
    """A rank entered its training function and joined the job."""

    attempt: int
    rank: int
    host: str
    entered_s: float  # wall clock, when the training function began
    connect_s: float  # how long connect() took
    wall_s: float


@dataclass(frozen=True)
class Restored:
    """What one rank's get() returned; `bytes_by_tier` and `ranks_moved` are of the whole job."""

    attempt: int
    rank: int
    step: int
    nbytes: int
    verdict: str
    steps_lost: int
    ranks_moved: tuple[int, ...]
    bytes_by_tier: dict[str, int]
    seconds_by_phase: dict[str, float]
    get_s: float  # how long get() took
    wall_s: float


@dataclass(frozen=True)
class StepRun:
    """One rank ran one step; `loss` is the mean over the ranks, as the exact text of `float.hex`."""

    attempt: int
    rank: int
    step: int
    loss: str
    committed: int  # newest step of this attempt that this rank's tickets call committed, -1 for none
    stall_s: float
    wall_s: float


Record = Joined | Restored | StepRun
_KINDS: dict[str, type[Any]] = {"joined": Joined, "restored": Restored, "step": StepRun}


class Journal:
    """Appends records of one process to a file of its own."""

    def __init__(self, folder: str | Path, rank: int) -> None:
        self._file = (Path(folder) / f"rank{rank}-{os.getpid()}.jsonl").open("a", encoding="utf-8", buffering=1)

    def write(self, record: Record) -> None:
        """Append one line; the operating system has it when this returns."""
        kind = next(kind for kind, cls in _KINDS.items() if isinstance(record, cls))
        self._file.write(json.dumps({"kind": kind, **asdict(record)}) + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


@dataclass(frozen=True)
class Run:
    """Everything the ranks of one training run wrote."""

    joined: list[Joined] = field(default_factory=list)
    restored: list[Restored] = field(default_factory=list)
    steps: list[StepRun] = field(default_factory=list)

    def losses(self) -> dict[int, str]:
        """Step -> loss of the newest attempt that ran it."""
        return {s.step: s.loss for s in sorted(self.steps, key=lambda s: s.attempt)}


def read_run(folder: str | Path) -> Run:
    """Return what is in the journals; a line that a kill cut short is left out."""
    run = Run()
    lists: dict[type[Any], list[Any]] = {Joined: run.joined, Restored: run.restored, StepRun: run.steps}
    for path in sorted(Path(folder).glob("*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
            if not line.endswith("\n"):
                continue
            values = json.loads(line)
            cls = _KINDS[values.pop("kind")]
            if cls is Restored:
                values["ranks_moved"] = tuple(values["ranks_moved"])
            lists[cls].append(cls(**values))
    for records in lists.values():
        records.sort(key=lambda r: (r.wall_s, r.rank))
    return run
