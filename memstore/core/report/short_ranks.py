"""Which ranks lack copies of the newest committed step, where the rest lies, where repair goes. Pure (R18, R29).

Follows `repair.py`, which orders the copies, and decides nothing. Read `problems.py` for the words.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from memstore.core.capacity.reservations import Reservations
from memstore.core.cluster.job import Attempt, Job
from memstore.core.cluster.state import ClusterState
from memstore.core.repair.pushes import Pushes
from memstore.core.targets.targets import ClusterView
from memstore.core.wire.status_rows import ShortRow
from recovery.inventory import ShardId, StepId

RANKS_NAMED_MAX = 64  # looked at for one status; how many there are is counted beside it


@dataclass(frozen=True, slots=True)
class RepairView:
    """Reasons why a copy is not made: hosts, targets, room and what repair leaves alone."""

    state: ClusterState
    view: ClusterView
    room: Reservations
    pushes: Pushes


def short_rows(look: RepairView, job: Job, short: Mapping[int, int]) -> list[ShortRow]:
    """Return which ranks lack copies and why; ranks in the same state share a row.

    Args:
        look: At the store.
        job: Has a newest committed step.
        short: The ranks that lack copies of it; the first RANKS_NAMED_MAX are named.

    Returns:
        `hosts` have a whole copy, `targets` are to get one; `why_not` says what repair waits for, or what keeps it
        from a host.
    """
    step, attempt = job.newest_committed, job.newest
    if step is None or attempt is None:
        return []
    waits = _waits(look, job, attempt, step) if short else ""
    found: dict[tuple[tuple[str, ...], tuple[str, ...], str], list[int]] = {}
    for rank in sorted(short)[:RANKS_NAMED_MAX]:
        shard = ShardId(job.name, step.attempt, step.step, rank)
        found.setdefault(_state(look, job, attempt, shard, waits), []).append(rank)
    return [
        ShortRow(
            attempt=step.attempt, step=step.step, ranks=ranks, hosts=list(hosts), targets=list(targets), why_not=why_not
        )
        for (hosts, targets, why_not), ranks in found.items()
    ]  # fmt: skip


def _waits(look: RepairView, job: Job, attempt: Attempt, step: StepId) -> str:
    """Return why repair of the whole step has not begun, or ""."""
    if step in job.retired:
        return "the step is retired"
    active, state = look.state.rounds.get(job.name), look.state
    if (active is not None and active.is_due) or attempt.is_fetching(state.now):
        return "after the restore that is under way"
    late_s = state.rules.dead_after_s
    late = state.hosts.dead_since(state.now - late_s) & {member.host_id for member in attempt.members.values()}
    return f"{', '.join(sorted(late)[:3])} died within {late_s:g} s and may be back with its copies" if late else ""


def _state(
    look: RepairView, job: Job, attempt: Attempt, shard: ShardId, waits: str
) -> tuple[tuple[str, ...], tuple[str, ...], str]:
    """Return the hosts with a whole copy of a shard, those that are to get one, and what keeps them from it."""
    copies = job.copies.get(StepId(shard.attempt, shard.step), {}).get(shard.rank, {})
    hosts = tuple(sorted(host for host, copy in copies.items() if not copy.missing))
    if not copies:
        return hosts, (), "no copy is left in RAM to rebuild it from"
    lacking = [host for host in dict.fromkeys(look.view.wanted(job, attempt, shard.rank)) if host not in hosts]
    if not lacking:
        return hosts, (), "; ".join(["no other host may hold it", *([waits] if waits else [])])
    reasons = {host: _why_not(look, job, shard, host) for host in lacking}
    targets = tuple(host for host in lacking if not reasons[host])
    kept_from = [f"{host}: {why}" for host, why in reasons.items() if why]
    return hosts, targets, "; ".join([*kept_from, *([waits] if waits else [])])


def _why_not(look: RepairView, job: Job, shard: ShardId, host: str) -> str:
    """Return why repair cannot copy a shard to a host now, or ""."""
    unroomed = look.room.unroomed.get((job.name, host))
    refusal = unroomed.why if unroomed is not None else job.refusals.get((shard, host), "")
    if refusal:
        return refusal
    hosts, state = look.state.hosts, look.state.hosts.states.get(host)
    if state is None or state.status != "live":
        return f"{state.status}, {state.why}" if state is not None else "it is not here"
    is_passed_over = hosts.is_on_probation(look.state.now, host) and shard not in look.pushes.vain_s
    return "it died 3 times within 10 minutes, another host is sought" if is_passed_over else ""
