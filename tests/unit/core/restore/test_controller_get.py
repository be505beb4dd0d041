"""One round, one step, all ranks alike: the newest whole step of the lineage or an error that says why (R22-R27)."""

from __future__ import annotations

import pytest

from memstore.core.wire.orders import Bring
from memstore.testing.controller.trained import trained
from memstore.testing.controller.world import JOB, ControllerWorld
from recovery.inventory import ShardId, StepId


def test_a_job_no_process_knows_gets_none_on_all_ranks() -> None:
    """None is for a job without history, alike on all ranks."""
    world = ControllerWorld(2)
    assert world.get(world.launch(2)) == [{"step": None}, {"step": None}]


def test_the_newest_step_comes_back_to_all_ranks() -> None:
    """After a relaunch every rank gets its own bytes of the same newest step."""
    world, _ = trained(3, last=2)
    answers = world.get(world.launch(3))
    world.check_restored(answers)
    assert {(a["attempt"], a["step"], a["verdict"]) for a in answers} == {(1, 2, "local")}


def test_none_waits_for_hosts_that_may_know_the_job() -> None:
    """Just after a start, None is not said while an announced host is still on its way (R23, R24)."""
    world, _ = trained(3, last=1)
    for host in world.holders:
        world.kill_host(host, keep_memory=True)
    world.crash_controller(restart_after_s=None)
    for holder in world.holders.values():
        holder.memory.journal = []
    world.return_host("h0", keep_memory=False)
    world.start_controller()
    world.run(4.0)
    ranks = [world.join(0, 1, "k", host="h0")]
    world.run(3.0)
    assert not ranks[0].attempt  # its launch waits
    assert world.run_until(lambda: ranks[0].attempt > 0, 5.0)
    assert [answer["step"] for answer in world.get(ranks)] == [None]  # the grace is over and no host came


def test_a_get_waits_for_a_late_host_that_holds_the_newest_commit() -> None:
    """A host that comes up late after a full restart saves the newest step; no rank falls back meanwhile."""
    world, _ = trained(hosts=2, last=2, replicas=1)
    world.kill_host("h1", keep_memory=True)
    world.crash_controller()
    world.run(4.0)
    ranks = [world.join(r, 2, "k", host="h0") for r in range(2)]
    world.run(2.0)
    for rank in ranks:
        world.call(rank, "get", step=None, timeout_s=60.0)
    world.run(3.0)
    assert not ranks[0].answers.get("get")
    assert any("get waits for hosts h1" in note for note in world.notes)
    world.return_host("h1")
    world.run(3.0)
    answers = [r.answers["get"][-1] for r in ranks]
    world.check_restored(answers)
    assert answers[0]["step"] == 2


def test_history_without_a_whole_step_is_an_error_that_lists_what_lacks() -> None:
    """With the bytes gone for good the error names the step, its ranks and the hosts that had them (R23)."""
    world, _ = trained(hosts=2, last=1, replicas=1)
    world.kill_host("h1")
    world.run(7.0)
    ranks = [world.join(r, 2, "k", host="h0") for r in range(2)]
    world.run(2.0)
    error = world.get(ranks)[0]["error"]
    assert error.startswith("RecoveryError")
    assert "step 1 (attempt 1)" in error
    assert "h1" in error
    assert "fresh=True" in error


def test_a_job_that_died_before_its_first_commit_starts_again() -> None:
    """Copies of an attempt that never committed anything are no history: the next one gets None and may put."""
    world = ControllerWorld(2)
    ranks = world.launch(2)
    world.get(ranks)
    world.reserve(ranks)
    world.put(ranks[0], 1)
    world.run(1.0)
    ranks = world.launch(2)
    for answer in world.get(ranks):
        assert answer["step"] is None
        assert answer["lost"].startswith("attempt 1 put steps up to 1, and none was committed: ")
    assert world.put_all(ranks, 1)


def test_another_world_size_is_refused_by_name() -> None:
    """A step put by three ranks is not given to two; both numbers and the way on are named (R27)."""
    world, _ = trained(3, last=2)
    error = world.get(world.launch(2))[0]["error"]
    assert error.startswith("WorldSizeError")
    assert "put by 3 ranks, this attempt has 2" in error
    assert "get(step, rank=r)" in error


def test_a_step_that_keeps_killing_its_group_is_retired() -> None:
    """After three restores without a newer commit the step is not offered a fourth time (R25)."""
    world, ranks = trained(3, last=2, keep_steps=2)
    for _ in range(3):
        ranks = world.launch(3)
        assert world.get(ranks)[0]["step"] == 2
    answers = world.get(world.launch(3))
    world.check_restored(answers)
    assert answers[0]["step"] == 1
    assert "the training dies of it" in str(answers[0]["rejected"])


@pytest.mark.parametrize(
    ("max_restores", "crash_window_s", "rest_s"), [(2, 600.0, 0.0), (5, 600.0, 0.0), (3, 50.0, 60.0)]
)
def test_the_rules_say_how_many_restores_within_which_time_are_a_crash_loop(
    max_restores: int, crash_window_s: float, rest_s: float
) -> None:
    """As many as `max_restores` allows are served; those longer ago than `crash_window_s` do not count (R25)."""
    rules = {"max_restores": max_restores, "crash_window_s": crash_window_s}
    world, _ = trained(3, last=2, keep_steps=2, rules=rules)
    for _ in range(max_restores):
        assert world.get(world.launch(3))[0]["step"] == 2
    world.run(rest_s)
    assert world.get(world.launch(3))[0]["step"] == (2 if rest_s else 1)


def test_the_only_step_is_restored_however_often_its_group_died() -> None:
    """Nothing else could be given instead: a launcher that flaps does not cost the run (R25, D137)."""
    world, _ = trained(3, last=1)
    for _ in range(5):
        answers = world.get(world.launch(3))
        world.check_restored(answers)
        assert answers[0]["step"] == 1
    assert "no other step is whole, so it is restored again" in str(answers[0]["notes"])
    assert not world.job().retired


def test_attempts_that_end_well_do_not_retire_a_step() -> None:
    """Runs that restore, look and close (an evaluation) are no crash loop."""
    world, ranks = trained(3, last=1)
    for _ in range(5):
        ranks = world.launch(3)
        answers = world.get(ranks)
        assert answers[0].get("step") == 1, answers
        for rank in ranks:
            world.call(rank, "close")
        world.run(1.0)


def test_get_after_a_put_points_to_rewind() -> None:
    """Going back in time inside an attempt is refused with the way to do it (R22)."""
    world, ranks = trained(3, last=1)
    assert "use store.rewind(step)" in world.get(ranks)[0]["error"]


def test_the_first_put_without_a_get_is_refused_on_a_job_with_history() -> None:
    """No job evicts weeks of work by a put: both ways are named (R19); connect(fresh=True) may."""
    world, _ = trained(3, last=1)
    ranks = world.launch(3)
    world.reserve(ranks)
    assert ranks[0].error("reserve").startswith("CommitError")
    assert "store.get()" in ranks[0].error("reserve")
    ranks = world.launch(3, fresh=True)
    assert world.put_all(ranks, 1)


@pytest.mark.parametrize("is_agreement", [False, True])
def test_a_get_after_a_fresh_start_returns_none(is_agreement: bool) -> None:
    """The loop of every script goes on as on a new job: what was left behind is neither restored nor missed (R23)."""
    world, _ = trained(3, last=1)
    world.kill_host("h2")  # nor waited for
    ranks = [world.join(rank, 2, "k", host=host, fresh=True) for rank, host in enumerate(["h0", "h1"])]
    world.run(1.0)
    assert world.get(ranks, is_agreement=is_agreement) == [{"step": None}, {"step": None}]
    assert world.put_all(ranks, 0)


@pytest.mark.parametrize("keep", [1, 2])
def test_damaged_bytes_are_taken_from_elsewhere_or_the_step_before(keep: int) -> None:
    """A chunk that fails its digest at one host comes from another; if it is nowhere, the next candidate is taken."""
    world, _ = trained(hosts=2, last=2, keep_steps=2)
    shard = ShardId(JOB, 1, 2, 0)
    world.holders["h0"].damage(shard, is_found=False)
    if keep == 2:
        world.holders["h1"].damage(shard, is_found=False)
    answers = world.get(world.launch(2))
    world.check_restored(answers)
    assert answers[0]["step"] == (2 if keep == 1 else 1)
    assert answers[0]["verdict"] == ("peer" if keep == 1 else "local")


def test_a_source_that_dies_while_staging_is_replaced() -> None:
    """The death of a peer in the middle of a restore costs another plan, not the step."""
    world, _ = trained(hosts=4, last=1, replicas=3)
    world.kill_host("h0")
    world.run(1.0)
    world.work_s = (1.0, 1.2)
    ranks = [world.join(r, 4, "k", host="h3") for r in range(4)]
    world.run(1.0)
    for rank in ranks:
        world.call(rank, "get", step=None, timeout_s=60.0)
    world.run(0.5)
    world.kill_host("h1")
    world.run(8.0)
    answers = [r.answers["get"][-1] for r in ranks]
    world.check_restored(answers)
    assert answers[0]["step"] == 1


def test_a_source_that_dies_before_all_is_staged_is_replaced() -> None:
    """A rank fetches from it only after the release: it is not released to a host that is known dead (R23)."""
    world, _ = trained(hosts=4, world_size=1, replicas=2)
    copies = set(world.holders_of(StepId(1, 1), 0))
    host = min(set(world.holders) - copies)
    rank = world.join(0, 1, "k", host=host, launcher="launcher")
    world.run(2.0)
    reader = world.holders[host]
    reader.instead[Bring] = lambda order: None  # it stages, or its rank compares into=, for long
    world.call(rank, "get", step=None, timeout_s=60.0)
    assert world.run_until(
        lambda: JOB in world.served.state.rounds and world.served.state.rounds[JOB].phase == "staging"
    )

    def sources() -> list[set[str | None]]:
        return [{run.source for run in order.runs} for order in reader.received(Bring)]

    world.run(1.0)
    assert sources() == [copies]
    gone = max(copies)
    world.kill_host(gone)
    reader.instead.clear()
    assert world.run_until(lambda: bool(rank.answers.get("get")))
    assert sources() == [copies, copies - {gone}]
    world.check_restored([rank.answers["get"][-1]])


@pytest.mark.parametrize("why", ["PeerUnreachable: connection reset", "CapacityError: the arena is full"])
def test_a_broken_transfer_fails_the_get_and_never_the_step(why: str) -> None:
    """What says nothing about the bytes costs this get, with the cause named; the next one gets the same step (R25)."""
    world, _ = trained(3, last=2, keep_steps=2)
    ranks = world.launch(3)
    world.holders["h1"].staging_fails = why
    errors = [a["error"] for a in world.get(ranks)]
    assert len(set(errors)) == 1
    assert errors[0].startswith("RecoveryError: step 2 ")
    assert why in errors[0]
    assert all(not c.missing for hosts in world.job().copies[StepId(1, 2)].values() for c in hosts.values())
    world.holders["h1"].staging_fails = ""
    for rank in ranks:
        rank.errors.clear()
    answers = world.get(ranks)
    world.check_restored(answers)
    assert answers[0]["step"] == 2


def test_a_source_that_falls_silent_while_staging_is_replaced() -> None:
    """A frozen source is no evidence: staging waits until it is dead, then another copy serves the same step (R25)."""
    world, _ = trained(hosts=4, last=2, replicas=3, keep_steps=2)
    world.kill_host("h0")
    world.run(1.0)
    ranks = [world.join(r, 4, "k", host="h3") for r in range(4)]
    world.run(1.0)
    world.work_s = (0.1, 0.2)
    for rank in ranks:
        world.call(rank, "get", step=None, timeout_s=60.0)
    world.run(0.08)
    world.silence("h1")
    world.run(20.0)
    answers = [r.answers["get"][-1] for r in ranks]
    world.check_restored(answers)
    assert answers[0]["step"] == 2


def test_a_mismatch_of_into_fails_the_round_for_all() -> None:
    """One rank whose `into=` does not fit ends the get on every rank before anything is written (R26)."""
    world, _ = trained(3, last=1)
    ranks = world.launch(3)
    ranks[1].into_error = "layer 3 has another shape"
    errors = [a["error"] for a in world.get(ranks)]
    assert len(set(errors)) == 1
    assert "rank 1: layer 3 has another shape" in errors[0]


def test_a_rank_that_dies_in_a_get_ends_it_for_the_others() -> None:
    """No rank waits for a dead rank's check: the others get an error at once (R20, R23)."""
    world, _ = trained(3, last=1)
    ranks = world.launch(3)
    world.work_s = (1.0, 1.5)
    for rank in ranks:
        world.call(rank, "get", step=None, timeout_s=60.0)
    world.run(0.5)
    world.kill_rank(ranks[2])
    world.run(1.0)
    assert "rank 2 died" in ranks[0].error("get")


def test_a_withdrawal_names_who_never_asked() -> None:
    """A rank whose deadline passes learns which ranks did not call get(); one that withdrew too is not blamed."""
    world, _ = trained(3, last=1)
    ranks = world.launch(3)
    for rank in ranks[:2]:
        world.call(rank, "get", step=None, timeout_s=5.0)
    world.run(5.0)
    for rank in ranks[:2]:
        world.call(rank, "withdraw", timeout_s=5.0)
        world.run(0.5)
    for rank in ranks[:2]:
        assert "2 of 3 ranks have called get(), missing: rank 2." in rank.error("get")


def test_rewind_opens_an_attempt_from_an_older_step() -> None:
    """After a rewind the older step is the past; the newer one is hidden, and freed with the first commit (R22)."""
    world, ranks = trained(3, last=2, keep_steps=2)
    for rank in ranks:
        world.call(rank, "rewind", step=1, nonce=rank.nonce, key=rank.key)
    world.run(2.0)
    assert [r.answers["rewind"][-1]["restored_step"] for r in ranks] == [1, 1, 1]
    answers = world.get(ranks)
    assert answers[0]["step"] == 1
    for rank in ranks:
        rank.has_room, rank.answers["reserve"] = False, []
    world.reserve(ranks)
    world.skip(ranks[0], 2)  # makes room of any may go
    world.run(1.0)
    assert world.holders_of(StepId(1, 2), 0) != []
    assert world.put_all(ranks, 3)
    world.run(1.0)
    assert world.holders_of(StepId(1, 2), 0) == []
    answers = world.get(world.launch(3))
    assert (answers[0]["attempt"], answers[0]["step"]) == (2, 3)


def test_get_of_a_step_prefers_the_lineage() -> None:
    """get(step=S) after a rewind reads the S of this lineage, also if hidden attempts have one (R22)."""
    world, ranks = trained(3, last=2, keep_steps=2)
    for rank in ranks:
        world.call(rank, "rewind", step=1, nonce=rank.nonce, key=rank.key)
    world.run(2.0)
    answers = world.get(ranks, step=1)
    world.check_restored(answers)
    assert (answers[0]["attempt"], answers[0]["step"]) == (1, 1)
