"""A host is silent if nobody heard it while somebody listened (R28)."""

from __future__ import annotations

import pytest

from memstore.core.cluster.hosts import HostTable
from memstore.core.wire.messages import Heard, HostInfo, Tick
from memstore.testing.controller.catalog_fleet import CatalogFleet


def table_of(*hosts: str) -> HostTable:
    """Live hosts, heard of at second 0, when the first tick came."""
    table = HostTable(suspect_after_s=1.5, dead_after_s=5.0, failure_domains=("rack",))
    for host in hosts:
        table.up(0.0, HostInfo(host, 1, "10.0.0.1", 7000, machine=f"m-{host}"))
    table.tick(0.0)
    return table


def statuses(table: HostTable) -> list[str]:
    return [state.status for state in table.states.values()]


def test_silence_makes_suspect_then_dead_as_seconds_pass() -> None:
    """With ticks in time the clock of silence is the clock."""
    table = table_of("a", "b")
    at = {}
    for tenth in range(1, 70):
        table.heard(tenth / 10, Heard("b"))
        for change in table.tick(tenth / 10):
            at[change.host_id, change.status] = tenth / 10
    assert at == {("a", "suspect"): 1.6, ("a", "dead"): 5.1}


def test_silence_shorter_than_some_ticks_is_found_in_its_time_too() -> None:
    """Whoever sets `suspect_after_s` to a tick's time has silent hosts found within a tick or two of that (R28)."""
    table = HostTable(suspect_after_s=0.1, dead_after_s=0.3, failure_domains=("rack",))
    table.up(0.0, HostInfo("a", 1, "10.0.0.1", 7000, machine="m-a"))
    at = {change.status: tenth / 10 for tenth in range(8) for change in table.tick(tenth / 10)}
    assert at == {"suspect": 0.2, "dead": 0.4}


@pytest.mark.parametrize("late_s", [1.0, 10.0, 1000.0])
def test_a_tick_that_comes_late_makes_nobody_silent(late_s: float) -> None:
    """What lay unread meanwhile, or was not sent because all was stopped, is heard before the next ticks."""
    table = table_of("a", "b")
    assert table.tick(late_s) == []
    table.heard(late_s + 0.05, Heard("a"))
    changes = [change for tenth in range(1, 12) for change in table.tick(late_s + tenth / 10)]
    assert [(change.host_id, change.status) for change in changes] == [("b", "suspect")]


def test_who_is_silent_is_found_though_all_ticks_are_late() -> None:
    """Overload puts detection off, for ever it does not."""
    table = table_of("a", "b")
    for number in range(1, 5):
        table.heard(number * 3.0 - 1.0, Heard("b"))
        table.tick(number * 3.0)
    assert statuses(table) == ["suspect", "live"]


def test_a_tick_takes_what_was_heard_before_it_looks_who_is_silent() -> None:
    """Beats come with the tick, however much else waits to be done."""
    fleet = CatalogFleet(3)
    for tenth in range(1, 30):
        fleet.now = 20.0 + tenth / 10
        fleet.handle(Tick(tuple(Heard(host) for host in fleet.hosts[1:])))
    states = fleet.catalog.hosts.states
    assert [states[host].status for host in fleet.hosts] == ["suspect", "live", "live"]
