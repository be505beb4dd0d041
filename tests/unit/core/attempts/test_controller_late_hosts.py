"""A launch of a job that no host here knows waits for hosts that are on their way, then leaves them numbers (R20)."""

from __future__ import annotations

import pytest

from memstore.core.wire.orders import ListMarkers, Order
from memstore.testing.controller.trained import trained
from memstore.testing.controller.world import JOB, ControllerWorld


def restarted_without_memory() -> ControllerWorld:
    """Return a cluster of two that trained to step 3: all restarted, h0 has lost its memory, h1 has not come yet."""
    world, _ = trained(2, last=3)
    world.crash_controller(restart_after_s=None)
    world.kill_host("h1", keep_memory=True)
    world.kill_host("h0")
    world.return_host("h0")
    world.start_controller()
    assert world.run_until(lambda: world.served.is_settled, 20.0)
    assert JOB not in world.served.state.jobs
    return world


def test_a_launch_waits_for_the_host_that_has_everything() -> None:
    """It takes the number after those that the late host knows, and restores what only that host has."""
    world = restarted_without_memory()
    ranks = [world.join(rank, 2, "again", host="h0") for rank in range(2)]
    world.run(3.0)
    assert [(row["awaited"], row["missing"]) for row in world.status()["launches"]] == [
        ("host h1, which may know the job", [])
    ]
    world.return_host("h1")
    assert world.run_until(lambda: all(rank.attempt for rank in ranks), 5.0)
    assert {rank.attempt for rank in ranks} == {2}
    answers = world.get(ranks)
    world.check_restored(answers)
    assert {(answer["attempt"], answer["step"]) for answer in answers} == {(1, 3)}


@pytest.mark.parametrize("connect_s", [4.0, 20.0])
def test_status_says_how_long_such_a_launch_still_waits(connect_s: float) -> None:
    """Until half of its connect is over, or the time for late hosts, whichever comes first."""
    world = restarted_without_memory()
    ranks = [world.join(rank, 2, "again", host="h0", limit_s=connect_s) for rank in range(2)]
    world.run(0.5)
    [row] = world.status()["launches"]
    says_s = world.now + row["left_s"]
    assert world.run_until(lambda: all(rank.attempt for rank in ranks), 12.0)
    assert world.now == pytest.approx(says_s, abs=1.0)


def test_a_fresh_launch_waits_for_no_host() -> None:
    """It wants nothing of the past; its number is none that the late host may know."""
    world = restarted_without_memory()
    assert world.launch(2, fresh=True)[0].attempt == 1001


def test_a_launch_that_no_late_host_joined_begins_with_half_of_its_time_left() -> None:
    """It starts from nothing under a number that no other launch has, and loses to what the late host brings."""
    world = restarted_without_memory()
    began_s = world.now
    ranks = world.launch(2)
    assert {rank.attempt for rank in ranks} == {1001}
    assert world.now - began_s < 11.0  # of a connect_timeout_s of 20
    assert [answer["step"] for answer in world.get(ranks)] == [None, None]
    world.return_host("h1")
    world.run(3.0)
    assert world.job().newest_number == 1001
    assert "a late host knows of attempt 1, which attempt 1001 does not follow" in "\n".join(world.notes)
    ranks = world.launch(2, takeover=True)
    assert {rank.attempt for rank in ranks} == {1002}
    assert {(answer["attempt"], answer["step"]) for answer in world.get(ranks)} == {(1, 3)}


def test_such_a_launch_does_not_take_the_racks_that_the_job_asked_for() -> None:
    """It knew of none, and sits in one rack; once the late host is here, the next one asks for racks again (R18)."""
    labels = {"h0": {"rack": "r0"}, "h1": {"rack": "r1"}, "h2": {"rack": "r0"}, "h3": {"rack": "r0"}}
    world = ControllerWorld(4, labels=labels)
    world.get(world.launch(2))
    world.crash_controller(restart_after_s=None)
    for host in world.holders:
        world.kill_host(host, keep_memory=host == "h1")
    for host in ("h0", "h2", "h3"):
        world.return_host(host)
    world.start_controller()
    for number in (1001, 1002):
        ranks = [world.join(rank, 2, str(number), host=host, takeover=True) for rank, host in enumerate(("h0", "h2"))]
        assert world.run_until(lambda ranks=ranks: all(rank.attempt for rank in ranks), 15.0)
        world.return_host("h1")
        world.run(3.0)
    asked = {number: attempt.level_asked for number, attempt in world.job().attempts.items()}
    assert asked == {1: "rack", 1001: "host", 1002: "rack"}


def test_what_such_a_launch_committed_is_what_the_next_one_goes_on_from() -> None:
    """Two lineages have steps: the newest attempt's counts, and the late host's stays for a rewind."""
    world = restarted_without_memory()
    ranks = world.launch(2)
    world.get(ranks)
    world.return_host("h1")
    world.run(3.0)
    assert world.put_all(ranks, 1)
    answers = world.get(world.launch(2, takeover=True))
    assert {(answer["attempt"], answer["step"]) for answer in answers} == {(1001, 1)}


def test_a_launch_that_only_connected_and_the_next_one_give_way_too() -> None:
    """Neither has got anything: the launch after them restores what the late host brought meanwhile."""
    world = restarted_without_memory()
    assert world.launch(2)[0].attempt == 1001
    assert world.launch(2, takeover=True)[0].attempt == 1002
    world.return_host("h1")
    world.run(3.0)
    ranks = world.launch(2, takeover=True)
    assert {(answer["attempt"], answer["step"]) for answer in world.get(ranks)} == {(1, 3)}


def test_newer_history_of_a_known_job_is_what_the_next_launch_goes_on_from() -> None:
    """h0 knows attempt 1, the late h1 attempt 2: a launch of h0 alone that got nothing gives way to attempt 2."""
    world, _ = trained(2, last=3)
    world.kill_host("h0", keep_memory=True)
    world.run(7.0)
    ranks = world.launch(2, takeover=True)
    world.get(ranks)
    assert world.put_all(ranks, 5)
    world.run(1.0)
    world.crash_controller(restart_after_s=None)
    world.kill_host("h1", keep_memory=True)
    world.return_host("h0")
    world.start_controller()
    assert world.run_until(lambda: world.served.is_settled, 20.0)
    assert world.launch(2, takeover=True)[0].attempt == 1002
    world.return_host("h1")
    world.run(3.0)
    answers = world.get(world.launch(2, takeover=True))
    world.check_restored(answers)
    assert {(answer["attempt"], answer["step"]) for answer in answers} == {(2, 5)}


def test_ranks_that_only_a_late_host_knows_keep_no_other_launcher_out() -> None:
    """All machines were restarted, so they are dead; a launch of another name waits for their host, and goes on."""
    world = restarted_without_memory()
    first = world.join(0, 2, "again", host="h0", launcher="another")
    world.run(1.0)
    world.return_host("h1")
    world.run(3.0)
    second = world.join(1, 2, "again", host="h0", launcher="another")
    assert world.run_until(lambda: first.attempt > 0 and second.attempt > 0, 5.0), (first.errors, second.errors)
    assert {first.attempt, second.attempt} == {2}


@pytest.mark.parametrize("takeover", [False, True])
@pytest.mark.parametrize("phase", ["gathering", "listing"])
def test_a_launch_that_waits_is_asked_again_once_the_job_is_known(
    phase: str, monkeypatch: pytest.MonkeyPatch, *, takeover: bool
) -> None:
    """The late host was only out of reach: the rank that trains there is fenced by a takeover alone (R20)."""
    world, trains = trained(2, last=3)
    world.crash_controller(restart_after_s=None)
    world.silence("h1")
    world.kill_host("h0")
    world.return_host("h0")
    world.start_controller()
    assert world.run_until(lambda: world.served.is_settled, 20.0)
    config = {**world.config, "durable": "/durable" if phase == "listing" else None}
    first, lists, held = world.holders["h0"], world.holders["h0"].obey, list[Order]()
    monkeypatch.setattr(first, "obey", lambda order: (held.append if isinstance(order, ListMarkers) else lists)(order))
    ranks = [
        world.join(rank, 2, "again", host="h0", launcher="another", takeover=takeover, config=config)
        for rank in range(2)
    ]
    assert world.run_until(lambda: [row["phase"] for row in world.status()["launches"]] == [phase], 12.0)
    world.thaw("h1")
    assert world.run_until(lambda: JOB in world.served.state.jobs, 2.0)
    monkeypatch.undo()
    for order in held:
        first.obey(order)
    assert world.run_until(lambda: all(rank.attempt or rank.errors for rank in ranks), 8.0)
    if takeover:
        assert ({rank.attempt for rank in ranks}, trains[1].is_fenced) == ({2}, True)
    else:
        assert ["rank 1 of attempt 1 is alive on host h1" in rank.error("join") for rank in ranks] == [True, True]
        assert (world.job().newest_number, trains[1].is_fenced) == (1, False)
