"""Reads through NIXL between the agents of two arenas, over TCP on this machine."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from memstore.shell.transport.nixl import NixlTransport
from memstore.shell.transport.transport import Piece
from memstore.testing.clusters.processes import wait_for

HAS_NIXL = any(importlib.util.find_spec(name) for name in ("nixl_cu12", "nixl_cu13"))
pytestmark = pytest.mark.skipif(not HAS_NIXL, reason="nixl is not installed (pip install nixl)")
NBYTES = 64 << 20
CHUNK = 1 << 20


class Site:
    """One arena with its agents."""

    def __init__(self, path: Path) -> None:
        self.arena_fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(self.arena_fd, NBYTES)
        self.lock_fd = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o600)
        self.transport = NixlTransport(path, self.lock_fd)

    def fill(self, number: int, byte: int) -> None:
        """Fill a chunk's place."""
        os.pwrite(self.arena_fd, bytes([byte]) * CHUNK, number * CHUNK)

    def chunk(self, number: int) -> bytes:
        """Return what lies in a chunk's place."""
        return os.pread(self.arena_fd, CHUNK, number * CHUNK)

    def serving_pid(self) -> int:
        """Return the process that others read from."""
        return self.transport._serving._process.pid

    def close(self) -> None:
        """End the agents."""
        self.transport.close()
        os.close(self.arena_fd)
        os.close(self.lock_fd)


@pytest.fixture
def sites(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Site, Site]]:
    """Two arenas in memory, the first filled."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    names = [Path(f"/dev/shm/memstore-test-nixl-{os.getpid()}-{name}") for name in "ab"]
    made: list[Site] = []
    try:
        made.append(Site(names[0]))
        made.append(Site(names[1]))
        for number in range(NBYTES // CHUNK):
            made[0].fill(number, number + 1)
        yield made[0], made[1]
    finally:
        for site in made:
            site.close()
        for name in names:
            name.unlink(missing_ok=True)
            name.with_suffix(".lock").unlink(missing_ok=True)


def pieces(count: int) -> list[Piece]:
    """Return the first chunks, each to be read into the place of another one."""
    return [Piece(number * CHUNK, (count - 1 - number) * CHUNK, CHUNK) for number in range(count)]


def test_a_read_brings_every_byte(sites: tuple[Site, Site]) -> None:
    """Chunks come from scattered places into others, once and again."""
    sender, receiver = sites
    for _ in range(2):
        assert receiver.transport.read(sender.transport.metadata(), pieces(8), host="a", deadline_s=20) is None
        assert [receiver.chunk(number)[:1] for number in range(8)] == [bytes([8 - number]) for number in range(8)]
        assert receiver.chunk(3) == sender.chunk(4)
        for number in range(8):
            receiver.fill(number, 0)


def test_a_read_beyond_an_arena_is_refused(sites: tuple[Site, Site]) -> None:
    """A place that the sender's arena does not have costs a read, and no process dies of it."""
    sender, receiver = sites
    given_up = receiver.transport.read(sender.transport.metadata(), [Piece(NBYTES, 0, CHUNK)], host="a", deadline_s=20)
    assert given_up is not None
    assert "beyond an arena's end" in str(given_up.error)
    wait_for(given_up.has_ended, "the read's agent to be gone")
    assert receiver.transport.read(sender.transport.metadata(), pieces(2), host="a", deadline_s=20) is None


def test_a_given_up_read_ends_before_its_places_are_used_again(sites: tuple[Site, Site]) -> None:
    """The sender stops for longer than the deadline; once the read has ended, nothing lands when it goes on."""
    sender, receiver = sites
    assert receiver.transport.read(sender.transport.metadata(), pieces(1), host="a", deadline_s=20) is None
    metadata = sender.transport.metadata()
    os.kill(sender.serving_pid(), signal.SIGSTOP)
    try:
        begun_s = time.monotonic()
        given_up = receiver.transport.read(metadata, pieces(64), host="a", deadline_s=0.5)
        assert time.monotonic() - begun_s < 5
        assert given_up is not None
        wait_for(given_up.has_ended, "the read's agent to be gone")
        for number in range(64):
            receiver.fill(number, 0xEE)
    finally:
        os.kill(sender.serving_pid(), signal.SIGCONT)
    time.sleep(1.0)
    assert all(receiver.chunk(number) == b"\xee" * CHUNK for number in range(64))
    # What serves may have been aborted by UCX for that; another one takes its place.
    wait_for(
        lambda: receiver.transport.read(sender.transport.metadata(), pieces(4), host="a", deadline_s=5) is None,
        "reads to succeed again",
    )


def test_a_sender_that_dies_ends_the_wait(sites: tuple[Site, Site]) -> None:
    """A read from a process that is killed meanwhile is given up at once, and the next agent serves."""
    sender, receiver = sites
    metadata = sender.transport.metadata()
    assert receiver.transport.read(metadata, pieces(1), host="a", deadline_s=20) is None
    os.kill(sender.serving_pid(), signal.SIGKILL)
    begun_s = time.monotonic()
    given_up = receiver.transport.read(metadata, pieces(64), host="a", deadline_s=20)
    assert given_up is not None
    assert time.monotonic() - begun_s < 10
    wait_for(given_up.has_ended, "the read's agent to be gone")
    assert receiver.transport.read(sender.transport.metadata(), pieces(4), host="a", deadline_s=20) is None


def test_an_agent_whose_holder_ends_the_socket_is_gone(sites: tuple[Site, Site]) -> None:
    """It ends itself, or the kernel kills it because the thread that started it has ended."""
    sender, _ = sites
    agent = sender.transport._serving
    agent._pipe.shutdown(2)
    wait_for(agent.has_ended, "the agent to be gone")


HOLDER = """
import fcntl, os, sys, time
from pathlib import Path
from memstore.shell.transport.nixl import NixlTransport

lock = os.open(sys.argv[1] + ".lock", os.O_RDWR | os.O_CREAT, 0o600)
fcntl.flock(lock, fcntl.LOCK_EX)
transport = NixlTransport(Path(sys.argv[1]), lock)
print(transport._serving._process.pid, transport._reading._process.pid, flush=True)
time.sleep(600)
"""


def test_agents_that_are_stopped_end_with_their_holder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A frozen container: nothing of it runs, its holder is killed, and the next one gets the arena's lock."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    arena = tmp_path / "arena"
    arena.write_bytes(bytes(CHUNK))
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(arena)], stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout is not None
            agents = [int(pid) for pid in holder.stdout.readline().split()]
            assert len(agents) == 2
            for pid in agents:
                os.kill(pid, signal.SIGSTOP)
        finally:
            holder.kill()
    lock = os.open(tmp_path / "arena.lock", os.O_RDWR)

    def is_free() -> bool:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        return False

    wait_for(is_free, "the lock to be free")
    os.close(lock)
