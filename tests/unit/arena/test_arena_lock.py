"""The arena's lock and folder: one owner, replaced only when frozen, never behind a link (R2, R5, R8)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from memstore.errors import ConfigError
from memstore.shell.arena import folder as arena_folder
from memstore.shell.arena import lock as arena_lock
from memstore.shell.arena.lock import ArenaLock, LockOwner
from memstore.testing.clusters.scratch_folder import scratch_folder

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
