"""A host is silent if nothing came from it while the controller listened (R28)."""

from __future__ import annotations

from typing import Any

import pytest

from memstore.core.cluster.hosts import HostTable
from memstore.core.wire.ids import Endpoint
from memstore.core.wire.messages import HostBeat, HostInfo, Tick
from memstore.core.wire.orders import ListMarkers
from memstore.testing.controller.fleet import ControllerFleet
from memstore.testing.controller.holder import DirectedRank
from memstore.testing.controller.world import ControllerWorld


def table_of(*hosts: str) -> HostTable:
    """Live hosts, learned of at second 0, when the first tick came."""
    table = HostTable(suspect_after_s=1.5, dead_after_s=5.0, failure_domains=("rack",))
    for host in hosts:
        table.up(0.0, HostInfo(host, 1, (Endpoint("10.0.0.1", 7000),), machine=f"m-{host}"))
    table.tick(0.0)
    return table


def statuses(table: HostTable) -> list[str]:
    return [state.status for state in table.states.values()]


def test_silence_makes_suspect_then_dead_as_seconds_pass() -> None:
    """With ticks in time the clock of silence is the clock."""
    table = table_of("a", "b")
    at = {}
    for tenth in range(1, 70):
        table.heartbeat(tenth / 10, HostBeat("b"))
        for change in table.tick(tenth / 10):
            at[change.host_id, change.status] = tenth / 10
    assert at == {("a", "suspect"): 1.6, ("a", "dead"): 5.1}


def test_silence_shorter_than_some_ticks_is_found_in_its_time_too() -> None:
    """A process that sets `suspect_after_s` to a tick's time has silent hosts found within a tick or two of that
    (R28).
    """
    table = HostTable(suspect_after_s=0.1, dead_after_s=0.3, failure_domains=("rack",))
    table.up(0.0, HostInfo("a", 1, (Endpoint("10.0.0.1", 7000),), machine="m-a"))
    at = {change.status: tenth / 10 for tenth in range(8) for change in table.tick(tenth / 10)}
    assert at == {"suspect": 0.2, "dead": 0.4}


@pytest.mark.parametrize("late_s", [1.0, 10.0, 1000.0])
def test_a_tick_that_comes_late_makes_no_process_silent(late_s: float) -> None:
    """What lay unread meanwhile, or was not sent because all was stopped, is received before the next ticks."""
    table = table_of("a", "b")
    assert table.tick(late_s) == []
    table.heartbeat(late_s + 0.05, HostBeat("a"))
    changes = [change for tenth in range(1, 12) for change in table.tick(late_s + tenth / 10)]
    assert [(change.host_id, change.status) for change in changes] == [("b", "suspect")]


def test_who_is_silent_is_found_though_all_ticks_are_late() -> None:
    """Overload puts detection off, for ever it does not."""
    table = table_of("a", "b")
    for number in range(1, 5):
        table.heartbeat(number * 3.0 - 1.0, HostBeat("b"))
        table.tick(number * 3.0)
    assert statuses(table) == ["suspect", "live"]


def test_a_tick_takes_what_was_received_before_it_looks_who_is_silent() -> None:
    """Beats come with the tick, however much else waits to be done."""
    fleet = ControllerFleet(3)
    for tenth in range(1, 30):
        fleet.now = 20.0 + tenth / 10
        fleet.handle(Tick(tuple(HostBeat(host) for host in fleet.hosts[1:])))
    states = fleet.machine.hosts.states
    assert [states[host].status for host in fleet.hosts] == ["suspect", "live", "live"]


# -- roll call ----------------------------------------------------------------------------------------
# Ranks that wait in a collective call can ask which ranks it awaits, by number and host (R23).


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
