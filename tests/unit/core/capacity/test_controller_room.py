"""Room at a preparation, a first put, and when states grow: on all hosts, for all ranks, or refused (R10)."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memstore.core.wire.orders import Reserve
from memstore.testing.controller.holder import CHUNKS, DirectedHolder, DirectedRank
from memstore.testing.controller.world import JOB, ControllerWorld, trained
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


def limit_room(world: ControllerWorld, limit: int, *hosts: str) -> None:
    """Every host, or these, refuses orders for more slots."""
    for holder in [world.holders[name] for name in hosts or world.holders]:

        def limited(order: Reserve, holder: DirectedHolder = holder) -> None:
            wanted = sum(slots_of(order).values()) + order.peer_slots
            holder.refuses_room = f"full at {limit}" if wanted > limit else ""
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


@pytest.mark.parametrize(
    ("durable", "in_flight", "versions"), [(None, 1, 3), ("/durable", 1, 4), (None, 2, 4), ("/durable", 4, 7)]
)
def test_a_rank_gets_room_for_every_version_that_its_config_keeps(
    durable: str | None, in_flight: int, versions: int
) -> None:
    """The kept steps, those that may wait for their commit, and with durable storage the one being written (R10)."""
    world = ControllerWorld(2, keep_steps=2, durable=durable, in_flight=in_flight)
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


def test_a_table_of_reservations_is_in_the_error_and_in_no_line_of_status() -> None:
    """The ranks read all of it; one who looks at a host that joined without room reads the line in front of it."""
    world, _ = trained(2)
    table = "\nReserved on this host:\nJOB    RESERVED\ntrain  1.0 MiB"
    world.holders["h1"].refuses_room = "no memory left" + table
    ranks = world.launch(2, job="late")
    world.reserve(ranks)
    for rank in ranks:
        assert rank.error("reserve") == f"CapacityError: late does not fit on h1: no memory left{table}"
    world.add_host("h2", {}).refuses_room = "none here" + table
    world.run(1.0)
    world.kill_host("h1")
    world.run(20.0)
    said = str(world.status()) + str(world.notes)
    assert ("none here" in said, "Reserved" in said) == (True, False)


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


def test_the_ranks_of_a_launch_may_be_leased_slots_once_their_get_is_over() -> None:
    """A host that joins before it reserves room for them: what they will put has room that the get uses (R10)."""
    world, _ = trained(2)
    ranks = world.launch(2)
    world.add_host("h2", {"memstore": "replica"})
    world.run(5.0)

    def found() -> set[tuple[int, bool]]:
        return {(holder.rooms[JOB].attempt, holder.rooms[JOB].may_lease) for holder in world.holders.values()}

    assert found() == {(2, False)}
    world.get(ranks)
    assert world.put_all(ranks, 2)
    assert found() == {(2, True)}


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


# -- several versions in flight ------------------------------------------------------------------------


def claimed(world: ControllerWorld) -> set[int]:
    """Return how many versions the hosts have claimed."""
    return {holder.rooms[JOB].versions for holder in world.holders.values() if JOB in holder.rooms}


def in_flight(world: ControllerWorld) -> tuple[int, str]:
    """Return what status says: how many versions are in flight, and what `memstore status` prints of that."""
    status = world.status()
    [job] = status["jobs"]
    return job["in_flight"], "; ".join(row["cause"] for row in status["problems"] if row["kind"] == "in_flight")


@pytest.mark.parametrize(("versions", "found"), [(4, 3), (3, 2), (2, 1)])
def test_the_host_with_the_least_memory_says_how_many_versions_are_in_flight(versions: int, found: int) -> None:
    """All hosts have room alike for as many as it has, the first put succeeds, and status names it (R10)."""
    world = ControllerWorld(3, in_flight=3)
    ranks = world.launch(3)
    limit_room(world, 2 * versions * CHUNKS, "h1")
    world.reserve(ranks)
    assert not any(rank.errors.get("reserve") for rank in ranks)
    world.run(1.0)
    assert claimed(world) == {versions}
    lacks = f"in_flight=3 is asked for, {found} is claimed on all hosts: no room for more on h1: full at"
    number, said = in_flight(world)
    assert number == found
    assert (not said) if found == 3 else said.startswith(lacks)
    assert world.put_all(ranks, 1)


def test_a_job_that_does_not_fit_with_one_version_in_flight_is_refused_on_every_rank() -> None:
    """With the numbers of the order that asked for the least; a smaller put is accepted then (R10)."""
    world = ControllerWorld(3, in_flight=4)
    ranks = world.launch(3)
    limit_room(world, 4 * CHUNKS - 1, "h2")
    world.reserve(ranks)
    assert all(
        rank.error("reserve") == f"CapacityError: train does not fit on h2: full at {4 * CHUNKS - 1}" for rank in ranks
    )
    world.run(1.0)
    assert {holder.rooms[JOB].total for holder in world.holders.values() if JOB in holder.rooms} == {0}
    limit_room(world, 4 * CHUNKS, "h2")
    world.reserve(ranks)
    assert world.put_all(ranks, 1)


def test_a_successor_asks_no_host_for_versions_in_flight_that_were_refused() -> None:
    """The fact that the room is claimed says how many they are (R10, R16)."""
    world = ControllerWorld(3, in_flight=3)
    ranks = world.launch(3)
    limit_room(world, 6 * CHUNKS, "h1")
    world.reserve(ranks)
    assert world.put_all(ranks, 1)
    orders = watch_orders(world)
    world.crash_controller()
    world.run(5.0)
    world.kill_host("h0")  # placement is new, and hosts are ordered to claim what comes to them
    world.run(10.0)
    assert in_flight(world)[0] == 2
    asked = [order.versions for orders in orders.values() for order in orders]
    assert asked
    assert max(asked) == 3


@pytest.mark.parametrize("is_closed", [False, True])
def test_a_host_that_joins_without_room_for_them_lowers_the_versions_in_flight_everywhere(is_closed: bool) -> None:
    """A step waits for every host: it joins with what it has, and copies go to it. A closed job has none (R10)."""
    world = ControllerWorld(2, in_flight=2)
    ranks = world.launch(2)
    world.reserve(ranks)
    assert world.put_all(ranks, 1)
    assert claimed(world) == {3}
    for rank in ranks if is_closed else ():
        world.call(rank, "close")
    world.run(1.0)
    world.kill_host("h1")
    world.add_host("h2", {"memstore": "replica"})
    limit_room(world, (1 if is_closed else 4) * CHUNKS, "h2")
    world.run(20.0)
    assert in_flight(world)[0] == (2 if is_closed else 1)
    if not is_closed:
        assert [world.holders[host].rooms[JOB].versions for host in ("h0", "h2")] == [2, 2]
        assert [world.holders_of(StepId(1, 1), rank) for rank in (0, 1)] == [["h0", "h2"]] * 2


@pytest.mark.parametrize("verb", ["pin", "lease"])
def test_a_pin_takes_the_place_of_a_version_in_flight_and_a_lease_does_not(verb: str) -> None:
    """What a person keeps is worth more than room to put ahead, and that more than what a reader keeps (R19, R36)."""
    world = ControllerWorld(3, in_flight=2)
    ranks = world.launch(3)
    world.reserve(ranks)
    assert world.put_all(ranks, 1)
    limit_room(world, 6 * CHUNKS)
    if verb == "pin":
        world.call(ranks[0], "pin", step=1, name="best")
    else:
        world.call(ranks[0], "lease_step", step=1, of_attempt=None, lease="l", limit_s=60.0)
    world.run(5.0)
    assert in_flight(world)[0] == (1 if verb == "pin" else 2)
    assert claimed(world) == {2 if verb == "pin" else 3}
    assert not ranks[0].errors
    assert (ranks[0].answers.get("lease_step", [{}])[0].get("why_not_kept", "") != "") == (verb == "lease")
    assert world.put_all(ranks, 2)


def test_a_state_that_grows_takes_the_place_of_a_version_in_flight() -> None:
    """Else every step would be skipped for want of room to put ahead (R10, R12)."""
    world = ControllerWorld(3, in_flight=2)
    ranks = world.launch(3)
    world.reserve(ranks)
    assert world.put_all(ranks, 1)
    limit_room(world, 8 * CHUNKS)
    for rank in ranks:
        world.call(rank, "reserve", slots=2 * CHUNKS)
    assert world.run_until(lambda: answered(ranks, 2), 10.0)
    assert not any(rank.errors for rank in ranks)
    assert {slots for rank in ranks for slots in world.holders[rank.host_id].rooms[JOB].ranks.values()} == {4 * CHUNKS}


@given(
    limits=st.lists(st.integers(1, 5), min_size=3, max_size=3),
    late_s=st.lists(st.sampled_from([0.0, 0.3, 1.5]), min_size=3, max_size=3),
    wish=st.integers(1, 4),
    seed=st.integers(0, 99),
)
@settings(max_examples=60, deadline=None)
def test_all_hosts_claim_as_many_versions_as_the_smallest_has(
    limits: list[int], late_s: list[float], wish: int, seed: int
) -> None:
    """Whichever answers first, and with one version for the kept step: as many as are asked for, or none (R10)."""
    world = ControllerWorld(3, in_flight=wish, seed=seed)
    ranks = world.launch(3)
    for host, versions, delay_s in zip(sorted(world.holders), limits, late_s, strict=True):
        limit_room(world, 2 * versions * CHUNKS, host)
        holder = world.holders[host]
        holder.instead[Reserve] = lambda order, carry_out=holder.instead[Reserve], delay_s=delay_s: world.at(
            delay_s, lambda: carry_out(order)
        )
    for rank in ranks:
        world.call(rank, "reserve", slots=CHUNKS)
    assert world.run_until(lambda: answered(ranks, 1), 20.0)
    world.run(5.0)
    found = min(wish, min(limits) - 1)
    assert [bool(rank.errors.get("reserve")) for rank in ranks] == [found < 1] * 3
    assert claimed(world) == {1 + found} or found < 1
    assert found < 1 or (in_flight(world)[0] == found and world.put_all(ranks, 1))


def test_a_refusal_that_comes_late_lowers_the_versions_in_flight_no_further() -> None:
    """Two hosts refuse one order, one of them after it was sent the next: that is no answer to the next (R10)."""
    world = ControllerWorld(3, in_flight=3)
    ranks = world.launch(3)
    limit_room(world, 6 * CHUNKS)
    late = world.holders["h2"]
    carry_out = late.instead[Reserve]
    late.instead[Reserve] = lambda order: world.at(0.5, lambda: carry_out(order))
    world.reserve(ranks)
    world.run(1.0)
    assert (in_flight(world)[0], claimed(world)) == (2, {3})
    assert world.put_all(ranks, 1)
