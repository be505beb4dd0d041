"""An example learns of its node's end. In a module of its own: a process can be in one Ray cluster at a time."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from example_runs import DEADLINE_S, EXAMPLES, command_of, environment, kill_all, wait_committed

from memstore.shell.on_ray.actors import RayMembership
from memstore.testing.clusters.embedded import EmbeddedCluster
from memstore.testing.clusters.processes import wait_for

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.long
def test_ray_train_learns_of_a_preemption(tmp_path: Path) -> None:
    """The node of a rank is drained while it trains.

    Every rank is informed which ranks lose it, and commits its step.
    """
    with EmbeddedCluster({"h1": {"rack": "r1"}, "h2": {"rack": "r2"}}, cpus_per_host=2) as cluster:
        env = {**environment(cluster, tmp_path), "RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S": "0.5"}
        command = command_of("ray_train.py", cluster, "preempted", "--preemption", "--steps", "100000")
        with (tmp_path / "out").open("wb") as out:
            launch = subprocess.Popen(command, env=env, cwd=EXAMPLES.parent, stdout=out, stderr=subprocess.STDOUT)
        try:
            wait_committed(cluster, "preempted", 3, launch)
            drained = RayMembership(cluster.config.store).hosts()["h2"]["node"]
            subprocess.run(
                [sys.executable, "-m", "ray.scripts.scripts", "drain-node", "--address", cluster.address,
                 "--node-id", drained, "--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "spot",
                 "--deadline-remaining-seconds", "600"], check=True, capture_output=True, timeout=DEADLINE_S,
            )  # fmt: skip
            reported = re.compile(r"rank (\d): ranks \[\d\] lose their node, step \d+ is safe")

            def output() -> str:
                return (tmp_path / "out").read_text()

            def is_reported() -> bool:
                assert launch.poll() is None, output()[-3000:]
                return {found[1] for found in reported.finditer(output())} == {"0", "1"}

            wait_for(is_reported, "both ranks to be reported", DEADLINE_S, seen=lambda: output()[-3000:])
        finally:
            kill_all(launch)
