"""Skipping is collective: what one rank has no room for is committed by no process, and commits go on (R12)."""

from __future__ import annotations

import pytest

from memstore.core.wire.orders import StepLevel, WriteJournal
from memstore.testing.controller.holder import DirectedRank
from memstore.testing.controller.world import ControllerWorld
from recovery.inventory import StepId


def trained(hosts: int = 2, **config: object) -> tuple[ControllerWorld, list[DirectedRank]]:
    """A job that has asked for its past and reserved its room."""
    world = ControllerWorld(hosts, **config)
    ranks = world.launch(hosts)
    world.get(ranks)
    world.reserve(ranks)
    return world, ranks


def test_a_step_one_rank_skips_is_abandoned_everywhere() -> None:
    """The other rank's copies go, its ticket ends skipped with the reason, and both put again from one step."""
    world, ranks = trained()
    world.put(ranks[0], 1)
    world.run(0.5)
    world.skip(ranks[1], 1)
    world.run(1.0)
    assert [r.tickets[1] for r in ranks] == ["skipped", "skipped"]
    reported = [order for order in world.holders["h0"].received(StepLevel) if order.level == "skipped"]
    assert reported[-1].reason == "rank 1 gave up step 1: no room"
    assert world.holders_of(StepId(1, 1), 0) == []
    assert ranks[0].resume_step == ranks[1].resume_step == 2
    assert world.put_all(ranks, 2)


def skip_row(world: ControllerWorld, rank: DirectedRank) -> tuple[str, str]:
    """Return what status says of skipped steps, and what to do."""
    world.call(rank, "status")
    world.run(0.5)
    [row] = [row for row in rank.answers["status"][-1]["problems"] if "skipped" in row["cause"]]
    return row["cause"], row["remedy"]


def test_status_tells_why_a_step_was_skipped() -> None:
    """Room, a put that failed, a rank that passed over a step: each with its own words; and one from before."""
    world, ranks = trained()
    world.skip(ranks[1], 1)
    world.run(1.0)
    cause, remedy = skip_row(world, ranks[0])
    assert cause == "1 step skipped; the newest: rank 1 gave up step 1: no room"
    assert "raise stall_budget_s" in remedy
    world.skip(ranks[0], 2, is_failed=True)
    world.run(1.0)
    cause, remedy = skip_row(world, ranks[0])
    assert cause == "2 steps skipped; the newest: rank 0 gave up step 2: its state was changed"
    assert "stall_budget_s" not in remedy
    world.put(ranks[0], 3)
    world.put(ranks[1], 4)
    world.run(1.0)
    assert "rank 1 put step 4 without having put it" in skip_row(world, ranks[0])[0]
    assert "rank 1 put step 4 without having put it" in str(world.holders["h0"].orders)
    world.crash_controller()
    world.run(10.0)
    assert "the controller that got the reason is gone" in skip_row(world, ranks[0])[0]


@pytest.mark.parametrize("is_first_ahead", [True, False], ids=["behind", "ahead"])
def test_a_step_that_a_rank_passed_over_is_given_up_whichever_put_comes_first(is_first_ahead: bool) -> None:
    """Rank 0 puts step 2 and not 1, rank 1 step 1: if that stayed open, rank 1 would have no room to put step 2."""
    world, ranks = trained()
    for rank, step in ((0, 2), (1, 1)) if is_first_ahead else ((1, 1), (0, 2)):
        world.put(ranks[rank], step)
        world.run(1.0)
    assert ranks[1].tickets[1] == "skipped"
    assert "rank 0 put step 2 without having put it" in str(world.holders["h1"].orders)
    assert world.holders_of(StepId(1, 1), 1) == []
    world.put(ranks[1], 3)
    world.run(1.0)
    assert ranks[0].tickets[2] == "skipped"
    assert world.put_all(ranks, 4)


@pytest.mark.parametrize("is_first_ahead", [True, False], ids=["behind", "ahead"])
def test_a_successor_gives_up_a_step_that_a_rank_passed_over(is_first_ahead: bool) -> None:
    """The controller ends before it learns of either put: the hosts' inventories alone say who passed over what."""
    world, ranks = trained()
    for rank, step in ((0, 2), (1, 1)) if is_first_ahead else ((1, 1), (0, 2)):
        world.put(ranks[rank], step)
    world.crash_controller()
    world.run(10.0)
    assert ranks[1].tickets[1] == "skipped"
    assert "rank 0 put step 2 without having put it" in str(world.holders["h1"].orders)


def test_a_controller_that_is_new_gives_up_what_a_rank_passed_over_before() -> None:
    """Its predecessor died before it could: the next rank without room makes the new one look."""
    world, ranks = trained()
    world.put(ranks[0], 2)
    world.run(1.0)
    world.crash_controller()
    world.put(ranks[1], 1)
    world.run(10.0)
    world.skip(ranks[1], 3)
    world.run(1.0)
    assert ranks[1].tickets[1] == "skipped"
    assert "rank 0 put step 2 without having put it" in str(world.holders["h1"].orders)
    assert world.holders_of(StepId(1, 1), 1) == []


def test_puts_that_fail_do_not_widen_the_pause() -> None:
    """Skips for want of room space the puts out ever more; failures of other causes cost their own step only (R12)."""
    world, ranks = trained()
    for step in (1, 2, 3, 4):
        world.put(ranks[0], step)
        world.run(0.5)
        world.skip(ranks[1], step, is_failed=True)
        world.run(1.0)
        assert ranks[0].resume_step == ranks[1].resume_step == step + 1
    for step, resume in ((5, 6), (6, 8), (8, 12)):
        world.skip(ranks[1], step)
        world.run(1.0)
        assert ranks[0].resume_step == ranks[1].resume_step == resume
    world.skip(ranks[1], 12, is_failed=True)
    world.run(1.0)
    assert ranks[0].resume_step == 13
    assert world.put_all(ranks, 13)


def test_a_put_that_fails_late_leaves_the_newer_step_that_another_rank_has_put() -> None:
    """Its rank puts that step too: only the failed one is given up (R12)."""
    world, ranks = trained()
    world.put(ranks[0], 1)
    world.put(ranks[0], 2)
    world.run(0.5)
    world.skip(ranks[1], 1, is_failed=True)
    world.run(0.5)
    assert (ranks[0].tickets[1], ranks[0].resume_step) == ("skipped", 2)
    world.put(ranks[1], 2)
    assert world.run_until(lambda: [rank.tickets[2] for rank in ranks] == ["committed"] * 2, 10.0)


def widest_gap(step_s: float, first: int = 1) -> int:
    """How far ahead ranks are sent while one of them never finds room, at a pace."""
    world, ranks = trained()
    step, widest = first, 0
    for _ in range(12):
        world.skip(ranks[1], step)
        world.run(step_s)
        widest = max(widest, ranks[0].resume_step - step)
        for _ in range(step + 1, ranks[0].resume_step):
            world.run(step_s)
        step = ranks[0].resume_step
    return widest


def test_the_pause_is_bounded_by_time_as_well() -> None:
    """Ranks wait a minute at the most until they put again, for any length of a step, and learn of it before
    (R12).
    """
    assert widest_gap(0.2) == 64
    assert widest_gap(10.0) in (6, 7)
    assert widest_gap(45.0) == 2
    assert widest_gap(300.0) == 1


def test_the_pace_of_seals_bounds_the_pause() -> None:
    """What was put before the trouble tells how long a step takes; a pause among the steps changes little."""
    world, ranks = trained()
    for step in range(1, 8):
        assert world.put_all(ranks, step)
        world.run(400.0 if step == 3 else 20.0)
    widest = 0
    for _ in range(6):
        at = max(8, ranks[0].resume_step)
        world.skip(ranks[1], at)
        world.run(1.0)
        widest = max(widest, ranks[0].resume_step - at)
        world.run(20.0 * (ranks[0].resume_step - at))
    assert widest == 3


def test_the_pause_is_short_while_the_pace_is_unknown() -> None:
    """Until two steps are known, ranks are not kept from putting for many (R12)."""
    world, ranks = trained()
    for step in (50, 40, 30, 20, 10):  # words of older steps that come late tell no pace
        world.skip(ranks[1], step)
        world.run(1.0)
    assert ranks[0].resume_step == 50 + 4


def test_a_seal_after_the_skip_is_not_counted() -> None:
    """A rank that learns of the skip too late puts in vain: its copy is freed and its ticket ends."""
    world, ranks = trained()
    world.skip(ranks[1], 1)
    world.run(1.0)
    ranks[0].resume_step = 0  # the word has not reached it
    world.put(ranks[0], 1)
    world.run(2.0)
    assert ranks[0].tickets[1] == "skipped"
    assert world.holders_of(StepId(1, 1), 0) == []


def test_no_rank_is_sent_a_skip_before_its_fact_is_replicated() -> None:
    """Neither a copy that comes late nor a host that joins again brings it: a successor may commit the step (R16)."""
    world, ranks = trained(4, replicas=2)
    world.skip(ranks[1], 1)
    world.run(1.0)
    for holder in world.holders.values():
        holder.instead[WriteJournal] = lambda _: None  # the next fact is on its way
    world.skip(ranks[1], 2)
    world.run(0.2)
    assert ranks[1].resume_step == 4
    world.put(ranks[0], 3)  # its rank knows of no such skip
    world.kill_host("h3", keep_memory=True)
    world.return_host("h3")
    world.run(0.5)
    assert ranks[0].tickets[3] == "replicated"
    assert world.holders_of(StepId(1, 3), 0)
    given_up = [order for holder in world.holders.values() for order in holder.received(StepLevel)]
    assert {order.step for order in given_up if order.level == "skipped"} == {1}

    for holder in world.holders.values():
        holder.instead.clear()
        for order in holder.received(WriteJournal):
            holder.carry_out(order)
    world.run(1.0)
    assert ranks[0].tickets[3] == "skipped"
    assert world.holders_of(StepId(1, 3), 0) == []


def test_a_skip_of_a_step_a_newer_one_overtook_changes_nothing() -> None:
    """A skip that arrives after a newer step was committed abandons nothing and moves no process."""
    world, ranks = trained()
    assert world.put_all(ranks, 2)
    world.skip(ranks[0], 1)
    world.run(1.0)
    assert ranks[0].resume_step == 0
    assert world.put_all(ranks, 3)


def test_a_newer_commit_ends_older_open_steps() -> None:
    """An older step that lacks a rank is given up when all go on past it, and its copies go."""
    world, ranks = trained(keep_steps=1)
    world.put(ranks[0], 1)
    world.run(1.0)
    assert world.put_all(ranks, 2)
    world.run(1.0)
    assert ranks[0].tickets[1] == "skipped"
    assert world.holders_of(StepId(1, 1), 0) == []


@pytest.mark.parametrize(("step_s", "steps"), [(0.1, 400), (10.0, 100)])
def test_alternate_skipping_under_steady_overload_still_commits(step_s: float, steps: int) -> None:
    """Ranks that run out of room at different steps are brought to one step together, and commits go on."""
    world, ranks = trained(3)
    world.work_s = (3 * step_s, 8 * step_s)  # a push takes longer than a step
    for step in range(1, steps):
        for rank in ranks:
            if step < rank.resume_step:
                rank.tickets[step] = "skipped"
            elif room(world, rank):
                world.put(rank, step)
            else:
                world.skip(rank, step)
        world.run(step_s)
    world.run(50 * step_s)
    committed = sum(ranks[0].tickets.get(step) == "committed" for step in range(steps))
    assert committed >= 5
    job = world.job()
    assert not any(job.is_abandoned(step) for step in job.commits)


def room(world: ControllerWorld, rank: DirectedRank) -> bool:
    """A rank has room for keep_steps + 1 versions on its host (R10)."""
    mine = [s for s in world.holders[rank.host_id].held if s.rank == rank.rank]
    return len(mine) < 2


def test_a_skip_outlives_the_controller() -> None:
    """A successor keeps the abandoned step abandoned and tells ranks that come back where to put again."""
    world, ranks = trained()
    world.put(ranks[0], 1)
    world.skip(ranks[1], 1)
    world.run(1.0)
    ranks[0].resume_step = 0
    world.crash_controller()
    world.run(5.0)
    assert ranks[0].resume_step == 2
    assert world.job().is_abandoned(StepId(1, 1))
    assert world.put_all(ranks, 2)


def test_a_step_that_one_rank_never_put_does_not_hold_the_room_for_ever() -> None:
    """A rank that goes on past a step without having sealed it gives it up for all; later steps commit (R12)."""
    world, ranks = trained(keep_steps=1)
    assert world.put_all(ranks, 1)
    world.put(ranks[0], 2)  # rank 1's copy of step 2 failed: no rank skipped it, no rank will ever seal it
    world.run(1.0)
    world.put(ranks[1], 3)
    world.run(1.0)

    assert ranks[0].tickets[2] == "skipped"
    assert world.holders_of(StepId(1, 2), 0) == []
    assert world.put_all(ranks, 4)
