"""Threads that move bulk bytes stand a little behind training for a core, and a holder not far behind its ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from memstore.shell.threads.priority import BULK_NICE, RankPriority, lower_thread_priority

HOLDER = """
import json, os, sys, threading
from memstore.shell.threads.priority import RankPriority, lower_thread_priority

is_lowered, may_end = threading.Event(), threading.Event()

def work():
    lower_thread_priority()
    is_lowered.set()
    may_end.wait()

thread = threading.Thread(target=work)
thread.start()
is_lowered.wait()
priority = RankPriority()
priority.follow([int(sys.argv[1])])
print(json.dumps([os.getpriority(os.PRIO_PROCESS, task) for task in (0, thread.native_id)] + [priority.behind]))
may_end.set()
"""
HOLDER_NICE = 7
AUTOGROUPS = Path("/proc/sys/kernel/sched_autogroup_enabled")
HAS_AUTOGROUPS = AUTOGROUPS.exists() and AUTOGROUPS.read_text().strip() == "1"
WITHOUT_RIGHT = ["setpriv", "--bounding-set", "-sys_nice", "--inh-caps", "-sys_nice"] if os.geteuid() == 0 else []


def holder(*prefix: str, has_session: bool = False) -> list[object]:
    """Return the nice values of the two threads of a process behind this one, once it has looked, and what it says."""
    command = ["nice", "-n", str(HOLDER_NICE), *prefix, sys.executable, "-c", HOLDER, str(os.getpid())]
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


@pytest.mark.skipif(os.geteuid() != 0, reason="needs the right to lower a nice value")
def test_a_holder_that_may_comes_forward_to_its_rank() -> None:
    """All of its threads, and those that give way stay behind the others."""
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    assert holder() == [nice, min(19, nice + BULK_NICE), ""]


def test_a_holder_that_may_not_says_so() -> None:
    """As in a container: it goes on, and `status` has the remedy."""
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    own = min(19, nice + HOLDER_NICE)
    says = f"nice {own}, a rank (process {os.getpid()}) nice {nice}"
    assert holder(*WITHOUT_RIGHT) == [own, min(19, own + BULK_NICE), says]


@pytest.mark.skipif(not HAS_AUTOGROUPS, reason="here nice values count between sessions too")
def test_a_rank_of_another_session_is_not_followed() -> None:
    """There nice values say nothing about the two."""
    own = min(19, os.getpriority(os.PRIO_PROCESS, 0) + HOLDER_NICE)
    assert holder(*WITHOUT_RIGHT, has_session=True) == [own, min(19, own + BULK_NICE), ""]


def test_a_process_that_is_gone_is_not_followed() -> None:
    """It may end between two looks."""
    gone = subprocess.Popen(["true"])
    gone.wait()
    priority = RankPriority()
    priority.follow([gone.pid])
    assert priority.behind == ""
