"""Errors as a caller reads them: the line that matters, without the threads that it came through."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
import traceback
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path
from types import SimpleNamespace

import pytest

from memstore.core.wire.handshake import HolderIdentity
from memstore.core.wire.ids import Endpoint
from memstore.errors import PeerTimeout, PeerUnreachable, RecoveryError, TransportError
from memstore.shell import threads
from memstore.shell.net.channel import Pacing
from memstore.shell.peer.chunk_frames import Damage
from memstore.shell.peer.client import PeerClient
from memstore.shell.threads import (
    BULK_NICE,
    OwnThreads,
    ProgressLog,
    RankPriority,
    answer_of,
    await_ended,
    lower_thread_priority,
)
from memstore.testing.clusters.processes import may_lower_nice, wait_for


def fail() -> None:
    raise RecoveryError("no whole step")


def test_an_error_comes_without_the_frames_of_other_threads() -> None:
    """What is raised is the same error; its traceback begins with the caller and ends where it asked."""
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(fail)
        with pytest.raises(RecoveryError, match="no whole step") as caught:
            answer_of(asked, 10.0)
    frames = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert frames[-1] == "answer_of"
    assert "fail" not in frames
    assert "concurrent" not in "".join(traceback.format_exception(caught.value))


def test_long_work_is_told_with_all_that_its_threads_have_done(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A line in each period, of work that takes as long; none of shorter work."""
    caplog.set_level(logging.INFO, "memstore")
    clock_s = [100.0]
    monkeypatch.setattr(threads, "time", SimpleNamespace(monotonic=lambda: clock_s[0]))
    told = ProgressLog("job rank 0: copying", 10 << 30)
    for _ in range(5):
        with ThreadPoolExecutor(2) as pool:
            for done in [pool.submit(told.add, 1 << 30) for _ in range(2)]:
                done.result()
        clock_s[0] += 0.6 * ProgressLog.PERIOD_S
    assert [record.message for record in caplog.records] == [
        "memstore job rank 0: copying: 5.0 GiB of 10.0 GiB",
        "memstore job rank 0: copying: 9.0 GiB of 10.0 GiB",
    ]


def test_an_answer_is_returned_and_waited_for() -> None:
    future: Future[int] = Future()
    with pytest.raises(FutureTimeout):
        answer_of(future, 0.0)
    future.set_result(3)
    assert answer_of(future) == 3


@pytest.mark.parametrize("package", ["ray", "torch"])
def test_a_missing_package_is_named_with_its_remedy(package: str) -> None:
    """Importing memstore works without it; using what needs it says what to install."""
    code = (
        f"import sys; sys.modules[{package!r}] = None; import memstore\n"
        "for name in ('start', 'connect'):\n"
        "    try:\n        getattr(memstore, name)\n"
        "    except memstore.ConfigError as error:\n        print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert f"needs the package {package}" in done.stdout
    assert "pip install" in done.stdout


# -- test own threads ---------------------------------------------------------------------------------
# OwnThreads: no key's work waits behind another's, and threads without work end.


NAME = "own-threads-test"


def named() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(NAME)]


def test_a_key_that_hangs_holds_up_no_other_and_idle_threads_end() -> None:
    """All threads of one key wait; another key's work is done, in order, what raises among it."""
    threads, gate, done = OwnThreads(2, NAME), threading.Event(), list[int]()
    for _ in range(5):
        threads.submit("hangs", gate.wait)
    wait_for(lambda: len(named()) == 2, "both threads of the key that hangs")
    threads.submit("other", int, "no number")
    for number in range(20):
        threads.submit("other", done.append, number)
    wait_for(lambda: len(done) == 20, "the other key's work")
    wait_for(lambda: len(named()) == 2, "the other key's threads to end")
    gate.set()
    wait_for(lambda: not named(), "all threads to end")
    threads.submit("hangs", done.append, 20)
    wait_for(lambda: 20 in done, "work of a key whose threads had ended")
    threads.close()


def test_after_close_nothing_is_begun() -> None:
    """What waits behind work under way is dropped, and so is what comes later."""
    threads, gate, done = OwnThreads(1, NAME), threading.Event(), list[int]()
    began = threading.Event()
    threads.submit("key", lambda: (began.set(), gate.wait()))
    threads.submit("key", done.append, 1)
    began.wait(30.0)
    threads.close()
    threads.submit("key", done.append, 2)
    threads.submit("new", done.append, 3)
    gate.set()
    wait_for(lambda: not named(), "the thread to end")
    assert not done


# -- test pool work -----------------------------------------------------------------------------------
# Work of a pool that is shut down has ended, also what had not begun; a peer that goes ends the pushes to it.


WAIT_S = 30.0


def test_work_that_was_cancelled_has_ended() -> None:
    """`concurrent.futures.wait` would wait for ever: no worker has taken it."""
    go = threading.Event()
    pool = ThreadPoolExecutor(1)
    begun, queued = pool.submit(go.wait, WAIT_S), pool.submit(int)
    pool.shutdown(wait=False, cancel_futures=True)
    with ThreadPoolExecutor(1) as threads:
        waits = threads.submit(await_ended, [queued, begun])
        assert not waits.done()
        go.set()
        waits.result(WAIT_S)
    assert queued.cancelled()
    assert begun.done()


def test_an_error_of_the_work_is_no_error_of_the_wait() -> None:
    """It stays in its future."""
    with ThreadPoolExecutor(1) as pool:
        failed = pool.submit(int, "x")
        late = pool.submit(lambda: (_ for _ in ()).throw(TimeoutError("of the work")))
        await_ended([failed, late])
    assert isinstance(failed.exception(), ValueError)
    assert isinstance(late.exception(), TimeoutError)


def peer_of_one_stream() -> PeerClient:
    """Return the client of a host that nothing has to answer for."""
    return PeerClient(
        "h2",
        [Endpoint("127.0.0.1", 1)],
        secret=b"s",
        store="s",
        identity=HolderIdentity(host="h1", incarnation=1),
        streams=1,
        damage=Damage(),
        pacing=Pacing(0, 0, 4 << 20),
    )


def test_a_push_to_a_peer_that_goes_ends() -> None:
    """Batches that wait for a stream are cancelled; their push would keep one of the few threads for ever."""
    peer = peer_of_one_stream()
    is_begun, go = threading.Event(), threading.Event()

    def send(batch: list[int]) -> None:
        is_begun.set()
        go.wait(WAIT_S)

    with ThreadPoolExecutor(1) as threads:
        push = threads.submit(peer.over_streams, [[0], [1], [2]], send)
        assert is_begun.wait(WAIT_S)
        peer.close()
        go.set()
        with pytest.raises(PeerUnreachable, match="host h2 is gone"):
            push.result(WAIT_S)


@pytest.mark.parametrize(("error", "begun"), [(PeerTimeout("silent"), [[0]]), (PeerUnreachable("reset"), [[0], [1]])])
def test_a_silence_is_paid_for_once(error: TransportError, begun: list[list[int]]) -> None:
    """Batches that have not begun would each wait as long for the same peer; after a reset they are sent."""
    done = []

    def fetch(batch: list[int]) -> None:
        done.append(batch)
        if batch == [0]:
            raise error

    peer = peer_of_one_stream()
    with pytest.raises(type(error), match=str(error)):
        peer.over_streams([[0], [1]], fetch)
    peer.close()
    assert done == begun


# -- test priority ------------------------------------------------------------------------------------
# Threads that move bulk bytes stand a little behind training for a core, and a holder not behind its ranks.


HOLDER = """
import json, os, sys, threading
from memstore.shell.threads import RankPriority, lower_thread_priority

may_end = threading.Event()

def started(work):
    is_there = threading.Event()
    def run():
        work()
        is_there.set()
        may_end.wait()
    thread = threading.Thread(target=run)
    thread.start()
    is_there.wait()
    return thread

def values():
    return [os.getpriority(os.PRIO_PROCESS, task) for task in (os.getpid(), bulk.native_id, late.native_id)]

bulk = started(lower_thread_priority)
priority, rank = RankPriority(), int(sys.argv[1])
priority.follow([rank])
late = started(lambda: os.setpriority(os.PRIO_PROCESS, 0, max(HOLDER_NICE, os.getpriority(os.PRIO_PROCESS, 0))))
priority.follow([rank])
found = [values(), priority.behind]
priority.follow([])
print(json.dumps([*found, values(), priority.behind]))
may_end.set()
"""
BEHIND = 7
WITHOUT_RIGHT = ["setpriv", "--bounding-set", "-sys_nice", "--inh-caps", "-sys_nice"] if may_lower_nice() else []


def holder(*prefix: str, has_session: bool = False) -> list[object]:
    """Return what a process behind this one has made of its threads while this one is its rank, and then without it.

    The nice values of its first thread, of one that moves bulk bytes, and of one that was started at the old value as
    it came forward; what it says; the same again.
    """
    own = min(19, os.getpriority(os.PRIO_PROCESS, 0) + BEHIND)
    script = HOLDER.replace("HOLDER_NICE", str(own))
    command = ["nice", "-n", str(BEHIND), *prefix, sys.executable, "-c", script, str(os.getpid())]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=60, start_new_session=has_session
    )
    found: list[object] = json.loads(done.stdout)
    return found


def test_a_thread_that_gives_way_leaves_the_others_alone() -> None:
    """By thread, not by process, no lower than there is, and no further with a second call."""
    found: list[int] = []

    def work() -> None:
        for _ in range(2):
            lower_thread_priority()
            found.append(os.getpriority(os.PRIO_PROCESS, 0))

    before = os.getpriority(os.PRIO_PROCESS, 0)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [min(19, before + BULK_NICE)] * 2
    assert os.getpriority(os.PRIO_PROCESS, 0) == before


@pytest.mark.skipif(not may_lower_nice(), reason="needs the right to lower a nice value")
@pytest.mark.parametrize("has_session", [False, True])
def test_a_holder_that_may_comes_forward_to_its_rank_and_goes_back(has_session: bool) -> None:
    """All of its threads; those that give way stay behind the others, as does one of which that is not known."""
    rank, own = os.getpriority(os.PRIO_PROCESS, 0), min(19, os.getpriority(os.PRIO_PROCESS, 0) + BEHIND)
    forward = [rank, min(19, rank + BULK_NICE), min(19, rank + BULK_NICE)]
    back = [own, min(19, own + BULK_NICE), min(19, own + BULK_NICE)]
    assert holder(has_session=has_session) == [forward, "", back, ""]


def test_a_holder_that_may_not_says_so() -> None:
    """As in a container: it goes on, and `status` has the remedy."""
    rank, own = os.getpriority(os.PRIO_PROCESS, 0), min(19, os.getpriority(os.PRIO_PROCESS, 0) + BEHIND)
    stays = [own, min(19, own + BULK_NICE), own]
    says = f"nice {own}, a rank (process {os.getpid()}) nice {rank}"
    assert holder(*WITHOUT_RIGHT) == [stays, says, stays, ""]


AUTOGROUPS, WEIGHT = Path("/proc/sys/kernel/sched_autogroup_enabled"), Path("/sys/fs/cgroup/cpu.weight")
GROUPS = [line for line in Path("/proc/self/cgroup").read_text().splitlines() if ":cpu" in line or line[:2] == "0:"]
IS_IN_ROOT = not WEIGHT.exists() and all(line.endswith(":/") for line in GROUPS)
HAS_AUTOGROUPS = AUTOGROUPS.exists() and AUTOGROUPS.read_text().strip() == "1" and IS_IN_ROOT


@pytest.mark.skipif(not HAS_AUTOGROUPS, reason="here nice values count between sessions too")
def test_of_a_rank_in_another_session_nothing_is_said_where_sessions_share_alike() -> None:
    """There its nice value does not put it before the holder."""
    assert holder(*WITHOUT_RIGHT, has_session=True)[1] == ""


def test_a_rank_that_is_gone_is_not_followed() -> None:
    """It may end between two looks."""
    gone = subprocess.Popen(["true"])
    gone.wait()
    priority = RankPriority()
    priority.follow([gone.pid])
    assert priority.behind == ""
