"""The drill that ends all of Ray, on a cluster of its own: of the Ray it began with nothing is left (R5, R24)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("ray")

from memstore.config import MIB
from memstore.drills.model.options import Options
from memstore.drills.model.report import PASS
from memstore.drills.run.runner import run_drill
from memstore.drills.sites.site import EmbeddedSite
from memstore.errors import DrillError
from memstore.testing.clusters.embedded import EmbeddedCluster
from memstore.testing.clusters.store_name import racks


@pytest.mark.ray
@pytest.mark.drill
@pytest.mark.long
@pytest.mark.timeout(400)
def test_ray_restarted_with_a_late_host_ends_as_promised() -> None:
    """Every process killed at once, one host late: the newest step comes back from arenas that were adopted."""
    # A cluster made by a fixture counts as there before the test; Ray's new processes would count as left behind.
    with EmbeddedCluster(racks(3)) as cluster:
        site = EmbeddedSite(cluster)
        report = run_drill("restart-ray", site, Options(seed=7, ranks_count=2, nbytes=2 * MIB, config=site.config))
        site.close()
    assert report.outcome == PASS, report.words
    assert (report.rpo_steps, report.is_verified, report.bytes_by_tier["durable"]) == (0, True, 0)
    assert {"started", "joined"} <= {line.label for line in report.timeline}


@pytest.mark.parametrize("kill", [EmbeddedCluster.kill_everything, EmbeddedCluster.kill_head])
def test_a_child_of_pid_1_does_not_end_its_own_raylet(
    kill: Callable[[EmbeddedCluster], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray would end this process with the raylet, so nothing is killed, and the refusal says how to start instead."""
    monkeypatch.setattr("os.getppid", lambda: 1)
    cluster = EmbeddedCluster(racks(3))
    monkeypatch.setattr(cluster, "node_processes", lambda host: pytest.fail(f"{host} was to be killed"))
    with pytest.raises(DrillError, match=r"is pid 1, and Ray ends such a process.*not pid 1 itself"):
        kill(cluster)
