"""A step that its rank saw torn: its digests match, and nothing brings it back (R11, R25, R31)."""

from __future__ import annotations

import pytest

from memstore.testing.catalog_holder import FakeRank
from memstore.testing.catalog_trained import trained
from memstore.testing.catalog_world import JOB, CatalogWorld

TORN = "state['w'] was changed before the fence"


def retire(world: CatalogWorld, rank: FakeRank, step: int, *, is_torn: bool = True) -> None:
    """The rank tells the controller; it need not be known to all yet."""
    world.call(rank, "retire", attempt=1, step=step, reason=TORN, is_torn=is_torn)


def marked(world: CatalogWorld) -> list[int]:
    """The steps that durable storage says are whole."""
    return sorted(step for _, _, step in world.durable.markers)


def begun(world: CatalogWorld, ranks: list[FakeRank], step: int) -> None:
    """All ranks put a step; return once it is committed and its durable write has begun, with its phases slow."""
    world.work_s = (1.0, 1.5)
    for rank in ranks:
        world.put(rank, step)
    assert world.run_until(lambda: ranks[0].tickets[step] == "committed", 10.0)
    active = world.served.durable.state(JOB).active
    assert active is not None
    assert active.step.step == step


@pytest.mark.parametrize("is_torn", [True, False])
def test_verify_lifts_no_torn_step(is_torn: bool) -> None:
    """Its digests say nothing about it; a step that was retired for its bytes or for a crash loop may come back."""
    world, ranks = trained(2, last=3, keep_steps=3)
    retire(world, ranks[0], 3, is_torn=is_torn)
    world.run(1.0)
    world.call(ranks[0], "verify", job=JOB)
    assert world.run_until(lambda: bool(ranks[0].answers.get("verify")), 10.0)
    answers = world.get(world.launch(2))
    world.check_restored(answers)
    assert {a["step"] for a in answers} == {2 if is_torn else 3}


@pytest.mark.parametrize("is_verified", [True, False])
def test_a_new_controller_knows_that_a_step_is_torn(is_verified: bool) -> None:
    """The fact says so, not only that the step was retired (R16)."""
    world, ranks = trained(2, last=3, keep_steps=3)
    retire(world, ranks[0], 3)
    world.run(1.0)
    retire(world, ranks[0], 3, is_torn=False)
    world.run(1.0)
    world.crash_controller()
    world.run(6.0)
    ranks = world.launch(2)
    if is_verified:
        world.call(ranks[0], "verify", job=None)
        assert world.run_until(lambda: bool(ranks[0].answers.get("verify")), 10.0)
    assert {a["step"] for a in world.get(ranks)} == {2}


@pytest.mark.parametrize("is_torn", [True, False])
def test_a_step_that_is_retired_while_it_is_written_gets_no_marker(is_torn: bool) -> None:
    """The write stops, and the next committed step is written."""
    world, ranks = trained(2, durable="/durable", durable_every=1)
    world.run(3.0)
    before = marked(world)
    begun(world, ranks, before[-1] + 1)
    retire(world, ranks[0], before[-1] + 1, is_torn=is_torn)
    world.run(10.0)
    assert marked(world) == before
    assert world.put_all(ranks, before[-1] + 2, until="durable")
    assert marked(world) == [*before, before[-1] + 2]


@pytest.mark.parametrize("is_ordered_only", [True, False])
def test_the_marker_of_a_torn_step_is_taken_back(is_ordered_only: bool) -> None:
    """Written, or on its way: when RAM has forgotten the job, the step before is restored from storage."""
    world, ranks = trained(2, durable="/durable", durable_every="1h")
    world.run(3.0)
    (first,) = marked(world)
    job = world.job()
    job.newest.config = {**job.newest.config, "durable_every": 1}  # type: ignore[union-attr]
    begun(world, ranks, first + 1)
    active = world.served.durable.state(JOB).active
    assert active is not None
    if is_ordered_only:
        assert world.run_until(lambda: active.phase == "marking", 10.0)
    else:
        assert world.run_until(lambda: marked(world) == [first, first + 1], 10.0)
        world.run(0.1)
    job.newest.config = {**job.newest.config, "durable_every": "1h"}  # type: ignore[union-attr]
    retire(world, ranks[0], first + 1)
    world.run(10.0)
    assert marked(world) == [first]
    assert world.put_all(ranks, first + 2, until="durable"), "the next step takes its place at once"


@pytest.mark.parametrize("death", ["writer", "controller"])
def test_no_death_leaves_the_marker_of_a_torn_step(death: str) -> None:
    """The host that writes it dies, or the controller that would have taken it back."""
    world, ranks = trained(3, durable="/durable", durable_every=1)
    world.run(3.0)
    before = marked(world)
    begun(world, ranks, before[-1] + 1)
    active = world.served.durable.state(JOB).active
    assert active is not None
    assert world.run_until(lambda: active.phase == "marking", 10.0)
    retire(world, ranks[0], before[-1] + 1)
    world.run(0.3)
    assert not active.waits.keys() - {(-1, 0)}
    if death == "writer":
        world.kill_host(active.waits[-1, 0])
    else:
        world.crash_controller()
    world.run(10.0)
    assert marked(world) == before


def test_a_torn_marker_that_comes_late_goes_when_it_is_listed() -> None:
    """A write on the far side of a partition: nobody restores it, and the next get has it removed."""
    world, ranks = trained(2, durable="/durable", durable_every=1, durable_keep=10)
    world.run(3.0)
    last = marked(world)[-1]
    late = world.durable.markers[JOB, 1, last]
    retire(world, ranks[0], last)
    world.run(3.0)
    assert last not in marked(world)
    world.durable.markers[JOB, 1, last] = late
    answers = world.get(world.launch(2))
    assert last not in {a.get("step") for a in answers}
    world.run(3.0)
    assert last not in marked(world)
