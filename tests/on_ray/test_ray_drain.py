"""A node that Ray will take away: the store learns of it from Ray and does without it before its moment (R29)."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

ray = pytest.importorskip("ray")

from ray_job import ray_job  # noqa: E402

from memstore.shell.on_ray.actors import RayMembership  # noqa: E402
from memstore.testing.clusters.embedded import EmbeddedCluster  # noqa: E402
from memstore.testing.clusters.processes import wait_for  # noqa: E402

pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.timeout(600)]
NOTICE_S = 120


def test_a_node_drained_by_ray_is_evacuated() -> None:
    """The preemption notice reaches the store by itself; when the host dies every shard still has two copies."""
    hosts = {"h1": {"rack": "r1"}, "h2": {"rack": "r2"}, "h3": {"rack": "r1"}}
    with EmbeddedCluster(hosts, cpus_per_host=3) as cluster:
        job = ray_job(cluster)
        job.start(["h1", "h2", "h3"])
        job.train(0, 2, "before the notice")
        job.leave()

        def host(name: str) -> dict[str, Any]:
            return next(row for row in cluster.status()["hosts"] if row["host"] == name)

        node = RayMembership(cluster.config.store).hosts()["h3"]["node"]
        notice = [sys.executable, "-m", "ray.scripts.scripts", "drain-node", "--address", cluster.address,
                  "--node-id", node, "--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "spot",
                  "--deadline-remaining-seconds", str(NOTICE_S)]  # fmt: skip
        subprocess.run(notice, check=True, capture_output=True, timeout=120)

        due_s = wait_for(lambda: host("h3")["drains_s"], "the notice to reach the store")
        assert 0 < due_s <= NOTICE_S
        wait_for(lambda: host("h3")["drain_left"] == 0, "the store to do without h3")
        cluster.lose_host("h3")
        wait_for(lambda: host("h3")["status"] == "dead", "its death to be noticed")
        newest = job.newest()
        assert (newest.committed_step, newest.copies) == (2, 2)
