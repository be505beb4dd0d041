"""The records of the ranks, lines of JSON that a kill does not lose, and the claims of the demo over them."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

# -- records ------------------------------------------------------------------------------------------
# The records of the ranks: lines of JSON that are written as things happen, so that a kill loses none of them.
#
# All hosts of the demo are on one machine; so one folder holds all records. The checks must not depend on the program
# that they check; so this file uses nothing of the store.


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


# -- checks -------------------------------------------------------------------------------------------
# The claims of the demo, as functions over records alone: each returns yes or no, with the numbers behind it.
#
# A run that restores must pass them. The control run does not restore, and must fail those that need a restore.


@dataclass(frozen=True)
class Kill:
    """The kill: the host, the newest committed step in the store's status before it, and the time."""

    host: str
    committed: int
    wall_s: float


@dataclass(frozen=True)
class DemoCheck:
    """One claim, whether it holds, and the values behind that."""

    name: str
    is_ok: bool
    detail: str


RESUMED, NOTHING_REDONE, FROM_PEER, SAME_LOSSES = "resumed", "nothing-redone", "from-peer", "same-losses"
KEPT = "processes-kept"
# Without SAME_LOSSES: a fresh start repeats the same losses, only later.
NEED_RESTORE = (RESUMED, NOTHING_REDONE, FROM_PEER)


def check_all(run: RunRecord, undisturbed: RunRecord, kill: Kill, steps_count: int) -> list[DemoCheck]:
    """Return every check of a run that lost a host, and whose ranks were all started again."""
    return [
        _check_resumed(run, kill),
        _check_nothing_redone(run, kill),
        _check_from_peer(run, kill),
        _check_same_losses(run, undisturbed, steps_count),
    ]


def check_in_place(run: RunRecord, undisturbed: RunRecord, kill: Kill, steps_count: int) -> list[DemoCheck]:
    """Return every check of a run that lost a host, and of which only the lost rank was started again.

    The new process may be on the host that has the copy: then no byte crosses the wire.
    """
    return [
        _check_resumed(run, kill),
        _check_nothing_redone(run, kill),
        check_kept(run, kill),
        _check_same_losses(run, undisturbed, steps_count),
    ]


def killed_attempt(run: RunRecord, kill: Kill) -> int:
    """Return the attempt that was training when the host died."""
    return max((j.attempt for j in run.joined if j.wall_s <= kill.wall_s), default=0)


def committed_step(run: RunRecord, kill: Kill) -> int:
    """Return the newest committed step at the kill.

    That is the newest one in the store's status, in a rank's tickets or in the restore. The restore counts because a
    step may be committed so shortly before the kill that neither status nor ticket showed it.
    """
    killed = killed_attempt(run, kill)
    announced = [s.committed for s in run.steps if s.attempt == killed]
    restored = sorted((r.attempt, r.step) for r in run.restored if r.attempt > killed)
    return max([kill.committed, *announced, *(step for _, step in restored[:1])])


def steps_redone(run: RunRecord) -> list[int]:
    """Return the steps that more than one attempt ran to their end."""
    runs = Counter(step for _, step in {(s.attempt, s.step) for s in run.steps})
    return sorted(step for step, count in runs.items() if count > 1)


def _check_resumed(run: RunRecord, kill: Kill) -> DemoCheck:
    """Check that the first step after the kill is the newest committed step + 1."""
    committed, killed = committed_step(run, kill), killed_attempt(run, kill)
    later = min(((s.attempt, s.step) for s in run.steps if s.attempt > killed), default=None)
    if later is None:
        return DemoCheck(RESUMED, False, f"no step ran after the kill; step {committed} was committed")
    return DemoCheck(
        RESUMED, later[1] == committed + 1, f"first step after the kill {later[1]}, newest committed {committed}"
    )


def _check_nothing_redone(run: RunRecord, kill: Kill) -> DemoCheck:
    """Check that no committed step ran twice; a step that was not committed at the kill may, and is counted."""
    committed, redone = committed_step(run, kill), steps_redone(run)
    bad = [step for step in redone if step <= committed]
    detail = f"{len(redone)} steps ran twice, {len(bad)} of them committed before the kill"
    return DemoCheck(NOTHING_REDONE, not bad, detail)


def _check_from_peer(run: RunRecord, kill: Kill) -> DemoCheck:
    """Check that the ranks of the killed host got bytes from a peer's memory, and none from durable storage."""
    killed = killed_attempt(run, kill)
    ranks = sorted({j.rank for j in run.joined if j.attempt == killed and j.host == kill.host})
    restored = [r for r in run.restored if r.attempt > killed]
    nbytes = {t: max((r.bytes_by_tier.get(t, 0) for r in restored), default=0) for t in ("peer", "durable")}
    moved = {rank for r in restored for rank in r.ranks_moved}
    is_ok = bool(ranks) and set(ranks) <= moved and nbytes["peer"] > 0 and nbytes["durable"] == 0
    detail = f"ranks of {kill.host}: {ranks}, ranks restored over the wire: {sorted(moved)}, {nbytes['peer']:,} bytes"
    return DemoCheck(FROM_PEER, is_ok, detail)


def check_kept(run: RunRecord, kill: Kill) -> DemoCheck:
    """Check that every rank that was not on the killed host went on in its process, and that the others did not."""
    killed = killed_attempt(run, kill)
    before = {j.rank: j for j in run.joined if j.attempt == killed}
    after = {j.rank: j.pid for j in run.joined if j.attempt > killed}
    lost = sorted(rank for rank, joined in before.items() if joined.host == kill.host)
    kept = sorted(rank for rank, joined in before.items() if after.get(rank) == joined.pid)
    others = sorted(before.keys() - lost)
    is_ok = bool(lost) and kept == others and set(after) == set(before)
    pids = ", ".join(f"rank {rank}: {before[rank].pid} and {after.get(rank, 'none')}" for rank in sorted(before))
    return DemoCheck(KEPT, is_ok, f"{len(kept)} of {len(others)} survivors kept their process ({pids})")


def _check_same_losses(run: RunRecord, undisturbed: RunRecord, steps_count: int) -> DemoCheck:
    """Check that every loss of every rank and attempt equals the uninterrupted run's, and that none is missing."""
    expected = undisturbed.losses()
    missing = sorted(set(range(steps_count)) - (run.losses().keys() & expected.keys()))
    other = sorted({s.step for s in [*run.steps, *undisturbed.steps] if s.loss != expected.get(s.step)})
    detail = f"{steps_count - len(missing) - len(other)} of {steps_count} values equal, bit for bit"
    if missing or other:
        detail += f"; missing {missing[:5]}, other {other[:5]}"
    return DemoCheck(SAME_LOSSES, not missing and not other, detail)
