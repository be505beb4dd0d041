"""Whom a get() waits for, in words. Pure (R20, R23)."""

from __future__ import annotations

from memstore.core.cluster.collective import missing_ranks
from memstore.core.cluster.job import Attempt, Job
from memstore.core.cluster.state import ClusterState
from memstore.core.cluster.text import HOSTS_MAX, listed, named_hosts, plural, who_is_missing


def awaited_by_get(state: ClusterState, job: Job, attempt: Attempt) -> tuple[list[int], str] | None:
    """Return the ranks that have not called get() yet, and what those that have wait for; None if there is no get()."""
    active = state.rounds.get(job.name)
    if active is None or active.attempt != attempt.attempt_number:
        return None
    bringing = {host for rank, host in active.staging_hosts.items() if rank not in active.staged}
    return missing_ranks(attempt.world_size, active.calls), {
        "gathering": "its hosts to refuse ranks of older attempts",
        "listing": "durable storage to be listed",
        "waiting": f"{named_hosts(active.plan.wait_for if active.plan else ())}, which may have a newer step",
        "deciding": "hosts to write down what is restored",
        "staging": f"{named_hosts(bringing)} to have the bytes, and its ranks to compare into=",
        "loading": f"{named_ranks(attempt, missing_ranks(attempt.world_size, active.loads))} to load the bytes",
        "releasing": "hosts to write down that it is over",
    }[active.phase]


def awaited_text(state: ClusterState, job: Job, attempt: Attempt) -> str:
    """Return the reason why a get() that all ranks have called waits; "" if there is none."""
    found = awaited_by_get(state, job, attempt)
    if found is None:
        return ""
    missing, awaited = found
    return named_ranks(attempt, missing) if missing else awaited


def ran_out_text(missing: list[int], world_size: int, awaited: str) -> str:
    """Return the error of a get() after its timeout: the ranks that never asked, or the reason for the wait."""
    if missing:
        return f"{who_is_missing(missing, world_size, 'called get()')}. Every rank must call get()"
    return f"all ranks have called get(), waiting for {awaited}. Raise timeout_s of get()"


def named_ranks(attempt: Attempt, ranks: list[int]) -> str:
    """Return "ranks 2, 3 on h1, rank 5 on h2", and whose process is gone."""
    by_host: dict[str, list[int]] = {}
    for rank in ranks:
        by_host.setdefault(attempt.members[rank].host_id, []).append(rank)
    parts = [f"{_some(found)} on {host}" for host, found in list(by_host.items())[:HOSTS_MAX]]
    more = len(by_host) - HOSTS_MAX
    parts += [f"those of {plural(more, 'more host')}"] if more > 0 else []
    gone = [rank for rank in ranks if not attempt.members[rank].is_alive]
    return ", ".join(parts) + (f"; the process of {_some(gone)} is gone" if gone else "")


def _some(ranks: list[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {listed(ranks)}"
