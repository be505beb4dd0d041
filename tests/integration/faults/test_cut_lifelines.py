"""A host that is cut off loses its ranks; one whose processes do not run for a while does not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from memstore.inplace import watchdog
from memstore.testing.clusters.namespaces import NamespaceRig, available
from memstore.testing.clusters.processes import wait_for

pytestmark = [pytest.mark.root, pytest.mark.skipif(available() is not None, reason=str(available()))]
HANG_S = 2.0
LISTEN = """
import sys, time
from memstore.inplace.lifelines import Lifelines
lifelines = Lifelines("run", float(sys.argv[1]))
print(lifelines.port, flush=True)
while True:
    for rank, end in lifelines.take_lost({0: 1, 1: 1}, time.monotonic()).items():
        print(rank, end.name, flush=True)
    time.sleep(0.05)
"""
RANK = """
import os, subprocess, sys, time
argv = [sys.executable, "-I", "-S", sys.argv[1], str(os.getpid()), *sys.argv[2:]]
watchdog = subprocess.Popen(argv, stdin=subprocess.PIPE)
while True:
    watchdog.stdin.write(b".")
    watchdog.stdin.flush()
    time.sleep(0.05)
"""


class Listener:
    """The process that replaces lost ranks, on host `c`."""

    def __init__(self, rig: NamespaceRig) -> None:
        self.rig = rig
        self.process = rig.popen("c", [sys.executable, "-c", LISTEN, str(HANG_S)], stdout=subprocess.PIPE, text=True)
        self.port = int(self.process.stdout.readline())

    def start_rank(self, host: str, rank: int) -> None:
        """Start a rank with its watchdog on a host, and wait until they are connected."""
        arguments = (self.rig.address("c"), self.port, "run", rank, 1, 60.0)
        self.rig.popen(host, [sys.executable, "-c", RANK, watchdog.__file__, *map(str, arguments)])
        port = f":{self.port:04X} "

        def is_connected() -> bool:
            pids = self.rig.processes(host)
            return any(f"{port}01" in line for pid in pids for line in open(f"/proc/{pid}/net/tcp"))

        wait_for(is_connected, f"the watchdog of rank {rank}")

    def next_lost(self) -> str:
        """Return the next rank that is lost, and how."""
        return str(self.process.stdout.readline())


@pytest.fixture
def rig() -> Iterator[NamespaceRig]:
    with NamespaceRig(["a", "b", "c"]) as made:
        yield made


@pytest.mark.parametrize("direction", ["both", "from-host", "to-host"])
def test_the_ranks_of_a_host_that_is_cut_off_are_lost(rig: NamespaceRig, direction: str) -> None:
    """A link that loses only one direction is cut all the same. No other host's rank is lost."""
    listener = Listener(rig)
    listener.start_rank("a", 0)
    listener.start_rank("b", 1)
    if direction == "both":
        rig.cut("a")
    else:
        rig.block(*(("a", "c") if direction == "from-host" else ("c", "a")), one_way=True)
    assert listener.next_lost() == "0 SILENT\n"
    rig.cut("b")
    assert listener.next_lost() == "1 SILENT\n"


def test_a_host_whose_processes_do_not_run_is_not_lost(rig: NamespaceRig) -> None:
    """They are starved, or stopped for a while: the host's kernel answers for them."""
    listener = Listener(rig)
    listener.start_rank("a", 0)
    listener.start_rank("b", 1)
    for pid in rig.processes("a"):
        os.kill(pid, signal.SIGSTOP)
    rig.cut("b")
    assert listener.next_lost() == "1 SILENT\n"
    rig.kill("a")
    assert listener.next_lost() == "0 BROKEN\n"


def test_a_host_that_is_cut_off_for_a_moment_is_not_lost(rig: NamespaceRig) -> None:
    """The kernel may have ended the connection; the watchdog makes another one."""
    listener = Listener(rig)
    listener.start_rank("a", 0)
    rig.cut("a")
    listener.start_rank("b", 1)
    rig.heal("a")
    rig.cut("b")
    assert listener.next_lost() == "1 SILENT\n"
