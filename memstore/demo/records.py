"""The records of the ranks: lines of JSON that are written as things happen, so that a kill loses none of them.

All hosts of the demo are on one machine; so one folder holds all records. The checks must not depend on the program
that they check; so this file uses nothing of the store.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Joined:
    """The record of a rank that entered its training function and joined the job."""

    attempt: int
    rank: int
    host: str
    entered_s: float  # wall clock at the begin of the training function
    connect_s: float  # how long connect() took
    wall_s: float


@dataclass(frozen=True)
class Restored:
    """The result of one rank's get(); `bytes_by_tier` and `ranks_moved` belong to the whole job."""

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
    """The record of one step of one rank; `loss` is the mean of the ranks, as the exact text of `float.hex`."""

    attempt: int
    rank: int
    step: int
    loss: str
    committed: int  # newest committed step of this attempt by this rank's tickets, -1 for none
    stall_s: float
    wall_s: float


Record = Joined | Restored | StepRun
_KINDS: dict[str, type[Any]] = {"joined": Joined, "restored": Restored, "step": StepRun}


class Journal:
    """A file of records of one process."""

    def __init__(self, folder: str | Path, rank: int) -> None:
        self._file = (Path(folder) / f"rank{rank}-{os.getpid()}.jsonl").open("a", encoding="utf-8", buffering=1)

    def write(self, record: Record) -> None:
        """Append one record; it survives a kill of this process."""
        kind = next(kind for kind, cls in _KINDS.items() if isinstance(record, cls))
        self._file.write(json.dumps({"kind": kind, **asdict(record)}) + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


@dataclass(frozen=True)
class Run:
    """The records of all ranks of one training run."""

    joined: list[Joined] = field(default_factory=list)
    restored: list[Restored] = field(default_factory=list)
    steps: list[StepRun] = field(default_factory=list)

    def losses(self) -> dict[int, str]:
        """Return step -> loss of the newest attempt that ran the step."""
        return {s.step: s.loss for s in sorted(self.steps, key=lambda s: s.attempt)}


def read_run(folder: str | Path) -> Run:
    """Return the records of a folder's journals, without lines that a kill has cut short."""
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
