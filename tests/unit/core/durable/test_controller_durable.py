"""Durable storage: parts, then the marker, and a job that RAM forgot comes back from it (R31)."""

from __future__ import annotations

import pytest

from memstore.core.durable.writes import FAILED_AGAIN_S
from memstore.core.schedule.put_interval import optimal_interval_s
from memstore.core.wire.orders import ListMarkers
from memstore.testing.controller.holder import WRITES, DirectedRank
from memstore.testing.controller.trained import written
from memstore.testing.controller.world import ControllerWorld
from recovery.inventory import StepId


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
    """All machines restart, one without its memory, the other late: what it has is newer than storage (R24).

    If no host here knows the job, the launch waits; else its get.
    """
    world, ranks = written(durable_every=10)
    world.call(ranks[0], "persist", step=1)
    world.run(2.0)
    assert world.put_all(ranks, 2)
    assert list(world.durable.markers) == [("train", 1, 1)]
    world.kill_host("h1", keep_memory=True)
    ranks = join_on_a_blank_host(world, knows_job=knows_job)
    if knows_job:
        for rank in ranks:
            world.call(rank, "get", step=None, timeout_s=60.0)
        world.run(1.0)
    said = "get waits for hosts h1: they may have a newer step" if knows_job else "its launch waits for host h1"
    assert any(said in note for note in world.notes)
    assert not any(rank.answers.get("get" if knows_job else "join") for rank in ranks)
    world.return_host("h1")
    world.run(3.0)
    answers = [rank.answers["get"][-1] for rank in ranks] if knows_job else world.get(ranks)
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
