"""Hosts that come and go in a row: placed together, orders sent piecewise, as if placed at once (R13, R18)."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from memstore.core.targets import targets
from memstore.core.wire.messages import HostBeat, HostLost, HostUp, SendOrder, Tick
from memstore.core.wire.orders import Order, PushTargets, Reserve
from memstore.core.wire.reports import Reserved
from memstore.testing.controller.fleet import JOB, ControllerFleet

HOSTS = 12


@pytest.fixture
def placements(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many hosts each placement was made for."""
    real, found = targets.scattered, list[int]()

    def counted(before: Any, topology: Any, **kwargs: Any) -> Any:
        found.append(len(topology.hosts))
        return real(before, topology, **kwargs)

    monkeypatch.setattr(targets, "scattered", counted)
    return found


def lose(fleet: ControllerFleet, host: str) -> None:
    fleet.targets.pop(host, None)
    fleet.rooms.pop(host, None)
    fleet.handle(HostLost(host, "reset"))


def come_back(fleet: ControllerFleet, host: str) -> None:
    info = fleet.machine.hosts.states[host].info
    fleet.handle(HostUp(dataclasses.replace(info, incarnation=info.incarnation + 1)))


def tick(fleet: ControllerFleet) -> None:
    """Time passes, and the controller learns which hosts live."""
    fleet.now += 0.1
    fleet.handle(Tick(tuple(HostBeat(host) for host in fleet.machine.hosts.live_ids())))


def sent_whole(fleet: ControllerFleet) -> list[tuple[str, Order]]:
    """What every host would be sent now: targets and room."""
    machine, found = fleet.machine, list[tuple[str, Order]]()
    job = machine.jobs[JOB]
    assert job.newest is not None
    machine.out.actions = []
    machine.parts.room.order(job, job.newest)
    machine.parts.view.send_targets(job)
    for action in machine.actions:
        assert isinstance(action, SendOrder)
        found.append((action.host_id, action.order))
    return found


def test_a_rack_that_dies_host_by_host_is_placed_twice(placements: list[int]) -> None:
    """The first loss is placed at once; all others that come before the next tick are placed with it."""
    fleet = ControllerFleet(96, ranks_per_host=1)
    fleet.put(1)
    tick(fleet)
    placements.clear()
    for host in fleet.hosts[:32]:
        lose(fleet, host)
    assert placements == [95]
    tick(fleet)
    # Substitutes there are none: 64 hosts have ranks of their own.
    assert placements == [95, 64]
    tick(fleet)
    assert placements == [95, 64]


def test_a_change_tells_only_those_whom_it_concerns() -> None:
    """The targets and the room of most hosts stay what they were when one is lost (R13)."""
    fleet = ControllerFleet(64)
    fleet.put(1)
    tick(fleet)
    fleet.targets.clear()
    fleet.rooms.clear()
    lose(fleet, fleet.hosts[3])
    assert 0 < len(fleet.targets) <= 8
    assert 0 < len(fleet.rooms) <= 16


def test_a_host_that_refused_its_room_is_reported_again_with_the_next_change() -> None:
    """It does not go by the order: that another one would say the same is no reason to be silent (R10)."""
    fleet = ControllerFleet(8)
    fleet.put(1)
    tick(fleet)
    refused = fleet.rooms[fleet.hosts[7]]
    full = Reserved(job=JOB, attempt=refused.attempt, number=refused.number, problem="full")
    fleet.machine.parts.room.reserved(fleet.hosts[7], full)
    fleet.rooms.clear()
    lose(fleet, fleet.hosts[0])
    tick(fleet)
    assert fleet.hosts[7] in fleet.rooms


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["lose", "lose", "return", "tick"]), st.integers(0, HOSTS - 1)), max_size=25))
def test_what_is_reported_piecewise_is_what_all_would_be_sent(story: list[tuple[str, int]]) -> None:
    """For any order of losses, returns and ticks: every live host goes by the placement of now."""
    fleet = ControllerFleet(HOSTS, ranks_per_host=2)
    fleet.put(1)
    for what, number in story:
        host = fleet.hosts[number]
        is_live = fleet.machine.hosts.is_live(host)
        if what == "tick":
            tick(fleet)
        elif what == "lose" and is_live and len(fleet.machine.hosts.live_ids()) > 1:
            lose(fleet, host)
        elif what == "return" and not is_live:
            come_back(fleet, host)
    tick(fleet)
    tick(fleet)
    for host, order in sent_whole(fleet):
        if isinstance(order, PushTargets):
            assert fleet.targets[host] == list(order.targets)
        if isinstance(order, Reserve):
            assert replace(fleet.rooms[host], number=order.number) == order


def test_nothing_commits_before_it_is_known_who_is_to_have_copies() -> None:
    """A target that died is not one copy less: another takes its place with the next tick, and the step waits (R18)."""
    fleet = ControllerFleet(8, ranks_per_host=1)
    owner = fleet.hosts[5]
    target = fleet.targets[owner][0]
    other = next(host for host in fleet.hosts if host not in (owner, target))
    for rank in range(fleet.world_size):
        fleet.seal(fleet.hosts[rank], rank, 1, is_own=True)
        if fleet.hosts[rank] != owner:
            for host in fleet.targets[fleet.hosts[rank]]:
                fleet.seal(host, rank, 1, is_own=False)
    lose(fleet, other)
    lose(fleet, target)
    assert fleet.machine.state.is_placement_stale
    for rank, host in enumerate(fleet.hosts):  # for any order of the seals
        if fleet.machine.hosts.is_live(host):
            fleet.seal(host, rank, 1, is_own=True)
    assert not fleet.machine.jobs[JOB].commits
    tick(fleet)
    assert fleet.targets[owner] != [target]
    assert not fleet.machine.jobs[JOB].commits
