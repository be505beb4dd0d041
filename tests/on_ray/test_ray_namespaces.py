"""Raylets with a network each: one is cut off, its processes live on as zombies, and the job goes on (R3, R21; F6)."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from click.testing import CliRunner

ray = pytest.importorskip("ray")

from ray_job import ray_job  # noqa: E402

from memstore.cli import main  # noqa: E402
from memstore.config import MIB, Config  # noqa: E402
from memstore.testing.clusters.embedded import EmbeddedCluster  # noqa: E402
from memstore.testing.clusters.namespaces import NamespaceRig, available  # noqa: E402
from memstore.testing.clusters.processes import wait_for  # noqa: E402
from memstore.testing.clusters.scratch import scratch_store_name  # noqa: E402

pytestmark = [
    pytest.mark.ray,
    pytest.mark.root,
    pytest.mark.timeout(600),
    pytest.mark.skipif(available() is not None, reason=str(available())),
    pytest.mark.long,
    pytest.mark.alone,  # a raylet joins within Ray's own limits, which other clusters on two cores use up
]
HOSTS = {"h0": {"rack": "r0"}, "h1": {"rack": "r1"}}


@pytest.fixture
def cluster() -> Iterator[EmbeddedCluster]:
    """A head on this machine's end of the rig, another host in a namespace."""
    with NamespaceRig(["h1"]) as rig:
        config = Config(
            store=scratch_store_name("e"),
            arena_bytes=64 * MIB,
            chunk_bytes=64 << 10,
            interface=str(rig.network),
            detect="fast",
        )
        with EmbeddedCluster(HOSTS, cpus_per_host=3, config=config, rig=rig) as cluster:
            yield cluster


def test_a_host_that_is_cut_off_is_done_without_and_taken_back(cluster: EmbeddedCluster) -> None:
    """The cable of a host is pulled: the newest step is restored without it, and with it back all copies are again."""
    rig = cluster.rig
    assert rig is not None
    job = ray_job(cluster)
    job.start(["h0", "h1"])
    job.train(0, 3, "before the cut")
    job.leave()

    rig.cut("h1")
    zombies = set(rig.processes("h1"))
    assert len(zombies) > 3, "raylet, agents, holder and rank are on the host"
    wait_for(lambda: cluster.host_status().get("h1") == "dead", "the cut host to be dead")
    job.stand_by(["h0", "h0"])
    job.restart()
    assert [(found.step, found.problem) for found in job.restore()] == [(3, "")] * 2
    job.leave()
    assert job.newest().copies == 1

    address = rig.address("h1")
    # A raylet that Ray has not given up by then would go on, and no other could take its place.
    wait_for(
        lambda: not any(node["Alive"] for node in ray.nodes() if node["NodeManagerAddress"] == address),
        "Ray to give up the raylet that is cut off",
    )
    rig.heal("h1")
    wait_for(lambda: not zombies & set(rig.processes("h1")), "the raylet that Ray gave up to end", timeout_s=60)
    cluster.add_node("h1")
    wait_for(lambda: job.newest().copies == 2, "the second copies")


def test_the_doctor_names_a_link_that_is_cut_and_one_that_is_slow() -> None:
    """Five hosts in a ring, each with a network of its own: a firewall between two, and a cable of 80 Mbit/s."""
    hosts = {f"h{at}": {"rack": f"r{at}"} for at in range(5)}
    with NamespaceRig(list(hosts)[1:]) as rig, EmbeddedCluster(hosts, has_store=False, cpus_per_host=1, rig=rig):
        rig.block("h1", "h2")
        rig.shape("h4", 80_000_000)
        typed = f"doctor --store {scratch_store_name('d')} --interface {rig.network} --arena-bytes 64MiB"
        result = CliRunner().invoke(main, [*typed.split(), "--timeout-s", "120", "--json"])
        assert result.exit_code == 1, result.output
        links = [row for row in json.loads(result.stdout)["findings"] if row["subject"] == "link"]
        [cut] = [row["what"] for row in links if row["level"] == "FAIL"]
        slow = {row["what"].partition(" carries")[0] for row in links if row["level"] == "WARN"}
        assert cut.startswith("h2 cannot be reached from h1: ")
        assert slow == {"h3 to h4", "h4 to h3", "h4 to h0", "h0 to h4"}
