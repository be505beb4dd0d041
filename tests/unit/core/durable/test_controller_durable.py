"""Durable storage: parts, then the marker, and a job that RAM forgot comes back from it (R31)."""

from __future__ import annotations

import math
from typing import Any, get_args

import pytest

from memstore.core.durable.checks import AGAIN_S, CHECK_DEADLINE_S, LOOK_EVERY_S, PATIENCE_S
from memstore.core.durable.paths import other_key
from memstore.core.durable.writes import FAILED_AGAIN_S, REMOVAL_S, DurableOrders
from memstore.core.report.problems import DEGRADED
from memstore.core.schedule import optimal_interval_s, retire
from memstore.core.wire.ids import WireStep
from memstore.core.wire.orders import DurableOrder, ListMarkers, WriteSlices
from memstore.core.wire.reports import MarkersListed, Report, SliceWritten
from memstore.testing.controller.holder import WRITES, DirectedHolder, DirectedRank
from memstore.testing.controller.world import ControllerWorld, written
from recovery.inventory import ShardId, StepId


def forget_ram(world: ControllerWorld) -> None:
    """All machines lose power; empty ones come up."""
    for host in list(world.holders):
        world.kill_host(host)
        world.return_host(host, keep_memory=False)
    world.crash_controller()
    world.run(6.0)


def test_a_committed_step_becomes_durable() -> None:
    """Every part, then the marker; then the tickets rise."""
    world, ranks = written()
    assert list(world.durable.markers) == [("train", 1, 1)]
    assert [r.tickets[1] for r in ranks] == ["durable", "durable"]


def test_a_pace_that_is_no_whole_number_reaches_the_holders() -> None:
    """`durable_bytes_per_s=1e6` is a setting like 1000000: orders carry it as whole bytes."""
    world, _ = written(durable_bytes_per_s=1e6)
    assert list(world.durable.markers) == [("train", 1, 1)]


def test_only_the_newest_durable_steps_are_kept() -> None:
    """durable_keep bounds what stays; the newest never goes."""
    world, _ = written(last=4, durable_keep=2)
    world.run(2.0)
    assert sorted(step for _, _, step in world.durable.markers) == [3, 4]


def test_a_job_that_ram_forgot_comes_back_from_durable_storage() -> None:
    """With every machine's memory gone, the next attempt is numbered after the marker and restores its step."""
    world, _ = written(last=2)
    forget_ram(world)
    ranks = world.launch(2)
    assert [r.attempt for r in ranks] == [2, 2]
    answers = world.get(ranks)
    world.check_restored(answers)
    assert {(a["attempt"], a["step"], a["verdict"]) for a in answers} == {(1, 2, "durable")}
    assert world.put_all(ranks, 3)


def test_a_new_controller_writes_no_step_before_it_knows_what_storage_has() -> None:
    """Else it writes a durable step once more, and the first step of the next launch waits for the distance between."""
    world, _ = written(durable_every="30min")

    for holder in world.holders.values():
        holder.delay(2.0, ListMarkers)
    world.crash_controller()
    world.run(10.0)
    ranks = world.launch(2)
    world.get(ranks)
    assert world.put_all(ranks, 2)
    world.run(2.0)
    assert sorted(world.durable.markers) == [("train", 1, 1), ("train", 2, 2)]


def join_on_a_blank_host(world: ControllerWorld, *, knows_job: bool) -> list[DirectedRank]:
    """All machines restarted, and h0 came without its copies: both ranks of a launch there connect."""
    journal = list(world.holders["h0"].journal)
    world.kill_host("h0")
    world.crash_controller()
    world.memories["h0"].journal = journal if knows_job else []
    world.return_host("h0")
    world.run(3.0)
    ranks = [world.join(rank, 2, "k", host="h0") for rank in range(2)]
    world.run(1.0)
    return ranks


@pytest.mark.parametrize("knows_job", [True, False])
def test_a_late_host_is_awaited_before_durable_storage_is_read(knows_job: bool) -> None:
    """All machines restart, one without its memory, the other late: the launch waits, storage is older (R20, R24)."""
    world, ranks = written(durable_every=10)
    world.call(ranks[0], "persist", step=1)
    world.run(2.0)
    assert world.put_all(ranks, 2)
    assert list(world.durable.markers) == [("train", 1, 1)]
    world.kill_host("h1", keep_memory=True)
    ranks = join_on_a_blank_host(world, knows_job=knows_job)
    assert any("its launch waits for host h1" in note for note in world.notes)
    assert not any(rank.answers.get("join") for rank in ranks)
    world.return_host("h1")
    world.run(3.0)
    answers = world.get(ranks)
    world.check_restored(answers)
    assert {answer["step"] for answer in answers} == {2}


@pytest.mark.parametrize("knows_job", [True, False])
def test_a_late_host_is_not_awaited_for_ever(knows_job: bool) -> None:
    """It does not come within the grace: the step on durable storage is restored."""
    world, _ = written()
    world.kill_host("h1", keep_memory=True)
    ranks = join_on_a_blank_host(world, knows_job=knows_job)
    assert world.run_until(lambda: all(rank.attempt for rank in ranks), world.rules.recovery_grace_s + 3.0)
    answers = world.get(ranks)
    assert {(answer["step"], answer["verdict"]) for answer in answers} == {(1, "durable")}


def test_a_job_known_to_durable_storage_alone_is_history() -> None:
    """A first put without a get is refused also when only markers remember the job (R19)."""
    world, _ = written()
    forget_ram(world)
    ranks = world.launch(2)
    world.reserve(ranks)
    assert ranks[0].error("reserve").startswith("CommitError")


def test_storage_that_cannot_be_read_is_no_reason_to_start_over() -> None:
    """If no host knows the job and its markers cannot be listed, connect says so; no rank begins at step 0 (R23)."""
    world, _ = written()
    forget_ram(world)
    world.durable.problem = "permission denied"
    ranks = world.launch(2)
    assert ranks[0].error("join").startswith("RecoveryError")
    assert "permission denied" in ranks[0].error("join")
    world.durable.problem = ""
    assert world.get(world.launch(2))[0]["step"] == 1


def test_a_writer_that_dies_ends_the_write_and_the_next_one_goes_on() -> None:
    """The marker is never written without all parts; another host writes what the dead one owed."""
    world, ranks = written()
    world.work_s = (1.0, 1.5)
    for rank in ranks:
        world.put(rank, 2)
    assert world.run_until(lambda: ranks[0].tickets[2] == "committed", 10.0)
    world.run(0.3)
    world.kill_host("h1")
    world.run(10.0)
    assert ("train", 1, 2) in world.durable.markers


@pytest.mark.parametrize("failures", [0, 30])
def test_auto_writes_at_the_optimum_of_what_a_write_took(failures: int) -> None:
    """Daly's, by the measured write and the failures seen; nothing is written before it is due (R31, R33)."""
    world = ControllerWorld(2, durable="/durable", durable_every="auto")
    for _ in range(failures):
        ranks = world.launch(2)
    ranks = world.launch(2)
    world.get(ranks)
    world.work_s = (1.0, 1.5)
    assert world.put_all(ranks, 1, until="durable")
    state = world.served.parts.durable_states.of("train")
    assert state.write_s is not None
    assert state.last_started_s is not None
    mtbf_s = (86_400.0 + world.now) / (failures + 1)
    due_s, step = state.last_started_s + optimal_interval_s(state.write_s, mtbf_s), 1
    while state.last_started_step == StepId(ranks[0].attempt, 1):
        step += 1
        world.run(5.0)
        assert world.put_all(ranks, step)
        assert world.now < 2 * due_s
    assert due_s - 1.0 <= state.last_started_s <= due_s + 15.0


def test_a_failed_write_is_reported_and_training_goes_on() -> None:
    """A full disk shows in the status; commits do not wait for it."""
    world, ranks = written()
    world.durable.problem = "no space left"
    assert world.put_all(ranks, 2)
    world.run(2.0)
    assert world.served.parts.durable_states.of("train").problem == "no space left"
    world.durable.problem = ""
    assert world.put_all(ranks, 3)
    assert world.run_until(lambda: ranks[0].tickets[3] == "durable", 5.0)


def written_by(world: ControllerWorld, step: int) -> dict[tuple[int, int], list[str]]:
    """(rank, slice) -> the hosts that wrote it."""
    return {(s.rank, number): hosts for (s, number), hosts in world.durable.writers.items() if s.step == step}


def test_the_last_step_of_a_run_is_tried_again_when_its_write_failed() -> None:
    """No newer commit will come, and status says that the write is tried by itself."""
    world, ranks = written()
    world.durable.problem = "no space left"
    assert world.put_all(ranks, 2)
    world.run(3.0)
    close_all(world, ranks)
    world.run(FAILED_AGAIN_S)
    assert world.served.parts.durable_states.of("train").failures_count == 2
    world.durable.problem = ""
    assert world.run_until(lambda: ("train", 1, 2) in world.durable.markers, FAILED_AGAIN_S + 5.0)
    world.run(1.0)
    assert world.served.parts.durable_states.of("train").problem == ""


def test_the_holders_of_a_shard_share_its_slices() -> None:
    """Every slice is written once, and both holders of each shard write some of it."""
    world, _ = written()
    wrote = written_by(world, 1)
    assert all(len(hosts) == 1 for hosts in wrote.values())
    for rank in range(2):
        assert {hosts[0] for (r, _), hosts in wrote.items() if r == rank} == {"h0", "h1"}


def test_what_a_dead_writer_owed_another_holder_writes_and_nothing_twice() -> None:
    """The write of the same step goes on: it is not abandoned, and what was written is not written again."""
    world, ranks = written()
    world.work_s = (1.0, 1.5)
    for rank in ranks:
        world.put(rank, 2)
    assert world.run_until(lambda: ranks[0].tickets[2] == "committed", 10.0)
    world.run(0.3)
    write = world.served.parts.durable_states.of("train").active
    assert write is not None
    assert "h1" in write.waits.values()
    world.kill_host("h1")
    assert world.run_until(lambda: ("train", 1, 2) in world.durable.markers, 10.0)
    assert world.served.parts.durable_states.of("train").abandoned_count == 0
    assert set(map(tuple, written_by(world, 2).values())) == {("h0",)}


def test_a_slice_that_one_host_cannot_write_another_does() -> None:
    """A host without a way to the storage fails; the write goes on at the other, and status has no problem."""
    world, ranks = written()
    world.durable.problems["h1"] = "no route"
    assert world.put_all(ranks, 2)
    assert world.run_until(lambda: ranks[0].tickets[2] == "durable", 10.0)
    assert set(map(tuple, written_by(world, 2).values())) == {("h0",)}
    assert world.served.parts.durable_states.of("train").problem == ""


def test_a_write_that_no_process_can_finish_leaves_no_slices() -> None:
    """When every holder of a shard failed, what was written of the step is removed: full storage needs the room."""
    world, ranks = written()
    world.durable.problem = "no space left"
    assert world.put_all(ranks, 2)
    world.run(3.0)
    assert world.served.parts.durable_states.of("train").failures_count == 1
    assert ("train", 1, 2) in world.durable.discarded


def test_when_storage_cannot_keep_up_the_newest_committed_step_wins() -> None:
    """Writes that take longer than the steps are abandoned slice by slice for newer ones; in the end one is whole."""
    world, ranks = written(keep_steps=2)
    for holder in world.holders.values():
        holder.delay(2.5, *WRITES)
    for step in range(2, 12):
        assert world.put_all(ranks, step)
        world.run(1.0)
    state = world.served.parts.durable_states.of("train")
    assert state.abandoned_count >= 1
    world.run(20.0)
    newest = max(step for _, _, step in world.durable.markers)
    assert newest > 2
    assert all(hosts for hosts in written_by(world, newest).values())
    assert not [key for key in world.durable.markers if key in world.durable.discarded]


def test_a_host_whose_way_to_the_storage_hangs_is_done_without() -> None:
    """One holder writes nothing and says nothing: the next write is the other's alone, and steps become durable."""
    world, ranks = written(keep_steps=2)
    world.holders["h1"].instead.update(dict.fromkeys(WRITES, lambda order: None))
    for step in range(2, 9):
        assert world.put_all(ranks, step)
        world.run(2.0)
    assert max(step for _, _, step in world.durable.markers) > 2
    assert [event["event"] for event in world.events("train")].count("durable_abandoned") == 1


def close_all(world: ControllerWorld, ranks: list[DirectedRank]) -> None:
    """Every rank closes its store, as at the end of a run."""
    for rank in ranks:
        world.call(rank, "close")
    world.run(1.0)


def test_a_closed_job_that_is_durable_leaves_ram_in_the_end() -> None:
    """Only after job_ttl_s, which a new controller counts again; the next launch restores it from durable storage."""
    world, ranks = written(last=2, job_ttl_s=100.0)
    close_all(world, ranks)
    world.run(60.0)
    world.crash_controller()
    world.run(60.0)
    assert world.holders_of(StepId(1, 2), 0) != []
    world.run(60.0)
    assert world.holders_of(StepId(1, 2), 0) == []
    assert "train" not in world.served.jobs
    again = world.launch(2)
    assert {(a["step"], a["verdict"]) for a in world.get(again)} == {(2, "durable")}


@pytest.mark.parametrize("loss", ["emptied", "a part is gone", "unreadable"])
def test_the_last_copies_stay_when_durable_storage_lost_the_step(loss: str) -> None:
    """The storage is looked at when job_ttl_s is over, also if all was written once; the word is an event (R19)."""
    world, ranks = written(last=2, job_ttl_s=100.0)
    close_all(world, ranks)
    if loss == "emptied":
        world.durable.markers.clear()
    elif loss == "unreadable":
        world.durable.problem = "not mounted"
    else:
        world.durable.lacks = "rank-0.0 is gone"
    world.run(150.0)
    assert len(world.holders_of(StepId(1, 2), 0)) == 2
    page = world.events("train")
    assert [event["step"] for event in page if event["event"] == "not_expired"] == [2]
    assert ("train", 1, 2) in world.durable.markers or loss == "unreadable"  # written again from RAM
    world.durable.problem = world.durable.lacks = ""
    world.run(900.0)
    assert world.holders_of(StepId(1, 2), 0) == []
    assert ("train", 1, 2) in world.durable.markers


@pytest.mark.parametrize("keeper", ["ram only", "running", "crashed", "pinned", "no limit"])
def test_what_may_be_needed_does_not_expire(keeper: str) -> None:
    """A step that lies only in RAM, a run that goes on or died, a pinned step, job_ttl_s=0: nothing is freed."""
    world, ranks = written(last=2, job_ttl_s=0 if keeper == "no limit" else 100.0)
    if keeper == "ram only":
        world.durable.problem = "no space left"
        assert world.put_all(ranks, 3)
    if keeper == "pinned":
        world.call(ranks[0], "pin", step=2, name="best")
        world.run(1.0)
    if keeper == "crashed":
        for rank in ranks:
            world.kill_rank(rank)
    elif keeper != "running":
        close_all(world, ranks)
    world.run(300.0)
    newest = 3 if keeper == "ram only" else 2
    assert len(world.holders_of(StepId(1, newest), 0)) == 2


@pytest.mark.parametrize("news", ["a pin", "a launch", "half a launch"])
def test_what_is_needed_again_while_the_storage_is_looked_at_stays(news: str) -> None:
    """job_ttl_s is over and the look takes 10 s: a process that comes meanwhile loses nothing by its good result."""
    world, ranks = written(last=2, job_ttl_s=100.0)
    close_all(world, ranks)
    for holder in world.holders.values():
        holder.delay(10.0, ListMarkers)
        holder.orders.clear()
    assert world.run_until(lambda: any(holder.received(ListMarkers) for holder in world.holders.values()), 150.0)
    if news == "a pin":
        world.call(ranks[0], "pin", step=2, name="best")
    elif news == "a launch":
        world.launch(2)
    else:
        world.join(0, 2, "the next launch")
    world.run(60.0)
    assert "train" in world.served.jobs
    assert all(len(world.holders_of(StepId(1, 2), rank)) == 2 for rank in range(2))


def test_a_job_of_a_removed_name_is_written_at_once() -> None:
    """A write of the job before, cut off by its removal, is none that the new one waits for (R31)."""
    world = ControllerWorld(2, durable="/durable", durable_every="1h")
    ranks = world.launch(2)
    world.get(ranks)
    world.work_s = (5.0, 6.0)
    assert world.put_all(ranks, 1)
    assert world.served.parts.durable_states.of("train").active is not None
    world.call(ranks[0], "rm", job="train", force=True)
    world.run(10.0)
    world.work_s = (0.01, 0.2)
    assert not world.durable.markers
    ranks = world.launch(2)
    world.get(ranks)
    assert world.put_all(ranks, 1, until="durable", limit_s=60.0)


def test_what_durable_storage_brings_back_after_a_removal_is_the_jobs_own() -> None:
    """The step has the number of a removed attempt; its copies stay, and it is committed, pinned, retired."""
    world, ranks = written(last=2)
    assert world.run_until(lambda: ("train", 1, 2) in world.durable.markers, 60.0)
    world.call(ranks[0], "rm", force=True)
    world.run(1.0)
    ranks = world.launch(2)
    assert {(a["step"], a["verdict"]) for a in world.get(ranks)} == {(2, "durable")}
    step = StepId(1, 2)
    world.run(1.0)
    assert [world.holders_of(step, rank) != [] for rank in range(2)] == [True, True]
    world.call(ranks[0], "pin", step=2, of_attempt=1, name="best")
    assert world.run_until(lambda: "pin" in ranks[0].answers, 20.0), ranks[0].errors
    world.crash_controller()
    world.run(8.0)
    job = world.job()
    assert (step in job.commits, job.pinned_steps()) == (True, {step})
    world.call(ranks[0], "retire", attempt=1, step=2, reason="it diverges")
    assert world.run_until(lambda: "retire" in ranks[0].answers, 10.0)
    world.crash_controller()
    world.run(8.0)
    assert world.job().retired == {step: "it diverges"}


def test_a_get_that_ran_out_of_time_says_that_it_waited_for_the_storage() -> None:
    """All ranks asked and the storage hangs: no rank is called missing, the next thing to do is named (R23)."""
    world, _ = written(last=2)
    ranks = world.launch(2)
    for holder in world.holders.values():
        holder.instead[ListMarkers] = lambda order: None
    for rank in ranks:
        world.call(rank, "get", step=None, timeout_s=5.0)
    world.run(5.0)
    for rank in ranks:
        world.call(rank, "withdraw", timeout_s=5.0)
        world.run(0.5)
    for rank in ranks:
        waited = "after 5 s all ranks have called get(), waiting for durable storage to be listed. Raise timeout_s"
        assert waited in rank.error("get")


def test_a_job_that_is_read_does_not_expire_until_the_read_has_ended() -> None:
    """A reader's shard is on its way when job_ttl_s is over: it gets it, and the job leaves RAM after that."""
    world, ranks = written(last=2, job_ttl_s=100.0)
    close_all(world, ranks)
    world.run(90.0)
    world.work_s = (60.0, 60.0)  # the staging
    world.call(ranks[0], "read_step", step=2, rank=1)
    world.run(50.0)
    assert len(world.holders_of(StepId(1, 2), 0)) == 2
    world.run(20.0)
    assert ranks[0].answers["read_step"][-1]["step"] == 2
    world.run(110.0)
    assert "train" not in world.served.jobs


def test_a_write_to_another_place_than_the_newest_attempts_is_given_up() -> None:
    """An attempt opens with other durable storage while a step is written: all that a step has lies in one place."""
    world = ControllerWorld(2, durable="/durable", durable_every="1h")
    ranks = world.launch(2)
    world.get(ranks)
    world.work_s = (5.0, 6.0)
    assert world.put_all(ranks, 1)
    states = world.served.parts.durable_states
    write = states.of("train").active
    assert write is not None
    assert write.place.url == "/durable"
    world.work_s = (0.01, 0.2)
    world.config = {**world.config, "durable": "/elsewhere"}
    world.launch(2)
    world.run(1.0)
    after = states.of("train").active
    assert after is None or after.place.url == "/elsewhere"


# -- keys ---------------------------------------------------------------------------------------------
# One key for all slices of a durable step: hosts that have another one fail with theirs, and are named (R31).


A, B = "a" * 16, "b" * 16


def encrypted(keys: dict[str, str], hosts: int = 2, **config: Any) -> tuple[ControllerWorld, list[DirectedRank]]:
    """A running job with an encrypted durable directory, whose hosts have these keys."""
    world = ControllerWorld(hosts, durable="/durable", durable_every=1, durable_key_file="/key", **config)
    for host, key in keys.items():
        world.durable.keys[host] = key
    ranks = world.launch(hosts)
    world.get(ranks)
    return world, ranks


def keys_on_storage(world: ControllerWorld, step: int) -> set[str]:
    """Keys that slices of a step were written under."""
    names = [name for place, files in world.durable.slices.items() if place[2] == step for name in files]
    return {name.rpartition(".")[2].partition("-")[0] for name in names}


def job_row(world: ControllerWorld, rank: DirectedRank) -> dict[str, Any]:
    """The job in the answer to `memstore status`."""
    rank.answers.pop("status", None)
    world.call(rank, "status")
    world.run(0.5)
    status = rank.answers["status"][-1]
    return {**status["jobs"][0], "problems": status["problems"]}


def test_a_step_is_written_under_one_key_and_the_other_host_is_named() -> None:
    """Every shard is on both hosts, so one of them writes all; status names the other, both keys and the remedy."""
    world, ranks = encrypted({"h0": A, "h1": B})
    for step in (1, 2, 3):
        assert world.put_all(ranks, step, until="durable", limit_s=20.0)
        assert world.durable.marker("train", 1, step).key in keys_on_storage(world, step)
    [key] = {world.durable.marker(*place).key for place in world.durable.markers}
    other, its = ("h1", B) if key == A else ("h0", A)
    [problem] = [problem for problem in job_row(world, ranks[0])["problems"] if problem["kind"] == "durable_failed"]
    assert f"host {other} wrote nothing of step 3: {other_key(key, its)}" in problem["cause"]
    world.durable.keys[other] = key  # the remedy
    assert world.put_all(ranks, 4, until="durable", limit_s=20.0)
    assert "durable_failed" not in {problem["kind"] for problem in job_row(world, ranks[0])["problems"]}


def test_a_step_that_fits_under_no_key_is_not_durable() -> None:
    """Each shard has one copy, on hosts with different keys: no marker, and the reason names a host and both keys."""
    world, ranks = encrypted({"h0": A, "h1": B}, replicas=1)
    assert world.put_all(ranks, 1)
    world.run(5.0)
    assert world.durable.markers == {}
    problem = world.served.parts.durable_states.of("train").problem
    assert problem.startswith(("host h0 wrote nothing of step 1", "host h1 wrote nothing of step 1"))
    assert A in problem
    assert B in problem
    failed = [event for event in world.events("train") if event["event"] == "durable_failed"]
    assert len(failed) == 1  # not again and again: storage and network have better to do
    world.durable.keys["h1"] = A
    assert world.put_all(ranks, 2, until="durable", limit_s=20.0)
    assert job_row(world, ranks[0])["durable_problem"] == ""


def test_a_key_replaced_while_a_step_is_written_makes_no_mixed_step() -> None:
    """Hosts read the new file between two of their slices: the write fails, and the next one has the new key."""
    world, ranks = encrypted({"h0": A, "h1": A})
    assert world.put_all(ranks, 1, until="durable", limit_s=20.0)
    world.work_s = (1.0, 1.5)
    for rank in ranks:
        world.put(rank, 2)
    writing = lambda: (w := world.served.parts.durable_states.of("train").active) is not None and w.phase == "writing"  # noqa: E731
    assert world.run_until(writing, 20.0)
    for holder in world.holders.values():
        world.durable.keys[holder.host_id] = B
    assert world.run_until(lambda: ("train", 1, 2) in world.durable.markers, 20.0)
    assert world.durable.marker("train", 1, 2).key == B


@pytest.mark.parametrize("is_reported", [True, False])
def test_a_step_is_written_again_once_its_remains_are_removed(
    monkeypatch: pytest.MonkeyPatch, is_reported: bool
) -> None:
    """The removal would take the new slices; a host that never says that it has removed holds the write up 30 s."""
    if not is_reported:
        monkeypatch.setattr(DurableOrders, "step_removed", lambda self, host, report: None)
    world, ranks = encrypted({"h0": A, "h1": A})
    world.durable.problem = "no space left"
    assert world.put_all(ranks, 1)
    assert world.run_until(lambda: world.served.parts.durable_states.of("train").failures_count == 1, 20.0)
    failed_s, world.durable.problem = world.now, ""
    world.served.parts.durable_states.of("train").failed_s = -math.inf  # as if it had waited for its next try
    assert world.run_until(lambda: ("train", 1, 1) in world.durable.markers, REMOVAL_S + 10.0)
    assert (world.now - failed_s >= REMOVAL_S) is not is_reported


def test_a_key_replaced_host_by_host_never_mixes() -> None:
    """One host's file first, the other's steps later: every step is under one key, in the end the new one."""
    world, ranks = encrypted({"h0": A, "h1": A}, durable_keep=9)
    for step in range(1, 7):
        if step in (3, 5):
            world.durable.keys["h0" if step == 3 else "h1"] = B
        assert world.put_all(ranks, step, until="durable", limit_s=20.0)
    assert all(len(keys_on_storage(world, step)) == 1 for step in range(1, 7))
    assert world.durable.marker("train", 1, 6).key == B


def test_nothing_older_goes_while_hosts_differ_or_the_present_key_has_too_few() -> None:
    """durable_keep counts steps under the present key only, and waits while it is open which key that is."""
    assert retire({StepId(1, 1): A, StepId(1, 2): A, StepId(1, 3): B}, 2, B) == ()
    assert retire({StepId(1, 1): A, StepId(1, 2): B, StepId(1, 3): A, StepId(1, 4): B}, 2, B) == (StepId(1, 1),)
    world, ranks = encrypted({"h0": A, "h1": A}, durable_keep=1)
    assert world.put_all(ranks, 1, until="durable", limit_s=20.0)
    world.durable.keys["h0"] = B
    for step in (2, 3):
        assert world.put_all(ranks, step, until="durable", limit_s=20.0)
    world.run(2.0)
    assert sorted(step for _, _, step in world.durable.markers) == [1, 2, 3]
    world.durable.keys["h1"] = B
    assert world.put_all(ranks, 4, until="durable", limit_s=20.0)
    assert world.run_until(lambda: [step for _, _, step in world.durable.markers] == [4], 5.0)


def test_a_look_says_which_key_the_newest_step_needs() -> None:
    """After all memory is lost the hosts have a new key: status names the old one, which the marker knows."""
    world, ranks = encrypted({"h0": A, "h1": A})
    assert world.put_all(ranks, 1, until="durable", limit_s=20.0)
    for host in list(world.holders):
        world.kill_host(host)
        world.return_host(host, keep_memory=False)
        world.durable.keys[host] = B
    world.crash_controller()
    world.run(6.0)
    world.launch(2)
    world.run(2.0)
    assert f"step 1: {other_key(A, B)}" in world.served.parts.durable_states.of("train").unread


def test_late_slices_of_a_write_are_no_mixture() -> None:
    """A report under another key than the first one's counts as that host's failure."""
    world, ranks = encrypted({"h0": A, "h1": A})
    world.reserve(ranks)
    world.work_s = (1.0, 1.5)
    for rank in ranks:
        world.put(rank, 1)
    durable = world.served.parts.durable
    assert world.run_until(lambda: durable.states.of("train").active is not None, 20.0)
    write = durable.states.of("train").active
    assert write is not None
    pieces = {host: piece for piece, host in write.waits.items()}
    for host, key in (("h0", A), ("h1", B)):
        rank, number = pieces[host]
        report = SliceWritten(job="train", step=WireStep(1, 1), rank=rank, number=number, key=key, problem=None)
        durable.slice_written(host, report)
    assert (write.key, write.other_keys) == (A, {"h1": B})
    assert "h1" in write.failed[pieces["h1"]]


# -- looks --------------------------------------------------------------------------------------------
# What is said of durable storage is what was seen there, and when: before the last copies go, and in status (R19).


def last_copies(world: ControllerWorld, rank: DirectedRank, job: str | None = "train") -> dict[str, list[str]]:
    """Ask what would be lost with the copies in RAM."""
    count = len(rank.answers.get("last_copies", ()))
    world.call(rank, "last_copies", job=job)
    assert world.run_until(lambda: len(rank.answers.get("last_copies", ())) > count, 400.0)
    lost: dict[str, list[str]] = rank.answers["last_copies"][-1]["lost"]
    return lost


def status(world: ControllerWorld) -> dict[str, Any]:
    """What status says of the job."""
    row: dict[str, Any] = world.status()["jobs"][0]
    return row


def rows(world: ControllerWorld) -> list[dict[str, Any]]:
    """The problems about durable storage."""
    return [row for row in world.status()["problems"] if "/durable" in row["cause"]]


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        ("nothing", ""),
        ("emptied", "step 2 lives only in RAM (nothing of it is durable): durable storage does not have its marker"),
        ("a part is gone", "step 2 lives only in RAM (durable is step 1): rank-0.0 is gone"),
        ("unreadable", "step 2 cannot be read on durable storage: not mounted (h0, h1)"),
        ("no host looks", "step 2 cannot be read on durable storage: no host that could look answers"),
    ],
)
def test_a_step_is_durable_only_if_the_storage_has_it_when_a_process_asks(loss: str, said: str) -> None:
    """Its marker was seen once; before its last copies go it is looked for again, slices and all."""
    world, ranks = written(last=2, keep_steps=2, durable_keep=2)
    if loss == "emptied":
        world.durable.markers.clear()
    elif loss == "a part is gone":
        world.durable.lacks = "rank-0.0 is gone"
    elif loss == "unreadable":
        world.durable.problem = "not mounted"
    elif loss == "no host looks":
        world.served.hosts.is_answering = lambda host: False  # type: ignore[method-assign]
    lost = last_copies(world, ranks[0])
    if not said:
        assert lost == {}
    else:
        [words] = lost["train"]
        assert words.startswith(said)
    if loss in ("emptied", "a part is gone"):
        world.durable.lacks = ""
        world.run(20.0)
        assert ("train", 1, 2) in world.durable.markers  # written again from RAM
        assert last_copies(world, ranks[0], None) == {}


def test_a_pinned_step_is_looked_for_as_well() -> None:
    """Both the newest and the pinned one have a marker; the pinned one's bytes went."""
    world, ranks = written(last=2, keep_steps=2, durable_keep=2)
    world.call(ranks[0], "pin", step=1, name="best")
    world.run(1.0)
    assert last_copies(world, ranks[0], None) == {}
    del world.durable.markers["train", 1, 1]
    [words] = last_copies(world, ranks[0], None)["train"]
    assert words.startswith("what is pinned as best (step 1) lives only in RAM: ")


def test_a_job_that_goes_while_a_process_asks_is_not_waited_for() -> None:
    """The look ends with the job."""
    world, ranks = written()
    for holder in world.holders.values():
        holder.instead[ListMarkers] = lambda order: None
    world.call(ranks[0], "last_copies", job=None)
    world.run(1.0)
    assert not ranks[0].answers.get("last_copies")
    world.call(ranks[1], "rm", force=True)
    assert world.run_until(lambda: bool(ranks[0].answers.get("last_copies")), 10.0)
    assert ranks[0].answers["last_copies"] == [{"lost": {}}]


def test_status_says_when_the_durable_step_was_last_seen() -> None:
    """As it was written, and then by a look now and then; status itself asks no process."""
    world, _ = written()
    world.run(100.0)
    assert 90.0 < status(world)["durable_seen_s"] < 110.0
    world.run(LOOK_EVERY_S)
    assert status(world)["durable_seen_s"] < 110.0
    assert rows(world) == []


@pytest.mark.parametrize("loss", ["emptied", "a part is gone", "unreadable"])
def test_what_durable_storage_lost_is_a_problem_until_it_is_there_again(loss: str) -> None:
    """Without any request it is found by itself, written again from RAM where it is gone, and looked for until it is
    seen.
    """
    world, _ = written()
    if loss == "emptied":
        world.durable.markers.clear()
    elif loss == "a part is gone":
        world.durable.lacks = "rank-0.0 is gone"
    else:
        world.durable.problem = "not mounted"
    world.run(LOOK_EVERY_S - 10.0)
    assert rows(world) == []
    assert world.run_until(lambda: bool(rows(world)), 20.0)
    [row] = rows(world)
    assert (row["kind"], row["severity"]) == ("durable_missing", DEGRADED)
    assert {"emptied": "its marker", "a part is gone": "rank-0.0 is gone"}.get(loss, "not mounted") in row["cause"]
    world.durable.problem = world.durable.lacks = ""
    world.run(3 * AGAIN_S)
    assert rows(world) == []
    assert status(world)["durable_seen_s"] < 3 * AGAIN_S
    assert ("train", 1, 1) in world.durable.markers


def test_a_marker_that_is_written_during_a_look_stays_known() -> None:
    """The list is older than the marker by the time it comes: it says nothing against it, nor for one removed since."""
    world, ranks = written(durable_keep=1)
    late: list[Any] = []
    for holder in world.holders.values():
        notify = holder.state.report

        def report(report: Report, notify: Any = notify) -> None:
            if isinstance(report, MarkersListed):
                late.append(lambda: notify(report))
            else:
                notify(report)

        holder.state.report = report
    world.run(LOOK_EVERY_S)
    assert late
    assert world.put_all(ranks, 2)
    world.run(2.0)
    assert list(world.served.jobs["train"].markers) == [StepId(1, 2)]
    late.pop()()
    world.run(1.0)
    assert list(world.served.jobs["train"].markers) == [StepId(1, 2)]


def test_a_new_controller_lists_the_markers_by_itself() -> None:
    """No get has to come first: status and plan know what is durable, and that the bytes are there."""
    world, ranks = written(last=2)
    world.crash_controller()
    assert world.run_until(lambda: world.machine is not None and world.machine.is_settled, 20.0)
    world.run(3.0)
    row = status(world)
    assert row["durable_step"] == 2
    assert row["durable_seen_s"] < 3.0
    world.call(ranks[0], "plan", lose=[])
    world.run(1.0)
    assert ranks[0].answers["plan"][-1]["unlisted"] == ""


def test_plan_says_that_the_markers_are_not_listed_yet() -> None:
    """Storage that does not answer a new controller: what plan says of durable steps is not all there may be."""
    world, ranks = written(last=2)
    world.durable.problem = "not mounted"
    world.crash_controller()
    world.run(15.0)
    world.call(ranks[0], "plan", lose=["h0", "h1"])
    world.run(1.0)
    answer = ranks[0].answers["plan"][-1]
    assert answer["unlisted"] == "durable markers are not listed yet: not mounted (h0, h1)"
    world.durable.problem = ""
    world.run(2 * AGAIN_S)
    world.call(ranks[0], "plan", lose=["h0", "h1"])
    world.run(1.0)
    answer = ranks[0].answers["plan"][-1]
    assert (answer["unlisted"], answer["step"], answer["verdict"]) == ("", 2, "durable")


@pytest.mark.parametrize("fault", ["cannot read", "hangs", "dies"])
def test_one_host_with_a_bad_mount_says_nothing_of_the_storage(fault: str) -> None:
    """Another host is asked, at once or after half a minute, and the first one from then on; the log names the bad."""
    world, ranks = written(last=2, keep_steps=2, durable_keep=2)
    bad = world.holders["h0"]
    if fault == "cannot read":
        world.durable.problems[bad.host_id] = "not mounted"
    else:
        bad.instead[ListMarkers] = lambda order: None
    world.call(ranks[1], "last_copies", job="train")
    world.run(1.0)
    if fault == "dies":
        world.kill_host("h0", keep_memory=True)
    assert world.run_until(lambda: bool(ranks[1].answers.get("last_copies")), PATIENCE_S + 5.0)
    assert ranks[1].answers["last_copies"] == [{"lost": {}}]
    if fault != "dies":
        why = "not mounted" if fault == "cannot read" else "no answer for "
        assert any(f"durable storage as host h0 sees it: {why}" in note for note in world.notes)
        world.call(ranks[1], "last_copies", job="train")
        assert world.run_until(lambda: len(ranks[1].answers["last_copies"]) == 2, 1.0)
        assert rows(world) == []


def test_as_many_hosts_as_there_are_do_not_make_a_look_longer() -> None:
    """None of 9 answers: a few are asked, and the answer names them when the time is over."""
    world = ControllerWorld(9, durable="/durable", durable_every=1)
    ranks = world.launch(9)
    world.get(ranks)
    assert world.put_all(ranks, 1, until="durable")
    asked: list[str] = []
    for name, holder in world.holders.items():
        holder.instead[ListMarkers] = lambda order, name=name: asked.append(name)  # type: ignore[misc]
    world.call(ranks[0], "last_copies", job="train")
    assert world.run_until(lambda: bool(ranks[0].answers.get("last_copies")), CHECK_DEADLINE_S + 2.0)
    world.run(1.0)
    assert sorted(asked[:5]) == ["h0", "h1", "h2", "h3", "h4"]  # the last one for the next look
    [words] = ranks[0].answers["last_copies"][-1]["lost"]["train"]
    assert words.endswith("no answer within 300 s (h0, h1, h2, h3)")


def under(world: ControllerWorld, written: str, **keys: str) -> None:
    """All was written under one key, and since then hosts got other files."""
    world.durable.put_under(written * 16)
    for host, key in keys.items():
        world.durable.keys[host] = key * 16


@pytest.mark.parametrize("has_ram", [True, False])
def test_a_step_under_a_key_that_no_process_has_is_neither_there_nor_lost(has_ram: bool) -> None:
    """All key files were replaced: RAM stays, the words name both keys; what RAM has is written under the new one."""
    world, ranks = written(durable_key_file="/key")
    under(world, "a", h0="b", h1="b")
    for host in () if has_ram else ("h0", "h1"):
        world.job().drop_copy(ShardId("train", 1, 1, 0), host)
    [words] = last_copies(world, ranks[0])["train"]
    assert words == f"step 1 cannot be read on durable storage: {other_key('a' * 16, 'b' * 16)} (h0, h1)"
    world.run(20.0)
    assert world.durable.marker("train", 1, 1).key == ("b" if has_ram else "a") * 16
    assert world.job().newest_durable == StepId(1, 1)
    if has_ram:
        assert last_copies(world, ranks[0]) == {}
    else:
        assert any(other_key("a" * 16, "b" * 16) in row["cause"] for row in rows(world))


@pytest.mark.parametrize("host", ["h0", "h1"])
def test_the_host_that_has_the_key_is_asked(host: str) -> None:
    """Only one has the file of the key that the step is under: all is there, and nothing is written again."""
    world, ranks = written(durable_key_file="/key")
    under(world, "a", **{"h0": "b", "h1": "b", host: "a"})
    assert last_copies(world, ranks[0]) == {}
    world.run(20.0)
    assert world.durable.marker("train", 1, 1).key == "a" * 16


def test_a_pinned_step_under_a_lost_key_is_not_said_to_be_gone() -> None:
    """Its marker and bytes are there: the words say which key it needs, not that it lives only in RAM."""
    world, ranks = written(last=2, keep_steps=2, durable_keep=2, durable_key_file="/key")
    world.call(ranks[0], "pin", step=1, name="best")
    world.run(1.0)
    under(world, "a", h0="b", h1="b")
    words = last_copies(world, ranks[0])["train"]
    assert [text.split(" on durable storage: ")[0] for text in words] == [
        "step 1 cannot be read",
        "step 2 cannot be read",
    ]


def test_a_closed_job_whose_step_needs_another_key_keeps_its_ram() -> None:
    """The storage takes no new write, so that it stays so: job_ttl_s passes, and the event names the key."""
    world, ranks = written(job_ttl_s=100.0, durable_key_file="/key")
    for rank in ranks:
        world.call(rank, "close")
    under(world, "a", h0="b", h1="b")
    for holder in world.holders.values():
        holder.instead.update(dict.fromkeys(get_args(DurableOrder), lambda order: None))
        del holder.instead[ListMarkers]
    world.run(150.0)
    assert len(world.holders_of(StepId(1, 1), 0)) == 2
    page = world.events("train")
    [event] = [event for event in page if event["event"] == "not_expired"]
    assert event["why"].startswith(f"it is under key {'a' * 16}")


def test_a_host_may_not_go_for_a_step_that_no_process_can_read() -> None:
    """Both hosts have notice, the durable step needs another key: it counts as there once it is written again."""
    world, ranks = written(durable_key_file="/key")
    under(world, "a", h0="b", h1="b")
    held: list[tuple[DirectedHolder, WriteSlices]] = []
    for holder in world.holders.values():
        holder.instead[WriteSlices] = lambda order, holder=holder: held.append((holder, order))  # type: ignore[misc]
    for host in ("h0", "h1"):
        world.call(ranks[0], "drain", host=host, within_s=600.0)
    world.run(5.0)
    [row] = world.served.parts.departures.remains("h1").short
    assert row.step == 1
    for holder, order in held:
        holder.instead.clear()
        holder.obey(order)
    assert world.run_until(lambda: bool(world.served.parts.departures.remains("h1").durable), 120.0)
    assert world.durable.marker("train", 1, 1).key == "b" * 16
