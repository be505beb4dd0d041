"""Steps with parity: what a commit needs, and what is added up or decoded again after a loss (R16, R18, R29, R37)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from memstore.core.report.redundancy import survival_rows
from memstore.core.wire.orders import Bring, PushCopy
from memstore.core.wire.reports import Brought
from memstore.shell.peer.parity import IDLE_S
from memstore.testing.controller.holder import DirectedHolder, DirectedRank
from memstore.testing.controller.world import JOB, ControllerWorld, describe, trained
from recovery.inventory import ShardId, StepId
from recovery.parity import ParitySet

HOSTS = ("h0", "h1", "h2", "h3", "h4")


def used_slots(world: ControllerWorld) -> dict[str, int]:
    """Return how many slots hold something, by host, leases apart."""
    found = {}
    for host, holder in world.holders.items():
        table = holder.replicas.table
        leased = sum(map(len, table.leases.values()))
        found[host] = table.claimed_count - len(table.free) - leased if holder.is_up else 0
    return found


def pushes(world: ControllerWorld) -> list[PushCopy]:
    """Return the repairs that were ordered."""
    return [order for holder in world.holders.values() for order in holder.received(PushCopy)]


def test_a_step_is_one_copy_and_parity_of_every_rank() -> None:
    """Five hosts, one rank each: four chunks of its own, and one row, which is one chunk of each other one (R37)."""
    world, _ = trained(5, last=3, parity=4)
    world.run(3.0)
    for step in (1, 2):
        assert world.parity_on(StepId(1, step)) == {}, "an older step goes with its parity (R19)"
    assert world.has_all_parity(StepId(1, 3), 5), describe(world)
    assert [world.holders_of(StepId(1, 3), rank) for rank in range(5)] == [[host] for host in HOSTS]
    assert set(used_slots(world).values()) == {5}
    assert all(holder.rooms[JOB].peer_slots == 2 for holder in world.holders.values())
    assert pushes(world) == []


def test_a_commit_waits_for_the_parity_of_every_host() -> None:
    """The last host's seals are lost for a while: the step stays open, and commits when its parity is there (R16)."""
    world, ranks = trained(5, parity=4)
    slow = world.holders["h4"].peer_server.parity
    real, held = slow.on_sealed, []
    slow.on_sealed = held.append
    assert not world.put_all(ranks, 2, limit_s=3.0)
    assert {rank.tickets[2] for rank in ranks} <= {"sealed", "replicated"}
    slow.on_sealed = real
    for copy in held:
        real(copy)
    assert world.run_until(lambda: all(rank.tickets[2] == "committed" for rank in ranks), 20.0), describe(world)
    assert not any(rank.degraded[2] for rank in ranks)


def test_a_host_that_refuses_parity_is_named_by_a_degraded_commit() -> None:
    """The other four hosts have parity of what is lost if one of them goes; status and ticket name the fifth (R18)."""
    world, ranks = trained(5, parity=4)
    world.holders["h2"].refuses_copies = "out of order"
    assert world.put_all(ranks, 2, limit_s=40.0), describe(world)
    assert all(rank.degraded[2] for rank in ranks)
    assert "h2" in ranks[0].reasons[2]
    assert "out of order" in ranks[0].reasons[2]
    world.holders["h2"].refuses_copies = ""
    assert world.put_all(ranks, 3, limit_s=40.0), describe(world)
    assert world.run_until(lambda: world.has_all_parity(StepId(1, 3), 5), 60.0), describe(world)


def test_a_new_controller_knows_the_sets_of_a_put_under_way() -> None:
    """It reads them from the fact of the room; the step that was open commits with its parity (R2, R16)."""
    world, ranks = trained(5, parity=4)
    sets = dict(world.job().attempts[1].parity_sets)
    assert sets == dict.fromkeys(range(5), ParitySet((0, 1, 2, 3, 4)))
    for rank in ranks[:3]:
        world.put(rank, 2)
    world.run(0.05)
    world.crash_controller()
    world.run(1.0)
    for rank in ranks[3:]:
        world.put(rank, 2)
    assert world.run_until(lambda: all(rank.tickets[2] == "committed" for rank in ranks), 40.0), describe(world)
    assert world.job().attempts[1].parity_sets == sets
    assert world.run_until(lambda: world.has_all_parity(StepId(1, 2), 5), 20.0)
    assert not any(rank.degraded[2] for rank in ranks)


@pytest.mark.parametrize("after_s", [1.5, 15.0])
def test_rows_that_a_restarted_holder_lost_are_added_again(after_s: float) -> None:
    """It ends with rows that are not full; the rest is added to them afresh, and the step commits all the same (R6).

    Also when two ranks are late, so that repair has looked at the open step: no order for others stands in the way.
    """
    world, ranks = trained(5, parity=4)
    for rank in ranks[:3]:
        world.put(rank, 2)
    world.run(after_s)
    assert world.holders["h4"].replicas.index.parity
    world.return_host("h4")
    ranks[4].connect(world.holders["h4"])
    world.run(1.0)
    assert not world.holders["h4"].replicas.index.parity
    for rank in ranks[3:]:
        world.put(rank, 2)
    assert world.run_until(lambda: all(rank.tickets[2] == "committed" for rank in ranks), 40.0), describe(world)
    assert world.has_all_parity(StepId(1, 2), 5), describe(world)
    assert not any(rank.degraded[2] for rank in ranks)


def lost(*, replaced: bool) -> tuple[ControllerWorld, list[DirectedRank]]:
    """Return a world whose host h1 went with its memory after step 3."""
    world, _ = trained(5, last=3, parity=4)
    world.run(2.0)
    world.kill_host("h1")
    if replaced:
        world.add_host("h5")
    world.run(5.0)
    return world, [rank for _, rank in sorted(world.ranks.items())]


def test_a_lost_host_is_decoded_at_its_replacement_and_parity_is_complete_again() -> None:
    """The newest step comes back bit for bit; its parity is added up on the new host (R24, R29)."""
    world, _ = lost(replaced=True)
    ranks = world.launch(5)
    answers = world.get(ranks)
    world.check_restored(answers)
    assert {answer.get("step") for answer in answers} == {3}, answers
    assert world.put_all(ranks, 4, limit_s=40.0), describe(world)
    assert world.run_until(lambda: world.has_all_parity(StepId(2, 4), 5), 30.0), describe(world)
    world.run(IDLE_S + 5.0)  # parity of the step before may have been begun, and was left when that step went
    assert set(used_slots(world).values()) == {5, 0} - ({0} if world.holders["h1"].is_up else set())


def test_a_lost_shard_is_decoded_onto_another_host_while_none_replaces_it() -> None:
    """Four hosts are left: the shard of the fifth is decoded onto one of them, so that one more loss is survived."""
    world, _ = lost(replaced=False)
    assert world.run_until(lambda: bool(world.holders_of(StepId(1, 3), 1)), 60.0), describe(world)
    (host,) = world.holders_of(StepId(1, 3), 1)
    assert host in {"h0", "h2", "h3", "h4"}
    ranks = world.launch(5)
    answers = world.get(ranks)
    world.check_restored(answers)
    assert {answer.get("step") for answer in answers} == {3}, answers


def test_rows_of_a_step_that_nobody_finishes_give_way_to_those_of_a_kept_one() -> None:
    """All ranks are dead, and the peers' part is full of an open step's row: the kept step's comes in its place."""
    world, ranks = trained(5, parity=4)
    for rank in ranks[:4]:
        world.put(rank, 2)
    world.run(2.0)
    index = world.holders["h0"].replicas.index
    assert [parity.shard.step for parity in index.parity.values()] == [2]
    for rank in ranks:
        world.kill_rank(rank)
    index.shares[JOB] = replace(index.shares[JOB], peer_slots=1)
    world.holders["h0"].lose(ShardId(JOB, 1, 1, 0, is_parity=True))
    assert world.run_until(lambda: world.parity_on(StepId(1, 1)).get(0) == ["h0"], 60.0), describe(world)
    assert list(index.parity) == []


def with_h4_empty() -> tuple[ControllerWorld, DirectedHolder]:
    """Return a set of five hosts, one of which is back without its memory."""
    world, _ = trained(5, parity=4)
    world.run(2.0)
    world.kill_host("h4")
    world.return_host("h4", keep_memory=False)
    return world, world.holders["h4"]


def test_a_lost_shard_is_decoded_before_its_host_adds_parity_up_again() -> None:
    """A get waits for the shard: until it is there nothing else is sent to its host, and then the rows come."""
    (world, back), held = with_h4_empty(), list[Bring]()
    back.instead[Bring] = held.append
    assert world.run_until(lambda: bool(held), 20.0), describe(world)
    world.run(5.0)
    assert [order.parity.rank for order in pushes(world) if order.parity is not None] == []
    back.instead.clear()
    back.carry_out(held[0])
    assert world.run_until(lambda: world.has_all_parity(StepId(1, 1), 5), 30.0), describe(world)


def test_a_lost_shard_comes_before_parity_in_a_newer_attempt_too() -> None:
    """What was being decoded is fenced by the launch: rows that come in its place would have the link of the get."""
    (world, back), held = with_h4_empty(), list[Bring]()
    back.instead[Bring] = held.append
    assert world.run_until(lambda: bool(held), 20.0), describe(world)
    world.launch(5)
    back.state.report(Brought(read=held[0].read, problem="FencedError: its attempt is over", bad={}))
    assert world.run_until(lambda: len(held) == 2, 2.0), describe(world)
    assert [order.attempt for order in held] == [1, 2]
    world.run(3.0)
    assert [order.parity.rank for order in pushes(world) if order.parity is not None] == []


def test_a_host_adds_parity_up_again_once_it_has_decoded_a_shard() -> None:
    """Also when the shard was for safety, and went from there again: nothing is sent for it any more."""
    world, _ = trained(5, parity=4)
    world.run(2.0)
    world.kill_host("h4")
    assert world.run_until(lambda: world.holders_of(StepId(1, 1), 4) == ["h0"], 20.0), describe(world)
    world.return_host("h4", keep_memory=False)
    ranks = world.launch(5)
    world.get(ranks)
    assert world.run_until(lambda: world.holders_of(StepId(1, 1), 4) == ["h4"], 40.0), describe(world)
    world.holders["h0"].lose(ShardId(JOB, 1, 1, 0, is_parity=True))
    assert world.run_until(lambda: world.has_all_parity(StepId(1, 1), 5), 15.0), describe(world)


def test_a_shard_that_could_not_be_decoded_is_ordered_again_soon() -> None:
    """A source was out of reach for a moment: meanwhile the host may add parity up."""
    (world, back), failed = with_h4_empty(), list[Bring]()

    def fail(order: Bring) -> None:
        failed.append(order)
        back.state.report(Brought(read=order.read, problem="out of reach", bad={}))

    back.instead[Bring] = fail
    assert world.run_until(lambda: len(failed) == 2, 20.0), describe(world)
    back.instead.clear()
    assert world.run_until(lambda: world.holders_of(StepId(1, 1), 4) == ["h4"], 15.0), describe(world)


def test_a_first_put_reserves_nothing_for_a_shard_that_was_decoded_for_safety() -> None:
    """It goes once its rank's host has it and parity is there again: a put waits for that, and is not refused."""
    world, _ = trained(5, parity=4)
    world.run(2.0)
    world.kill_host("h4")
    world.run(10.0)
    assert world.holders_of(StepId(1, 1), 4) == ["h0"]
    world.return_host("h4", keep_memory=False)
    ranks = world.launch(5)
    world.get(ranks)
    world.reserve(ranks)
    assert all(rank.has_room for rank in ranks)
    assert {host: holder.rooms[JOB].peer_slots for host, holder in world.holders.items()} == dict.fromkeys(HOSTS, 2)
    assert world.put_all(ranks, 2)


def test_a_shard_that_was_decoded_for_safety_is_kept_for_no_reader() -> None:
    """It is a copy as any: when its step is dropped its slots are the next put's at once, on the host that has few."""
    world, _ = lost(replaced=True)
    assert world.run_until(lambda: world.holders_of(StepId(1, 3), 1) == ["h5"], 60.0), describe(world)
    world.run(1.0)
    assert world.holders["h5"].replicas.index.incoming == {}
    ranks = world.launch(5)
    world.check_restored(world.get(ranks))
    for step in (4, 5, 6):
        assert world.put_all(ranks, step), (describe(world), ranks[1].reasons)


def test_two_lost_hosts_of_a_set_are_more_than_parity_gives() -> None:
    """Without durable storage get() says so by name, and not that nothing was ever put (R23, R25)."""
    world, _ = trained(5, last=2, parity=4)
    world.run(2.0)
    world.kill_host("h1")
    world.kill_host("h2")
    world.add_host("h5")
    world.add_host("h6")
    world.run(8.0)
    ranks = world.launch(5)
    answers = world.get(ranks, limit_s=120.0)
    assert all("RecoveryError" in answer.get("error", "") for answer in answers), answers
    assert all("ranks 1: 4 of 4 chunks, 2: 4 of 4 chunks (2 of 5)" in answer["error"] for answer in answers), answers


@pytest.mark.parametrize("is_late", [True, False])
def test_a_skipped_step_leaves_no_row_anywhere(*, is_late: bool) -> None:
    """Rows that are full and rows that are not: every slot is free again once the step is given up (R12, R19)."""
    world, ranks = trained(5, parity=4)
    world.run(2.0)
    before = used_slots(world)
    for rank in ranks[: 4 if is_late else 2]:
        world.put(rank, 2)
    world.run(2.0 if is_late else 0.3)
    for rank in ranks[4 if is_late else 2 :]:
        world.skip(rank, 2)
    world.run(8.0)
    assert world.parity_on(StepId(1, 2)) == {}
    assert used_slots(world) == before, describe(world)
    assert all(not holder.replicas.index.parity for holder in world.holders.values())
    assert world.put_all(ranks, 3), describe(world)


def test_a_damaged_row_is_added_again() -> None:
    """A scrub finds it; the others are ordered to add theirs, and nothing else is pushed (R30)."""
    world, _ = trained(5, parity=4)
    world.run(2.0)
    parity = ShardId(JOB, 1, 1, 3, is_parity=True)
    holder = world.holders["h3"]
    stored = holder.replicas.index.find(parity)
    assert stored is not None
    assert stored.slots[0] is not None
    holder.memory.spoil(stored.slots[0], world.now)
    holder.replicas.verify_slots([stored.slots[0]])
    world.run(1.0)
    assert world.run_until(lambda: world.has_all_parity(StepId(1, 1), 5), 30.0), describe(world)
    assert {(order.shard.rank, order.target) for order in pushes(world)} == {(rank, "h3") for rank in (0, 1, 2, 4)}
    assert all(order.parity is not None for order in pushes(world))


@pytest.mark.parametrize("ways", [(4, 0, 4), (0, 4, 0), (4, 2, 4)])
def test_launches_with_and_without_parity_take_turns(ways: tuple[int, ...]) -> None:
    """Each launch restores what the one before put, in its way, and puts in its own; no slot is left behind (R10)."""
    world, ranks = trained(5, last=2, parity=ways[0])
    step = 2
    for parity in ways[1:]:
        world.config = {**world.config, "parity": parity}
        ranks = world.launch(5)
        answers = world.get(ranks)
        world.check_restored(answers)
        assert {answer.get("step") for answer in answers} == {step}, answers
        for _ in range(2):
            step += 1
            assert world.put_all(ranks, step, limit_s=40.0), describe(world)
        assert not any(rank.degraded[step] for rank in ranks), ranks[0].reasons
    world.run(8.0)
    attempt = world.job().newest_number
    expected = {4: 5, 0: 8, 2: 6}[ways[-1]]
    assert set(used_slots(world).values()) == {expected}, describe(world)
    assert (world.parity_on(StepId(attempt, step)) == {}) is (ways[-1] == 0)


@pytest.mark.parametrize(("before", "now", "slots"), [(4, 4, 2), (4, 0, 2 * 4 + 1), (0, 4, 2 + 4)])
def test_a_first_put_reserves_what_the_step_before_takes_besides(before: int, now: int, slots: int) -> None:
    """Two versions, a row each or four chunks; a row, or a copy, of the kept step lies in no place of theirs."""
    world, _ = trained(5, parity=before)
    world.config = {**world.config, "parity": now}
    ranks = world.launch(5)
    world.get(ranks)
    world.reserve(ranks)
    assert {holder.rooms[JOB].peer_slots for holder in world.holders.values()} == {slots}


def test_a_job_of_two_hosts_has_copies() -> None:
    """Parity needs three hosts in domains of their own; with fewer it is a copy each, as without it."""
    world, _ = trained(2, parity=4)
    assert world.holders_of(StepId(1, 1), 0) == ["h0", "h1"]


def test_a_plan_counts_on_parity_for_any_one_host() -> None:
    """Any one of five hosts may be lost, and no two: each has the only copy of a shard, and rows of all others."""
    world, _ = trained(5, parity=4)
    odds = survival_rows(world.job(), world.served.hosts.live_ids(), 3)
    assert [(row.lost, row.chance, row.is_exact) for row in odds] == [(1, 1.0, True), (2, 0.0, True), (3, 0.0, True)]


def test_status_says_what_keeps_parity_from_being_added_up_again() -> None:
    """Five hosts are left with four: the lost shard is decoded on one that has another shard of its set (R37)."""
    world, _ = trained(5, parity=4)
    world.run(2.0)
    world.kill_host("h1")
    world.run(30.0)
    rows = world.status()["jobs"][0]["short"]
    assert [row["targets"] for row in rows] == [[]] * len(rows)
    assert {row["why_not"] for row in rows} == {"h0: it alone has the shard of rank 0, which is in the same parity"}


def pin(world: ControllerWorld, rank: DirectedRank, step: int) -> None:
    """Pin a step by a name, and wait for it."""
    world.call(rank, "pin", step=step, name="best")
    assert world.run_until(lambda: bool(rank.answers.get("pin")), 20.0), rank.error("pin")


@pytest.mark.parametrize(
    ("before", "now", "slots"), [(4, 4, 2 + 1), (4, 0, 2 * 4 + 1), (0, 4, 2 + 4), (0, 0, 2 * 4 + 4)]
)
def test_a_pinned_step_has_room_for_the_parity_or_the_copies_that_it_has(before: int, now: int, slots: int) -> None:
    """Two versions of the newest attempt's beside the pinned one: a row each with parity, else four chunks (R10)."""
    world, ranks = trained(5, parity=before)
    pin(world, ranks[0], 1)
    world.config = {**world.config, "parity": now}
    ranks = world.launch(5)
    world.get(ranks)
    for step in (2, 3):
        assert world.put_all(ranks, step, limit_s=40.0), describe(world)
    world.run(2.0)
    assert {holder.rooms[JOB].peer_slots for holder in world.holders.values()} == {slots}
    world.kill_host("h4")
    world.add_host("h5")
    assert world.run_until(lambda: is_whole(world, StepId(1, 1), before), 60.0), describe(world)
    assert world.run_until(lambda: is_whole(world, StepId(2, 3), now), 60.0), describe(world)


def test_a_job_that_was_closed_before_it_put_keeps_its_pinned_step_whole() -> None:
    """It has no version left to reserve for; after a loss the pinned shard and its parity are made again."""
    world, ranks = trained(5, parity=4)
    pin(world, ranks[0], 1)
    ranks = world.launch(5)
    world.get(ranks)
    for rank in ranks:
        world.call(rank, "close")
    assert world.run_until(lambda: world.job().newest.phase == "closed", 20.0)
    world.kill_host("h4")
    world.add_host("h5")
    assert world.run_until(lambda: len(world.parity_on(StepId(1, 1))) == 5, 60.0), describe(world)
    assert [len(world.holders_of(StepId(1, 1), rank)) for rank in range(5)] == [1] * 5


def is_whole(world: ControllerWorld, step: StepId, parity: int) -> bool:
    """Say whether a step of five ranks can lose any host."""
    held = [len(world.holders_of(step, rank)) for rank in range(5)]
    return held == [2] * 5 if not parity else min(held) > 0 and len(world.parity_on(step)) >= 4
