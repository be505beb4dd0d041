"""The claims of the demo, as functions over records alone: each returns yes or no, with the numbers behind it.

A run that restores must pass them. The control run does not restore, and must fail those that need a restore.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from memstore.demo.records import RunRecord


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
