"""Several durable writes of a job at once: when one begins beside another, and what the later may not do (R31)."""

from __future__ import annotations

from functools import partial
from typing import Any

from memstore.core.durable.increments import needed_names
from memstore.core.durable.states import DurableState
from memstore.core.wire.orders import WriteMarker, WriteSlices
from memstore.testing.controller.holder import DirectedHolder, DirectedRank
from memstore.testing.controller.world import ControllerWorld, written
from recovery.inventory import ShardId, StepId

WRITE_S = 3.0  # of every write from step 2 on
PUT_S = 2.0  # from put to put


def slow(world: ControllerWorld, seconds: dict[int, float], *, first_s: float | None = None) -> None:
    """Let the slices of each step be written so late, of steps that are not named after WRITE_S; h0 after `first_s`."""

    def late(holder: DirectedHolder, order: WriteSlices) -> None:
        after_s = seconds.get(order.step.step, WRITE_S)
        is_first = first_s is not None and holder.host_id == "h0"
        world.at(first_s if is_first and first_s else after_s, lambda: holder.carry_out(order))

    for holder in world.holders.values():
        holder.instead[WriteSlices] = partial(late, holder)


def trained(keep_steps: int = 2, **config: Any) -> tuple[ControllerWorld, list[DirectedRank]]:
    """A job whose newest durable step is 3, and of which the controller knows how long a write takes."""
    world, ranks = written(2, keep_steps=keep_steps, **config)
    slow(world, {})
    assert world.put_all(ranks, 3, until="durable")
    return world, ranks


def begin(world: ControllerWorld, ranks: list[DirectedRank], first: int, last: int) -> DurableState:
    """Put steps, PUT_S apart."""
    for step in range(first, last + 1):
        assert world.put_all(ranks, step)
        world.run(PUT_S if step < last else 0.2)
    return state_of(world)


def state_of(world: ControllerWorld) -> DurableState:
    return world.served.parts.durable_states.of("train")


def under_way(world: ControllerWorld) -> list[int]:
    """The steps that are being written."""
    return sorted(step.step for step in state_of(world).writes)


def marked(world: ControllerWorld) -> list[int]:
    """The steps that are durable."""
    return sorted(step for _, _, step in world.durable.markers)


def is_marked(world: ControllerWorld, step: int) -> bool:
    return step in marked(world)


def test_a_step_is_written_beside_one_that_is_not_done() -> None:
    """Each takes longer than the steps are apart: all become durable, in order, and none is given up."""
    world, ranks = trained()
    begin(world, ranks, 4, 5)
    assert under_way(world) == [4, 5]
    begin(world, ranks, 6, 8)
    assert world.run_until(lambda: is_marked(world, 8), 2 * WRITE_S)
    world.run(0.2)
    assert [rank.tickets[step] for rank in ranks for step in range(4, 9)] == ["durable"] * 10
    assert "durable_abandoned" not in [event["event"] for event in world.events("train")]


def test_none_begins_beside_one_whose_end_nobody_knows() -> None:
    """The first write that is slow is waited for: it gets on, and what it has written is not thrown away."""
    world, ranks = written(2, keep_steps=2)
    slow(world, {}, first_s=1.2)
    begin(world, ranks, 3, 4)
    assert under_way(world) == [3]
    assert world.run_until(lambda: is_marked(world, 3), WRITE_S)


def test_none_begins_beside_one_that_would_not_end_before_its_room_is_needed() -> None:
    """With one kept step the next commit leaves one version for both: the second waits for the first's end."""
    world, ranks = trained(keep_steps=1)
    begin(world, ranks, 4, 4)
    world.run(0.3)
    assert world.put_all(ranks, 5)
    world.run(0.2)
    assert under_way(world) == [4]
    assert world.run_until(lambda: under_way(world) == [5], 2 * WRITE_S)
    assert is_marked(world, 4)


def test_none_begins_beside_one_that_keeps_all_threads_busy() -> None:
    """It would only be older than what can be written once they are free."""
    world, ranks = trained(world_size=8)
    begin(world, ranks, 4, 5)
    assert under_way(world) == [4]


def test_the_older_one_may_end_later() -> None:
    """The newer step stays the newest durable one; the slices of the older are not swept, and its ticket is durable."""
    world, ranks = trained()
    slow(world, {4: 5.0, 5: 0.5})
    begin(world, ranks, 4, 5)
    assert under_way(world) == [4, 5]
    assert world.run_until(lambda: is_marked(world, 5), 2.0)
    world.run(0.5)
    assert (under_way(world), ranks[0].tickets[4]) == ([4], "committed")
    newest = StepId(1, 5)
    assert world.job().newest_durable == newest
    assert world.run_until(lambda: ranks[0].tickets[4] == "durable", 5.0)
    world.run(0.5)
    assert (world.job().newest_durable, marked(world)) == (newest, [3, 4, 5])
    assert all(len(hosts) == 1 for (shard, _), hosts in world.durable.writers.items() if shard.step == 4)


def test_an_older_one_that_retention_would_remove_at_once_is_given_up() -> None:
    """durable_keep=1: the newer one is durable first, and the older leaves no marker and no slices."""
    world, ranks = trained(durable_keep=1)
    slow(world, {4: 5.0, 5: 0.5})
    begin(world, ranks, 4, 5)
    assert world.run_until(lambda: is_marked(world, 5), 2.0)
    world.run(8.0)
    assert (marked(world), ranks[0].tickets[4], under_way(world)) == ([5], "committed", [])
    assert world.put_all(ranks, 6, until="durable")
    world.run(1.0)
    assert ("train", 1, 4) not in world.durable.slices


def test_a_base_stays_until_the_writes_that_read_it_are_done() -> None:
    """durable_keep=1: step 4 is durable, and what step 5 reads of step 3 stays, with its marker, until 5 is too."""
    world, ranks = trained(durable_keep=1)
    for step in (4, 5):
        for rank in ranks:
            world.put_contents[ShardId("train", 1, step, rank.rank)] = (
                rank.content(3)[:3] + rank.content(100 + step)[:1]
            )
    begin(world, ranks, 4, 5)
    assert under_way(world) == [4, 5]
    bases = {write.base.step.step for write in state_of(world).writes.values() if write.base is not None}
    assert bases == {3}
    assert world.run_until(lambda: is_marked(world, 4), WRITE_S)
    world.run(0.5)
    assert marked(world) == [3, 4]
    assert world.run_until(lambda: is_marked(world, 5), WRITE_S)
    world.run(0.5)
    assert marked(world) == [5]
    assert {step.step for step in needed_names([world.durable.marker("train", 1, 5)])} == {3}
    assert world.durable.lost("train") == {}


def test_the_first_write_under_a_key_has_storage_for_itself() -> None:
    """Until a host has reported its key a second write might take another host's."""
    world, ranks = trained(durable_key_file="/key")
    state = begin(world, ranks, 4, 4)
    state.writes[StepId(1, 4)].key = None
    begin(world, ranks, 5, 5)
    assert under_way(world) == [4]


def test_no_more_than_one_lies_in_memory_beside_the_kept_steps() -> None:
    """Storage turned slow: when both are kept no longer, the older goes on, and the other's copies are freed."""
    world, ranks = trained()
    slow(world, dict.fromkeys(range(4, 20), 5.5), first_s=1.2)
    begin(world, ranks, 4, 5)
    assert under_way(world) == [4, 5]
    begin(world, ranks, 6, 7)
    assert under_way(world) == [4]
    world.run(0.5)
    assert sorted({held.step for held in world.holders["h0"].held}) == [4, 6, 7]
    assert world.run_until(lambda: is_marked(world, 4), 20.0)


def test_a_late_write_makes_way_when_its_room_is_needed() -> None:
    """A host hangs with slices of it: the newer write has the room, and does without that host."""
    world, ranks = trained()
    carried_out = world.holders["h1"].instead[WriteSlices]
    world.holders["h1"].instead[WriteSlices] = lambda order: carried_out(order) if order.step.step != 4 else None
    begin(world, ranks, 4, 5)
    begin(world, ranks, 6, 10)
    assert world.run_until(lambda: is_marked(world, 10), 3 * WRITE_S)
    assert 4 not in marked(world)
    assert state_of(world).abandoned_count <= 1


def test_a_new_controller_ends_the_writes_of_the_old_one() -> None:
    """It knows of none: those that its first order does not name stop, and the newest step becomes durable."""
    world, ranks = trained()
    begin(world, ranks, 4, 5)
    assert under_way(world) == [4, 5]
    world.crash_controller()
    assert world.run_until(lambda: is_marked(world, 5), 30.0)
    world.run(WRITE_S)
    assert ("train", StepId(1, 4)) not in world.holders["h0"].state.stops
    assert world.job().newest_durable == StepId(1, 5)


def test_a_step_that_is_asked_for_has_the_others_make_way() -> None:
    """Both scheduled writes end; they are not counted as too slow."""
    world, ranks = trained()
    begin(world, ranks, 4, 5)
    assert world.put_all(ranks, 6)
    world.call(ranks[0], "persist", step=6, within_s=60.0)
    world.run(0.2)
    assert under_way(world) == [6]
    assert state_of(world).abandoned_count == 0
    assert world.run_until(lambda: is_marked(world, 6), 2 * WRITE_S)


def test_a_marker_that_hangs_holds_up_no_newer_step() -> None:
    """Only the marker's order is late: newer steps are written beside it."""
    world, ranks = trained()
    for holder in world.holders.values():
        holder.instead[WriteMarker] = lambda order, holder=holder: (
            None if order.step.step == 4 else holder.carry_out(order)
        )
    begin(world, ranks, 4, 7)
    assert 4 in under_way(world)
    world.run(0.5)
    assert {held.step for held in world.holders["h0"].held} <= {5, 6, 7}  # its slices are written: it needs no memory
    begin(world, ranks, 8, 9)
    assert world.run_until(lambda: is_marked(world, 9), 3 * WRITE_S)
    assert 4 not in marked(world)
