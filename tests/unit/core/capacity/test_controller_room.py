"""Room at a preparation, a first put, and when states grow: on all hosts, for all ranks, or refused (R10)."""

from __future__ import annotations

import pytest

from memstore.core.wire.orders import Reserve
from memstore.testing.controller.holder import CHUNKS, DirectedHolder, DirectedRank
from memstore.testing.controller.world import ControllerWorld, trained
from recovery.inventory import StepId


def watch_orders(world: ControllerWorld) -> dict[str, list[Reserve]]:
    """Return what every host is ordered to reserve from now on."""
    seen: dict[str, list[Reserve]] = {name: [] for name in world.holders}
    for name, holder in world.holders.items():

        def note(order: Reserve, name: str = name, holder: DirectedHolder = holder) -> None:
            seen[name].append(order)
            holder.carry_out(order)

        holder.instead[Reserve] = note
    return seen


def slots_of(order: Reserve) -> dict[int, int]:
    return order.ranks


def limit_room(world: ControllerWorld, limit: int) -> None:
    """Every host refuses orders for more slots."""
    for holder in world.holders.values():

        def limited(order: Reserve, holder: DirectedHolder = holder) -> None:
            wanted = sum(slots_of(order).values()) + order.peer_slots
            holder.refuses_room = "full" if wanted > limit else ""
            holder.carry_out(order)

        holder.instead[Reserve] = limited


def answered(ranks: list[DirectedRank], count: int) -> bool:
    return all(len(r.answers.get("reserve", ())) + len(r.errors.get("reserve", ())) >= count for r in ranks)


def test_a_larger_put_after_a_preparation_gets_its_room_on_every_rank() -> None:
    """Each rank asks for more while the first one's order is under way: no answer comes before its own room (R10)."""
    world = ControllerWorld(3)
    ranks = world.launch(3)
    world.reserve(ranks)
    orders = watch_orders(world)
    for rank in ranks:
        world.call(rank, "reserve", slots=3 * CHUNKS)
        world.run(0.001)  # the first call is ordered before the last has come
    assert world.run_until(lambda: answered(ranks, 2), 10.0)
    for rank in ranks:
        wanted = [slots_of(order).get(rank.rank) for order in orders[rank.host_id]]
        assert wanted[-1] == 2 * 3 * CHUNKS, f"rank {rank.rank} was answered, its host reserved {wanted}"
    assert world.put_all(ranks, 1)


def test_a_reservation_of_more_slots_than_a_message_can_add_up_is_refused() -> None:
    """No host is ordered anything: the sum of the ranks would fit no order, and the controller would end of it."""
    world = ControllerWorld(3)
    ranks = world.launch(3)
    orders = watch_orders(world)
    world.call(ranks[0], "reserve", slots=(1 << 40) + 1)
    world.run(1.0)
    [error] = ranks[0].errors["reserve"]
    assert "1,099,511,627,777 slots, the limit is 1,099,511,627,776" in str(error)
    assert not any(orders.values())


@pytest.mark.parametrize(("durable", "versions"), [(None, 3), ("/durable", 4)])
def test_a_rank_gets_room_for_every_version_that_its_config_keeps(durable: str | None, versions: int) -> None:
    """The kept steps, the one being put, and with durable storage the one being written (R10)."""
    world = ControllerWorld(2, keep_steps=2, durable=durable)
    ranks = world.launch(2)
    orders = watch_orders(world)
    world.reserve(ranks)
    for rank in ranks:
        assert slots_of(orders[rank.host_id][-1])[rank.rank] == versions * CHUNKS


@pytest.mark.parametrize("last", [0, 1])
def test_refused_growth_leaves_the_room_that_was_claimed(last: int) -> None:
    """CapacityError names the host; what the attempt needed before stands, and its puts go on (R10, R11)."""
    world, ranks = trained(2, last=last)
    if not last:
        world.reserve(ranks)
    before = dict(world.job().attempts[1].needs)
    world.holders[ranks[1].host_id].refuses_room = "no memory left"
    world.call(ranks[0], "reserve", slots=20 * CHUNKS)
    assert world.run_until(lambda: bool(ranks[0].errors.get("reserve")), 10.0)
    assert "no memory left" in ranks[0].error("reserve")
    world.holders[ranks[1].host_id].refuses_room = ""
    assert world.job().attempts[1].needs == before
    assert world.put_all(ranks, last + 1)


def test_a_larger_first_put_that_does_not_fit_is_refused_on_every_rank() -> None:
    """Counted one by one, the first rank's would fit beside what the others prepared, and the last one's not (R10)."""
    world = ControllerWorld(3)
    ranks = world.launch(3)
    world.reserve(ranks)
    limit_room(world, 11 * CHUNKS)
    for rank in ranks:
        world.call(rank, "reserve", slots=3 * CHUNKS)
        world.run(1.0)
    assert world.run_until(lambda: answered(ranks, 2), 10.0)
    assert all(rank.error("reserve").startswith("CapacityError") and "full" in rank.error("reserve") for rank in ranks)
    assert world.job().attempts[1].needs == dict.fromkeys(range(3), CHUNKS)
    assert world.put_all(ranks, 1)


def test_hosts_that_had_room_for_what_was_refused_elsewhere_give_it_back() -> None:
    """Else the room of a job that could not begin stays reserved until the job is removed (R10)."""
    world = ControllerWorld(3)
    ranks = world.launch(3)
    world.holders["h1"].refuses_room = "no memory left"
    for rank in ranks:
        world.call(rank, "reserve", slots=3 * CHUNKS)
    assert world.run_until(lambda: answered(ranks, 1), 10.0)
    assert all(rank.error("reserve").startswith("CapacityError") for rank in ranks)
    world.run(1.0)
    for host in ("h0", "h2"):
        assert world.holders[host].rooms["train"].total == 0, host
    world.holders["h1"].refuses_room = ""
    for rank in ranks:
        world.call(rank, "reserve", slots=CHUNKS)
    assert world.run_until(lambda: answered(ranks, 2), 10.0)
    assert world.put_all(ranks, 1)


def test_one_larger_first_put_waits_for_no_rank_whose_put_fits() -> None:
    """The others have nothing to ask: their puts say so (R10)."""
    world = ControllerWorld(2)
    ranks = world.launch(2)
    world.reserve(ranks)
    world.call(ranks[0], "reserve", slots=3 * CHUNKS)
    world.run(1.0)
    assert not answered(ranks[:1], 2)
    world.put(ranks[1], 1)
    assert world.run_until(lambda: answered(ranks[:1], 2), 3.0)
    assert not ranks[0].errors.get("reserve")


@pytest.mark.parametrize("has_put", [True, False])
def test_a_rank_that_asks_alone_in_vain_is_ordered_to_skip(has_put: bool) -> None:
    """The others' first puts fit, and have come or will: an error of this rank's put would end them all (R10, R12)."""
    world = ControllerWorld(3)
    ranks = world.launch(3)
    world.reserve(ranks)
    limit_room(world, 12 * CHUNKS)
    if has_put:
        world.put(ranks[1], 1)
        world.run(0.2)
    world.call(ranks[0], "reserve", slots=30 * CHUNKS)
    assert world.run_until(lambda: bool(ranks[0].errors.get("reserve")), 10.0)
    assert ranks[0].error("reserve").startswith("GrowthRefused: train does not fit on")
    world.skip(ranks[0], 1)
    for rank in ranks[1:]:
        world.put(rank, 1)
    world.run(3.0)
    assert {rank.tickets[1] for rank in ranks} == {"skipped"}
    assert world.put_all(ranks, max(2, *(rank.resume_step for rank in ranks)))


def test_room_that_is_refused_to_a_second_order_leaves_what_the_first_one_claimed() -> None:
    """A rank that grew twice, the second time in vain, has the room of the first (R10)."""
    world, ranks = trained(2)
    limit_room(world, 40 * CHUNKS)
    world.call(ranks[0], "reserve", slots=3 * CHUNKS)
    world.call(ranks[0], "reserve", slots=20 * CHUNKS)
    assert world.run_until(lambda: bool(ranks[0].errors.get("reserve")), 10.0)
    assert world.job().attempts[1].needs[0] == 3 * CHUNKS


def test_a_smaller_preparation_while_training_leaves_the_share_as_it_is() -> None:
    """Puts go on at the size that was claimed: a share cut under them would skip every one (R10, R12)."""
    world, ranks = trained(2)
    orders = watch_orders(world)
    for count, slots in ((2, 10 * CHUNKS), (3, 5 * CHUNKS)):
        for rank in ranks:
            world.call(rank, "reserve", slots=slots)
        assert world.run_until(lambda count=count: answered(ranks, count), 10.0)
    for rank in ranks:
        assert slots_of(orders[rank.host_id][-1])[rank.rank] == 2 * 10 * CHUNKS


def test_a_preparation_of_some_ranks_and_the_first_put_of_the_others_are_one_round() -> None:
    """No rank is answered before all ranks have asked (R10)."""
    world = ControllerWorld(2)
    ranks = world.launch(2)
    world.get(ranks)
    world.call(ranks[0], "reserve", slots=CHUNKS)
    world.run(2.0)
    assert not ranks[0].answers.get("reserve")
    world.call(ranks[1], "reserve", slots=CHUNKS)
    assert world.run_until(lambda: answered(ranks, 1), 10.0)
    assert world.put_all(ranks, 1)


def test_a_preparation_before_a_get_that_the_job_needs_is_refused() -> None:
    """Preparing frees what no lineage can restore, as a first put does: not before get() has been asked (R19)."""
    world, _ = trained(2)
    ranks = world.launch(2)
    world.reserve(ranks)
    assert all("store.get()" in rank.error("reserve") for rank in ranks)
    world.get(ranks)
    assert world.put_all(ranks, 2)


def test_an_old_step_that_was_held_at_the_first_put_goes_when_a_put_is_skipped() -> None:
    """It fills the version that every put needs, and only a commit would let it go: so no step was ever committed."""
    world, ranks = trained(2, last=1)
    world.call(ranks[0], "pin", step=1, name="best")
    world.run(1.0)
    assert world.put_all(ranks, 2)
    ranks = world.launch(2)
    assert [answer["step"] for answer in world.get(ranks)] == [2, 2]
    world.reserve(ranks)
    assert world.holders_of(StepId(1, 1), 0), "it is held"
    world.call(ranks[0], "unpin", name="best")
    world.run(1.0)
    world.skip(ranks[0], 3)
    world.run(1.0)
    assert sorted(world.job().copies) == [StepId(1, 2)]
    assert all(shard.step != 1 for host in world.holders.values() for shard in host.held if shard.job == "train")


def test_a_holder_that_could_not_claim_is_not_said_to_be_too_small() -> None:
    """It may have room: all ranks get the fault; a host that really lacks room is named before it."""
    world = ControllerWorld(3)
    ranks = world.launch(3)
    world.get(ranks)
    holder = world.holders[ranks[0].host_id]
    holder.refuses_room, holder.is_room_fault = "lost", True
    world.reserve(ranks)
    for rank in ranks:
        said = (
            "CapacityError: room for train is not claimed on h0: its holder failed to claim room (RuntimeError('lost'))"
        )
        assert rank.error("reserve").startswith(said)
    world.holders[ranks[1].host_id].refuses_room = "needs 9 slots"
    world.reserve(ranks)
    world.run(5.0)
    assert ranks[0].error("reserve") == "CapacityError: train does not fit on h1: needs 9 slots"
