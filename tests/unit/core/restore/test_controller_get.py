"""One round, one step, all ranks alike: the newest whole step of the lineage or an error that says why (R22-R27)."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from memstore.core.arena.slot_table import PeerShare
from memstore.core.wire.orders import Bring, ListMarkers, PushCopy
from memstore.testing.controller.holder import DirectedRank
from memstore.testing.controller.world import JOB, ControllerWorld, trained, written
from memstore.testing.requests import request_of
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
    assert world.run_until(lambda: all(rank.attempt for rank in ranks), 10.0)
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


def test_bytes_that_are_damaged_on_every_host_are_not_awaited() -> None:
    """No host is to be brought back that is here; and where one is not, that is what to do."""
    world, _ = trained(hosts=2)
    for holder in world.holders.values():
        holder.damage(ShardId(JOB, 1, 1, 0), is_found=False)
    said = world.get(world.launch(2))[0]["error"]
    assert "The named hosts are here, and what they have of it is damaged\nStart over with" in said
    world, _ = trained(hosts=3)
    for host in ("h0", "h1"):
        world.kill_host(host)
    world.run(40.0)
    said = world.get(world.launch(3))[0]["error"]
    assert "\nBring the named hosts back and call get() again, or start over with" in said


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


# -- agree on a step ----------------------------------------------------------------------------------
# agree_on_step(): one step for all ranks, of any world size, verified where its copies lie (R23, R27).


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


# -- loads --------------------------------------------------------------------------------------------
# A get is over when every rank has loaded what it was sent. One that cannot ends it for all: no step is adopted.


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
    assert world.run_until(lambda: world.served.hosts.is_live("h0"), 2.0)
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


# -- reads --------------------------------------------------------------------------------------------
# Reads of single shards: what is answered is what was asked for, also if much happened meanwhile (R17, R27).


def test_what_a_former_controller_ordered_answers_no_read_of_its_successor() -> None:
    """A slow staging of its time ends when the successor has as many reads: the reader gets the shard it asked for."""
    world, ranks = trained(3, last=1)
    reader = ranks[0]
    holder = world.holders[reader.host_id]
    world.work_s = (6.0, 6.0)
    world.call(reader, "read_step", step=1, rank=1)
    world.run(0.5)
    assert isinstance(holder.orders[-1], Bring)
    holder.calls.forget(reader.owner)  # the reader of rank 1 is gone
    world.crash_controller(restart_after_s=0.1)
    assert world.run_until(lambda: world.machine is not None and world.machine.is_settled, 5.0)
    world.work_s = (20.0, 20.0)
    world.call(reader, "read_step", step=1, rank=2)
    assert world.run_until(lambda: bool(reader.answers.get("read_step")), 60.0)
    assert reader.answers["read_step"][-1]["shard"] == [JOB, 1, 1, 2]


def test_a_read_whose_host_was_replaced_is_forgotten() -> None:
    """A holder that is back at once has lost the order; its reader asks again, and no copy is kept for ever (R7)."""
    world, ranks = trained(3, last=1)
    holder = world.holders[ranks[0].host_id]
    world.work_s = (5.0, 5.0)
    world.call(ranks[0], "read_step", step=1, rank=1)
    assert world.run_until(lambda: bool(world.served.state.reads), 5.0)
    world.kill_host(holder.host_id, keep_memory=True)
    world.return_host(holder.host_id)
    assert world.run_until(lambda: world.served.hosts.is_live(holder.host_id), 5.0)
    world.run(10.0)
    assert not world.served.state.reads


def test_a_shard_of_another_world_size_comes_without_its_step_being_named() -> None:
    """A reader, or a rank of a launch that has another size, on a host that has no copy of it (R27)."""
    world, _ = trained(4, 3)
    ranks = [world.join(r, 2, "k", host=f"h{3 - r}", launcher="launcher") for r in range(2)]
    world.run(2.0)
    for step in (None, 1):
        world.holders["h3"].orders.clear()
        world.call(ranks[0], "read_step", step=step, rank=2)
        world.run(2.0)
        [order] = world.holders["h3"].received(Bring)
        assert order.shard.step == 1
        assert sum(run.count for run in order.runs if run.tier == "peer") == order.spec.chunks_count


def test_what_is_read_is_surplus_nowhere_until_the_read_has_ended() -> None:
    """A host that placement has left keeps the copy that a read was planned to come from (R7)."""
    world, _ = trained(6, 3)
    for host in ("h3", "h4", "h5"):  # memory of another job that is gone
        world.holders[host].replicas.claim(JOB, PeerShare(attempt=1, ranks={}, peer_slots=100, world_size=3))
    world.work_s = (3.0, 3.0)  # of the pushes to where the ranks are now
    ranks = [world.join(r, 3, "k", host=f"h{3 + r}", launcher="launcher") for r in range(3)]
    sources = [world.holders[source] for source in ("h0", "h1", "h2")]
    assert world.run_until(lambda: all(source.received(PushCopy) for source in sources), 2.0)
    world.work_s = (30.0, 30.0)  # of the read
    world.call(ranks[2], "read_step", step=1, rank=1)
    world.run(15.0)
    assert world.holders_of(StepId(1, 1), 0) == ["h3", "h5"]
    assert world.holders_of(StepId(1, 1), 1) == ["h1", "h2", "h3", "h4"]
    world.run(30.0)
    assert world.holders_of(StepId(1, 1), 1) == ["h3", "h4"]


def test_a_plan_of_another_world_size_counts_the_bytes_of_the_step() -> None:
    """A launch of two ranks after a step of three: the plan names both sizes and says where the step's bytes are."""
    world, _ = trained(4, 3)
    ranks = [world.join(r, 2, "k", host=f"h{r}", launcher="launcher") for r in range(2)]
    world.run(2.0)
    world.call(ranks[0], "plan", lose=[])
    assert world.run_until(lambda: bool(ranks[0].answers.get("plan")), 5.0)
    [plan] = ranks[0].answers["plan"]
    assert (plan["step"], plan["step_world_size"], plan["world_size"]) == (1, 3, 2)
    assert sum(plan["bytes"].values()) > 0


def test_a_reader_whose_step_was_dropped_on_the_way_is_reported_so() -> None:
    """Puts wait for no reader: the chunks that did not come any more are gone for newer steps, not damaged (R27)."""
    world, ranks = trained(3, 3)
    world.work_s = (3.0, 3.0)  # of the read
    world.call(ranks[2], "read_step", step=1, rank=0)
    world.run(0.5)
    world.work_s = (0.01, 0.02)
    assert world.put_all(ranks, 2)
    assert world.run_until(lambda: not world.holders_of(StepId(1, 1), 0), 2.0)
    assert world.run_until(lambda: "read_step" in ranks[2].errors, 20.0)
    [(name, why)] = ranks[2].errors["read_step"]
    assert name == "StepDropped"
    assert "step 1 of job 'train' was dropped while it was read" in why


# -- branches -----------------------------------------------------------------------------------------
# A get of another job's step: which step it is, what keeps it, and what is remembered of it (R32).


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
