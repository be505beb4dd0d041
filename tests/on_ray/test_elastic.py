"""An elastic Ray Train run loses a host, goes on with fewer ranks, gets a host, goes on with more (R27)."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from repository import ROOT

import memstore
from memstore.testing.clusters.embedded import EmbeddedCluster
from memstore.testing.clusters.processes import wait_for

EXAMPLE = ROOT / "examples" / "ray_train_elastic.py"
DEADLINE_S = 240.0
FIRST = re.compile(r"(\d+) ranks: first step (\d+), state ([0-9a-f]+)")
STEP = re.compile(r"(\d+) ranks: step (\d+) loss \S+ state ([0-9a-f]+)")
pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.slow, pytest.mark.drill, pytest.mark.timeout(900)]


class Run:
    """The example as a user runs it, and what it says."""

    def __init__(self, cluster: EmbeddedCluster, tmp_path: Path) -> None:
        own = {
            "RAY_ADDRESS": cluster.address,
            "HOME": str(tmp_path),
            "PYTHONUNBUFFERED": "1",
            "RAY_DEDUP_LOGS": "0",
            "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
            "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "5",
        }
        command = [
            sys.executable,
            str(EXAMPLE),
            "--store",
            cluster.config.store,
            "--steps",
            "100000",
            "--look-every-s",
            "2",
        ]
        self.process = subprocess.Popen(
            command, env={**os.environ, **own}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.lines: list[str] = []
        self.reader = threading.Thread(target=self._read)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.lines.extend(iter(self.process.stdout.readline, ""))

    def end(self) -> None:
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(timeout=120)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(timeout=120)
        self.reader.join(timeout=120)
        assert self.process.stdout is not None
        self.process.stdout.close()

    def states(self) -> dict[int, set[str]]:
        """Step -> digests of the whole state that was put at it."""
        found: dict[int, set[str]] = {}
        for _, step, state in STEP.findall("".join(self.lines)):
            found.setdefault(int(step), set()).add(state)
        return found

    def starts(self) -> list[tuple[int, int, str]]:
        """World size, first step and restored state of every launch."""
        found = dict.fromkeys(FIRST.findall("".join(self.lines)))  # Ray Train shows some lines twice
        return [(int(size), int(step), state) for size, step, state in found]

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        def tail() -> str:
            said = [line for line in self.lines if "PlacementGroupCleaner" not in line]  # repeats itself without end
            return "".join(said[-100:])

        def look() -> bool:
            assert self.process.poll() is None, f"the example ended before {what}:\n{tail()}"
            return condition()

        wait_for(look, what, DEADLINE_S, seen=tail)

    def wait_trains_with(self, ranks: int) -> None:
        """Wait until a launch of that many ranks, newer than what is known now, has put three steps."""
        known = len(STEP.findall("".join(self.lines)))

        def is_there() -> bool:
            return [size for size, _, _ in STEP.findall("".join(self.lines))[known:]].count(str(ranks)) >= 3

        self.wait(is_there, f"{ranks} ranks to train")


def test_training_goes_on_with_fewer_hosts_and_with_more(tmp_path: Path) -> None:
    """4 ranks, a host is lost with its memory, 3 go on; a host comes, 4 go on: each from the state last committed."""
    with EmbeddedCluster({f"h{n}": {} for n in range(1, 5)}, cpus_per_host=1) as cluster:
        run = Run(cluster, tmp_path)
        try:
            run.wait_trains_with(4)
            # Rank 0 prints, and the first host is Ray's head.
            [job] = memstore.status(config=cluster.config).jobs
            victim = next(h for h in ("h4", "h3", "h2") if h != job["rank_hosts"]["0"])
            cluster.lose_host(victim)
            run.wait_trains_with(3)
            cluster.add_node("h5", {})
            run.wait_trains_with(4)
        finally:
            run.end()
        starts, states = run.starts(), run.states()
    assert [size for size, _, _ in starts[:1]] == [4]
    assert [size for size, _, _ in starts].count(3) >= 1
    assert starts[-1][0] == 4
    for size, first, state in starts[1:]:
        assert first > 0, f"{size} ranks started from nothing"
        assert state in states[first - 1], f"{size} ranks restored {state} as step {first - 1}: {states[first - 1]}"
