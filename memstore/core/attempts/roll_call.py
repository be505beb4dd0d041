"""Calls that are answered when all ranks made them: how many have, and who or what is awaited. Pure (R20, R23)."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from memstore.core.attempts.launches import come_text, launch
from memstore.core.cluster.job import Attempt, Job
from memstore.core.cluster.text import listed, plural, who_is_missing
from memstore.core.wire.messages import Body

if TYPE_CHECKING:
    from memstore.core.controller.machine import Catalog

HOSTS_MAX = 5  # named


def roll_call(catalog: Catalog, name: str, verb: str) -> Body | None:
    """Return {come, awaited, is_complete} of a call that ranks of a job wait for; None if none of them does."""
    job = catalog.jobs.get(name)
    attempt = job.newest if job is not None else None
    look = _LOOKS.get(verb)
    found = look(catalog, job, attempt) if look is not None and job is not None and attempt is not None else None
    if found is not None and attempt is not None:
        missing, awaited = found
        ranks = {"ranks": attempt.world_size - len(missing), "world_size": attempt.world_size}
        awaited = _ranks(attempt, missing) if missing else awaited
        return {"come": come_text({**ranks, "missing": missing}), "awaited": awaited, "is_complete": not missing}
    row = launch(catalog, name)
    return {"come": come_text(row), "awaited": row["awaited"], "is_complete": not row["missing"]} if row else None


def ran_out_text(missing: list[int], world_size: int, awaited: str) -> str:
    """Return what a get() whose time is over has to say: who never asked, or what all who asked waited for."""
    if missing:
        return f"{who_is_missing(missing, world_size, 'called get()')}. Every rank must call get()"
    return f"all ranks have called get(), waiting for {awaited}. Raise timeout_s of get()"


def _get(catalog: Catalog, job: Job, attempt: Attempt) -> tuple[list[int], str] | None:
    active = catalog.rounds.active.get(job.name)
    if active is None or active.attempt != attempt.ordinal:
        return None
    bringing = {host for rank, host in active.homes.items() if rank not in active.staged}
    return _missing(attempt, active.calls), {
        "gathering": "its hosts to refuse ranks of older attempts",
        "listing": "durable storage to be listed",
        "waiting": f"{_hosts(active.plan.wait_for if active.plan else ())}, which may have a newer step",
        "deciding": "hosts to write down what is restored",
        "staging": f"{_hosts(bringing)} to have the bytes",
        "checking": f"{_ranks(attempt, _missing(attempt, active.checked))} to compare into=",
        "releasing": "hosts to write down that it is over",
    }[active.phase]


def _mesh_order(catalog: Catalog, job: Job, attempt: Attempt) -> tuple[list[int], str] | None:
    asked = catalog.mesh_orders.asked.get(job.name)
    late = _hosts(catalog.view.silent_hosts(job))
    return (_missing(attempt, asked.calls), f"{late}, which may have a newer step") if asked is not None else None


def _reserve(catalog: Catalog, job: Job, attempt: Attempt) -> tuple[list[int], str] | None:
    active = catalog.room.active.get(job.name)
    if active is None or active.attempt != attempt.ordinal:
        return None
    missing = [] if active.is_ordered else catalog.room.silent_ranks(job, attempt)
    return missing, f"{_hosts(active.waits)} to have the room" if active.waits else "hosts to write it down"


_LOOKS: dict[str, Callable[[Catalog, Job, Attempt], tuple[list[int], str] | None]] = {
    "get": _get, "mesh_order": _mesh_order, "reserve": _reserve,
}  # fmt: skip


def _missing(attempt: Attempt, called: Collection[int]) -> list[int]:
    return [rank for rank in range(attempt.world_size) if rank not in called]


def _ranks(attempt: Attempt, ranks: list[int]) -> str:
    """Return "ranks 2, 3 on h1, rank 5 on h2", and whose process is gone."""
    by_host: dict[str, list[int]] = {}
    for rank in ranks:
        by_host.setdefault(attempt.seats[rank].host_id, []).append(rank)
    parts = [f"{_some(found)} on {host}" for host, found in list(by_host.items())[:HOSTS_MAX]]
    more = len(by_host) - HOSTS_MAX
    parts += [f"those of {plural(more, 'more host')}"] if more > 0 else []
    gone = [rank for rank in ranks if not attempt.seats[rank].is_alive]
    return ", ".join(parts) + (f"; the process of {_some(gone)} is gone" if gone else "")


def _some(ranks: list[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {listed(ranks)}"


def _hosts(hosts: Collection[str]) -> str:
    names = sorted(hosts)
    more = f" and {len(names) - HOSTS_MAX} more" if len(names) > HOSTS_MAX else ""
    return f"{'host' if len(names) == 1 else 'hosts'} {', '.join(names[:HOSTS_MAX])}{more}"
