"""What RAM and durable storage know of a job may be of different times, or of different runs (R22, R31, D136)."""

from __future__ import annotations

from typing import Any

import pytest

from memstore.testing.controller.holder import DirectedRank
from memstore.testing.controller.world import ControllerWorld
from recovery.inventory import ShardId


def train(world: ControllerWorld, *steps: int, **more: Any) -> list[DirectedRank]:
    """A launch of two ranks that gets and puts these steps; durable ones are waited for."""
    ranks = world.launch(2, **more)
    if not more.get("fresh"):
        world.get(ranks)
    for step in steps:
        assert world.put_all(ranks, step, until="durable" if world.config["durable"] else "committed")
    return ranks


def forget_ram(world: ControllerWorld, *hosts: str, back: str = "") -> None:
    """Machines lose their memory; `back` comes back with what it had."""
    for host in hosts:
        world.kill_host(host)
        world.return_host(host, keep_memory=False)
    if back:
        world.return_host(back)
    world.crash_controller()
    world.run(6.0)


def digests(answers: list[dict[str, Any]]) -> list[str]:
    return [answer["digest"] for answer in answers]


@pytest.mark.parametrize("clock_s", [0.0, -3600.0, 86_400.0])
@pytest.mark.parametrize("fresh", [False, True])
def test_a_host_that_comes_back_with_old_memory_hides_no_newer_durable_step(fresh: bool, clock_s: float) -> None:
    """It knows attempt 1 alone.

    Storage has attempt 3: that is gone on from, regardless of what the clock said meanwhile.
    """
    world = ControllerWorld(3, durable="/durable", durable_every=1)
    train(world, 1)
    world.kill_host("h0", keep_memory=True)
    world.served.state.wall_offset_s += clock_s
    train(world, 2)
    train(world, 3, 4)
    forget_ram(world, "h1", "h2", back="h0")
    assert sorted(world.job().attempts) == [1]
    ranks = world.launch(2, fresh=fresh)
    assert [rank.attempt for rank in ranks] == [4, 4]
    if fresh:
        return
    answers = world.get(ranks)
    world.check_restored(answers)
    assert {(a["attempt"], a["step"], a["verdict"]) for a in answers} == {(3, 4, "durable")}
    assert world.put_all(ranks, 5, until="durable")


@pytest.mark.parametrize("clock_s", [0.0, -3600.0])
@pytest.mark.parametrize("old_launches", [1, 3])
def test_an_older_run_of_the_name_on_storage_is_never_restored(old_launches: int, clock_s: float) -> None:
    """RAM was lost, the job started over without durable=, then with it: its own steps count, not those of then."""
    world = ControllerWorld(2, durable="/durable", durable_every=1)
    for number in range(old_launches):
        train(world, 10 * number + 8, 10 * number + 9)
    forget_ram(world, "h0", "h1")
    world.served.state.wall_offset_s += clock_s
    config = dict(world.config)
    world.config["durable"] = None
    world.put_contents.clear()
    train(world, 1)
    put = [world.put_contents[ShardId("train", 1, 1, rank)] for rank in range(2)]
    world.config.update(config)
    ranks = world.launch(2)
    answers = world.get(ranks)
    assert {(a["attempt"], a["step"]) for a in answers} == {(1, 1)}
    assert [answer["bytes"] for answer in answers] == put
    assert any("another, older run" in note for note in world.notes)
    assert ranks[0].attempt == old_launches + 1
    assert world.put_all(ranks, 2, until="durable")
    forget_ram(world, "h0", "h1")
    answers = world.get(world.launch(2))
    world.check_restored(answers)
    assert {(a["attempt"], a["step"], a["verdict"]) for a in answers} == {(old_launches + 1, 2, "durable")}


def test_storage_that_cannot_be_read_keeps_no_process_from_what_ram_knows() -> None:
    """Only a job that no host knows must learn from storage before it opens (R23)."""
    world = ControllerWorld(2, durable="/durable", durable_every=1)
    train(world, 1)
    world.durable.problem = "permission denied"
    ranks = world.launch(2)
    assert {(a["step"], a["verdict"]) for a in world.get(ranks)} == {(1, "local")}


@pytest.mark.parametrize("damaged", [{1, 2}, {2}])
def test_markers_that_cannot_be_read_are_no_empty_storage(damaged: set[int]) -> None:
    """All empty after a power cut: no job starts from nothing. One: an older step, and status says why (R23)."""
    world = ControllerWorld(2, durable="/durable", durable_every=1)
    train(world, 1, 2)
    forget_ram(world, "h0", "h1")
    world.durable.damaged = {(1, step) for step in damaged}
    ranks = world.launch(2)
    if damaged == {1, 2}:
        assert ranks[0].error("join").startswith("RecoveryError")
        assert "marker of step 2 is torn" in ranks[0].error("join")
        return
    assert {(a["step"], a["verdict"]) for a in world.get(ranks)} == {(1, "durable")}
    assert world.served.parts.durable_states.of("train").unread == "marker of step 2 is torn"


def test_a_rank_that_dies_while_storage_is_listed_is_named_to_those_who_wait() -> None:
    """The launch gathers again: the rank that takes its place opens the attempt."""
    world = ControllerWorld(2, durable="/durable", durable_every=1)
    train(world, 1)
    world.kill_rank(world.ranks["train", 0])
    world.kill_rank(world.ranks["train", 1])
    ranks = [world.join(rank, 2, "key") for rank in range(2)]
    gatherings = world.served.parts.attempts.gatherings
    assert world.run_until(lambda: "train" in gatherings and gatherings["train"].markers_call > 0, 5.0)
    world.kill_rank(ranks[0])
    world.run(25.0)
    assert ranks[1].error("join").startswith("GatherTimeout")
    assert "missing: rank 0" in ranks[1].error("join")
