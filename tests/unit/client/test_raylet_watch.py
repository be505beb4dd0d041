"""A holder or controller does not outlive the raylet that started it (R3)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from memstore.shell.arena.lock import is_alive, process_start_time
from memstore.testing.clusters.processes import wait_for

CHILD = (
    "import time; from memstore.shell.on_ray.actors import end_with_parent; end_with_parent(); "
    "print('up', flush=True); "
)
PARENT = (
    "import subprocess, sys; "
    "child = subprocess.Popen([sys.executable, '-c', sys.argv[1]], stdout=subprocess.PIPE, text=True); "
    "child.stdout.readline(); print(child.pid, flush=True); child.wait()"
)


@pytest.mark.timeout(600)
def test_a_process_whose_parent_is_killed_ends() -> None:
    """The child of a killed process is gone soon after, although it got no message.

    While the parent lived it stayed.
    """
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, CHILD + "time.sleep(40)"], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    start = process_start_time(child)
    assert start is not None
    try:
        parent.send_signal(signal.SIGKILL)
        parent.wait(timeout=120)
        wait_for(lambda: not is_alive(child, start), "the orphan to end", 20.0)
    finally:
        parent.stdout.close()
        if is_alive(child, start):
            os.kill(child, signal.SIGKILL)
