"""The drill that ends all of Ray, on a cluster of its own: of the Ray it began with nothing is left (R5, R24)."""

from __future__ import annotations

import pytest

pytest.importorskip("ray")

from memstore.config import MIB
from memstore.drills.model.options import Options
from memstore.drills.model.report import PASS
from memstore.drills.run.runner import run_drill
from memstore.drills.sites.site import EmbeddedSite


@pytest.mark.ray
@pytest.mark.drill
@pytest.mark.long
@pytest.mark.timeout(400)
def test_ray_restarted_with_a_late_host_ends_as_promised(site: EmbeddedSite) -> None:
    """Every process killed at once, one host late: the newest step comes back from arenas that were adopted."""
    report = run_drill("restart-ray", site, Options(seed=7, ranks_count=2, nbytes=2 * MIB, config=site.config))
    assert report.outcome == PASS, report.words
    assert (report.rpo_steps, report.is_verified, report.bytes_by_tier["durable"]) == (0, True, 0)
    assert {"started", "joined"} <= {line.label for line in report.timeline}
