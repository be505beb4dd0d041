"""Leaving by an exception is a death with a reason: it counts, and it is named wherever people look (R25)."""

from __future__ import annotations

from memstore.testing.controller.holder import DirectedRank
from memstore.testing.controller.trained import trained
from memstore.testing.controller.world import ControllerWorld

NAN = "ValueError: the loss is NaN"


def leave(world: ControllerWorld, ranks: list[DirectedRank], error: str = NAN) -> None:
    for rank in ranks:
        world.call(rank, "close", error=error)
    world.run(1.0)


def kinds(world: ControllerWorld) -> list[str]:
    return [row["event"] for row in world.events("train")]


def test_a_job_that_dies_of_an_exception_is_moved_off_its_bad_step() -> None:
    """Three restores of step 2 end by the same exception: the fourth gets step 1, and says why."""
    world, _ = trained(3, last=2, keep_steps=2)
    for _ in range(3):
        ranks = world.launch(3)
        assert world.get(ranks)[0]["step"] == 2
        leave(world, ranks)
    answers = world.get(world.launch(3))
    world.check_restored(answers)
    assert answers[0]["step"] == 1
    assert "the training dies of it" in str(answers[0]["rejected"])


def test_a_good_end_is_no_death() -> None:
    """Ranks that close without an exception may restore a step as often as they like."""
    world, _ = trained(3, last=2, keep_steps=2)
    for _ in range(5):
        ranks = world.launch(3)
        assert world.get(ranks)[0]["step"] == 2
        leave(world, ranks, error="")
    assert "closed" in kinds(world)
    assert "ended" not in kinds(world)


def test_the_exception_and_its_rank_are_named_and_outlive_the_controller() -> None:
    """status and events say who ended and by what, not "closed by all its ranks", also under a successor."""
    world, ranks = trained(3, last=2)
    leave(world, ranks[1:2])
    leave(world, [ranks[0], ranks[2]], error="")
    for _ in range(2):
        newest = world.status()["jobs"][0]["newest"]
        assert (newest["phase"], newest["ended_by"]) == ("closed", "ValueError on rank 1: the loss is NaN")
        world.crash_controller()
        world.run(5.0)
    rows = {row["event"]: row for row in world.events("train")}
    assert "closed" not in rows


def test_a_rank_that_ends_by_an_exception_frees_the_others_at_once() -> None:
    """A get of the others does not wait for it until their deadline."""
    world, _ = trained(3, last=2)
    ranks = world.launch(3)
    ranks[0].loads = False
    for rank in ranks:
        world.call(rank, "get", step=None, timeout_s=600.0)
    assert world.run_until(lambda: all(rank.answers.get("get") for rank in ranks))
    leave(world, ranks[:1])
    assert "rank 0 died" in ranks[1].error("get")
    row = next(row for row in world.events("train") if row["event"] == "rank_ended")
    assert (row["rank"], row["why"]) == (0, NAN)


def test_the_last_close_is_answered_once_it_is_recorded() -> None:
    """A status that is asked for after it shows a closed job; the ranks before it do not wait for the others."""
    world, ranks = trained(3, last=1)
    world.call(ranks[0], "close")
    assert world.run_until(lambda: "close" in ranks[0].answers, 5.0)
    assert world.job().attempts[1].phase != "closed"
    for rank in ranks[1:]:
        world.call(rank, "close")
    assert world.run_until(lambda: all("close" in rank.answers for rank in ranks), 5.0)
    assert world.job().attempts[1].phase == "closed"
