"""What a nursery forks is a process like one that was started: killed and frozen alone, with its own exit code."""

from __future__ import annotations

import json
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from memstore.testing.clusters import processes
from memstore.testing.clusters.nursery import ForkedProcess, Nursery


def forked(log: Path, **spec: Any) -> ForkedProcess:
    """Fork a process of a cluster, which reads this specification."""
    assert processes.shared_nursery is not None
    nursery = processes.shared_nursery()
    pid, channel = nursery.fork({})
    process = ForkedProcess(nursery, pid)
    with channel:
        if spec:
            channel.sendall(json.dumps({"folder": "", "log": str(log), **spec}).encode())
        else:
            with pytest.raises(subprocess.TimeoutExpired):  # it waits for the rest
                process.wait(timeout=0.01)
            process.send_signal(signal.SIGSTOP)
            process.kill()
            assert process.wait(timeout=60) == -signal.SIGKILL
    return process


def test_a_killed_process_is_reported_by_its_signal(tmp_path: Path) -> None:
    """Stopped or not; a signal that comes after its end goes nowhere."""
    process = forked(tmp_path / "log")
    assert process.poll() == -signal.SIGKILL
    process.kill()
    assert process.wait(timeout=0.0) == -signal.SIGKILL


def test_a_process_that_fails_leaves_its_error_in_its_log(tmp_path: Path) -> None:
    process = forked(tmp_path / "log", config={"stor": "x"}, membership=str(tmp_path), secret="00", role="holder")
    assert process.wait(timeout=60) == 1
    assert "ConfigError" in (tmp_path / "log").read_text()


def test_a_nursery_outlives_the_thread_that_started_it() -> None:
    with ThreadPoolExecutor(1) as threads:
        nursery = threads.submit(Nursery, "memstore.testing.clusters.process_main").result()
    with nursery:
        pid, channel = nursery.fork({})
        with channel:
            process = ForkedProcess(nursery, pid)
            process.kill()
            assert process.wait(timeout=60) == -signal.SIGKILL
