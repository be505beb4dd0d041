"""The rig of network namespaces itself: hosts that reach one another until a link is cut, blocked or slowed down."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from memstore.errors import DrillError
from memstore.testing.clusters.namespaces import NamespaceRig, available, sweep
from memstore.testing.clusters.processes import wait_for

pytestmark = [pytest.mark.root, pytest.mark.skipif(available() is not None, reason=str(available()))]
REACH_S = 0.3  # what does not come is waited for so long
ARRIVES_S = 20.0
SENT_BYTES = 600_000
SINK = """
import socket, sys
server = socket.create_server((sys.argv[1], 0))
print(server.getsockname()[1], flush=True)
while True:
    peer, _ = server.accept()
    while peer.recv(65536):
        pass
    peer.sendall(b"!")
    peer.close()
"""
PUSH = """
import socket, sys, time
started = time.monotonic()
peer = socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=float(sys.argv[3]))
peer.sendall(bytes(int(sys.argv[4])))
peer.shutdown(socket.SHUT_WR)
assert peer.recv(1) == b"!"
print(time.monotonic() - started)
"""
OWNER = """
import sys, time
from memstore.testing.clusters.namespaces import NamespaceRig
with NamespaceRig(["a", "b"]) as rig:
    sleeper = rig.popen("a", ["sleep", "60"])
    print(rig._link, sleeper.pid, flush=True)
    time.sleep(60)
"""


@pytest.fixture(scope="module")
def rig() -> Iterator[NamespaceRig]:
    """Three hosts."""
    with NamespaceRig(["a", "b", "c"]) as rig:
        yield rig


class Sink:
    """A process on a host that reads all that it is sent and then answers."""

    def __init__(self, rig: NamespaceRig, host: str) -> None:
        self.rig, self.host = rig, host
        argv = [sys.executable, "-c", SINK, rig.address(host)]
        self.process = rig.popen(host, argv, stdout=subprocess.PIPE, text=True)
        self.port = int(self.process.stdout.readline())

    def seconds(self, source: str, nbytes: int = 1, timeout_s: float = REACH_S) -> float | None:
        """How long `nbytes` take from a host to here; None if they do not arrive."""
        argv = [sys.executable, "-c", PUSH, self.rig.address(self.host), str(self.port), str(timeout_s), str(nbytes)]
        done = subprocess.run(
            [*self.rig.prefix(source), *argv], capture_output=True, text=True, timeout=30, check=False
        )
        return float(done.stdout) if done.returncode == 0 else None

    def close(self) -> None:
        """End it."""
        self.process.kill()
        self.process.communicate(timeout=10)


@pytest.fixture
def sink(rig: NamespaceRig) -> Iterator[Sink]:
    """A sink on host b, and afterwards a whole network."""
    sink = Sink(rig, "b")
    yield sink
    sink.close()
    rig.heal_all()


def test_hosts_reach_one_another_and_this_machine_reaches_them(rig: NamespaceRig, sink: Sink) -> None:
    """Every host has an address of its own that the others and this machine can connect to."""
    assert len({rig.address(host) for host in rig.hosts}) == 3
    assert sink.seconds("a", timeout_s=5.0) is not None
    assert sink.seconds("b", timeout_s=5.0) is not None
    socket.create_connection((rig.address("b"), sink.port), timeout=5.0).close()


def test_a_cut_host_is_out_of_reach_until_it_is_healed(rig: NamespaceRig, sink: Sink) -> None:
    """Without its cable a host answers no process, the others still talk, and with the cable back all is well."""
    other = Sink(rig, "c")
    try:
        rig.cut("b")
        assert sink.seconds("a") is None
        assert other.seconds("a", timeout_s=5.0) is not None
        rig.heal("b")
        wait_for(lambda: sink.seconds("a") is not None, "the healed link")
    finally:
        other.close()


def test_a_one_way_block_loses_one_direction_only(rig: NamespaceRig) -> None:
    """Datagrams from a to b vanish while those from b to a arrive; unblocked, both do."""
    rig.block("a", "b", one_way=True)
    try:
        assert not datagram_arrives(rig, "a", "b", 2 * REACH_S)
        assert datagram_arrives(rig, "b", "a", ARRIVES_S)
        rig.unblock("a", "b")
        assert datagram_arrives(rig, "a", "b", ARRIVES_S)
    finally:
        rig.heal_all()


def datagram_arrives(rig: NamespaceRig, source: str, target: str, timeout_s: float) -> bool:
    """Send datagrams to a socket on the target; True if one arrives in time, the start of the sender included."""
    listen = (
        "import socket, sys; s = socket.socket(type=socket.SOCK_DGRAM); s.bind((sys.argv[1], 0)); "
        "print(s.getsockname()[1], flush=True); s.settimeout(float(sys.argv[2])); s.recv(1)"
    )
    send = (
        "import socket, sys, time; s = socket.socket(type=socket.SOCK_DGRAM)\n"
        "for _ in range(3):\n    s.sendto(b'.', (sys.argv[1], int(sys.argv[2])))"
    )
    argv = [sys.executable, "-c", listen, rig.address(target), str(timeout_s)]
    process = rig.popen(target, argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    port = process.stdout.readline().strip()
    argv = [*rig.prefix(source), sys.executable, "-c", send, rig.address(target), port]
    subprocess.run(argv, capture_output=True, timeout=10, check=False)
    status = process.wait(timeout=10)
    process.stdout.close()
    return status == 0


def test_a_partition_splits_two_groups_and_nothing_else(rig: NamespaceRig, sink: Sink) -> None:
    """Across the partition nothing arrives, inside a group everything does, healed both."""
    rig.partition(["a"], ["b", "c"])
    assert sink.seconds("a") is None
    assert sink.seconds("c", timeout_s=5.0) is not None
    rig.heal_all()
    wait_for(lambda: sink.seconds("a") is not None, "the healed partition")


def test_a_shaped_link_is_as_slow_as_asked(rig: NamespaceRig, sink: Sink) -> None:
    """The same bytes take at least ten times as long over a link of 8 Mbit/s, and not over the others."""
    free_s = sink.seconds("a", SENT_BYTES, 20.0)
    rig.shape("b", 8_000_000)
    try:
        slow_s = sink.seconds("a", SENT_BYTES, 20.0)
    finally:
        rig.unshape("b")
    assert free_s is not None
    assert slow_s is not None
    assert slow_s > 0.8 * SENT_BYTES * 8 / 8_000_000
    assert slow_s > 10 * free_s
    assert sink.seconds("a", SENT_BYTES, 20.0) < slow_s / 3


def test_two_rigs_have_nothing_in_common(rig: NamespaceRig, sink: Sink) -> None:
    """A second rig gets another network, its hosts do not reach the first one's, and it goes without a trace."""
    with NamespaceRig(["a"]) as other:
        assert not rig.network.overlaps(other.network)
        argv = [*other.prefix("a"), sys.executable, "-c", PUSH, rig.address("b"), str(sink.port), "0.3", "1"]
        assert subprocess.run(argv, capture_output=True, timeout=10, check=False).returncode != 0
        link = Path("/sys/class/net") / other._link
        assert link.exists()
    assert not link.exists()
    assert sink.seconds("a", timeout_s=5.0) is not None


def test_a_host_that_fails_ends_what_ran_there(rig: NamespaceRig) -> None:
    """kill() ends exactly the processes of one host."""
    here, there = (rig.popen(host, ["sleep", "60"]) for host in ("a", "c"))
    wait_for(lambda: here.pid in rig.processes("a"), "the process to be on its host")
    assert here.pid in rig.kill("a")
    assert here.wait(timeout=10) == -signal.SIGKILL
    assert there.poll() is None
    there.kill()
    there.wait(timeout=10)


def test_a_failure_in_the_middle_leaves_nothing() -> None:
    """A rig whose second host cannot be made takes the first one and its links away again."""
    rig = NamespaceRig(["a", "a"])
    with pytest.raises(DrillError, match="'a' is there already"):
        rig.__enter__()
    assert not Path(f"/sys/class/net/{rig._link}").exists()
    assert rig._keepers == {}


def test_a_killed_owner_leaves_what_sweep_removes() -> None:
    """After SIGKILL of the owner the processes in its rig are swept and its links are gone; the living are spared."""
    process = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True)
    link, pid = process.stdout.readline().split()
    command = Path(f"/proc/{pid}/cmdline")
    # While a process becomes another program, it tells neither its command nor its environment.
    wait_for(lambda: command.read_bytes().startswith(b"sleep"), "the process in the rig")
    assert f"process {pid}" not in sweep()
    process.kill()
    process.wait(timeout=10)
    process.stdout.close()
    assert f"process {pid}" in sweep()
    wait_for(lambda: not Path(f"/proc/{pid}").exists(), "the process to be gone")
    wait_for(lambda: not Path(f"/sys/class/net/{link}").exists(), "the link to be gone")


def test_without_root_there_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """available() names what is missing instead of failing later."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "root" in (available() or "")
    monkeypatch.undo()
    monkeypatch.setenv("PATH", "/nonexistent")
    assert "ip, tc" in (available() or "")
