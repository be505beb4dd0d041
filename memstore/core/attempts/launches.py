"""Incomplete launches: which ranks have come, which are awaited. Pure; read `join.py` for the rules."""

from __future__ import annotations

from collections.abc import Sequence

from memstore.core.attempts.gathering import Entrant, Gathering
from memstore.core.attempts.join import FENCE_DEADLINE_S, MARKERS_DEADLINE_S, Attempts
from memstore.core.cluster.facts import AttemptOpened
from memstore.core.cluster.state import ClusterState
from memstore.core.cluster.text import listed, named_hosts, plural
from memstore.core.wire.calls import Rewind
from memstore.core.wire.status_rows import LaunchRow

LISTED_MAX = 1000  # ranks that one answer names


def launches(state: ClusterState, attempts: Attempts) -> list[LaunchRow]:
    """Return a row for each job that some rank waits to join or to rewind."""
    names = attempts.gatherings.keys() | attempts.opening.keys()
    return [row for name in sorted(names) if (row := launch(state, attempts, name)) is not None]


def launch(state: ClusterState, attempts: Attempts, name: str) -> LaunchRow | None:
    """Return how far the launch of a job is, None if no rank waits for one."""
    gathering = attempts.gatherings.get(name)
    if gathering is not None:
        return _gathering(state, name, gathering)
    waiting = attempts.opening.get(name)
    return _opening(state, attempts, name, waiting) if waiting else None


def _gathering(state: ClusterState, name: str, gathering: Gathering) -> LaunchRow:
    missing = [rank for rank in range(gathering.world_size) if rank not in gathering.joins]
    waiting = list(gathering.joins.values())
    awaited = f"{'rank' if len(missing) == 1 else 'ranks'} {listed(missing)}"
    until_s = min(each.call.since_s + each.limit_s for each in waiting)
    if gathering.markers_call:
        until_s = gathering.listing_since_s + MARKERS_DEADLINE_S
        awaited = f"host {gathering.joins[0].call.host_id} to list what durable storage has of the job"
    elif gathering.late_hosts and not missing:
        until_s = min(gathering.opens_by_s, state.late_until_s)
        awaited = f"{named_hosts(gathering.late_hosts)}, which may know the job"
    return LaunchRow(
        job=name,
        phase="listing" if gathering.markers_call else "gathering",
        since_s=_since_s(state, waiting),
        awaited=awaited,
        ranks=len(waiting),
        world_size=gathering.world_size,
        missing=missing[:LISTED_MAX],
        is_rewind=gathering.rewind is not None,
        left_s=max(0.0, until_s - state.now),
    )


def _opening(state: ClusterState, attempts: Attempts, name: str, waiting: list[Entrant]) -> LaunchRow:
    """A complete launch: hosts journal the attempt, then refuse the ranks of older ones."""
    waits, deadline_s = attempts.fence_waits.get(name, (set(), None))
    hosts = sorted(waits)
    awaited, left_s = "its hosts to write the attempt down", None
    if deadline_s is not None:
        more = f" and {len(hosts) - 10} more" if len(hosts) > 10 else ""
        awaited = f"{plural(len(hosts), 'host')} to refuse ranks of older attempts ({', '.join(hosts[:10])}{more})"
        left_s = max(0.0, min(deadline_s - state.now, FENCE_DEADLINE_S))
    world_size = _world_size(state, attempts, name, waiting)
    return LaunchRow(
        job=name,
        phase="fencing" if deadline_s is not None else "opening",
        since_s=_since_s(state, waiting),
        awaited=awaited,
        ranks=world_size,
        world_size=world_size,
        missing=[],
        is_rewind=isinstance(waiting[0].call.request, Rewind),
        left_s=left_s,
    )


def _world_size(state: ClusterState, attempts: Attempts, name: str, waiting: list[Entrant]) -> int:
    """Return the ranks of the attempt that is written down: rewind() does not name it."""
    facts = [fact for fact in attempts.journal.log.unapplied() if isinstance(fact, AttemptOpened) and fact.job == name]
    if facts:
        return facts[-1].world_size
    job = state.jobs.get(name)
    return job.newest.world_size if job is not None and job.newest is not None else len(waiting)


def _since_s(state: ClusterState, waiting: list[Entrant]) -> float:
    return state.now - min(each.call.since_s for each in waiting)


def come_text(ranks: int, world_size: int, missing: Sequence[int]) -> str:
    """Return "1 of 2 ranks have come"."""
    if missing:
        return f"{ranks} of {plural(world_size, 'rank')} have come"
    return "its rank has come" if world_size == 1 else f"all {world_size} ranks have come"
