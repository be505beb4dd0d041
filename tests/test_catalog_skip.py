"""Skipping is collective: what one rank has no room for is committed by nobody, and commits go on (R12)."""

from __future__ import annotations

from memstore.testing.catalog_holder import FakeRank
from memstore.testing.catalog_world import CatalogWorld
from recovery.inventory import StepId


def trained(hosts: int = 2, **config: object) -> tuple[CatalogWorld, list[FakeRank]]:
    """A job that has asked for its past and reserved its room."""
    world = CatalogWorld(hosts, **config)
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
    told = [body for kind, body in world.holders["h0"].orders if kind == "abandon"]
    assert told[-1]["reason"] == "rank 1 gave up step 1: no room"
    assert world.holders_of(StepId(1, 1), 0) == []
    assert ranks[0].resume_step == ranks[1].resume_step == 2
    assert world.put_all(ranks, 2)


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


def test_a_seal_after_the_skip_is_not_counted() -> None:
    """A rank that hears of the skip too late puts in vain: its copy is freed and its ticket told."""
    world, ranks = trained()
    world.skip(ranks[1], 1)
    world.run(1.0)
    ranks[0].resume_step = 0  # the word has not reached it
    world.put(ranks[0], 1)
    world.run(2.0)
    assert ranks[0].tickets[1] == "skipped"
    assert world.holders_of(StepId(1, 1), 0) == []


def test_a_skip_of_a_step_a_newer_one_overtook_changes_nothing() -> None:
    """A skip that arrives after a newer step was committed abandons nothing and moves nobody."""
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


def test_alternate_skipping_under_steady_overload_still_commits() -> None:
    """Ranks that run out of room at different steps are brought to one step together, and commits go on."""
    world, ranks = trained(3)
    world.work_s = (0.3, 0.8)  # a push takes longer than a step
    for step in range(1, 400):
        for rank in ranks:
            if step < rank.resume_step:
                rank.tickets[step] = "skipped"
            elif room(world, rank):
                world.put(rank, step)
            else:
                world.skip(rank, step)
        world.run(0.1)
    world.run(5.0)
    committed = sum(ranks[0].tickets.get(step) == "committed" for step in range(400))
    assert committed >= 5
    job = world.job()
    assert not any(job.is_abandoned(step) for step in job.commits)


def room(world: CatalogWorld, rank: FakeRank) -> bool:
    """A rank has room for keep_steps + 1 versions on its host (R10)."""
    mine = [s for s in world.holders[rank.host_id].copies if s.rank == rank.rank]
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
    world.put(ranks[0], 2)  # rank 1's copy of step 2 failed: nobody skipped it, nobody will ever seal it
    world.run(1.0)
    world.put(ranks[1], 3)
    world.run(1.0)

    assert ranks[0].tickets[2] == "skipped"
    assert world.holders_of(StepId(1, 2), 0) == []
    assert world.put_all(ranks, 4)
