"""Steps with two rows of parity: any two hosts of a set may be lost at once, and what repair brings back (R16-R37)."""

from __future__ import annotations

from collections.abc import Collection
from itertools import combinations
from math import comb
from typing import Any

import pytest

from memstore.core.report.redundancy import survival_rows
from memstore.core.wire.orders import PushCopy
from memstore.testing.controller.holder import DirectedRank
from memstore.testing.controller.world import JOB, ControllerWorld, describe, trained
from recovery.inventory import ShardId, StepId
from recovery.parity import ParitySet

HOSTS = tuple(f"h{n}" for n in range(6))
FOUR_AND_TWO = {"replicas": 3, "parity": 4}
PAIRS = list(combinations(range(6), 2))


def tolerated(world: ControllerWorld) -> int:
    """Return how many hosts may be lost, as status says."""
    ((level, count),) = [(row["level"], row["tolerated"]) for row in world.status()["jobs"][0]["survives"]]
    assert level == "host"
    return int(count)


def survives(world: ControllerWorld, lost: Collection[str], world_size: int) -> bool:
    """Return whether a get after the loss would return the newest committed step."""
    job = world.job()
    found = world.served.parts.dry_runs._what_if(job, job.newest, sorted(lost), world_size)
    return found.step == job.newest_committed


def promised(world: ControllerWorld) -> int:
    """Return how many hosts may be lost, as status says; the planner must find it so whichever they are."""
    count = tolerated(world)
    for lost in combinations(sorted(world.served.hosts.live_ids()), max(0, count)):
        assert survives(world, lost, 6) is (count >= 0), (lost, count)
    return count


def restored(world: ControllerWorld, step: int) -> list[DirectedRank]:
    """Launch the job; its get must return the step, every byte as put, from RAM alone."""
    ranks = world.launch(6)
    answers = world.get(ranks, limit_s=120.0)
    world.check_restored(answers)
    assert {answer.get("step") for answer in answers} == {step}, answers
    return ranks


def test_a_step_is_one_copy_and_two_rows_of_every_rank() -> None:
    """Six hosts, one rank each: four chunks of its own, and two rows of one chunk of each of four others (R37)."""
    world, _ = trained(6, last=3, **FOUR_AND_TWO)
    world.run(3.0)
    step = StepId(1, 3)
    assert world.job().attempts[1].parity_sets == dict.fromkeys(range(6), ParitySet((0, 1, 2, 3, 4, 5), spare=2))
    assert world.has_all_parity(step, 6), describe(world)
    assert [world.holders_of(step, rank) for rank in range(6)] == [[host] for host in HOSTS]
    for holder in world.holders.values():
        table = holder.replicas.table
        assert table.claimed_count - len(table.free) - sum(map(len, table.leases.values())) == 4 + 2
        assert holder.rooms[JOB].peer_slots == 2 * 2
        assert holder.received(PushCopy) == []
    assert (tolerated(world), world.status()["jobs"][0]["copies"]) == (2, 3)


def test_a_commit_waits_for_the_parity_of_all_five_others() -> None:
    """The last host's seals are lost for a while: the step stays open, and commits when its parity is there (R16)."""
    world, ranks = trained(6, **FOUR_AND_TWO)
    slow = world.holders["h5"].peer_server.parity
    real, held = slow.on_sealed, []
    slow.on_sealed = held.append
    assert not world.put_all(ranks, 2, limit_s=3.0)
    assert {rank.tickets[2] for rank in ranks} <= {"sealed", "replicated"}
    slow.on_sealed = real
    for copy in held:
        real(copy)
    assert world.run_until(lambda: all(rank.tickets[2] == "committed" for rank in ranks), 20.0), describe(world)
    assert not any(rank.degraded[2] for rank in ranks)


def test_parity_that_waits_for_one_host_keeps_no_other_from_being_added_up() -> None:
    """Two orders never arrive: the sets that they were for wait, and all others are whole within seconds (R29)."""
    world, _ = trained(6, **FOUR_AND_TWO)
    world.run(2.0)
    slow, lost, step = world.holders["h5"], list[PushCopy](), StepId(1, 1)
    slow.instead[PushCopy] = lambda order: lost.append(order) if len(lost) < 2 else slow.carry_out(order)
    for rank, host in enumerate(HOSTS):
        world.holders[host].lose(ShardId(JOB, 1, 1, rank, is_parity=True))
    assert world.run_until(lambda: len(lost) == 2, 10.0), describe(world)
    assert world.run_until(lambda: len(world.parity_on(step)) == 4, 3.0), describe(world)
    assert world.run_until(lambda: world.has_all_parity(step, 6), 30.0), describe(world)


def test_shards_that_ram_lacks_are_planned_once_a_minute() -> None:
    """Two hosts of a set are gone: no host of 30 could decode their shards, and a plan is dear in a large job (R37)."""
    world, ranks = trained(30, parity=4)
    world.run(2.0)
    decode, planned = world.served.parts.repair.parity._decode, list[str]()

    def counted(host: str, *of: Any) -> int | None:
        planned.append(host)
        return decode(host, *of)

    world.served.parts.repair.parity._decode = counted
    lost = world.job().attempts[1].parity_sets[0].ranks[:2]
    for rank in lost:
        world.kill_host(ranks[rank].host_id)
    world.run(50.0)
    assert len(planned) == len(lost)


def test_parity_of_a_step_that_goes_keeps_no_turn_of_its_host() -> None:
    """Parts of the step before were under way, and nothing reports that they ended: the next ones begin at once."""
    world, ranks = trained(5, 20, parity=4)
    world.run(2.0)
    slow = list[PushCopy]()
    for holder in world.holders.values():
        holder.instead[PushCopy] = lambda order, holder=holder: (
            slow.append(order) if order.shard.step == 1 else holder.carry_out(order)
        )
    here = [rank.rank for rank in ranks if rank.host_id == "h1"]
    world.holders["h1"].lose(*(ShardId(JOB, 1, 1, rank, is_parity=True) for rank in here))
    assert world.run_until(lambda: bool(slow), 5.0), describe(world)
    assert world.put_all(ranks, 2), describe(world)
    world.holders["h1"].lose(*(ShardId(JOB, 1, 2, rank, is_parity=True) for rank in here))
    assert world.run_until(lambda: not {*here} & {*world.parity_on(StepId(1, 2))}, 1.0), describe(world)
    assert world.run_until(lambda: {*here} <= {*world.parity_on(StepId(1, 2))}, 4.0), describe(world)


@pytest.mark.parametrize("pair", PAIRS)
def test_any_two_hosts_come_back_from_parity_alone(pair: tuple[int, int]) -> None:
    """Both shards are decoded at the new hosts, and the next step has all of its parity (R24, R37)."""
    world, _ = trained(6, last=2, **FOUR_AND_TWO)
    world.run(2.0)
    for rank in pair:
        world.kill_host(f"h{rank}")
    for name in ("h6", "h7"):
        world.add_host(name)
    ranks = restored(world, 2)
    assert {rank.host_id for rank in ranks}.isdisjoint(f"h{rank}" for rank in pair)
    assert world.put_all(ranks, 3, limit_s=40.0), describe(world)
    assert world.run_until(lambda: world.has_all_parity(StepId(2, 3), 6), 30.0), describe(world)
    assert not any(rank.degraded[3] for rank in ranks)


def test_two_hosts_lost_one_after_the_other_come_back_without_replacement() -> None:
    """The second goes before anything is repaired: four hosts are left, and each lost rank is on one of them."""
    world, _ = trained(6, last=2, **FOUR_AND_TWO)
    world.run(2.0)
    world.kill_host("h1")
    world.run(1.0)
    world.kill_host("h4")
    world.run(6.0)
    restored(world, 2)


def lost_three(**config: Any) -> ControllerWorld:
    """Return a world of six hosts of which three went at once."""
    world, _ = trained(6, last=2, **FOUR_AND_TWO, **config)
    world.run(4.0)
    for rank in (1, 2, 4):
        world.kill_host(f"h{rank}")
    for name in ("h6", "h7", "h8"):
        world.add_host(name)
    world.run(8.0)
    return world


def test_three_lost_hosts_of_a_set_are_refused_by_name() -> None:
    """Without durable storage get() says which ranks, and not that nothing was ever put (R23, R25)."""
    world = lost_three()
    answers = world.get(world.launch(6), limit_s=120.0)
    assert all("RecoveryError" in answer.get("error", "") for answer in answers), answers
    lost = "ranks 1: 4 of 4 chunks, 2: 4 of 4 chunks, 4: 4 of 4 chunks (3 of 6)"
    assert all(lost in answer["error"] for answer in answers), answers
    assert tolerated(world) == -1


def test_three_lost_hosts_of_a_set_come_from_durable_storage() -> None:
    """The newest durable step comes back whole, and only what no row gives is read there (R24, R31)."""
    world = lost_three(durable="/durable", durable_every=1)
    answers = world.get(world.launch(6), limit_s=120.0)
    world.check_restored(answers)
    assert {answer.get("step") for answer in answers} == {2}, answers


@pytest.mark.parametrize("is_replaced", [True, False])
def test_repair_decodes_both_lost_shards(*, is_replaced: bool) -> None:
    """Each is a copy on another host then; with hosts in place of both the parity that they had is back too (R29)."""
    world, _ = trained(6, last=3, **FOUR_AND_TWO)
    world.run(2.0)
    world.kill_host("h1")
    world.kill_host("h4")
    world.run(0.1)
    for name in ("h6", "h7") if is_replaced else ():
        world.add_host(name)
    step = StepId(1, 3)
    assert world.run_until(lambda: all(world.holders_of(step, rank) for rank in (1, 4)), 90.0), describe(world)
    assert set(world.holders_of(step, 1) + world.holders_of(step, 4)).isdisjoint({"h1", "h4"})
    ranks = restored(world, 3)
    if is_replaced:
        for number in (4, 5):
            assert world.put_all(ranks, number, limit_s=40.0), (describe(world), ranks[1].reasons)
        assert not any(rank.degraded[5] for rank in ranks), ranks[0].reasons
        assert world.run_until(lambda: tolerated(world) == 2, 30.0), describe(world)


@pytest.mark.parametrize(("spare_hosts", "after_repair"), [(0, 0), (1, 0), (2, 2)])
def test_status_counts_down_and_up_again(spare_hosts: int, after_repair: int) -> None:
    """Any two hosts may go, then any one, then none; with a host in place of each all of it comes back (R18, R29)."""
    world = ControllerWorld(6 + spare_hosts, **FOUR_AND_TWO)
    ranks = world.launch(6)
    world.get(ranks)
    assert world.put_all(ranks, 1)
    world.run(2.0)
    seen = [promised(world)]
    for rank in (1, 4):
        world.kill_host(ranks[rank].host_id)
        assert world.run_until(lambda rank=rank: ranks[rank].host_id not in world.served.hosts.live_ids(), 60.0)
        seen.append(promised(world))
    assert seen == [2, 1, 0]
    world.run(60.0)
    assert promised(world) == after_repair, describe(world)
    assert all(world.holders_of(StepId(1, 1), rank) for rank in range(6))


def test_a_host_that_refuses_parity_is_named_and_one_more_may_be_lost() -> None:
    """A commit without one host's parity is degraded; the rows on the four others still give any one host (R18)."""
    world, ranks = trained(6, **FOUR_AND_TWO)
    world.holders["h2"].refuses_copies = "out of order"
    assert world.put_all(ranks, 2, limit_s=40.0), describe(world)
    assert all(rank.degraded[2] for rank in ranks)
    assert "h2" in ranks[0].reasons[2]
    assert "out of order" in ranks[0].reasons[2]
    assert promised(world) == 1
    assert world.status()["jobs"][0]["copies"] == 2
    world.kill_host("h3")
    world.add_host("h6")
    world.run(1.0)
    restored(world, 2)


def test_racks_of_two_hosts_may_be_lost_by_two() -> None:
    """Two hosts of a rack are in two sets, so that any two racks, which are four hosts, come back (R18, R37)."""
    labels = {f"h{n}": {"rack": f"r{n % 6}"} for n in range(12)}
    world = ControllerWorld(12, labels=labels, **FOUR_AND_TWO)
    ranks = world.launch(12)
    world.get(ranks)
    assert world.put_all(ranks, 1)
    levels = {row["level"]: row["tolerated"] for row in world.status()["jobs"][0]["survives"]}
    assert levels == {"rack": 2, "host": 2}
    for racks in combinations(range(6), 2):
        assert survives(world, [f"h{n}" for n in range(12) if n % 6 in racks], 12)
    assert not survives(world, [f"h{n}" for n in range(12) if n % 6 in (0, 1, 2)], 12)


# -- the odds of a plan -------------------------------------------------------------------------------


def check_odds(world: ControllerWorld, world_size: int) -> list[float]:
    """Compare the odds with what the planner makes of every set of lost hosts; return them."""
    live = sorted(world.served.hosts.live_ids())
    odds = survival_rows(world.job(), live, 4)
    for row in odds:
        lost_sets = list(combinations(live, row.lost))
        kept = sum(survives(world, lost, world_size) for lost in lost_sets)
        assert len(lost_sets) == comb(len(live), row.lost)
        assert (row.chance, row.is_exact) == (pytest.approx(kept / len(lost_sets)), True), row
    return [row.chance for row in odds]


def test_the_odds_of_six_hosts_and_two_without_ranks() -> None:
    """Any two of all eight; three only if a host without ranks is among them (R37)."""
    world = ControllerWorld(8, **FOUR_AND_TWO)
    ranks = world.launch(6)
    world.get(ranks)
    assert world.put_all(ranks, 1)
    chances = check_odds(world, 6)
    assert chances[:3] == [1.0, 1.0, pytest.approx(1 - comb(6, 3) / comb(8, 3))]


def test_the_odds_of_two_sets() -> None:
    """Twelve hosts are two sets of six: three lost hosts take a step along only if they are of one set."""
    world, _ = trained(12, **FOUR_AND_TWO)
    assert len({*world.job().attempts[1].parity_sets.values()}) == 2
    chances = check_odds(world, 12)
    assert chances[:3] == [1.0, 1.0, pytest.approx(1 - 2 * comb(6, 3) / comb(12, 3))]


def test_the_odds_once_a_host_is_lost() -> None:
    """Any one of those that are left, and no two: one row of some chunks is gone with the host."""
    world, _ = trained(6, **FOUR_AND_TWO)
    world.run(2.0)
    world.kill_host("h1")
    assert world.run_until(lambda: "h1" not in world.served.hosts.live_ids(), 60.0)
    assert check_odds(world, 6)[:2] == [1.0, 0.0]


def test_a_damaged_row_is_added_again_by_those_whose_chunks_are_in_it() -> None:
    """A scrub finds a second row bad: the others are ordered to add theirs to that host, and no other (R30)."""
    world, _ = trained(6, **FOUR_AND_TWO)
    world.run(2.0)
    holder = world.holders["h3"]
    stored = holder.replicas.index.find(ShardId(JOB, 1, 1, 3, is_parity=True))
    assert stored is not None
    assert stored.slots[1] is not None
    holder.memory.spoil(stored.slots[1], world.now)
    holder.replicas.verify_slots([stored.slots[1]])
    world.run(1.0)
    assert world.run_until(lambda: world.has_all_parity(StepId(1, 1), 6), 30.0), describe(world)
    orders = [order for each in world.holders.values() for order in each.received(PushCopy)]
    assert {(order.shard.rank, order.target) for order in orders} == {(rank, "h3") for rank in (0, 1, 2, 4, 5)}


@pytest.mark.parametrize("is_tight", [False, True])
def test_parts_of_older_steps_have_room_beside_what_comes_in_their_place(*, is_tight: bool) -> None:
    """Every rank has moved by one host: there a shard of four chunks and two rows of each of two kept steps are left.

    A host that has no room for all of it keeps them in the places of the rows of a version (R10, R29).
    """
    world, _ = trained(6, last=3, keep_steps=2, **FOUR_AND_TWO)
    world.add_host("h6")
    world.run(2.0)
    world.kill_host("h0")
    world.run(5.0)
    limited = world.holders["h3"].replicas.arena
    if is_tight:
        limited.limit_slots = 12 + 3 * 2 + 2 * 4  # its rank's part, the rows of three versions, and the two shards
    ranks = restored(world, 3)
    world.reserve(ranks)
    assert all(rank.has_room for rank in ranks)
    slots = {host: holder.rooms[JOB].peer_slots for host, holder in world.holders.items() if holder.is_up}
    assert slots == {**dict.fromkeys(HOSTS[1:], 3 * 2 + 2 * (4 + 2)), "h3": 14 if is_tight else 18, "h6": 3 * 2}
    assert world.put_all(ranks, 4, limit_s=40.0), describe(world)
