"""A get of another job's step: which step it is, what keeps it, and what is remembered of it (R32)."""

from __future__ import annotations

import pytest

from memstore.core.wire.orders import ListMarkers
from memstore.testing.controller.holder import DirectedRank
from memstore.testing.controller.trained import trained, written
from memstore.testing.controller.world import JOB, ControllerWorld
from memstore.testing.requests import request_of
from recovery.inventory import StepId


def branch(world: ControllerWorld, step: int | None = None) -> tuple[list[DirectedRank], list[dict[str, object]]]:
    """Begin another job and get a step of the trained one; return its ranks and what they were answered."""
    twig = world.launch(3, job="twig")
    return twig, world.get(twig, step, from_job=JOB)


def begin(world: ControllerWorld, step: int | None = None) -> list[DirectedRank]:
    """The same, up to the moment when hosts bring the bytes."""
    twig = world.launch(3, job="twig")
    world.work_s = (0.5, 0.6)
    for rank in twig:
        world.call(rank, "get", step=step, from_job=JOB, timeout_s=60.0)
    assert world.run_until(lambda: stage(world) == "staging", 10.0)
    return twig


def stage(world: ControllerWorld) -> str:
    active = world.served.state.rounds.get("twig")
    return active.phase if active is not None else ""


def ended(world: ControllerWorld, ranks: list[DirectedRank]) -> list[object]:
    assert world.run_until(lambda: all(r.answers.get("get") or r.errors.get("get") for r in ranks), 60.0)
    return [r.error("get") or r.answers["get"][-1]["step"] for r in ranks]


def test_only_what_is_committed_is_read_of_another_job() -> None:
    """All shards of a step are there, and a rank may still give it up (R12)."""
    world, ranks = trained(3, last=2)
    world.work_s = (30.0, 40.0)
    for rank in ranks:
        world.put(rank, 3)
    world.run(2.0)
    assert (len(world.job().copies[StepId(1, 3)]), StepId(1, 3) in world.job().commits) == (3, False)
    world.work_s = (0.01, 0.2)
    twig, answers = branch(world)
    assert [answer["step"] for answer in answers] == [2, 2, 2]
    world.check_restored(answers)
    said = {str(answer["error"]) for answer in world.get(twig, 3, from_job=JOB)}
    assert said == {"RecoveryError: job 'train' has no step 3: its steps are 2"}


@pytest.mark.parametrize("keep", ["lease", "none"])
def test_puts_of_the_other_job_go_on_while_its_step_is_read(keep: str) -> None:
    """The step is leased, in room of its own; where there is none, a newer commit drops it, and the newest is read."""
    world, ranks = trained(3, last=1)
    for holder in world.holders.values():
        holder.refuses_room = "full" if keep == "none" else ""
    twig = begin(world)
    assert world.job().leased.keys() == ({StepId(1, 1)} if keep == "lease" else set())
    world.work_s = (0.01, 0.02)
    for step in (2, 3, 4):
        assert world.put_all(ranks, step)
    found = ended(world, twig)
    assert found in ([[1, 1, 1]] if keep == "lease" else [[1, 1, 1], [4, 4, 4]])
    world.run(2.0)
    assert not world.job().leased
    assert set(world.job().copies) == {StepId(1, 4)}


def test_a_step_that_is_seen_torn_while_another_job_reads_it_is_not_returned() -> None:
    """The next candidate is taken, as by a get of its own (R25)."""
    world, ranks = trained(3, last=3, keep_steps=3)
    twig = begin(world)
    torn = {"job": JOB, "attempt": 1, "rank": 0, "step": 3, "reason": "it was changed", "is_torn": True}
    ranks[0].relay(request_of("retire", torn))
    assert ended(world, twig) == [2, 2, 2]


def test_what_a_job_began_with_outlives_controllers_and_the_other_job() -> None:
    """One fact, recorded before any rank goes on; once the attempt restores a step of its own it is not shown."""
    world, _ = trained(3, last=2)
    twig, answers = branch(world, 2)
    assert [answer["step"] for answer in answers] == [2, 2, 2]
    begins = [event for event in world.events("twig") if event["event"] == "branched"]
    assert [(event["from_job"], event["step"]) for event in begins] == [(JOB, 2)]
    world.reserve(twig)
    assert world.put_all(twig, 0)
    world.call(twig[0], "rm", job=JOB, force=True)
    world.run(2.0)
    world.crash_controller()
    world.run(8.0)
    job = world.job("twig")
    assert (JOB in world.served.jobs, job.origin is not None and (job.origin.from_job, job.origin.step)) == (
        False,
        (JOB, 2),
    )
    assert [answer["step"] for answer in world.get(world.launch(3, job="twig"))] == [0, 0, 0]
    assert world.job("twig").origin == job.origin
    assert world.job("twig").attempts[2].origin is None


def test_a_job_that_only_a_late_host_knows_is_waited_for() -> None:
    """Just after a start any announced host may know it; then it is refused by name (R24)."""
    world = ControllerWorld(4, rules={"recovery_grace_s": 30.0})
    world.kill_host("h3", keep_memory=True)
    world.crash_controller()
    assert world.run_until(lambda: world.machine is not None and world.served.is_settled, 10.0)
    twig = world.launch(3, job="twig")
    for rank in twig:
        world.call(rank, "get", step=None, from_job="bass", timeout_s=60.0)
    assert world.run_until(lambda: stage(world) == "waiting", 5.0)
    assert set(ended(world, twig)) == {"RecoveryError: the store holds no job 'bass': it has twig"}


def test_a_job_that_only_durable_storage_has_is_read_from_there() -> None:
    """RAM forgot it: the storage of the job that asks is listed (R31)."""
    world, ranks = written(last=2)
    assert world.run_until(lambda: (JOB, 1, 2) in world.durable.markers, 60.0)
    world.call(ranks[0], "rm", force=True)
    world.run(2.0)
    assert JOB not in world.served.jobs
    twig = world.launch(2, job="twig")
    answers = world.get(twig, from_job=JOB)
    assert [(answer.get("step"), answer.get("verdict")) for answer in answers] == [(2, "durable")] * 2
    for holder in world.holders.values():
        holder.instead[ListMarkers] = lambda order: None
    assert [answer["step"] for answer in world.get(twig, from_job=JOB)] == [2, 2], "and by what was listed before"


def test_ranks_that_name_another_job_than_the_others_are_refused() -> None:
    """All must call the same (R23)."""
    world, _ = trained(3)
    twig = world.launch(3, job="twig")
    world.call(twig[0], "get", step=None, from_job=JOB, timeout_s=60.0)
    world.run(0.5)
    world.call(twig[1], "get", step=None, timeout_s=60.0)
    world.run(0.5)
    said = "this rank calls get() for step None, the ranks waiting get() for step None of job 'train'"
    assert said in twig[1].error("get")
