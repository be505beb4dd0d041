"""Does a job train? What status says of ranks that ended, hang, or put and commit nothing, and what ends it (D283)."""

from __future__ import annotations

from typing import Any

import pytest

from memstore.cli.output import ExitCode
from memstore.cli.status import check_code
from memstore.core.report.metrics import status_gauges
from memstore.core.report.problems import CLOSED_SHOWN_S, DEGRADED, NOTE, STOPPED
from memstore.core.schedule import LAG_MIN_S, LATE_MIN_S, LATE_UNPACED_S, Pace
from memstore.testing.controller.holder import DirectedRank
from memstore.testing.controller.world import JOB, ControllerWorld, trained


def rows(world: ControllerWorld, kind: str, job: str = JOB) -> list[dict[str, Any]]:
    """The problems of one kind that status shows of a job."""
    return [row for row in world.status()["problems"] if (row["kind"], row["about"]) == (kind, job)]


def check(world: ControllerWorld) -> ExitCode:
    """What `memstore status --check` exits with."""
    return check_code(world.served.parts.status.answer())


def stopped_s(world: ControllerWorld, job: str = JOB) -> float:
    """The gauge that alarms."""
    samples = status_gauges(world.served.parts.status.answer(), 0)
    return next(s.value for s in samples if s.name == "memstore_training_stopped_seconds" and s.tags == (job,))


def train(world: ControllerWorld, ranks: list[DirectedRank], first: int, last: int, step_s: float = 1.0) -> None:
    """Put steps on all ranks at a pace."""
    for step in range(first, last + 1):
        assert world.put_all(ranks, step)
        world.run(step_s)


def durable(hosts: int = 2, world_size: int | None = None, last: int = 5, **config: Any) -> Any:
    """A job that trains a step a second and has nothing to complain of: durable storage, too."""
    world, ranks = trained(hosts, world_size, last, pause_s=1.0, durable="/durable", durable_every=1, **config)
    world.run(3.0)
    assert (check(world), world.status()["problems"], stopped_s(world)) == (ExitCode.FINE, [], 0.0)
    return world, ranks


def test_no_committed_step_is_said_to_wait_that_is_lost() -> None:
    """One line of `status` would promise what another one denies."""
    world, ranks = trained(2, replicas=1)
    for rank in ranks:
        world.kill_rank(rank)
    world.kill_host("h1")
    world.run(8.0)
    [row], [gone] = rows(world, "ranks_ended"), rows(world, "not_whole")
    assert "is not whole in RAM any more" in gone["cause"]
    assert "waits" not in row["remedy"]
    assert "(`memstore plan train` shows what it would get)" in row["remedy"]


def test_ranks_that_ended_stop_training_until_the_job_is_started_again() -> None:
    """The dead one is named with host, pid and step; a launch that gathers makes it a note, a new attempt ends it."""
    world, ranks = durable()
    world.kill_rank(ranks[1])
    world.run(1.0)
    [row] = rows(world, "ranks_ended")
    assert (row["severity"], check(world)) == (STOPPED, ExitCode.STOPPED)
    assert "1 of 2 ranks ended without closing the store (rank 1 on h1, pid 1001, put up to step 5)" in row["cause"]
    assert "start the job again, once the others have ended, too; committed step 5 waits for it" in row["remedy"]
    assert stopped_s(world) > 0
    world.kill_rank(ranks[0])
    world.join(0, 2, "again")
    world.run(1.0)
    assert rows(world, "ranks_ended")[0]["severity"] == NOTE
    world.get(world.launch(2, "again"))
    assert (rows(world, "ranks_ended"), check(world), stopped_s(world)) == ([], ExitCode.FINE, 0.0)


def test_a_job_whose_only_rank_is_dead_does_not_run() -> None:
    """The gauge that says so counts processes, not attempts that no rank closed."""
    world, ranks = durable(2, 1)
    world.kill_rank(ranks[0])
    world.run(1.0)
    values = {s.name: s.value for s in status_gauges(world.served.parts.status.answer(), 0) if s.tags == (JOB,)}
    assert (values["memstore_job_running"], values["memstore_committed_step"]) == (0, 5)
    assert 0.5 < values["memstore_training_stopped_seconds"] < 1.5


def test_a_frozen_holder_is_not_taken_for_dead_ranks() -> None:
    """Its ranks are out of sight: the remedy is no restart, and the row goes when the holder is back (R28)."""
    world, ranks = durable(4, 2)
    world.silence("h1")
    assert world.run_until(lambda: world.status()["hosts"][1]["status"] == "dead", 20.0)
    assert rows(world, "ranks_ended") == []
    [row] = rows(world, "ranks_unseen")
    assert (row["severity"], check(world)) == (DEGRADED, ExitCode.DEGRADED)
    assert "1 of 2 ranks is out of sight" in row["cause"]
    assert "do not restart them" in row["remedy"]
    world.thaw("h1")
    assert world.run_until(lambda: not rows(world, "ranks_unseen"), 20.0)
    train(world, ranks, 6, 7)
    world.run(10.0)
    assert check(world) == ExitCode.FINE


def test_one_rank_that_puts_nothing_is_named_while_the_others_put() -> None:
    """With its host, pid and last step; no slow peer is made up; all rows go once it puts again."""
    world, ranks = durable(4, 3)
    for step in (6, 7):
        for rank in (ranks[0], ranks[2]):
            world.put(rank, step)
        world.run(1.0)
    world.skip(ranks[0], 8)
    world.run(LAG_MIN_S - 4.0)
    assert (rows(world, "rank_late"), check(world)) == ([], ExitCode.FINE)
    world.run(10.0)
    [row] = rows(world, "rank_late")
    assert (row["severity"], check(world)) == (STOPPED, ExitCode.STOPPED)
    assert "ranks put up to step 7, but rank 1 on h1 has put nothing since step 5" in row["cause"]
    assert row["since_s"] == pytest.approx(26.0, abs=3.0)
    assert "`py-spy dump --pid 1001` on h1" in row["remedy"]
    [skipped] = rows(world, "steps_skipped")
    assert "rank 1 has put nothing since step 5" in skipped["cause"]
    assert skipped["remedy"] == "see above"
    assert world.run_until(lambda: ranks[1].resume_step > 8, 5.0)
    train(world, ranks, ranks[1].resume_step, ranks[1].resume_step + 2)
    assert (rows(world, "rank_late"), check(world), stopped_s(world)) == ([], ExitCode.FINE, 0.0)
    world.run(LATE_MIN_S + 10.0)
    assert rows(world, "steps_skipped") == []


def test_a_rank_that_closed_the_store_before_the_others_is_named() -> None:
    """It is no death, and no commit can come without it."""
    world, ranks = durable(2, 2)
    world.call(ranks[1], "close")
    world.run(1.0)
    assert check(world) == ExitCode.FINE
    for step in (6, 7):
        world.put(ranks[0], step)
        world.run(1.0)
    world.run(LAG_MIN_S)
    [row] = rows(world, "rank_late")
    assert "rank 1 on h1 has closed the store after step 5" in row["cause"]
    assert "to the end" in row["remedy"]
    world.call(ranks[0], "close")
    world.run(1.0)
    assert check(world) == ExitCode.FINE


def test_a_training_that_hangs_is_seen_by_the_pace_of_its_puts() -> None:
    """All ranks live and none puts: no row for a short pause, one after three of the usual distances, gone with it."""
    world, ranks = durable(2, 2)
    world.run(LATE_MIN_S - 8.0)
    assert rows(world, "training_quiet") == []
    world.run(10.0)
    [row] = rows(world, "training_quiet")
    assert (row["severity"], check(world)) == (STOPPED, ExitCode.STOPPED)
    assert (
        row["cause"] == "no rank has put anything beyond step 5, usually one in 1 s" or "usually one in" in row["cause"]
    )
    assert "`py-spy dump --pid 1000` on h0" in row["remedy"]
    assert "committed step 5 waits" in row["remedy"]
    assert stopped_s(world) > LATE_MIN_S
    train(world, ranks, 6, 7)
    assert (rows(world, "training_quiet"), check(world), stopped_s(world)) == ([], ExitCode.FINE, 0.0)
    world.run(LATE_MIN_S + 10.0)  # as long as the pause before, which was none too long
    assert check(world) == ExitCode.FINE


def test_slow_training_is_no_dead_training() -> None:
    """Puts ten minutes apart are waited for; before a second put, and after a controller's end, the pace is unknown."""
    world, ranks = trained(2, 2, 3, pause_s=600.0, durable="/durable", durable_every=1)
    world.run(900.0)
    assert check(world) == ExitCode.FINE
    world.run(1000.0)
    assert check(world) == ExitCode.STOPPED
    train(world, ranks, 4, 4)
    world.crash_controller()
    world.run(5.0)
    assert check(world) == ExitCode.FINE
    world.run(LATE_UNPACED_S)
    [row] = rows(world, "training_quiet")
    assert "nothing is known of its pace" in row["cause"]


def test_a_launch_that_never_puts_is_seen() -> None:
    """It has ten minutes for its first step, from its get()."""
    world = ControllerWorld(2, durable="/durable", durable_every=1)
    world.get(world.launch(2))
    world.run(LATE_UNPACED_S - 10.0)
    assert rows(world, "training_quiet") == []
    world.run(20.0)
    [row] = rows(world, "training_quiet")
    assert row["cause"].startswith("no rank has put anything, ")


def test_steps_that_are_trained_and_not_put_count_as_training() -> None:
    """A job that puts every hour is watched by the steps that should_put() reports between its puts."""
    world, _ = durable(2, 2)
    attempt, steps = world.job().newest, world.served.parts.steps
    for step in range(6, 200):
        steps.trained({JOB: (attempt.attempt_number, step)})
        world.run(1.0)
    assert check(world) == ExitCode.FINE
    world.run(LATE_MIN_S + 5.0)
    assert [row["severity"] for row in rows(world, "training_quiet")] == [STOPPED]


def test_ranks_that_put_different_steps_name_who_puts_what() -> None:
    """Nothing is ever committed: from the third step on a ticket's reason names both ranks' steps, as status does."""
    world, ranks = durable(2, 2)
    for tens in range(1, 9):
        world.put(ranks[0], 10 * tens)
        world.run(1.0)
        world.put(ranks[1], 10 * tens + 1)
        world.run(1.0)
    says = "Every rank has to put the same steps, and rank 0 puts 10, 20, 30 but rank 1 puts 11, 21, 31"
    assert says in " ".join(ranks[0].reasons.values())
    for tens in range(9, 30):
        world.put(ranks[0], 10 * tens)
        world.run(1.0)
        world.put(ranks[1], 10 * tens + 1)
        world.run(1.0)
    [row] = rows(world, "nothing_committed")
    assert (row["severity"], check(world)) == (STOPPED, ExitCode.STOPPED)
    assert "nothing is committed after step 5" in row["cause"]
    assert "but rank 1 puts" in row["cause"]
    assert "should_put()" in row["remedy"]
    train(world, ranks, 400, 402)
    assert (rows(world, "nothing_committed"), check(world)) == ([], ExitCode.FINE)


def test_a_closed_job_raises_no_alarm_and_is_not_named_for_ever() -> None:
    """What it lacks is a note for an hour, or until another job runs."""
    world, ranks = trained(2)
    for rank in ranks:
        world.call(rank, "close")
    world.run(1.0)
    world.kill_host("h1")
    world.run(10.0)
    assert {row["severity"] for row in world.status()["problems"]} == {NOTE}
    assert (check(world), len(rows(world, "few_copies")), len(rows(world, "durable_off"))) == (ExitCode.FINE, 1, 1)
    other = world.launch(1, job="other")
    world.run(1.0)
    assert {row["about"] for row in world.status()["problems"]}.isdisjoint({JOB})
    world.call(other[0], "close")
    world.run(1.0)
    assert rows(world, "few_copies")
    world.run(CLOSED_SHOWN_S)
    assert {row["about"] for row in world.status()["problems"]} <= {"h1"}


def test_a_pause_that_was_seen_before_may_come_again() -> None:
    """Twice the longest one: the tenth part of a step does not make an evaluation of two minutes an alarm each time."""
    pace, now = Pace(), 0.0
    for step in range(100):
        now += 120.0 if step == 50 else 0.1
        pace.reached(step, now)
    assert pace.late_after_s() == pytest.approx(240.0)
    assert pace.passed_s(99, now) is None
    assert pace.passed_s(49, now + 1.0) == pytest.approx(1.0 + 49 * 0.1, abs=1.1)


def test_a_job_that_an_exception_ended_does_not_train() -> None:
    """Also once all its ranks have left, and under the next controller; a new launch ends the row."""
    world, ranks = durable(2, 2)
    for rank in ranks:
        world.call(rank, "close", error="ValueError: the loss is NaN")
        world.run(1.0)
        [row] = rows(world, "job_ended")
        assert (row["severity"], check(world)) == (STOPPED, ExitCode.STOPPED)
        assert row["cause"] == "ended by ValueError on rank 0: the loss is NaN"
        assert "start the job again; committed step 5 waits for it" in row["remedy"]
        assert (rows(world, "ranks_ended"), stopped_s(world) > 0) == ([], True)
    world.crash_controller()
    world.run(5.0)
    assert [row["severity"] for row in rows(world, "job_ended")] == [STOPPED]
    world.get(world.launch(2))
    assert (rows(world, "job_ended"), check(world)) == ([], ExitCode.FINE)


def test_a_notice_that_is_over_is_said_in_the_past() -> None:
    """Not "in -10 s"."""
    world, ranks = durable(3, 2)
    world.call(ranks[0], "drain", host="h2", within_s=5.0)
    world.run(1.0)
    [row] = rows(world, "host_drains", "h2")
    assert row["cause"].startswith("is to go in 4 s: ")
    world.run(10.0)
    [row] = rows(world, "host_drains", "h2")
    assert row["cause"].startswith("was to be gone 6 s ago: ")
    world.call(ranks[0], "drain", host="h2", within_s=None)  # the remedy
    world.run(1.0)
    assert rows(world, "host_drains", "h2") == []


def test_storage_that_fails_and_one_that_is_slow_are_rows_that_end() -> None:
    """A write that fails names why, until one goes well."""
    world, ranks = durable(2, 2)
    world.durable.problem = "no space left"
    train(world, ranks, 6, 7)
    [row] = rows(world, "durable_failed")
    assert ("no space left" in row["cause"], check(world)) == (True, ExitCode.DEGRADED)
    world.durable.problem = ""  # the remedy
    train(world, ranks, 8, 9)
    world.run(5.0)
    assert (rows(world, "durable_failed"), check(world)) == ([], ExitCode.FINE)


def test_copies_that_cannot_lie_far_apart_are_a_note_until_a_host_makes_it_possible() -> None:
    """Three hosts of one rack and one of another: some copy stays in its rack until another host joins there."""
    racks = {"a": "r1", "b": "r1", "c": "r1", "d": "r2"}
    world = ControllerWorld(list(racks), labels={host: {"rack": rack} for host, rack in racks.items()})
    ranks = world.launch(4)
    world.get(ranks)
    train(world, ranks, 1, 2)
    assert {row["severity"] for row in rows(world, "placement")} == {NOTE}
    world.add_host("e", {"rack": "r2", "memstore": "replica"})  # the remedy
    world.add_host("f", {"rack": "r2", "memstore": "replica"})
    world.run(10.0)
    train(world, ranks, 3, 4)
    assert rows(world, "placement") == []
