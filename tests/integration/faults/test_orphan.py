"""Jobs of a store that was forgotten leave RAM, and are not taken for new ones; what is in use never does (R5, R23)."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from variants import later

from memstore.cli import main
from memstore.shell.arena import folder
from memstore.shell.arena.folder import SEEN_NAME, IdleTime
from memstore.testing.clusters.processes import ProcessCluster, wait_for
from memstore.testing.clusters.stepped_clock import stepped_clock
from memstore.testing.controller.world import ControllerWorld, trained
from memstore.testing.ranks.fleet import Fleet
from memstore.testing.ranks.rank_process import RankNursery, fail_together, together

DAY_S = 86_400.0
TWO = ["h0", "h1"]


# -- what a host knows ---------------------------------------------------------------------------


def test_a_folder_is_idle_since_a_holder_ran_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Time counts from the last sign of the last holder; a new folder, and one that says nothing sensible, is young."""
    now_s = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    first = IdleTime(tmp_path)
    now_s += 3 * DAY_S
    first.keep()
    now_s += 7.0
    second = IdleTime(tmp_path)
    assert (first.idle_s, second.idle_s) == (0.0, 7.0)
    for text in ("", "x", f"{folder.read_boot_id()} x", "a b c"):
        (tmp_path / SEEN_NAME).write_text(text)
        assert IdleTime(tmp_path).idle_s == 0.0


def test_no_clock_makes_a_folder_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wall clock has no part in it; time before this boot does not count, nor does a moment yet to come."""
    IdleTime(tmp_path)
    monkeypatch.setattr(time, "time", lambda: 9e9)
    assert IdleTime(tmp_path).idle_s < 60.0
    now_s = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now_s - 50.0)
    assert IdleTime(tmp_path).idle_s == 0.0
    monkeypatch.setattr(folder, "read_boot_id", lambda: "another-boot")
    monkeypatch.setattr(time, "monotonic", lambda: 30.0)
    assert IdleTime(tmp_path).idle_s == 30.0


# -- what the controller decides -------------------------------------------------------------------


def restarted(world: ControllerWorld, idle_s: dict[str, float], *, late: tuple[str, ...] = ()) -> None:
    """Every process ends at once and comes back, with hosts idle for so long."""
    for name in world.holders:
        world.kill_host(name, keep_memory=True)
    world.crash_controller(restart_after_s=None)
    for name in sorted(set(world.holders) - set(late)):
        world.return_host(name, idle_s=idle_s[name])
    world.start_controller()
    assert world.run_until(lambda: world.machine is not None and world.served.is_settled, 30.0)
    all_die(world)


def all_die(world: ControllerWorld) -> None:
    """No rank lives."""
    for rank in world.ranks.values():
        world.kill_rank(rank)


def restored(world: ControllerWorld, **options: Any) -> list[Any]:
    """Launch, get on all ranks: the step of each, or its error."""
    ranks = world.launch(3, **options)
    for rank in ranks:
        world.call(rank, "get", step=None, timeout_s=60.0)
    assert world.run_until(lambda: all(r.answers.get("get") or r.errors.get("get") for r in ranks), 60.0)
    return [r.errors["get"][-1] if r.errors.get("get") else r.answers["get"][-1]["step"] for r in ranks]


ALL_IDLE = dict.fromkeys(("h0", "h1", "h2"), 2 * DAY_S)


def test_a_forgotten_job_is_dropped_and_a_get_says_so() -> None:
    """Its hosts had no holder for two days and no rank asks for ten minutes.

    One event and one line tell it. Get fails on all ranks alike, with why, as long as a journal knows of the removal.
    """
    world, _ = trained(3, last=4)
    restarted(world, ALL_IDLE)
    world.run(590.0)
    assert "train" in world.served.jobs
    world.run(20.0)
    assert "train" not in world.served.jobs
    assert not any(holder.held for holder in world.holders.values())
    dropped = [x for x in world.served.parts.recorder.recent_events.since(0) if x.event == "dropped"]
    assert [x.job for x in dropped] == ["train"]
    [said] = [text for text in world.notes if "are dropped from RAM" in text]
    assert "step 4 is the newest committed" in said
    assert "no holder of hosts h0, h1, h2 had run for 172800 s" in said
    for times in range(2):
        errors = restored(world)
        assert len({str(error) for error in errors}) == 1
        words = ("RecoveryError", "were dropped from RAM", "job_ttl_s", "fresh=True", "memstore rm")
        assert [word for word in words if word not in str(errors[0])] == []
        if not times:
            restarted(world, dict.fromkeys(ALL_IDLE, 1.0))


@pytest.mark.parametrize("way", ["fresh", "rm"])
def test_a_dropped_job_begins_again_if_a_person_says_so(way: str) -> None:
    """After a launch that began afresh, or `memstore rm`, a get finds nothing, and says nothing of what was."""
    world, _ = trained(3, last=4)
    restarted(world, ALL_IDLE)
    world.run(700.0)
    world.launch(3, fresh=way == "fresh")
    if way == "rm":
        all_die(world)
        other = world.launch(1, job="other")[0]
        world.call(other, "rm", job="train", force=True)
        assert world.run_until(lambda: bool(other.answers.get("rm")), 10.0)
    all_die(world)
    assert restored(world) == [None, None, None]


def test_a_put_without_a_get_does_not_pass_over_what_was_dropped() -> None:
    """A script that puts without asking is refused as on a job with history."""
    world, _ = trained(3, last=2)
    restarted(world, ALL_IDLE)
    world.run(700.0)
    rank = world.launch(3)[0]
    world.call(rank, "reserve", slots=4)
    assert world.run_until(lambda: bool(rank.errors.get("reserve")), 10.0)
    assert "fresh=True" in str(rank.errors["reserve"][-1])


@pytest.mark.parametrize("case", ["one host was in use", "one host is absent", "a rank connects", "pinned", "never"])
def test_what_is_in_use_stays(case: str) -> None:
    """A host that ran lately, one that has not come, a launch, a pin, or ttl 0: nothing is dropped, however long."""
    world, ranks = trained(3, last=4, **({"job_ttl_s": 0.0} if case == "never" else {}))
    if case == "pinned":
        world.call(ranks[0], "pin", step=None, name="best")
        assert world.run_until(lambda: bool(world.served.jobs["train"].pins), 10.0)
    idle_s = {**ALL_IDLE, "h2": 5.0} if case == "one host was in use" else ALL_IDLE
    restarted(world, idle_s, late=("h2",) if case == "one host is absent" else ())
    if case == "a rank connects":
        world.run(60.0)
        assert restored(world) == [4, 4, 4]
        all_die(world)
    world.run(1500.0)
    assert "train" in world.served.jobs
    if case == "one host is absent":
        world.return_host("h2", idle_s=2 * DAY_S)
        world.run(5.0)
    assert restored(world) == [4, 4, 4]


def test_the_ten_minutes_begin_again_with_a_host_that_died_meanwhile() -> None:
    """It goes after eight of them and is away for twelve: nothing is dropped before it was back for ten."""
    world, _ = trained(3, last=4)
    restarted(world, ALL_IDLE)
    world.run(480.0)
    world.kill_host("h2", keep_memory=True)
    world.run(720.0)
    assert "train" in world.served.jobs
    world.return_host("h2", idle_s=2 * DAY_S)
    world.run(590.0)
    assert "train" in world.served.jobs
    world.run(30.0)
    assert "train" not in world.served.jobs


# -- real processes --------------------------------------------------------------------------------

TTL_S = 3.0


def start_again(cluster: ProcessCluster) -> None:
    """Start every holder and a controller."""
    cluster.start_controller()
    for host in cluster.labels:
        cluster.start_holder(host)
    cluster.wait_live(*cluster.labels)


@pytest.mark.parametrize("jump_s", [DAY_S, *later(0.0)])
def test_training_longer_than_the_ttl_is_no_orphan(tmp_path: Path, nursery: RankNursery, jump_s: float) -> None:
    """Ranks train on after one connect, everything is killed, clocks may jump by a day: all get the newest step."""
    with ProcessCluster(tmp_path / "cluster", {"h0": {}, "h1": {}, "h2": {}}, job_ttl_s=TTL_S) as cluster:
        fleet = Fleet(cluster, nursery, replicas=3)
        ranks, step, until_s = fleet.begin(TWO, last_step=0), 0, time.monotonic() + 2 * TTL_S
        while time.monotonic() < until_s:
            step += 1
            together(ranks, "train", first=step, last=step)
        cluster.kill_all()
        fleet.kill(ranks)
        if jump_s:
            cluster.environ = dict.fromkeys(["", *cluster.labels], stepped_clock(tmp_path / "clock", jump_s))
        start_again(cluster)
        _, got = fleet.resume(TWO)
        assert got["step"] == step


def test_an_orphan_is_dropped_and_reported(tmp_path: Path, nursery: RankNursery) -> None:
    """Nothing runs for the ttl and no rank connects: dropped, as an event.

    Get says so after all processes were started again, until `fresh`.
    """
    with ProcessCluster(tmp_path / "cluster", {"h0": {}, "h1": {}}, job_ttl_s=TTL_S) as cluster:
        fleet = Fleet(cluster, nursery)
        ranks = fleet.begin(TWO, last_step=5)
        cluster.kill_all()
        fleet.kill(ranks)
        idle_since_s = time.monotonic()
        wait_for(lambda: time.monotonic() - idle_since_s > TTL_S + 1.0, "the ttl to pass")
        start_again(cluster)
        wait_for(lambda: cluster.job("train") is None, "the orphan to be dropped")
        events = cluster.events()
        assert [e["job"] for e in events if e["event"] == "dropped"] == ["train"]
        cluster.kill_all()
        start_again(cluster)
        ranks = fleet.launch(TWO)
        failed = fail_together(ranks, "get")
        assert {error.error for error in failed} == {"RecoveryError"}
        assert all("no holder of its hosts had run for its job_ttl_s" in str(error) for error in failed)
        fleet.kill(ranks)
        said = CliRunner().invoke(main, ["events", "train", "--store", cluster.config.store])
        assert said.exit_code == 0
        ranks = fleet.launch(TWO, fresh=True)
        together(ranks, "train", first=0, last=1)
        fleet.kill(ranks)
        _, got = fleet.resume(TWO)
        assert got["step"] == 1
