"""Increments of durable steps, as controller and holders write them: the base of a write, or none (R31)."""

from __future__ import annotations

from typing import Any

from memstore.core.durable.increments import needed_names
from memstore.core.durable.writes import FAILED_AGAIN_S
from memstore.core.wire.orders import WriteSlices
from memstore.testing.controller.holder import DirectedRank
from memstore.testing.controller.world import ControllerWorld
from memstore.testing.simulator.rank.rank import chunk_of
from recovery.inventory import DurableMarker, ShardId, StepId

FROZEN = 3  # of the four chunks of every shard
LAST = 9


def frozen(steps: int = 1, hosts: int = 2, **config: Any) -> tuple[ControllerWorld, list[DirectedRank]]:
    """A job of whose shards all chunks but the last never change, with so many durable steps."""
    world = ControllerWorld(hosts, **{"durable": "/durable", "durable_every": 1, "durable_keep": 2, **config})
    ranks = world.launch(hosts)
    world.get(ranks)
    for step in range(1, LAST + 1):
        for rank in range(hosts):
            texts = [f"frozen {rank} {index}" for index in range(FROZEN)] + [f"{rank} {step}"]
            world.put_contents[ShardId("train", 1, step, rank)] = [chunk_of(text) for text in texts]
    for step in range(1, steps + 1):
        assert world.put_all(ranks, step, until="durable")
    world.run(2.0)
    return world, ranks


def marker(world: ControllerWorld, step: int) -> DurableMarker:
    return world.durable.marker("train", 1, step)


def bases_of(world: ControllerWorld, step: int) -> set[int]:
    """The older steps that a durable step reads."""
    return {older.step for older in needed_names([marker(world, step)])}


def stored_chunks(world: ControllerWorld, step: int) -> int:
    """How many chunks a step's files have, about: the rest of each file is its header and the manifest."""
    files = world.durable.slices["train", 1, step]
    return sum(chunk_of(f"{rank} {step}") in data for rank in range(2) for data in files.values()) + sum(
        chunk_of(f"frozen {rank} {index}") in data
        for rank in range(2)
        for index in range(FROZEN)
        for data in files.values()
    )


def test_what_did_not_change_is_written_once_and_kept_as_long_as_it_is_read() -> None:
    """Step 1 left retention long ago: what it has of the frozen chunks stays, and the step is not offered any more."""
    world, _ = frozen(4)
    assert sorted(step for _, _, step in world.durable.markers) == [3, 4]
    assert [stored_chunks(world, step) for step in (1, 3, 4)] == [8, 2, 2]
    assert bases_of(world, 4) == {1}
    assert world.job().markers[StepId(1, 4)] == marker(world, 4)


def test_a_job_that_ram_forgot_comes_back_from_an_increment() -> None:
    """All memory is gone: the next attempt has the newest durable step, of chunks of two steps, bit for bit."""
    world, _ = frozen(3)
    for host in list(world.holders):
        world.kill_host(host)
        world.return_host(host, keep_memory=False)
    world.crash_controller()
    world.run(6.0)
    answers = world.get(world.launch(2))
    world.check_restored(answers)
    assert {(a["attempt"], a["step"], a["verdict"]) for a in answers} == {(1, 3, "durable")}


def test_every_step_is_whole_where_the_setting_says_so() -> None:
    """Its folder can be carried away, or an older one removed, without a look at any other."""
    world, _ = frozen(2, durable_bases=0)
    assert (marker(world, 2).uses, stored_chunks(world, 2)) == ({}, 8)


def test_a_base_that_lost_a_slice_is_not_named_again() -> None:
    """A person removed a file: a host that finds it missing writes the slice whole, and the step needs it no more."""
    world, ranks = frozen(1)
    files = world.durable.slices["train", 1, 1]
    for name in [name for name in files if name.startswith("rank-0.1.")]:
        del files[name]
    assert world.put_all(ranks, 2, until="durable")
    [names] = needed_names([marker(world, 2)]).values()
    assert sorted(name.rpartition(".")[0] for name in names) == ["rank-0.0", "rank-1.0", "rank-1.1"]


def test_the_write_after_one_that_failed_with_a_base_has_none() -> None:
    """The base may be why: what a retry needs of it is written."""
    world, ranks = frozen(1)
    world.durable.problem = "stale file handle"
    assert world.put_all(ranks, 2)
    world.run(3.0)
    world.durable.problem = ""
    assert world.run_until(lambda: ("train", 1, 2) in world.durable.markers, FAILED_AGAIN_S + 5.0)
    assert bases_of(world, 2) == set()
    assert world.put_all(ranks, 3, until="durable")
    assert bases_of(world, 3) == {2}


def test_a_slice_that_moves_to_another_holder_keeps_its_base() -> None:
    """The base belongs to the write: who takes over what a dead writer owed writes the same bytes."""
    world, ranks = frozen(1)
    world.work_s = (1.0, 1.5)
    for rank in ranks:
        world.put(rank, 2)
    assert world.run_until(lambda: ranks[0].tickets[2] == "committed", 10.0)
    world.run(0.3)
    world.kill_host("h1")
    assert world.run_until(lambda: ("train", 1, 2) in world.durable.markers, 10.0)
    assert all(use.tag for rank in range(2) for use in marker(world, 2).uses[rank])


def test_a_new_controller_names_what_a_look_has_found() -> None:
    """It knows the markers from a list; a step is no base before a host has opened all that it reads."""
    world, ranks = frozen(2)
    world.crash_controller()
    world.run(8.0)
    orders: list[WriteSlices] = []
    for holder in world.holders.values():
        holder.instead[WriteSlices] = orders.append  # type: ignore[assignment]
    for rank in ranks:
        world.put(rank, 3)
    assert world.run_until(lambda: len(orders) == 2, 10.0)
    bases = [part.base for order in orders for part in order.parts]
    assert {base.step.step for base in bases if base is not None} == {2}
    assert all(base is not None and base.tags for base in bases)
