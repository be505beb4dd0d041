"""The arena's lock and folder: one owner, replaced only when frozen, never behind a link (R2, R5, R8)."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TextIO

import pytest

from memstore.core.cluster.hosts import HostTable
from memstore.core.wire.ids import Endpoint
from memstore.core.wire.messages import HostInfo
from memstore.core.wire.orders import TakeIncarnation
from memstore.errors import ConfigError
from memstore.shell.arena import folder as arena_folder
from memstore.shell.arena import lock as arena_lock
from memstore.shell.arena.folder import INCARNATION_NAME, next_incarnation
from memstore.shell.arena.lock import ArenaLock, LockOwner
from memstore.testing.clusters.processes import ProcessCluster, wait_for
from memstore.testing.clusters.scratch import scratch_folder
from memstore.testing.clusters.stepped_clock import stepped_clock
from memstore.testing.controller.world import ControllerWorld, trained
from memstore.testing.ranks.fleet import Fleet
from memstore.testing.ranks.rank_process import RankNursery, together

OWNER = """
import signal, sys
from memstore.shell.arena.lock import ArenaLock
lock = ArenaLock.take(sys.argv[1], timeout_s=5, cluster="c1", address="10.0.0.1:7")
print("locked", flush=True)
signal.pause()
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    with scratch_folder() as path:
        yield path
    assert not path.parent.exists()


@pytest.fixture
def other(folder: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen([sys.executable, "-c", OWNER, str(folder)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "locked\n"
        yield process
    finally:
        process.kill()
        process.wait(timeout=120)
        process.stdout.close()


def test_live_owner_is_named_and_left_alone(folder: Path, other: subprocess.Popen[str]) -> None:
    """R5: a live lock is an error that names pid, address, cluster and the way out."""
    with pytest.raises(ConfigError, match=rf"pid {other.pid} at 10.0.0.1:7 of Ray cluster c1.*memstore down"):
        ArenaLock.take(folder, timeout_s=5, replace_frozen=lambda owner: False)
    with pytest.raises(ConfigError):
        ArenaLock.take(folder, timeout_s=5)
    assert other.poll() is None
    assert arena_lock.is_held(folder)


def test_frozen_owner_is_killed_and_no_other_process(folder: Path, other: subprocess.Popen[str]) -> None:
    """R2: a successor of a stopped owner kills exactly that pid and gets the lock."""
    bystander = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    try:
        other.send_signal(signal.SIGSTOP)
        asked: list[LockOwner] = []
        lock = ArenaLock.take(folder, timeout_s=10, replace_frozen=lambda owner: asked.append(owner) or True)
        assert [owner.pid for owner in asked] == [other.pid]
        assert other.wait(timeout=120) == -signal.SIGKILL
        assert bystander.poll() is None
        owner = arena_lock.owner(folder)
        assert owner is not None
        assert owner.pid == os.getpid()
        lock.release()
    finally:
        bystander.kill()
        bystander.wait(timeout=120)


def test_lock_of_a_killed_owner_is_free(folder: Path, other: subprocess.Popen[str]) -> None:
    """R2: the lock ends with its owner; the record of a dead owner stops no process."""
    other.kill()
    other.wait(timeout=120)
    record = arena_lock.owner(folder)
    assert record is not None
    assert not record.is_alive()
    assert not arena_lock.is_held(folder)
    ArenaLock.take(folder, timeout_s=1).release()
    assert arena_lock.owner(folder) is None


def test_recycled_pid_is_not_killed(folder: Path, other: subprocess.Popen[str]) -> None:
    """R2: a pid that another process has now, by its start time, is not touched."""
    start = arena_lock.process_start_time(other.pid)
    assert start is not None
    impostor = LockOwner(other.pid, start - 1, arena_lock.boot_id(), arena_lock.pid_namespace())
    arena_lock._kill_exactly(folder, impostor)
    with pytest.raises(subprocess.TimeoutExpired):
        other.wait(timeout=0.2)


def test_forked_child_does_not_keep_the_lock(folder: Path) -> None:
    """A child forked by the owner does not hold the lock after the owner gave it up (R2)."""
    lock = ArenaLock.take(folder, timeout_s=1)
    release, wait = os.pipe()[::-1]
    child = os.fork()
    if child == 0:
        os.close(release)
        os.read(wait, 1)
        os._exit(0)
    try:
        lock.release()
        ArenaLock.take(folder, timeout_s=5).release()
    finally:
        os.close(release)
        os.close(wait)
        os.waitpid(child, 0)


def test_zombie_counts_as_dead() -> None:
    """R8: a process that ended and was not reaped is not alive."""
    child = os.fork()
    if child == 0:
        os._exit(0)
    start = arena_lock.process_start_time(child)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    assert start is not None
    assert not arena_lock.is_alive(child, start)
    os.waitpid(child, 0)
    assert arena_lock.process_start_time(child) is None
    mine = arena_lock.process_start_time(os.getpid())
    assert mine is not None
    assert arena_lock.is_alive(os.getpid(), mine)
    assert not arena_lock.is_alive(os.getpid(), mine + 1)


def test_describe_and_garbage(folder: Path) -> None:
    """The record can be rewritten in place; garbage in it names no process."""
    lock = ArenaLock.take(folder, timeout_s=1)
    lock.describe(cluster="c2", address="a:1")
    owner = arena_lock.owner(folder)
    assert owner is not None
    assert (owner.cluster, owner.address) == ("c2", "a:1")
    (folder / "lock").write_bytes(b"[1, 2")
    assert arena_lock.owner(folder) is None
    with pytest.raises(ConfigError, match="not given up within 0 s"):
        ArenaLock.take(folder, timeout_s=0)
    lock.release()


@pytest.mark.parametrize("name", ["", "..", ".hidden", "a/b", "x" * 129, "a\0b"])
def test_names_cannot_leave_the_folder(name: str) -> None:
    """R5: a store or host name is one plain folder name."""
    with pytest.raises(ConfigError, match="cannot be a folder name"):
        arena_folder.arena_folder("/dev/shm", store=name, host="h1")


def test_unsafe_folders_are_refused(tmp_path: Path) -> None:
    """R5: links, open modes, foreign owners and a root where others could swap folders are refused."""
    root = tmp_path / "root"
    root.mkdir(mode=0o755)
    top = root / f"memstore-{os.geteuid()}"
    top.symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="symbolic link"):
        arena_folder.make_folder(root, store="s", host="h")
    top.unlink()
    folder = arena_folder.make_folder(root, store="s", host="h")
    assert [path.stat().st_mode & 0o777 for path in (top, folder.parent, folder)] == [0o700] * 3
    folder.chmod(0o750)
    with pytest.raises(ConfigError, match="mode 0750"):
        arena_folder.check_folder(folder)
    folder.chmod(0o700)
    (folder / "lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="cannot open"):
        ArenaLock.take(folder, timeout_s=0)
    assert not (tmp_path / "elsewhere").exists()
    if os.geteuid() == 0:
        os.chown(folder, 12345, -1)
        with pytest.raises(ConfigError, match="belongs to user 12345"):
            arena_folder.check_folder(folder)
    root.chmod(0o777)
    with pytest.raises(ConfigError, match="sticky"):
        arena_folder.make_folder(root, store="s", host="h2")


def test_secret_is_kept_private(folder: Path) -> None:
    """R4: the secret comes back, is 0600, and a damaged one is refused."""
    assert arena_folder.read_secret(folder) is None
    arena_folder.write_secret(folder, bytes(range(32)))
    assert arena_folder.read_secret(folder) == bytes(range(32))
    assert (folder / "secret").stat().st_mode & 0o777 == 0o600
    (folder / "secret").write_bytes(b"short")
    with pytest.raises(ConfigError, match="5 bytes"):
        arena_folder.read_secret(folder)


# -- test incarnation ---------------------------------------------------------------------------------
# A holder's incarnation only grows, also if its clock goes back or its folder is lost (R3).


HOUR_S = 3600.0


def open_private(path: Path) -> TextIO:
    """Make a file that no other process may read."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w")


def test_a_folder_counts_its_lives(tmp_path: Path) -> None:
    """Each life is the next one; a controller that knows a higher one is gone beyond."""
    first = next_incarnation(tmp_path)
    assert [next_incarnation(tmp_path) for _ in range(2)] == [first + 1, first + 2]
    assert next_incarnation(tmp_path, above=first + 100) == first + 101
    assert next_incarnation(tmp_path) == first + 102
    assert next_incarnation(tmp_path, above=5) == first + 103


def test_the_kits_holder_counts_its_lives_as_a_folder_does(tmp_path: Path) -> None:
    """Ordered above a life that it is past already, it does not go back; else a test would miss such an order."""
    world = ControllerWorld(1)
    holder = world.holders["h0"]
    above = [100, 5, 300]
    first = next_incarnation(tmp_path, above=holder.info.incarnation)
    folder = [next_incarnation(tmp_path, above=first + each) - first for each in above]
    first, kit = holder.info.incarnation, list[int]()
    for each in above:
        holder.obey(TakeIncarnation(above=first + each))
        kit.append(holder.info.incarnation - first)
    assert kit == folder == [101, 102, 301]


def test_a_folder_that_was_lost_repeats_no_number(tmp_path: Path) -> None:
    """Lives before and after are never taken for one; a torn file is no number."""
    numbers = set()
    for _ in range(20):
        numbers.add(next_incarnation(tmp_path))
        (tmp_path / INCARNATION_NAME).write_text("12")
    assert len(numbers) == 20


def test_the_table_names_the_later_life() -> None:
    """An older life of a host is distinguished from the next one, and from a new session of the same."""
    table = HostTable(suspect_after_s=1.5, dead_after_s=5.0, failure_domains=())
    lives = [HostInfo("a", n, (Endpoint("10.0.0.1", 7000),)) for n in (6, 7, 8)]
    table.up(0.0, lives[1])
    assert [table.later_life(info) for info in lives] == [lives[1], None, None]


def is_back(world: ControllerWorld) -> bool:
    """The controller counts the present life of h2 live."""
    machine = world.machine
    state = machine.hosts.states.get("h2") if machine is not None and machine.is_settled else None
    return state is not None and state.status == "live" and state.info == world.holders["h2"].info


@pytest.mark.parametrize("is_taken_over", [False, True])
def test_a_host_whose_folder_was_lost_is_back_at_once(is_taken_over: bool) -> None:
    """Its holder begins with a lower number: the controller refuses it aloud, it takes the next, and commits go on."""
    world, ranks = trained(3, last=2)
    for _ in range(3):
        world.kill_host("h2", keep_memory=True)
        world.return_host("h2")
        assert world.run_until(lambda: is_back(world), 5.0)
    before = world.holders["h2"].info.incarnation
    world.kill_host("h2", keep_memory=True)
    world.return_host("h2")
    holder = world.holders["h2"]
    holder.state.info = replace(holder.info, incarnation=1)
    if is_taken_over:  # the host shows itself twice while the new controller gathers: the later life counts
        world.crash_controller()
    assert world.run_until(lambda: is_back(world), 10.0)
    if not is_taken_over:
        assert holder.info.incarnation == before + 1
        assert any("incarnation 1" in note and "higher" in note for note in world.notes)
    ranks = world.launch(3)
    world.get(ranks)
    assert world.put_all(ranks, 3)


def test_a_clock_set_back_between_two_lives(tmp_path: Path, nursery: RankNursery) -> None:
    """An hour back, then a day ahead: the host is back in seconds each time, and steps commit with all copies."""
    with ProcessCluster(tmp_path / "cluster", {"h0": {}, "h1": {}}) as cluster:
        fleet = Fleet(cluster, nursery)
        ranks = fleet.begin(["h0", "h1"], last_step=2)
        for n, step_s in enumerate((-HOUR_S, 24 * HOUR_S, -HOUR_S)):
            cluster.kill_holder("h1")
            cluster.environ["h1"] = stepped_clock(tmp_path / "clock", step_s)
            cluster.start_holder("h1")
            cluster.wait_live("h0", "h1")
            together(ranks, "train", first=3 + 3 * n, last=5 + 3 * n)
            wait_for(lambda: (cluster.job("train") or {}).get("copies") == 2, "both copies")
        assert cluster.job("train")["committed_step"] == 11  # type: ignore[index]


def test_a_lost_number_is_refused_and_taken_above(tmp_path: Path, nursery: RankNursery) -> None:
    """The folder is lost and the new one has a lower number: both sides log it, and the host is back in seconds."""
    with ProcessCluster(tmp_path / "cluster", {"h0": {}, "h1": {}}) as cluster:
        fleet = Fleet(cluster, nursery)
        ranks = fleet.begin(["h0", "h1"], last_step=2)
        cluster.kill_holder("h1")
        number = int((cluster.arena("h1") / INCARNATION_NAME).read_text())
        ranks[1].kill()
        shutil.rmtree(cluster.arena("h1"))
        cluster.arena("h1").mkdir(mode=0o700)
        with open_private(cluster.arena("h1") / INCARNATION_NAME) as file:
            file.write(f"{1:020d}")
        cluster.start_holder("h1")
        cluster.wait_live("h0", "h1")
        assert int((cluster.arena("h1") / INCARNATION_NAME).read_text()) == number + 1
        assert "ordered to take a higher one" in cluster.logs()
        assert "the controller refused incarnation 2" in cluster.logs()
        ranks[0].kill()
        ranks, got = fleet.resume(["h0", "h1"])
        assert got["step"] == 2
        together(ranks, "train", first=3, last=5)
