"""Jobs of a store that was forgotten leave RAM, with a story; nothing that is in use ever does (R5, R23)."""

from __future__ import annotations

import contextlib
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from variants import later

from memstore.admin.cluster import remove_leftovers
from memstore.cli import main
from memstore.config import Config
from memstore.errors import MemstoreError
from memstore.shell.arena import idle_time
from memstore.shell.arena.folder import make_folder
from memstore.shell.arena.idle_time import SEEN_NAME, IdleTime
from memstore.shell.arena.tombstones import Tombstones, tombstone_path
from memstore.shell.rank.admin_link import store_root
from memstore.testing.clusters.processes import ProcessCluster, wait_for
from memstore.testing.clusters.stepped_clock import stepped_clock
from memstore.testing.controller.trained import trained
from memstore.testing.controller.world import ControllerWorld
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
    for text in ("", "x", f"{idle_time.read_boot_id()} x", "a b c"):
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
    monkeypatch.setattr(idle_time, "read_boot_id", lambda: "another-boot")
    monkeypatch.setattr(time, "monotonic", lambda: 30.0)
    assert IdleTime(tmp_path).idle_s == 30.0


def test_a_tombstone_outlives_the_folder(tmp_path: Path) -> None:
    """Stories lie beside the host's folder, are read again, and leave no file once all are forgotten."""
    folder = tmp_path / "h0"
    folder.mkdir()
    Tombstones(folder).take("a", "its steps were dropped")
    Tombstones(folder).take("b", "and these")
    shutil.rmtree(folder)
    stones = Tombstones(folder)
    assert stones.stories == {"a": "its steps were dropped", "b": "and these"}
    stones.take("a", "")
    stones.take("b", "")
    assert not tombstone_path(folder).exists()
    tombstone_path(folder).write_text("{")
    tombstone_path(folder).chmod(0o600)
    assert Tombstones(folder).stories == {}


# -- what the controller decides -------------------------------------------------------------------


def restarted(world: ControllerWorld, idle_s: dict[str, float], *, late: tuple[str, ...] = ()) -> None:
    """Every process ends at once and comes back, with hosts idle for so long."""
    for name in world.holders:
        world.kill_host(name, keep_memory=True)
    world.crash_controller(restart_after_s=None)
    for name, holder in world.holders.items():
        if name not in late:
            holder.idle_s = idle_s[name]
            holder.restart(keep_memory=True)
    world.start_controller()
    assert world.run_until(lambda: world.machine is not None and world.served.is_settled, 30.0)
    all_die(world)


def all_die(world: ControllerWorld) -> None:
    """No rank lives."""
    for rank in list(world.ranks.values()):
        rank.is_dead = False
        world.kill_rank(rank)


def restored(world: ControllerWorld, **options: Any) -> list[Any]:
    """Launch, get on all ranks: the step of each, or its error."""
    ranks = world.launch(3, **options)
    for rank in ranks:
        world.call(rank, "get", step=None, timeout_s=60.0)
    assert world.run_until(lambda: all(r.answers.get("get") or r.errors.get("get") for r in ranks), 60.0)
    return [r.errors["get"][-1] if r.errors.get("get") else r.answers["get"][-1]["step"] for r in ranks]


ALL_IDLE = dict.fromkeys(("h0", "h1", "h2"), 2 * DAY_S)


def test_a_story_that_could_not_be_written_is_written_when_it_is_reported_again(tmp_path: Path) -> None:
    """A full file system, or no descriptor: the next session of a controller brings the story once more."""
    folder = make_folder(tmp_path, store="s", host="h1")
    stones = Tombstones(folder)
    in_the_way = folder.parent / f"{tombstone_path(folder).name}-new"
    in_the_way.mkdir()
    with contextlib.suppress(MemstoreError, OSError):
        stones.take("a", "its steps were dropped")
    in_the_way.rmdir()
    stones.take("a", "its steps were dropped")
    assert Tombstones(folder).stories == {"a": "its steps were dropped"}


def test_a_forgotten_job_is_dropped_with_its_story() -> None:
    """Its hosts had no holder for two days and no rank asks for ten minutes.

    Get fails on all ranks alike, with why.
    """
    world, _ = trained(3, last=4)
    restarted(world, ALL_IDLE)
    world.run(590.0)
    assert "train" in world.served.jobs
    world.run(20.0)
    assert "train" not in world.served.jobs
    assert not any(holder.copies for holder in world.holders.values())
    dropped = [x for x in world.served.parts.recorder.recent_events.since(0) if x.kind == "dropped"]
    assert [x.job for x in dropped] == ["train"]
    errors = restored(world)
    assert len({str(error) for error in errors}) == 1
    words = ("RecoveryError", "4 (attempt 1)", "172800 s", "abandoned_arena_ttl_s", "2001-09-09 0", "fresh=True")
    assert [word for word in words if word not in str(errors[0])] == []


@pytest.mark.parametrize("loss", ["journals", "nothing"])
def test_a_story_outlives_journals_and_ends_with_a_fresh_start(loss: str) -> None:
    """With every journal gone the hosts still tell it; fresh=True ends it, on hosts that come later as well."""
    world, _ = trained(3, last=4)
    restarted(world, ALL_IDLE)
    world.run(700.0)
    assert all("train" in holder.stories for holder in world.holders.values())
    for holder in world.holders.values():
        if loss == "journals":
            holder.journal = []
    restarted(world, dict.fromkeys(ALL_IDLE, 1.0), late=("h2",))
    world.run(1.0)
    assert all("RecoveryError" in str(error) for error in restored(world))
    ranks = world.launch(2, fresh=True)
    assert world.put_all(ranks, 1)
    world.holders["h2"].restart(keep_memory=True)
    assert world.run_until(lambda: not any(holder.stories for holder in world.holders.values()), 10.0)
    assert "train" not in world.served.state.stories


def test_a_late_host_does_not_bring_back_a_story_of_a_job_that_was_removed() -> None:
    """It was away while a person removed the job by name: its word is older, and get() returns None, not the story."""
    world, _ = trained(3, last=4)
    restarted(world, ALL_IDLE)
    world.run(700.0)
    rank = world.launch(3)[0]
    world.kill_host("h2", keep_memory=True)
    world.run(10.0)
    world.call(rank, "rm", force=True)
    assert world.run_until(lambda: bool(rank.answers.get("rm")), 10.0)
    assert "train" not in world.served.state.stories
    world.holders["h2"].restart(keep_memory=True)
    assert world.run_until(lambda: "train" not in world.holders["h2"].stories, 10.0)
    assert "train" not in world.served.state.stories


def test_a_put_without_a_get_does_not_pass_a_story_over() -> None:
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
    world, ranks = trained(3, last=4, rules={"abandoned_arena_ttl_s": 0.0} if case == "never" else None)
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
        world.holders["h2"].restart(keep_memory=True)
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
    world.holders["h2"].restart(keep_memory=True)
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
    with ProcessCluster(tmp_path / "cluster", {"h0": {}, "h1": {}, "h2": {}}, abandoned_arena_ttl_s=TTL_S) as cluster:
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

    The story outlives folders, until `fresh`.
    """
    with ProcessCluster(tmp_path / "cluster", {"h0": {}, "h1": {}}, abandoned_arena_ttl_s=TTL_S) as cluster:
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
        wait_for(lambda: all(tombstone_path(cluster.arena(host)).exists() for host in TWO), "tombstones")
        cluster.kill_all()
        for host in TWO:
            shutil.rmtree(cluster.arena(host))
        start_again(cluster)
        ranks = fleet.launch(TWO)
        failed = fail_together(ranks, "get")
        assert {error.error for error in failed} == {"RecoveryError"}
        assert all(
            "5 (attempt 1)" in str(error) and "no holder of hosts h0, h1 had run" in str(error) for error in failed
        )
        fleet.kill(ranks)
        said = CliRunner().invoke(main, ["events", "train", "--store", cluster.config.store])
        assert said.exit_code == 0
        ranks = fleet.launch(TWO, fresh=True)
        together(ranks, "train", first=0, last=1)
        wait_for(lambda: not any(tombstone_path(cluster.arena(host)).exists() for host in TWO), "no tombstones")
        fleet.kill(ranks)
        _, got = fleet.resume(TWO)
        assert got["step"] == 1


def test_rm_forgets_a_story(tmp_path: Path, nursery: RankNursery) -> None:
    """`memstore rm JOB` ends what is remembered of a job that is gone: its next launch starts from nothing."""
    with ProcessCluster(tmp_path / "cluster", {"h0": {}, "h1": {}}) as cluster:
        cluster.kill_all()
        for host in TWO:
            Tombstones(cluster.arena(host)).take("train", "its committed steps 9 (attempt 1) were dropped")
        start_again(cluster)
        fleet = Fleet(cluster, nursery)
        fleet.kill(fleet.launch(TWO))
        wait_for(lambda: (cluster.job("train") or {"ranks_alive": 1})["ranks_alive"] == 0, "dead ranks")
        assert CliRunner().invoke(main, ["rm", "train", "--store", cluster.config.store]).exit_code == 0
        _, got = fleet.resume(TWO)
        assert got["step"] is None


def test_leftovers_take_their_stories_with_them(tmp_path: Path) -> None:
    """What `down --leftovers --discard` removes leaves nothing, whether the host's folder is there or gone."""
    config = Config(store="left", arena_dir=str(tmp_path))
    for host in TWO:
        Tombstones(make_folder(tmp_path, store="left", host=host)).take("train", "its steps were dropped")
    assert remove_leftovers(config, ["h0"]) == ["h0"]
    assert [p.name for p in sorted(store_root(config).iterdir())] == [".dropped-h1", "h1"]
    shutil.rmtree(store_root(config) / "h1")
    assert remove_leftovers(config) == []
    assert not store_root(config).exists()
