"""The records of the ranks: lines of JSON that are written as things happen, so that a kill loses none of them.

All hosts of the demo are on one machine; so one folder holds all records. The checks must not depend on the program
that they check; so this file uses nothing of the store.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec


class JoinedRecord(msgspec.Struct, frozen=True, tag="joined", tag_field="kind"):
    """The record of a rank that entered its training function and joined the job."""

    attempt: int
    rank: int
    host: str
    pid: int
    entered_s: float  # wall clock at the begin of the training function
    connect_s: float  # how long connect() took
    wall_s: float


class RestoredRecord(msgspec.Struct, frozen=True, tag="restored", tag_field="kind"):
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


class StepRun(msgspec.Struct, frozen=True, tag="step", tag_field="kind"):
    """The record of one step of one rank; `loss` is the mean of the ranks, as the exact text of `float.hex`."""

    attempt: int
    rank: int
    step: int
    loss: str
    committed: int  # newest committed step of this attempt by this rank's tickets, -1 for none
    stall_s: float
    wall_s: float


Record = JoinedRecord | RestoredRecord | StepRun
_DECODER: msgspec.json.Decoder[Record] = msgspec.json.Decoder(Record)


class RunRecord(msgspec.Struct, frozen=True):
    """The records of all ranks of one training run."""

    joined: list[JoinedRecord] = []
    restored: list[RestoredRecord] = []
    steps: list[StepRun] = []

    def losses(self) -> dict[int, str]:
        """Return step -> loss of the newest attempt that ran the step."""
        return {s.step: s.loss for s in sorted(self.steps, key=lambda s: s.attempt)}


def write(folder: str | Path, record: Record) -> None:
    """Append one record to the journal of this process; it survives a kill of the process."""
    with (Path(folder) / f"rank{record.rank}-{os.getpid()}.jsonl").open("ab") as file:
        file.write(msgspec.json.encode(record) + b"\n")


def read_run(folder: str | Path) -> RunRecord:
    """Return the records of a folder's journals, without lines that a kill has cut short."""
    lines = [line for path in Path(folder).glob("*.jsonl") for line in path.read_bytes().splitlines(keepends=True)]
    records = [_DECODER.decode(line) for line in lines if line.endswith(b"\n")]
    records.sort(key=lambda record: (record.wall_s, record.rank))

    def of(kind: type[Any]) -> list[Any]:
        return [record for record in records if isinstance(record, kind)]

    return RunRecord(of(JoinedRecord), of(RestoredRecord), of(StepRun))
