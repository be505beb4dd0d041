"""The numbers as Prometheus would read them, from Ray's own endpoint: after puts, a killed holder and a restore."""

from __future__ import annotations

import os
import signal
import urllib.request
from collections.abc import Callable
from typing import Any

import pytest

ray = pytest.importorskip("ray")

from prometheus_client.parser import text_string_to_metric_families  # noqa: E402
from ray_job import ray_job  # noqa: E402

import memstore  # noqa: E402
from memstore.shell.on_ray.actors import RayMembership  # noqa: E402
from memstore.testing.clusters import processes  # noqa: E402
from memstore.testing.clusters.embedded import EmbeddedCluster  # noqa: E402

pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.timeout(600)]
STEPS = 3
LIMIT_S = 90.0
Numbers = dict[tuple[str, ...], float]


def scraped(store: str) -> Numbers:
    """Return (name, our tags' values...) -> value, summed over the nodes' endpoints and the actors behind them."""
    found: Numbers = {}
    for node in ray.nodes():
        if node["Alive"]:
            url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
            with urllib.request.urlopen(url, timeout=20) as reply:
                text = reply.read().decode()
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    labels = sample.labels
                    if sample.name.startswith("ray_memstore_") and labels.get("store") == store and "le" not in labels:
                        tags = [
                            labels[k]
                            for k in ("job_name", "host", "tier", "verdict", "degraded", "state")
                            if k in labels
                        ]
                        key = (sample.name.removeprefix("ray_memstore_"), *tags)
                        found[key] = found.get(key, 0.0) + sample.value
    return found


def wait_for(store: str, what: str, is_there: Callable[[Numbers], Any]) -> Numbers:
    """Return the first numbers of which `is_there` is true."""
    numbers: Numbers = {}

    def look() -> Any:
        nonlocal numbers
        numbers = scraped(store)
        return is_there(numbers)

    processes.wait_for(look, what, LIMIT_S, seen=lambda: numbers)
    return numbers


def test_the_endpoint_has_the_right_numbers() -> None:
    """Commits, bytes, stalls, arena; then the death of the holder; then a restore from what it left, byte for byte.

    One host cannot hold the two copies that are asked for, so there is something to count on every gauge.
    """
    with EmbeddedCluster({"h1": {}}, cpus_per_host=3, ray_settings={"metrics_report_interval_ms": 500}) as cluster:
        store = cluster.config.store
        job = ray_job(cluster, "job")
        job.start(["h1"])
        assert [found.error for found in job.restore()] == ["None"], "a new job has no history"
        job.train(0, STEPS - 1, "a step")
        [shard_bytes] = {row.nbytes for row in job.site.job(job.name).steps}  # of one rank
        job.leave()

        now = wait_for(store, "the commits", lambda n: n.get(("commits_total", "job", "yes")) == STEPS)
        assert now["time_to_commit_seconds_count", "job"] == STEPS
        assert ("commits_total", "job", "no") not in now
        assert ("time_to_redundant_seconds_count", "job") not in now
        assert now["put_bytes_total", "job"] == STEPS * shard_bytes
        now = wait_for(store, "every stall", lambda n: n.get(("put_stall_seconds_count", "job", "h1")) == STEPS)
        assert now["put_stall_seconds_sum", "job", "h1"] > 0
        now = wait_for(store, "the closed job", lambda n: n.get(("job_running", "job")) == 0)
        assert (now["committed_step", "job"], now["shards_below_replicas", "job"]) == (STEPS - 1, 1)
        assert (now["hosts", "live"], now["hosts", "dead"]) == (1, 0)
        later = wait_for(store, "a later look", lambda n: n["degraded_seconds", "job"] > now["degraded_seconds", "job"])
        assert later["commit_age_seconds", "job"] == 0  # a closed job grows no older
        [row] = memstore.status(config=cluster.config).hosts
        wait_for(store, "the arena", lambda n: n.get(("arena_used_bytes", "h1")) == row["stats"]["used_bytes"])

        os.kill(RayMembership(store).hosts()["h1"]["pid"], signal.SIGKILL)
        wait_for(store, "the death", lambda n: n.get(("host_deaths_total", "h1")) == 1)
        wait_for(store, "the successor", lambda n: n.get(("hosts", "live")) == 1 and ("arena_used_bytes", "h1") in n)
        job.join(fresh=False)
        [found] = job.restore()
        assert (found.step, found.problem, found.verdict) == (STEPS - 1, "", "local")
        now = wait_for(store, "the restore", lambda n: n.get(("restores_total", "job", "local")) == 1)
        assert now["restored_bytes_total", "job", "local"] == shard_bytes
        assert ("restored_bytes_total", "job", "peer") not in now
        assert now["restores_total", "job", "none"] == 1
        assert now["restore_seconds_count", "job"] == 1
        assert ("steps_lost_total", "job") not in now
