"""agree_on_step(): one step for all ranks, of any world size, verified where its copies lie (R23, R27)."""

from __future__ import annotations

import pytest

from memstore.testing.controller.trained import trained
from memstore.testing.controller.world import JOB, ControllerWorld
from recovery.inventory import StepId


def copies_of(world: ControllerWorld, step: StepId) -> list[int]:
    """How many live hosts hold each rank's shard of a step."""
    ranks = world.served.jobs[JOB].copies.get(step, {})
    return [len({h for h in hosts if world.holders[h].is_up}) for _, hosts in sorted(ranks.items())]


@pytest.mark.parametrize("world_size", [2, 3, 6, 8])
def test_another_number_of_ranks_goes_on_from_the_newest_step(world_size: int) -> None:
    """Four ranks put, a host is lost with its memory; fewer or more ranks agree, and their own steps commit."""
    world, _ = trained(4, last=3)
    world.kill_host("h3")
    ranks = world.launch(world_size)
    answers = world.get(ranks, is_agreement=True)
    assert {(a.get("attempt"), a.get("step")) for a in answers} == {(1, 3)}, answers
    assert not any("shard" in a for a in answers)
    assert world.run_until(lambda: copies_of(world, StepId(1, 3)) == [2] * 4), "the old step's copies are formed again"
    assert world.put_all(ranks, 4), world.notes
    assert world.run_until(lambda: copies_of(world, StepId(2, 4)) == [2] * world_size)
    assert world.run_until(lambda: StepId(1, 3) not in world.served.jobs[JOB].copies), "retention drops the old world's"


def test_the_hosts_that_hold_the_copies_verify_them() -> None:
    """A copy that turns out bad while ranks agree is no longer a source; the other one is (R25)."""
    world, _ = trained(3, last=2)
    ranks = world.launch(2)
    holder = world.holders["h0"]
    for shard in [s for s in holder.held if s.step == 2]:
        holder.damage(shard, is_found=False)
    answers = world.get(ranks, is_agreement=True)
    assert {a.get("step") for a in answers} == {2}, answers
    assert any("damaged" in note for answer in answers for note in answer["notes"])


def test_a_step_that_is_not_whole_is_passed_over_for_all_alike() -> None:
    """Every copy of one shard of the newest step is gone: an older whole step is agreed on, and said so (R24)."""
    world, _ = trained(4, last=2, keep_steps=2)
    for holder in world.holders.values():
        holder.forget(*(s for s in holder.held if (s.step, s.rank) == (2, 1)))
    answers = world.get(world.launch(3), is_agreement=True)
    assert {a.get("step") for a in answers} == {1}, answers


def test_get_and_agree_do_not_mix() -> None:
    """A rank that gets while the others agree gets an error; nothing is decided (R23)."""
    world, _ = trained(2, last=1)
    ranks = world.launch(2)
    world.call(ranks[0], "get", step=None, timeout_s=30.0, is_agreement=True)
    world.run(0.5)
    world.call(ranks[1], "get", step=None, timeout_s=30.0)
    world.run(2.0)
    assert "all ranks must call the same" in ranks[1].error("get")
    world.call(ranks[1], "get", step=None, timeout_s=30.0, is_agreement=True)
    world.run(2.0)
    assert [r.answers["get"][-1]["step"] for r in ranks] == [1, 1]


def test_an_answer_that_was_lost_is_given_again() -> None:
    """A rank whose link broke asks once more after the release and learns the same step (R23)."""
    world, _ = trained(3, last=2)
    ranks = world.launch(2)
    world.get(ranks, is_agreement=True)
    world.call(ranks[1], "get", step=None, timeout_s=30.0, is_agreement=True)
    world.run(2.0)
    assert [a["step"] for a in ranks[1].answers["get"]] == [2, 2]


def test_a_host_lost_while_ranks_agree_costs_another_plan() -> None:
    """The host that was to verify a shard dies: the other holder's copy is taken instead."""
    world, _ = trained(4, last=2)
    ranks = world.launch(2)
    world.work_s = (2.0, 2.0)
    for rank in ranks:
        world.call(rank, "get", step=None, timeout_s=60.0, is_agreement=True)
    world.run(1.0)
    members = {rank.host_id for rank in ranks}
    world.kill_host(next(h for h in sorted(world.holders) if h not in members))
    assert world.run_until(lambda: all(rank.answers.get("get") for rank in ranks), 60.0)
    assert {rank.answers["get"][-1]["step"] for rank in ranks} == {2}


@pytest.mark.parametrize("is_back", [False, True])
def test_a_host_that_dies_before_it_verified_is_planned_around(is_back: bool) -> None:
    """No rank sits on it, and it was to verify a shard: another copy is verified, at once (R23)."""
    world, _ = trained(4, last=2)
    for old in list(world.ranks.values()):
        world.kill_rank(old)
    ranks = [world.join(rank, 2, "elsewhere", host=f"h{2 + rank}") for rank in range(2)]
    assert world.run_until(lambda: all(rank.answers.get("join") for rank in ranks), 15.0)
    world.work_s = (1.0, 1.5)
    for rank in ranks:
        world.call(rank, "get", step=None, timeout_s=300.0, is_agreement=True)
    rounds = world.served.state.rounds
    assert world.run_until(lambda: JOB in rounds and rounds[JOB].phase == "staging", 5.0)
    assert "h1" in rounds[JOB].staging_hosts.values()
    world.kill_host("h1", keep_memory=is_back)
    if is_back:
        world.return_host("h1")
    assert world.run_until(lambda: all(r.answers.get("get") or r.errors.get("get") for r in ranks), 30.0)
    assert [r.answers["get"][-1]["step"] for r in ranks] == [2, 2]
