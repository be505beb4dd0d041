"""Nodes that end under Ray: one is taken away (R29), or all at once while hosts' memory stays (R5, R17, R24)."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import FIRST_COMPLETED, wait
from typing import Any

import msgspec
import pytest
from ray_job import ray_job

from memstore.drills.ranks.ranks import collect
from memstore.shell.on_ray.actors import RayMembership
from memstore.testing.clusters.embedded import EmbeddedCluster
from memstore.testing.clusters.processes import wait_for
from memstore.testing.ranks.rank import Restored

pytest.importorskip("ray")

pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.timeout(600)]


# -- ray drain ----------------------------------------------------------------------------------------
# A node that Ray will take away: the store learns of it from Ray and does without it before its moment (R29).


ray = pytest.importorskip("ray")


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


# -- ray restart --------------------------------------------------------------------------------------
# All of Ray dies at once; the hosts' memory does not (R5, R17, R24). One host comes back late.


LATE_S = 20.0  # long after the others serve, within recovery_grace_s
GRACE_S = 90.0  # a busy machine takes many seconds more to start a raylet and its holder


def test_every_ray_process_killed_and_a_host_twenty_seconds_late() -> None:
    """The newest committed step comes back although the only host of one shard is 20 s late."""
    hosts = {"h1": {"rack": "r1"}, "h2": {"rack": "r2"}, "h3": {"rack": "r3"}}
    first = EmbeddedCluster(hosts, cpus_per_host=3)
    first.config = first.config.with_fields({"recovery_grace_s": GRACE_S})
    try:
        first.start()
        job = ray_job(first, replicas=1)  # so that no other process can stand in for the late host
        job.start(["h1", "h2", "h3"])
        job.train(0, 3, "before the end")
        job.leave()
        job.ranks = []  # a later use of their handles would start another Ray

        first.kill_everything()

        again = EmbeddedCluster({"h1": hosts["h1"], "h2": hosts["h2"]}, cpus_per_host=3, config=first.config)
        try:
            again.start()
            job = ray_job(again, job.name, replicas=1)
            job.stand_by(["h1", "h2", "h1"])  # rank 2 has to move: its host is not there yet
            job.restart()
            calls = job.all("restore", timeout_s=120.0)
            done, _ = wait(calls, timeout=LATE_S, return_when=FIRST_COMPLETED)
            assert not done, "a get ended without the host that holds the newest step"

            again.add_node("h3", hosts["h3"])
            restored = msgspec.convert(collect(calls, "get", 120.0), list[Restored])
            assert [(found.step, found.problem) for found in restored] == [(3, "")] * 3
        finally:
            again.stop()
    finally:
        first.stop()
