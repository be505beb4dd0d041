"""A get is over when every rank has loaded what it was sent. One that cannot ends it for all: no step is adopted."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from memstore.testing.controller.holder import DirectedRank
from memstore.testing.controller.trained import trained
from memstore.testing.controller.world import ControllerWorld

BROKEN = "LoadError: AdamW.load_state_dict() raised ValueError: another number of groups"


def hand_out(world: ControllerWorld, ranks: Sequence[DirectedRank], limit_s: float = 60.0) -> None:
    """Have all ranks ask, until each was sent its bytes."""
    for rank in ranks:
        world.call(rank, "get", step=None, timeout_s=limit_s)
    assert world.run_until(lambda: all(rank.answers.get("get") for rank in ranks), limit_s)


def word(world: ControllerWorld, rank: DirectedRank, number: int) -> None:
    world.call(rank, "shard_loaded", round=number, is_adopting=True, problem=None)


def test_no_get_returns_while_another_rank_loads() -> None:
    """Ranks that have loaded wait for one that has not; all return together then."""
    world, _ = trained(3, last=2)
    ranks = world.launch(3)
    ranks[1].loads = False
    hand_out(world, ranks)
    world.run(5.0)
    assert not any(rank.answers.get("shard_loaded") for rank in ranks)
    word(world, ranks[1], ranks[1].answers["get"][-1]["round"])
    assert world.run_until(lambda: all(rank.answers.get("shard_loaded") for rank in ranks))
    world.check_restored([rank.answers["get"][-1] for rank in ranks])


def test_a_rank_that_cannot_load_ends_the_get_of_all_and_adopts_nothing() -> None:
    """The error names the rank and its cause; puts are refused until a get succeeds, and no step is lost."""
    world, _ = trained(3, last=2)
    ranks = world.launch(3)
    ranks[2].load_error = BROKEN
    errors = {answer["error"] for answer in world.get(ranks)}
    assert len(errors) == 1
    assert "get() failed on rank 2 while its state was loaded" in (said := errors.pop())
    assert BROKEN in said
    world.reserve(ranks)
    assert {rank.error("reserve").partition(":")[0] for rank in ranks} == {"CommitError"}
    assert BROKEN in ranks[0].error("reserve")
    ranks[2].load_error = None
    for rank in ranks:
        rank.errors.clear()
    world.check_restored(world.get(ranks))
    world.reserve(ranks)
    assert world.put_all(ranks, 3)


def launched_after_no_commit() -> tuple[ControllerWorld, list[DirectedRank]]:
    """Return a world whose only step is whole and was never committed, and the ranks of the launch after it.

    Controller and hosts ended before the commit, and the host with rank 0's only copy came back after that launch.
    """
    world = ControllerWorld(3, replicas=1)
    ranks = world.launch(3)
    world.get(ranks)
    world.reserve(ranks)
    world.crash_controller(restart_after_s=None)
    for rank in ranks:
        world.put(rank, 1)
    world.run(1.0)
    for host in world.holders:
        world.kill_host(host, keep_memory=True)
    for host in ("h1", "h2"):
        world.return_host(host)
    world.start_controller()
    ranks = world.launch(3)
    world.return_host("h0")
    return world, ranks


@pytest.mark.parametrize("is_by_successor", [False, True])
def test_a_step_that_was_never_committed_is_kept_from_puts_as_well(is_by_successor: bool) -> None:
    """A get found it whole: a script's except-branch must not begin over it, nor under the next controller (R23)."""
    world, ranks = launched_after_no_commit()
    ranks[2].load_error = BROKEN
    assert all("while its state was loaded" in answer["error"] for answer in world.get(ranks))
    assert not world.job().has_history
    if is_by_successor:
        world.crash_controller()
    world.reserve(ranks)
    assert {rank.error("reserve").partition(":")[0] for rank in ranks} == {"CommitError"}
    assert ("not every rank of this attempt has loaded" if is_by_successor else BROKEN) in ranks[0].error("reserve")
    ranks[2].load_error = None
    for rank in ranks:
        rank.errors.clear()
    answers = world.get(ranks)
    world.check_restored(answers)
    assert answers[0]["step"] == 1
    assert world.put_all(ranks, 2)


def test_the_next_launch_gets_the_step_that_could_not_be_loaded() -> None:
    """A launch that could load nothing and put nothing costs no step, however often it comes (R25)."""
    world, _ = trained(3, last=2, keep_steps=2)
    for _ in range(4):  # three retire a step
        ranks = world.launch(3)
        ranks[0].load_error = BROKEN
        assert all("while its state was loaded" in answer["error"] for answer in world.get(ranks))
        for rank in ranks:
            world.kill_rank(rank)
    answers = world.get(world.launch(3))
    world.check_restored(answers)
    assert answers[0]["step"] == 2


def test_a_rank_that_dies_as_it_loads_ends_the_get_of_the_others() -> None:
    """The others do not wait for a dead rank, and do not go on without it."""
    world, _ = trained(3, last=1)
    ranks = world.launch(3)
    ranks[1].loads = False
    hand_out(world, ranks)
    world.kill_rank(ranks[1])
    assert world.run_until(lambda: bool(ranks[0].errors.get("get") and ranks[2].errors.get("get")))
    assert "rank 1 died" in ranks[0].error("get")


def test_a_rank_that_loads_for_too_long_is_named() -> None:
    """The deadline of get() ends a load; who comes late gets the same error, not a place in another round."""
    world, _ = trained(3, last=1)
    ranks = world.launch(3)
    ranks[1].loads = False
    hand_out(world, ranks, limit_s=5.0)
    assert world.run_until(lambda: bool(ranks[0].errors.get("get")), 20.0)
    assert "loading took more than 5 s on ranks 1" in ranks[0].error("get")
    word(world, ranks[1], ranks[1].answers["get"][-1]["round"])
    assert world.run_until(lambda: bool(ranks[1].errors.get("shard_loaded")))
    assert "loading took more than 5 s on ranks 1" in ranks[1].error("shard_loaded")


def test_a_controller_that_dies_while_ranks_load_has_all_ask_again() -> None:
    """Its successor knows of no round: ranks ask once more, and none had returned."""
    world, _ = trained(3, last=2)
    ranks = world.launch(3)
    ranks[2].loads = False
    hand_out(world, ranks)
    world.crash_controller()
    ranks[2].loads = True
    word(world, ranks[2], ranks[2].answers["get"][-1]["round"])
    assert world.run_until(lambda: all(len(r.answers["get"]) == 2 and not r.is_loading for r in ranks))
    world.check_restored([rank.answers["get"][-1] for rank in ranks])
    world.reserve(ranks)
    assert world.put_all(ranks, 3)


def test_a_controller_that_dies_when_all_have_loaded_leaves_no_rank_behind() -> None:
    """Once one get has returned the step is adopted: a rank whose answer was lost returns as well."""
    world, _ = trained(3, last=2)
    ranks = world.launch(3)
    world.check_restored(world.get(ranks))
    world.crash_controller()
    before = len(ranks[0].answers["shard_loaded"])
    word(world, ranks[0], ranks[0].answers["get"][-1]["round"])
    assert world.run_until(lambda: len(ranks[0].answers["shard_loaded"]) > before)
    assert len(ranks[0].answers["get"]) == 1
    newest = world.job().newest
    assert newest is not None
    assert (newest.parent, newest.parent_step) == (1, 2)


def test_a_rank_whose_bytes_got_lost_on_their_way_is_sent_them_once_more() -> None:
    """Its holder asks again in a new session; the others, which have loaded, wait for it."""
    world, _ = trained(3, last=2)
    ranks = world.launch(3)
    ranks[1].loads = False
    hand_out(world, ranks)
    ranks[1].loads = True
    world.call(ranks[1], "get", step=None, timeout_s=60.0)
    assert world.run_until(lambda: all(not rank.is_loading for rank in ranks))
    world.check_restored([rank.answers["get"][-1] for rank in ranks])
    assert len(ranks[1].answers["get"]) == 2
