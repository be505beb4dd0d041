"""Hosts that are to go and leave too few behind: what is kept is made durable meanwhile, by itself (R29, R31)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from memstore.core.durable.departures import Remains
from memstore.core.report.problems import drain_text
from memstore.core.wire.messages import DrainsSeen
from memstore.core.wire.orders import ListMarkers
from memstore.testing.controller.holder import DirectedRank
from memstore.testing.controller.trained import trained
from memstore.testing.controller.world import ControllerWorld

DURABLE = {"durable": "/durable", "durable_every": "1h"}


def drain(world: ControllerWorld, rank: DirectedRank, *hosts: str, within_s: float = 600.0) -> None:
    """Give notice to the hosts."""
    for host in hosts:
        world.call(rank, "drain", host=host, within_s=within_s)
    world.run(0.5)


def remains(world: ControllerWorld, host: str) -> Remains:
    """What a host that is to go would take along."""
    return world.served.parts.departures.remains(host)


def markers(world: ControllerWorld) -> list[int]:
    """The steps that are on durable storage."""
    return sorted(step for _, _, step in world.durable.markers)


@pytest.mark.parametrize("by_ray", [True, False])
def test_if_all_hosts_of_a_job_are_to_go_its_newest_step_is_made_durable(by_ray: bool) -> None:
    """The schedule has step 1 alone; each host can go once the storage was seen to have step 6."""
    world, ranks = trained(3, 3, last=6, **DURABLE)
    assert markers(world) == [1]
    if by_ray:
        world._handle(DrainsSeen(dict.fromkeys(world.holders, world.served.state.wall_s + 60.0)))
        world.run(0.5)
    else:
        drain(world, ranks[0], *world.holders)
    assert world.run_until(lambda: not any(remains(world, host).may_come for host in world.holders), 20.0)
    assert markers(world) == [1, 6]
    assert [(row.step, row.copies) for row in remains(world, "h1").durable] == [(6, 0)]
    assert not remains(world, "h1").short


def test_one_of_two_hosts_goes_for_a_durable_step() -> None:
    """The other alone cannot hold two copies, so that it would be waited for in vain; every kept step counts."""
    world, ranks = trained(2, 2, last=4, keep_steps=2, **DURABLE)
    drain(world, ranks[0], "h1")
    assert world.run_until(lambda: not remains(world, "h1").short, 20.0)
    assert markers(world) == [1, 3, 4]


def test_what_is_committed_after_the_notice_is_made_durable_as_well() -> None:
    """Training goes on until the end."""
    world, ranks = trained(2, 2, last=2, **DURABLE)
    drain(world, ranks[0], "h0", "h1")
    world.run(5.0)
    assert world.put_all(ranks, 3)
    assert world.run_until(lambda: not remains(world, "h1").short, 20.0)
    assert 3 in markers(world)


def test_hosts_that_stay_take_the_copies_and_nothing_is_written() -> None:
    """Enough others are there; nor without durable=, nor once the notice is taken back."""
    world, ranks = trained(4, 3, last=3, **DURABLE)
    drain(world, ranks[0], "h1")
    world.run(10.0)
    assert markers(world) == [1]
    world, ranks = trained(2, 2, last=3)
    drain(world, ranks[0], "h0", "h1")
    world.run(10.0)
    assert not markers(world)
    world, ranks = trained(2, 2, last=3, **DURABLE)
    world.durable.problem = "not mounted"
    drain(world, ranks[0], "h0", "h1")
    for host in world.holders:
        world.call(ranks[0], "drain", host=host, within_s=None)
    world.run(5.0)
    world.durable.problem = ""
    world.run(10.0)
    assert markers(world) == [1]


def test_storage_that_fails_is_tried_again_and_the_host_says_why_it_cannot_go() -> None:
    """A new controller goes on with it: the notice is a fact."""
    world, ranks = trained(2, 2, last=2, **DURABLE)
    world.durable.problem = "no space left"
    drain(world, ranks[0], "h0", "h1")
    world.run(5.0)
    [short] = remains(world, "h1").short
    assert drain_text([short], []) == "train step 2: 0 of 2 copies elsewhere, not durable yet: no space left"
    world.crash_controller()
    world.run(5.0)
    world.durable.problem = ""
    assert world.run_until(lambda: not remains(world, "h1").short, 20.0)
    assert 2 in markers(world)


def test_hosts_of_one_machine_that_stay_are_too_few() -> None:
    """Two hosts stay and can hold no two copies apart: the kept step is written, and then h0 can go."""
    world = ControllerWorld(3, **DURABLE)
    for name in ("h1", "h2"):
        holder = world.holders[name]
        holder.state.info = replace(holder.info, machine="m-shared")
        world.kill_host(name, keep_memory=True)
        world.return_host(name)
    world.run(3.0)
    rank = world.join(0, 1, "launch", host="h0")
    world.run(3.0)
    world.get([rank])
    for step in (1, 2):
        assert world.put_all([rank], step)
        world.run(2.0)
    assert markers(world) == [1]
    drain(world, rank, "h0")
    assert world.run_until(lambda: not remains(world, "h0").short, 20.0)
    assert markers(world) == [1, 2]


def test_a_job_that_was_removed_during_a_look_is_looked_for_once_it_is_back() -> None:
    """No host had answered whether storage has its step; restored from there, it must not keep the host for ever."""
    world, ranks = trained(2, 2, last=1, **DURABLE)
    for holder in world.holders.values():
        holder.instead[ListMarkers] = lambda order: None
    drain(world, ranks[0], "h1")
    for rank in ranks:
        world.kill_rank(rank)
    world.call(ranks[0], "rm", job="train", force=True)
    assert world.run_until(lambda: "train" not in world.served.jobs, 5.0)
    for holder in world.holders.values():
        holder.instead.clear()
    assert world.get(world.launch(2))[0]["step"] == 1
    world.run(1.0)
    assert not remains(world, "h1").short
    assert [row.step for row in remains(world, "h1").durable] == [1]
