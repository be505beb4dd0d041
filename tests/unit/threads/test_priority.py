"""Threads that move bulk bytes stand a little behind training for a core, and a holder not behind its ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from memstore.shell.threads.priority import BULK_NICE, RankPriority, lower_thread_priority
from memstore.testing.clusters.process_rights import may_lower_nice

HOLDER = """
import json, os, sys, threading
from memstore.shell.threads.priority import RankPriority, lower_thread_priority

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
