"""The drill that ends all of Ray, on a cluster of its own: of the Ray it began with nothing is left (R5, R24)."""

from __future__ import annotations

import pytest

pytest.importorskip("ray")

from memstore.config import MIB
from memstore.drills.model.options import Options
from memstore.drills.model.report import PASS
from memstore.drills.run.runner import run_drill
from memstore.drills.sites.site import EmbeddedSite
from memstore.testing.clusters.embedded import EmbeddedCluster
from memstore.testing.clusters.store_name import racks


@pytest.mark.ray
@pytest.mark.drill
@pytest.mark.long
@pytest.mark.alone  # a worker of pytest-xdist ended in it, for a reason not found yet
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
