"""What became of a job's time: what the store says is what an account of every single step says (D321)."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memstore.core.report.cells import goodput_text
from memstore.core.report.event_kinds import event_text
from memstore.core.report.goodput import MOMENTS_MAX, Account
from memstore.core.report.metrics import counted, status_gauges
from memstore.core.wire.messages import HostBeat
from memstore.testing.clusters.processes import ProcessCluster, wait_for
from memstore.testing.controller.world import JOB, ControllerWorld, trained
from memstore.testing.ranks.fleet import Fleet
from memstore.testing.ranks.rank_process import RankNursery, together

# -- against an account of every step -----------------------------------------------------------------


@dataclass
class EveryStep:
    """The oracle: a list of the steps that stay, each with its seconds."""

    kept: list[tuple[int, float]] = field(default_factory=list)
    all_s: list[float] = field(default_factory=list)
    lost: list[float] = field(default_factory=list)
    taken_back: list[float] = field(default_factory=list)
    down: dict[str, float] = field(default_factory=dict)
    outages: int = 0

    def train(self, step: int, took_s: float) -> None:
        self.kept.append((step, took_s))
        self.all_s.append(took_s)

    def go_back(self, step: int, *, is_chosen: bool) -> None:
        gone = [took_s for each, took_s in self.kept if each > step]
        self.kept = [row for row in self.kept if row[0] <= step]
        (self.taken_back if is_chosen else self.lost).extend(gone)

    def spend(self, phase: str, took_s: float) -> None:
        self.down[phase] = self.down.get(phase, 0.0) + took_s


SECONDS = st.floats(0.01, 1000.0)
LAUNCHES = st.tuples(
    st.lists(SECONDS, max_size=12),  # its steps
    st.integers(0, 15),  # so many of them the next launch goes back
    st.tuples(SECONDS, SECONDS, SECONDS, SECONDS),
    st.booleans(),  # the loss is seen
    st.booleans(),  # a person goes back
)


@given(first=st.lists(SECONDS, min_size=1, max_size=12), launches=st.lists(LAUNCHES, max_size=8))
def test_an_account_is_what_every_single_step_adds_up_to(first: list[float], launches: list[Any]) -> None:
    """Any steps, any losses, any phases: the same seconds, steps and outages."""
    oracle, now, step = EveryStep(), 100.0, 7
    account = Account(0.0, 1, now, is_whole=True, phase="closed")
    account.opened(now)

    def train(took_s: float) -> None:
        nonlocal now, step
        now, step = now + took_s, step + 1
        oracle.train(step, took_s)
        account.reached(step, now)

    for took_s in first:
        train(took_s)
    for steps, back, (detection, restart, restore, extra), is_seen, is_chosen in launches:
        now += detection
        if is_seen:
            account.notice("the loss of rank 1", now)
        oracle.spend("detection" if is_seen else "restart", detection)
        now += restart
        account.opened(now)
        oracle.spend("restart", restart)
        now, step = now + restore, max(7, step - back)
        account.went_on(step, now, is_chosen=is_chosen)
        oracle.spend("restore", restore)
        oracle.go_back(step, is_chosen=is_chosen)
        oracle.outages += not is_chosen
        usual_s = sum(oracle.all_s) / len(oracle.all_s)
        oracle.spend("first_step", extra)
        now += extra
        train(usual_s)
        for took_s in steps:
            train(took_s)
    row = account.row(now, 0.0)
    assert (row.lost_steps, row.taken_back_steps) == (len(oracle.lost), len(oracle.taken_back))
    assert row.kept_s == pytest.approx(sum(took_s for _, took_s in oracle.kept))
    assert (row.lost_s, row.taken_back_s) == pytest.approx((sum(oracle.lost), sum(oracle.taken_back)), abs=1e-6)
    assert row.down_s == pytest.approx(oracle.down)
    assert row.total_s == pytest.approx(now - 100.0)
    assert row.outages == oracle.outages


def test_a_long_run_is_remembered_in_little_and_well_enough() -> None:
    """Of a hundred thousand steps a few hundred moments; going back ten thousand steps is right to a few steps."""
    account = Account(0.0, 1, 0.0, phase="closed")
    account.opened(0.0)
    for step in range(100_000):
        account.reached(step, 2.0 * (step + 1))
    assert len(account.moments) <= MOMENTS_MAX
    account.opened(200_000.0)
    account.went_on(89_999, 200_000.0, is_chosen=False)
    row = account.row(200_000.0, 0.0)
    assert row.lost_steps == 10_000
    assert row.lost_s == pytest.approx(20_000.0, abs=1.0)


def test_steps_whose_time_is_not_known_are_counted_and_take_no_time() -> None:
    """A successor knows that step 9 was trained, and nothing of when: it goes back behind all of it."""
    account = Account(0.0, 1, 0.0, step=9, first=9)
    account.opened(5.0)
    account.went_on(5, 6.0, is_chosen=False)
    assert account.reached(6, 8.0) is not None
    row = account.row(8.0, 0.0)
    assert (row.lost_steps, row.lost_s, row.kept_s, row.total_s) == (4, 0.0, 2.0, 8.0)
    account.opened(10.0)
    account.went_on(3, 10.0, is_chosen=False)
    row = account.row(10.0, 0.0)
    assert (row.lost_steps, row.lost_s, row.kept_s) == (7, 2.0, 0.0)


# -- the controller -----------------------------------------------------------------------------------


def goodput(world: ControllerWorld, job: str = JOB) -> dict[str, Any]:
    """The account that `memstore status --json` prints."""
    row: dict[str, Any] = next(each["goodput"] for each in world.status()["jobs"] if each["job"] == job)
    return row


def outages(world: ControllerWorld) -> list[dict[str, Any]]:
    """The events of outages that are over."""
    return [event for event in world.events(JOB) if event["event"] == "outage"]


def report(world: ControllerWorld, step: int, attempt: int = 1) -> None:
    """A heartbeat that says which step is trained, put or not."""
    world._handle(HostBeat("h0", clock_s=world._sessions["h0"].clock_s, trained={JOB: (attempt, step)}))


def fail_and_go_on(world: ControllerWorld, ranks: Any, step: int, **launch: Any) -> Any:
    """A rank dies, the job is started again 30 s later, restores, and trains a step."""
    world.kill_rank(ranks[1])
    world.run(30.0)
    ranks = world.launch(2, **launch)
    world.get(ranks)
    assert world.put_all(ranks, step)
    world.run(1.0)
    return ranks


def test_steps_that_were_trained_and_never_put_are_lost_and_the_phases_named() -> None:
    """Steps 1 to 5 are committed, 9 is trained; one event at the end of the outage, the same numbers everywhere."""
    world, ranks = trained(2, last=5, pause_s=1.0)
    for step in (6, 7, 8, 9):
        report(world, step)
        world.run(1.0)
    fail_and_go_on(world, ranks, 6)
    row = goodput(world)
    assert (row["lost_steps"], row["outages"], row["is_whole"]) == (4, 1, True)
    assert row["lost_s"] == pytest.approx(4.0, abs=1.5)
    assert row["down_s"]["restart"] == pytest.approx(30.0, abs=1.0)
    assert row["down_s"]["detection"] < 2.0
    assert row["total_s"] == pytest.approx(row["kept_s"] + row["lost_s"] + sum(row["down_s"].values()), abs=1.5)
    [event] = outages(world)
    assert (event["steps_lost"], event["step"], event["attempt"], event["is_chosen"]) == (4, 6, 2, False)
    status = world.served.parts.status.answer()
    samples = {s.name: s.value for s in status_gauges(status, 0) if s.tags == (JOB,)}
    assert samples["memstore_goodput_ratio"] == pytest.approx(row["kept_s"] / row["total_s"])
    row_of = next(each for each in world.served.parts.recorder.recent_events.since(0) if each.event == "outage")
    assert {s.name: s.value for s in counted(row_of)}["memstore_steps_lost_total"] == 4
    assert "by the loss of rank 1 on h1: detection" in event_text(row_of)
    text = goodput_text(status.jobs[0].goodput)
    assert "1 outage: " in text
    assert "at least 4 steps (4" in text


def test_a_loss_without_a_launch_is_an_outage_that_goes_on() -> None:
    """What a person sees while the job is down."""
    world, ranks = trained(2, last=5, pause_s=1.0)
    before = goodput(world)
    assert (before["outages"], "restart" in before["down_s"]) == (0, False)
    world.kill_rank(ranks[1])
    world.run(100.0)
    row = goodput(world)
    assert row["outages"] == 1
    assert row["down_s"]["restart"] == pytest.approx(100.0, abs=2.0)
    assert row["total_s"] == pytest.approx(before["total_s"] + 100.0, abs=1.0)


def test_what_a_person_goes_back_behind_is_no_loss_by_failure() -> None:
    """A rewind from step 5 to step 4, and get(trusted=True): counted apart, and no outage by failure."""
    world, ranks = trained(2, last=5, keep_steps=3, pause_s=1.0)
    for rank in ranks:
        world.call(rank, "rewind", step=4, nonce=rank.nonce, key=rank.key)
    assert world.run_until(lambda: all(rank.answers.get("rewind") for rank in ranks), 20.0)
    world.get(ranks)
    assert world.put_all(ranks, 5)
    world.run(1.0)
    row = goodput(world)
    assert (row["lost_steps"], row["taken_back_steps"], row["outages"]) == (0, 1, 0)
    [event] = outages(world)
    assert event["is_chosen"]
    assert "1 step (" in goodput_text(world.served.parts.status.answer().jobs[0].goodput)


def test_a_closed_job_loses_no_time() -> None:
    """The hour until it is started again is none of its time, and no outage."""
    world, ranks = trained(2, last=5, pause_s=1.0)
    for rank in ranks:
        world.call(rank, "close")
    world.run(3600.0)
    assert goodput(world)["total_s"] < 60.0
    ranks = world.launch(2)
    world.get(ranks)
    assert world.put_all(ranks, 6)
    world.run(1.0)
    row = goodput(world)
    assert (row["outages"], row["total_s"] < 60.0, outages(world)) == (0, True, [])


def test_a_controller_that_comes_between_failure_and_restart_knows_the_steps() -> None:
    """Holders remember what was trained: the steps are counted, the seconds before it are not, and it says so."""
    world, ranks = trained(2, last=5, pause_s=1.0)
    report(world, 9)
    world.kill_rank(ranks[1])
    world.run(1.0)
    world.crash_controller()
    world.run(10.0)
    report(world, 9)
    ranks = world.launch(2)
    world.get(ranks)
    assert world.put_all(ranks, 6)
    world.run(1.0)
    row = goodput(world)
    assert (row["lost_steps"], row["outages"], row["is_whole"]) == (4, 1, False)
    assert "when this controller began" in goodput_text(world.served.parts.status.answer().jobs[0].goodput)


def test_a_controller_that_comes_in_the_middle_of_a_launch_knows_the_steps() -> None:
    """The next attempt is open, and has not restored yet."""
    world, ranks = trained(2, last=5, pause_s=1.0)
    report(world, 9)
    world.kill_rank(ranks[1])
    world.run(1.0)
    ranks = world.launch(2)
    world.crash_controller()
    world.run(10.0)
    report(world, 9)
    world.get(ranks)
    assert world.put_all(ranks, 6)
    assert goodput(world)["lost_steps"] == 4


def test_launches_that_die_before_a_step_are_one_outage_and_lose_no_step_twice() -> None:
    """Twice the job dies in or after its restore; the steps lost are those that were trained."""
    world, ranks = trained(2, last=5, pause_s=1.0)
    report(world, 9)
    for _ in range(2):
        world.kill_rank(ranks[1])
        world.run(10.0)
        ranks = world.launch(2)
        world.get(ranks)
    fail_and_go_on(world, ranks, 6)
    row = goodput(world)
    assert (row["lost_steps"], row["outages"], len(outages(world))) == (4, 1, 1)
    assert row["down_s"]["restart"] == pytest.approx(50.0, abs=3.0)


def test_a_step_lost_by_a_later_attempt_is_counted_once() -> None:
    """Attempt 1 trained 4 steps more than it committed, attempt 2 one more: five are lost, not eight."""
    world, ranks = trained(2, last=5, pause_s=1.0)
    report(world, 9)
    world.kill_rank(ranks[1])
    world.run(2.0)
    ranks = world.launch(2)
    world.get(ranks)
    report(world, 6, attempt=2)
    world.run(1.0)
    fail_and_go_on(world, ranks, 6)
    assert goodput(world)["lost_steps"] == 5
    assert [event["steps_lost"] for event in outages(world)] == [4, 1]


def test_two_jobs_a_job_that_is_removed_and_one_that_says_nothing() -> None:
    """Each has an account of its own; a removed one has none; of one that puts and says nothing there is none."""
    world, ranks = trained(2, last=5, pause_s=1.0)
    other = world.launch(2, job="other")
    assert goodput(world, "other") is None
    world.get(other)
    world.run(5.0)
    assert goodput(world, "other") is None
    fail_and_go_on(world, ranks, 6)
    assert goodput(world)["outages"] == 1
    assert world.put_all(other, 1)
    world.run(1.0)
    assert goodput(world, "other")["outages"] == 0
    world.call(other[0], "rm", force=True, job="other")
    world.run(1.0)
    assert [job["job"] for job in world.status()["jobs"]] == [JOB]
    again = world.launch(2, job="other")
    world.get(again)
    assert world.put_all(again, 1)
    world.run(1.0)
    assert goodput(world, "other")["total_s"] < 30.0


def test_a_wall_clock_that_steps_changes_no_number() -> None:
    """All is counted by the monotonic clock; only since when is told by the other one."""
    world, ranks = trained(2, last=5, pause_s=1.0)
    world.served.state.wall_offset_s -= 86_400.0
    fail_and_go_on(world, ranks, 6)
    row = goodput(world)
    assert row["since_s"] == 0.0
    assert 30.0 < row["total_s"] < 60.0
    assert "-" not in goodput_text(world.served.parts.status.answer().jobs[0].goodput)


# -- real processes -----------------------------------------------------------------------------------


def test_real_ranks_lose_what_they_counted_themselves(tmp_path: Path, nursery: RankNursery) -> None:
    """A job that puts every tenth step is killed after step 8: status says the trainer's own count."""
    with ProcessCluster(tmp_path, {"h0": {}, "h1": {}}) as cluster:
        fleet = Fleet(cluster, nursery, put_every=10)
        ranks, counted_by_trainer = fleet.begin(["h0", "h1"], last_step=0), 0
        for step in range(1, 9):
            together(ranks, "due", step=step)
            counted_by_trainer += 1

        def row() -> dict[str, Any]:
            job = next(job for job in cluster.status()["jobs"] if job["job"] == "train")
            return dict(job["goodput"] or {})

        def is_known() -> bool:
            together(ranks, "due", step=8)
            job = cluster.job("train")
            return job is not None and job["training_step"] == 8

        wait_for(is_known, "step 8 at the controller")
        fleet.kill([ranks[0]])
        wait_for(lambda: row()["outages"] == 1, "the loss of a rank")
        fleet.kill(ranks[1:])
        again, got = fleet.resume(["h0", "h1"])
        assert got["step"] == 0
        together(again, "put", step=1)
        wait_for(lambda: row().get("lost_steps") == counted_by_trainer, "the steps that were lost")
        wait_for(lambda: "first_step" in row()["down_s"] or row()["outages"] == 1, "the end of the outage")
        assert row()["outages"] == 1
