"""A page for people about a run that failed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memstore.testing.simulator.world.world import Simulation


def describe(world: Simulation, notes_count: int = 40) -> str:
    """A page about a failed run."""
    rows: list[str] = [world.scenario.text(), "", *world.notes[-notes_count:]]
    for rank in world.ranks:
        state = "dead" if rank.is_dead else "frozen" if rank.is_frozen else "alive"
        rows.append(
            f"rank {rank.rank} on {rank.host_id}: {state} {rank.why} attempt {rank.attempt} {_last(rank.tickets)}"
        )
    return "\n".join(rows)


def _last(tickets: Mapping[int, str]) -> dict[int, Any]:
    return {step: tickets[step] for step in sorted(tickets)[-4:]}
