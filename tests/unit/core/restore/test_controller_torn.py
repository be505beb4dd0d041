"""A step that its rank saw torn: its digests match, and nothing brings it back (R11, R25, R31)."""

from __future__ import annotations

import pytest

from memstore.core.cluster.facts import StepRetired
from memstore.core.journal.records import entries_of
from memstore.core.wire.orders import RemoveStep
from memstore.testing.controller.holder import DirectedRank
from memstore.testing.controller.world import JOB, ControllerWorld, trained
from memstore.testing.requests import request_of
from recovery.inventory import StepId

TORN = "state['w'] was changed before the fence"


def retire(world: ControllerWorld, rank: DirectedRank, step: int, *, is_torn: bool = True) -> None:
    """The rank tells the controller; it need not be known to all yet."""
    world.call(rank, "retire", attempt=1, step=step, reason=TORN, is_torn=is_torn)


def marked(world: ControllerWorld) -> list[int]:
    """The steps that durable storage says are whole."""
    return sorted(step for _, _, step in world.durable.markers)


def begun(world: ControllerWorld, ranks: list[DirectedRank], step: int) -> None:
    """All ranks put a step; return once it is committed and its durable write has begun, with its phases slow."""
    world.work_s = (1.0, 1.5)
    for rank in ranks:
        world.put(rank, step)
    assert world.run_until(lambda: ranks[0].tickets[step] == "committed", 10.0)
    active = world.served.parts.durable_states.of(JOB).active
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


def verify(world: ControllerWorld, rank: DirectedRank) -> None:
    """Ask for it and wait for the end."""
    rank.answers.pop("verify", None)
    world.call(rank, "verify", job=JOB)
    assert world.run_until(lambda: bool(rank.answers.get("verify")), 10.0)


def test_a_new_controller_knows_what_verify_has_lifted() -> None:
    """The lifting is a fact as the retirement is: the last word counts (R16)."""
    world, ranks = trained(2, last=3, keep_steps=3)
    for _ in range(2):
        retire(world, ranks[0], 3, is_torn=False)
        world.run(1.0)
        assert StepId(1, 3) in world.job().retired
        verify(world, ranks[0])
        world.run(1.0)
    kinds = [event["event"] for event in world.events(JOB)]
    assert [kind for kind in kinds if kind in ("retired", "lifted")] == ["retired", "lifted"] * 2
    world.crash_controller()
    world.run(6.0)
    assert {a.get("step") for a in world.get(world.launch(2))} == {3}


def test_what_verify_lifted_begins_its_crash_loop_again() -> None:
    """Restores from before count no more, or the next get would retire the step again at once (R25)."""
    world, _ = trained(2, last=2, keep_steps=2)
    for _ in range(3):
        assert {a.get("step") for a in world.get(world.launch(2))} == {2}
    ranks = world.launch(2)
    assert "the training dies of it" in str(world.get(ranks)[0]["rejected"])
    verify(world, ranks[0])
    world.crash_controller()
    world.run(6.0)
    ranks = world.launch(2)
    for rank in ranks:
        world.call(rank, "rewind", step=2, of_attempt=1, nonce=rank.nonce, key=rank.key)
    assert world.run_until(lambda: all(rank.answers.get("rewind") for rank in ranks), 30.0)
    assert {a.get("step") for a in world.get(world.launch(2))} == {2}


@pytest.mark.parametrize("is_torn", [True, False])
def test_who_gets_nothing_is_reported_what_verify_would_lift(is_torn: bool) -> None:
    """A person who is ordered to start over alone would throw the step away; of a torn one nothing can be had."""
    world, ranks = trained(2, last=1)
    retire(world, ranks[0], 1, is_torn=is_torn)
    world.run(1.0)
    ranks = world.launch(2)
    error = world.get(ranks)[0]["error"]
    assert ("`memstore verify train`" in error) == (not is_torn)
    world.call(ranks[0], "status")
    assert world.run_until(lambda: bool(ranks[0].answers.get("status")), 10.0)
    rows = ranks[0].answers["status"][-1]["problems"]
    cause = next(row["cause"] for row in rows if row["kind"] == "step_retired")
    assert cause == f"committed step 1 is retired, a get passes it over: {TORN}"


@pytest.mark.parametrize("lacking", ["torn", "lifted", "retired"])
def test_the_last_word_on_a_step_counts_if_a_late_host_has_it(lacking: str) -> None:
    """What it alone has kept fills the gap, for the attempt of now too: it is evidence about bytes (R16, R25)."""
    world, ranks = trained(3, last=3, keep_steps=3)
    retire(world, ranks[0], 3, is_torn=lacking == "torn")
    world.run(1.0)
    if lacking != "torn":
        verify(world, ranks[0])
        world.run(1.0)
    world.kill_host("h2", keep_memory=True)
    for name in ("h0", "h1"):
        journal = world.holders[name].journal
        words = [entry.record for entry in entries_of(name, journal) if isinstance(entry.fact, StepRetired)]
        journal.remove(words[1 if lacking == "lifted" else 0])
    world.crash_controller()
    world.run(6.0)
    assert list(world.job().retired) == ([StepId(1, 3)] if lacking == "lifted" else [])
    world.return_host("h2")
    world.run(3.0)
    assert (StepId(1, 3) in world.job().torn, StepId(1, 3) in world.job().retired) == (lacking == "torn",) * 2


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
    active = world.served.parts.durable_states.of(JOB).active
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
    active = world.served.parts.durable_states.of(JOB).active
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
    """A write on the far side of a partition: no rank restores it, and the next get has it removed."""
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


def test_a_late_host_brings_the_word_that_a_step_of_the_newest_attempt_is_torn() -> None:
    """A controller that began without it does not offer the step once the host that knows is back (R16, R25)."""
    world, ranks = trained(3, last=3, keep_steps=3)
    world.kill_host("h2", keep_memory=True)
    retire(world, ranks[0], 3)
    world.run(1.0)
    for name in ("h0", "h1"):
        world.kill_host(name, keep_memory=True)
    world.return_host("h2")
    world.crash_controller()
    assert world.run_until(lambda: world.machine is not None and world.served.is_settled, 10.0)
    for name in ("h0", "h1"):
        world.return_host(name)
    world.run(3.0)
    assert {a["step"] for a in world.get(world.launch(3))} == {2}


def test_the_word_that_a_step_is_torn_outlives_the_controller_that_received_it() -> None:
    """It is not answered before it has spread, so the rank's host says it again to the next one (R16)."""
    world, ranks = trained(3, last=3, keep_steps=3)
    world.has_lease = False
    world.silence("h2")
    assert world.run_until(lambda: not world.served.lease.may_record(), 10.0)
    retire(world, ranks[0], 3)
    world.run(0.5)
    assert not world.served.lease.may_record(), "the fact waits for a lease"
    world.crash_controller()
    world.has_lease = True
    world.thaw("h2")
    assert world.run_until(lambda: bool(ranks[0].answers.get("retire")), 20.0)
    assert {a["step"] for a in world.get(world.launch(3))} == {2}


@pytest.mark.parametrize("moment_s", [0.0, 0.2])
def test_a_step_that_is_seen_torn_while_it_is_restored_is_not_returned(moment_s: float) -> None:
    """A rank of the attempt before says so when the next one has chosen it already: the next candidate is taken."""
    world, ranks = trained(3, last=3, keep_steps=3)
    last, world.work_s = ranks[0], (0.3, 0.5)
    new = [world.join(rank, 3, "next", takeover=True) for rank in range(3)]
    assert world.run_until(lambda: all(rank.answers.get("join") for rank in new), 15.0)
    for rank in new:
        world.call(rank, "get", step=None, timeout_s=60.0, is_agreement=False)
    active = world.served.state.rounds
    assert world.run_until(lambda: JOB in active and active[JOB].phase == "staging", 5.0)
    world.run(moment_s)
    assert active[JOB].phase == "staging"
    last.relay(request_of("retire", {"job": JOB, "attempt": 1, "rank": 0, "step": 3, "reason": TORN, "is_torn": True}))
    assert world.run_until(lambda: all(rank.answers.get("get") for rank in new), 30.0)
    assert {rank.answers["get"][-1]["step"] for rank in new} == {2}


@pytest.mark.parametrize("cause", ["host", "storage"])
def test_the_removal_of_a_torn_marker_is_ordered_until_it_is_done(cause: str) -> None:
    """The host that got the order dies with the order, or storage fails just then.

    RAM may forget the job later (R31).
    """
    world, ranks = trained(3, durable="/durable", durable_every=1, durable_keep=10)
    world.run(3.0)
    last = marked(world)[-1]
    world.work_s = (1.0, 1.5)
    retire(world, ranks[0], last)
    ordered = lambda: [  # noqa: E731
        name for name, h in world.holders.items() for each in h.received(RemoveStep) if each.step.step == last
    ]
    assert world.run_until(lambda: bool(ordered()), 10.0)
    (reported,) = ordered()
    if cause == "host":
        world.kill_host(reported)
    else:
        world.durable.problem = "503"
        world.run(5.0)
        world.durable.problem = ""
    assert last in marked(world)
    world.run(90.0)
    assert last not in marked(world)
    assert 2 <= len(ordered()) <= 3
