"""Going back: to kept, pinned and durable steps, and every reason to refuse, on all ranks alike (R22, R27)."""

from __future__ import annotations

import pytest

from memstore.testing.controller.holder import DirectedRank
from memstore.testing.controller.trained import trained
from memstore.testing.controller.world import JOB, ControllerWorld
from recovery.inventory import StepId


def rewind(world: ControllerWorld, ranks: list[DirectedRank], step: int, attempt: int | None = None) -> str:
    """All ranks rewind; return the error that all of them got, or ""."""
    for rank in ranks:
        rank.answers.pop("rewind", None)
        rank.errors.pop("rewind", None)
        world.call(rank, "rewind", step=step, of_attempt=attempt, nonce=rank.nonce, key=rank.key)
    assert world.run_until(lambda: all(r.answers.get("rewind") or r.errors.get("rewind") for r in ranks), 30.0)
    errors = {rank.error("rewind") for rank in ranks}
    assert len(errors) == 1, errors
    for rank in ranks:
        rank.has_room = False
        rank.answers.pop("reserve", None)
    return errors.pop()


def test_three_steps_are_kept_and_the_oldest_is_gone_back_to() -> None:
    """keep_steps=3: the oldest of three is rewound to, training goes on, and a restart sees the new lineage alone."""
    world, ranks = trained(3, last=6, keep_steps=3)
    assert sorted(s.step for s in world.job().copies) == [4, 5, 6]
    assert rewind(world, ranks, 4) == ""
    answers = world.get(ranks)
    world.check_restored(answers)
    assert (answers[0]["attempt"], answers[0]["step"]) == (1, 4)
    assert world.put_all(ranks, 5)
    world.run(1.0)
    assert sorted(world.job().copies) == [StepId(1, 4), StepId(2, 5)]
    again = world.launch(3)
    answers = world.get(again)
    world.check_restored(answers)
    assert (answers[0]["attempt"], answers[0]["step"], again[0].attempt) == (2, 5, 3)
    assert [(s.attempt, s.step_max) for s in world.job().spans(3)] == [(3, None), (2, 5), (1, 4)]


@pytest.mark.parametrize(
    ("step", "why"),
    [
        (9, "no committed step 9: its committed steps are 2"),
        (3, "no committed step 3: it was put and is not committed"),
    ],
)
def test_what_is_not_committed_cannot_be_gone_back_to(step: int, why: str) -> None:
    """An unknown step and one that only one rank has put are refused with what there is; nothing changes."""
    world, ranks = trained(2, last=2)
    world.put(ranks[0], 3)
    world.run(1.0)
    assert why in rewind(world, ranks, step)
    assert world.job().newest_number == 1


def test_a_step_of_several_other_lineages_needs_its_attempt() -> None:
    """Two hidden attempts have step 2: the number alone is refused and names them, with the attempt it is found."""
    world, ranks = trained(2, last=2, keep_steps=3)
    for _ in range(2):
        assert rewind(world, ranks, 1) == ""
        world.call(ranks[0], "pin", step=1, name="start")
        assert world.put_all(ranks, 2)
        world.call(ranks[0], "pin", step=2, name=f"of-{ranks[0].attempt}")
        world.run(1.0)
    assert rewind(world, ranks, 1) == ""
    why = rewind(world, ranks, 2)
    assert "step 2 of job 'train' is not in the present lineage" in why
    assert "attempts 2, 3 each have one: name the attempt with store.rewind(2, attempt=...)" in why
    assert rewind(world, ranks, 2, attempt=2) == ""
    answers = world.get(ranks)
    world.check_restored(answers)
    assert (answers[0]["attempt"], answers[0]["step"]) == (2, 2)


def test_another_world_size_is_refused_before_an_attempt_opens() -> None:
    """Three ranks put the step, two want to go back to it (R27)."""
    world, _ = trained(3, last=2, keep_steps=2)
    two = world.launch(2)
    assert "WorldSizeError" in world.get(two)[0]["error"]
    why = rewind(world, two, 1)
    assert why.startswith("WorldSizeError: step 1 (attempt 1) of job 'train' was put by 3 ranks, this attempt has 2")
    assert world.job().newest_number == 2


def test_a_retired_step_and_a_lost_one_are_refused() -> None:
    """Else get() would quietly take an older one (R25)."""
    world, ranks = trained(3, last=3, keep_steps=3, replicas=2)
    world.call(ranks[0], "retire", attempt=1, step=2, reason="the training dies of it")
    world.run(1.0)
    assert "is retired: the training dies of it" in rewind(world, ranks, 2)
    for holder in world.holders.values():
        lost = [shard for shard in holder.held if shard.step == 1 and shard.rank == 2]
        if lost:
            holder.lose(*lost)
    world.run(0.1)
    assert "step 1 (attempt 1) of job 'train' is not whole any more" in rewind(world, ranks, 1)
    assert rewind(world, ranks, 3) == ""


def test_a_fenced_launch_cannot_rewind() -> None:
    """While another attempt runs the older one's ranks get an error that says so."""
    world, old = trained(2, last=2, keep_steps=2)
    newer = [world.join(rank, 2, "newer", takeover=True) for rank in range(2)]
    assert world.run_until(lambda: all(rank.attempt == 2 for rank in newer), 15.0)
    assert rewind(world, old, 1).startswith("FencedError")


def test_a_step_that_only_durable_storage_has_is_found_by_a_new_controller() -> None:
    """The step left RAM long ago and the controller is new: markers are listed before it is refused (R31)."""
    world, ranks = trained(2, last=4, durable="/durable", durable_every=1, durable_keep=10)
    assert world.run_until(lambda: (JOB, 1, 4) in world.durable.markers, 30.0)
    assert (JOB, 1, 1) in world.durable.markers
    assert StepId(1, 1) not in world.job().copies
    world.crash_controller()
    assert world.run_until(lambda: world.machine is not None and world.served.is_settled, 30.0)
    world.run(2.0)
    assert "no committed step 7" in rewind(world, ranks, 7)
    assert rewind(world, ranks, 1) == ""
    answers = world.get(ranks)
    world.check_restored(answers)
    assert (answers[0]["step"], answers[0]["verdict"]) == (1, "durable")


def test_an_unreadable_durable_directory_is_named() -> None:
    """A step that RAM does not have is refused with why the storage could not say."""
    world, ranks = trained(2, last=4, durable="/durable", durable_every=1)
    world.durable.problem = "Input/output error"
    why = rewind(world, ranks, 1)
    assert "Durable storage could not be read: Input/output error" in why


def test_a_rewind_while_the_newest_step_commits_leaves_room_for_the_next_put() -> None:
    """keep_steps=1: a newer step commits while the rewind holds its own, and two versions fill the share (R10)."""
    world, ranks = trained(3, last=1)
    for rank in ranks[:2]:
        world.call(rank, "rewind", step=1, of_attempt=None, nonce=rank.nonce, key=rank.key)
    assert world.put_all(ranks, 2)
    assert rewind(world, ranks, 1) == ""
    world.run(2.0)
    assert sorted(world.job().copies) == [StepId(1, 1), StepId(1, 2)]
    world.reserve(ranks)
    world.run(1.0)
    assert sorted(world.job().copies) == [StepId(1, 1)]
    assert world.put_all(ranks, 3)
