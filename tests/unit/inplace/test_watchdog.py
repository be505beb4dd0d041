"""A rank that is frozen is killed by its watchdog; one that computes, is starved or pauses is not."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memstore.inplace.watchdog import ALIVE, is_frozen

HANG_S = 1.0
ARRIVES_S = 30.0
RANK = """
import ctypes, sys, time
from memstore.inplace.meeting import MeetingPlace
from memstore.inplace.watchdog_process import WatchdogProcess
place = MeetingPlace(
    address="127.0.0.1", port=0, run="run", rank=7, life=2, first=0, world_size=8, launcher="", backend="gloo",
    collective_timeout_s=60.0, lifeline_port=int(sys.argv[1]), hang_after_s=1.0,
)
watchdog = WatchdogProcess(place)
print("ready", flush=True)
for line in sys.stdin:
    if line == "compute\\n":  # one call, in which no other thread of this process runs Python
        begin_s = time.monotonic()
        3 ** 9_000_000
        print(time.monotonic() - begin_s, flush=True)
    if line == "sleep\\n":  # PyDLL keeps the interpreter
        ctypes.PyDLL(None).sleep(30)
watchdog.close()
"""
SERVER = """
import sys, time
from memstore.inplace.meeting import MeetingServer
server = MeetingServer(2, 1.0)
print(server.port, server.lifeline_port, server.run, flush=True)
server.register(0)
server.register(1)
server.begin(0)
while len(server._lifelines._roll._known) < int(sys.argv[1]):
    server.take_lost(time.monotonic())
    time.sleep(0.05)
print("there", flush=True)
while True:
    for rank in server.take_lost(time.monotonic()):
        print("lost", rank, flush=True)
    time.sleep(0.05)
"""
WATCHED = """
import sys
from memstore.inplace.meeting import Meeting, MeetingPlace
from memstore.inplace.watcher import Watcher
port, lifeline, run, rank = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
place = MeetingPlace(
    address="127.0.0.1", port=port, run=run, rank=rank, life=1, first=0, world_size=2, launcher="", backend="gloo",
    collective_timeout_s=60.0, lifeline_port=lifeline, hang_after_s=1.0,
)
watcher = Watcher(Meeting(place), lambda: None)
watcher.guard(0)
print("ready", flush=True)
sys.stdin.readline()
watcher.close()
"""


def test_a_process_is_frozen_if_it_is_silent_and_none_of_its_threads_goes_on() -> None:
    """Silence alone is what a starved host or a long computation shows as well."""
    assert is_frozen([False] * 12, 12)
    assert not is_frozen([False] * 11, 12)
    assert not is_frozen([True] * 12, 12)
    assert is_frozen([True, *[False] * 11], 12)
    assert not is_frozen([True, False, False] * 4, 12)


@given(st.lists(st.booleans(), max_size=60), st.integers(2, 20))
def test_however_long_a_process_computed_it_is_frozen_once_it_did_nothing_for_long_enough(
    looks: list[bool], limit: int
) -> None:
    """Only what was seen within the limit counts."""
    assert is_frozen([*looks, *[False] * limit], limit)
    assert not is_frozen([*looks, *[True] * limit], limit)


FORKS = """
import os
make_pipe = os.pipe
held, let_go = make_pipe()
def pipe_and_fork():
    ends = make_pipe()
    if os.fork() == 0:  # as another thread does that starts a data loader's worker, which lives on
        os.closerange(0, 3)
        os.read(held, 1)
        os._exit(0)
    return ends
os.pipe = pipe_and_fork
"""


class Line:
    """What a rank's watchdogs say, as the process that replaces lost ranks gets it."""

    def __init__(self) -> None:
        self.server = socket.create_server(("127.0.0.1", 0))
        self.server.settimeout(ARRIVES_S)

    def next_watchdog(self) -> None:
        """Wait for the next watchdog: it is there, and watches."""
        sock, _ = self.server.accept()
        sock.settimeout(ARRIVES_S)
        self.file = sock.makefile()
        sock.close()  # once the file is
        assert self.file.readline() == "run 7 2\n"

    def last_word(self) -> str:
        """Return what the watchdog says at its end, beside that it goes on."""
        with self.file:
            return self.file.read().replace(ALIVE.decode(), "")


@pytest.fixture
def line() -> Iterator[Line]:
    made = Line()
    yield made
    made.server.close()


@pytest.fixture
def program() -> str:
    """What the rank runs."""
    return RANK


@pytest.fixture
def rank(line: Line, program: str) -> Iterator[subprocess.Popen[str]]:
    """A process with a watchdog; it does what a line of its input says."""
    port = str(line.server.getsockname()[1])
    with subprocess.Popen(
        [sys.executable, "-c", program, port], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        line.next_watchdog()
        yield process
        process.kill()


def tell(rank: subprocess.Popen[str], what: str) -> None:
    """Let a rank do something."""
    assert rank.stdin is not None
    rank.stdin.write(f"{what}\n")
    rank.stdin.flush()


def test_a_stopped_rank_is_killed(rank: subprocess.Popen[str], line: Line) -> None:
    """SIGKILL ends a stopped process, so its peers' connections break at once."""
    rank.send_signal(signal.SIGSTOP)
    assert rank.wait(ARRIVES_S) == -signal.SIGKILL
    assert line.last_word() == "frozen\n"


def test_a_rank_that_waits_while_it_holds_the_interpreter_is_killed(rank: subprocess.Popen[str], line: Line) -> None:
    """Nothing of it goes on, though its process is not stopped."""
    tell(rank, "sleep")
    assert rank.wait(ARRIVES_S) == -signal.SIGKILL
    assert line.last_word() == "frozen\n"


def test_a_rank_that_computes_while_it_holds_the_interpreter_is_left_alone(
    rank: subprocess.Popen[str], line: Line
) -> None:
    """It says nothing for longer than the limit, but it goes on."""
    tell(rank, "compute")
    assert rank.stdin is not None
    assert rank.stdout is not None
    assert float(rank.stdout.readline()) > 1.5 * HANG_S
    rank.stdin.close()
    assert rank.wait(ARRIVES_S) == 0
    assert line.last_word() == "bye\n"


def test_a_rank_that_dies_is_gone_at_once(rank: subprocess.Popen[str], line: Line) -> None:
    """Its watchdog outlives it for as long as it takes to say so."""
    rank.kill()
    assert line.last_word() == "gone\n"


def watchdog_of(rank: subprocess.Popen[str]) -> int:
    """Return the watchdog's process."""
    threads = Path(f"/proc/{rank.pid}/task").glob("*/children")
    (found,) = [int(pid) for thread in threads for pid in thread.read_text().split()]
    return found


def test_a_watchdog_that_is_killed_is_started_again(rank: subprocess.Popen[str], line: Line) -> None:
    """A rank without one would freeze unseen."""
    os.kill(watchdog_of(rank), signal.SIGKILL)
    assert line.last_word() == ""
    line.next_watchdog()
    rank.send_signal(signal.SIGSTOP)
    assert rank.wait(ARRIVES_S) == -signal.SIGKILL
    assert line.last_word() == "frozen\n"


@pytest.mark.parametrize("program", [FORKS + RANK + "os.write(let_go, b'.' * 9)"])
def test_a_rank_that_forks_while_its_watchdog_is_started_is_left_alone(rank: subprocess.Popen[str], line: Line) -> None:
    """What is forked keeps every pipe open that is there then; the thread that beats waits for none of them."""
    assert rank.stdin is not None
    rank.stdin.close()
    assert rank.wait(ARRIVES_S) == 0
    assert line.last_word() == "bye\n"


def test_no_rank_is_killed_because_the_process_that_replaces_ranks_is_paused() -> None:
    """A rank asks it whether its generation is over, and gets no answer; its beats wait for nothing."""
    piped = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", SERVER, "1"], **piped) as server:
        words = server.stdout.readline().split()
        with subprocess.Popen([sys.executable, "-c", WATCHED, *words, "0"], **piped) as rank:
            assert (rank.stdout.readline(), server.stdout.readline()) == ("ready\n", "there\n")
            server.send_signal(signal.SIGSTOP)
            with pytest.raises(subprocess.TimeoutExpired):
                rank.wait(3 * HANG_S)
            server.send_signal(signal.SIGCONT)
            rank.send_signal(signal.SIGSTOP)
            assert rank.wait(ARRIVES_S) == -signal.SIGKILL
            assert server.stdout.readline() == "lost 0\n"
        server.kill()


def test_a_rank_that_is_stopped_with_its_watchdog_is_lost_while_another_one_speaks() -> None:
    """As a pause of their container does: nothing of it can speak, and its host's kernel answers every probe."""
    piped = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", SERVER, "2"], **piped) as server:
        words = server.stdout.readline().split()
        ranks = [subprocess.Popen([sys.executable, "-c", WATCHED, *words, str(rank)], **piped) for rank in range(2)]
        try:
            for rank in ranks:
                assert rank.stdout.readline() == "ready\n"
            assert server.stdout.readline() == "there\n"
            for pid in (watchdog_of(ranks[1]), ranks[1].pid):
                os.kill(pid, signal.SIGSTOP)
            assert server.stdout.readline() == "lost 1\n"
            assert ranks[0].poll() is None
        finally:
            os.kill(watchdog_of(ranks[1]), signal.SIGKILL)
            for rank in ranks:
                rank.kill()
                rank.wait()
                for pipe in (rank.stdin, rank.stdout):
                    pipe.close()
            server.kill()
