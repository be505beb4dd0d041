"""Launches whose ranks are not all in yet: who has come, what is awaited. Pure; read `join.py` for the rules."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memstore.core.attempts.gathering import Gathering, limit_s
from memstore.core.attempts.join import FENCE_DEADLINE_S
from memstore.core.cluster.facts import AttemptOpened
from memstore.core.cluster.job import Call
from memstore.core.cluster.text import listed, plural
from memstore.core.wire.messages import Body

if TYPE_CHECKING:
    from memstore.core.controller.machine import Catalog

LISTED_MAX = 1000  # ranks that one answer names


def launches(catalog: Catalog) -> list[Body]:
    """Return a row for each job that some rank waits to join or to rewind."""
    names = catalog.attempts.gatherings.keys() | catalog.attempts.opening.keys()
    return [row for name in sorted(names) if (row := launch(catalog, name)) is not None]


def launch(catalog: Catalog, name: str) -> Body | None:
    """Return how far the launch of a job is, None if no rank waits for one."""
    gathering = catalog.attempts.gatherings.get(name)
    if gathering is not None:
        return _gathering(catalog, name, gathering)
    calls = catalog.attempts.opening.get(name)
    return _opening(catalog, name, calls) if calls else None


def _gathering(catalog: Catalog, name: str, gathering: Gathering) -> Body:
    missing = [rank for rank in range(gathering.world_size) if rank not in gathering.joins]
    awaited = f"{'rank' if len(missing) == 1 else 'ranks'} {listed(missing)}"
    if gathering.markers_call:
        awaited = f"host {gathering.joins[0].host_id} to list what durable storage has of the job"
    calls = list(gathering.joins.values())
    row = _row(catalog, name, "listing" if gathering.markers_call else "gathering", calls, awaited)
    left_s = min(call.since_s + limit_s(call) for call in calls) - catalog.now
    return {
        **row, "ranks": len(calls), "world_size": gathering.world_size, "missing": missing[:LISTED_MAX],
        "is_rewind": gathering.rewind is not None, "left_s": None if gathering.markers_call else max(0.0, left_s),
    }  # fmt: skip


def _opening(catalog: Catalog, name: str, calls: list[Call]) -> Body:
    """All ranks are there; hosts write the attempt down, then refuse the ranks of older ones."""
    waits, deadline_s = catalog.attempts.fence_waits.get(name, (set(), None))
    hosts = sorted(waits)
    awaited, left_s = "its hosts to write the attempt down", None
    if deadline_s is not None:
        more = f" and {len(hosts) - 10} more" if len(hosts) > 10 else ""
        awaited = f"{plural(len(hosts), 'host')} to refuse ranks of older attempts ({', '.join(hosts[:10])}{more})"
        left_s = max(0.0, min(deadline_s - catalog.now, FENCE_DEADLINE_S))
    world_size = _world_size(catalog, name, calls)
    return {
        **_row(catalog, name, "fencing" if deadline_s is not None else "opening", calls, awaited),
        "ranks": world_size, "world_size": world_size, "missing": [], "left_s": left_s,
        "is_rewind": "of_attempt" in calls[0].body,
    }  # fmt: skip


def _world_size(catalog: Catalog, name: str, calls: list[Call]) -> int:
    """Return the ranks of the attempt that is written down: calls of mesh_order and rewind do not say how many."""
    facts = [fact for fact in catalog.log.undone() if isinstance(fact, AttemptOpened) and fact.job == name]
    if facts:
        return facts[-1].world_size
    job = catalog.jobs.get(name)
    return job.newest.world_size if job is not None and job.newest is not None else len(calls)


def _row(catalog: Catalog, name: str, phase: str, calls: list[Call], awaited: str) -> Body:
    since_s = catalog.now - min(call.since_s for call in calls)
    return {"job": name, "phase": phase, "since_s": since_s, "awaited": awaited}


def come_text(row: Body) -> str:
    """Return "1 of 2 ranks have come", of a row of `launches`."""
    if row["missing"]:
        return f"{row['ranks']} of {plural(row['world_size'], 'rank')} have come"
    return "its rank has come" if row["world_size"] == 1 else f"all {row['world_size']} ranks have come"
