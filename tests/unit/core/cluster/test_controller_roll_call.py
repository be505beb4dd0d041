"""Ranks that wait in a collective call can ask which ranks it awaits, by number and host (R23)."""

from __future__ import annotations

from typing import Any

import pytest

from memstore.core.wire.orders import ListMarkers
from memstore.testing.controller.holder import DirectedRank
from memstore.testing.controller.world import ControllerWorld


def found(world: ControllerWorld, rank: DirectedRank, verb: str) -> dict[str, Any] | None:
    """Ask which ranks have come to a call."""
    world.call(rank, "roll_call", of=verb)
    world.run(0.5)
    answer: dict[str, Any] | None = rank.answers["roll_call"][-1] or None
    return answer


@pytest.mark.parametrize(("verb", "body"), [("get", {"step": None}), ("reserve", {"slots": 4})])
def test_ranks_that_have_not_called_are_named_with_their_hosts(verb: str, body: dict[str, Any]) -> None:
    """One of three ranks calls: the other two are awaited; once all have called, none is awaited."""
    world = ControllerWorld(3)
    ranks = world.launch(3)
    if verb == "reserve":
        world.get(ranks)
    assert found(world, ranks[0], verb) is None
    world.call(ranks[0], verb, **body)
    world.run(1.0)
    answer = found(world, ranks[0], verb)
    assert answer is not None
    assert (answer["come"], answer["is_complete"]) == ("1 of 3 ranks have come", False)
    assert answer["awaited"] == "rank 1 on h1, rank 2 on h2"
    world.kill_rank(ranks[2])
    world.run(1.0)
    answer = found(world, ranks[0], verb)
    assert answer is not None
    assert answer["awaited"] == "rank 1 on h1, rank 2 on h2; the process of rank 2 is gone"


def test_a_get_whose_ranks_are_all_there_names_the_hosts_that_work() -> None:
    """Storage does not list its markers: every rank has come, and that is what is awaited."""
    world = ControllerWorld(2, durable="/durable")
    ranks = world.launch(2)
    for holder in world.holders.values():
        holder.instead[ListMarkers] = lambda order: None
    for rank in ranks:
        world.call(rank, "get", step=None)
    world.run(1.0)
    answer = found(world, ranks[0], "get")
    assert answer == {"come": "all 2 ranks have come", "awaited": "durable storage to be listed", "is_complete": True}
