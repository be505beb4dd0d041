"""A page for people about a run that failed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memstore.testing.simulator.run.cluster import SimCluster


def describe(cluster: SimCluster, notes_count: int = 40) -> str:
    """Return a page: the scenario, the last notes, and each rank with its newest tickets."""
    rows: list[str] = [cluster.scenario.text(), "", *cluster.notes[-notes_count:]]
    for rank in cluster.ranks:
        state = "dead" if rank.is_dead else "frozen" if rank.is_frozen else "alive"
        rows.append(
            f"rank {rank.rank} on {rank.host_id}: {state} {rank.why} attempt {rank.attempt} {_last(rank.tickets)}"
        )
    return "\n".join(rows)


def _last(tickets: Mapping[int, str]) -> dict[int, Any]:
    return {step: tickets[step] for step in sorted(tickets)[-4:]}
