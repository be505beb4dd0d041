"""The drill that cuts the link of a host whose ranks recover in place: raylets in network namespaces, as root."""

from __future__ import annotations

import pytest

pytest.importorskip("ray")

from memstore.config import MIB
from memstore.drills.model.catalogue import Options
from memstore.drills.model.report import ERROR, PASS
from memstore.drills.run.runner import run_drill
from memstore.drills.sites.site_options import embedded_site
from memstore.testing.clusters.namespaces import NamespaceRig, available

NO_NAMESPACES = available()
pytestmark = [
    pytest.mark.ray,
    pytest.mark.drill,
    pytest.mark.long,
    pytest.mark.timeout(600),
    pytest.mark.skipif(NO_NAMESPACES is not None, reason=str(NO_NAMESPACES)),
]
RANKS = 4


def test_a_host_that_is_cut_off_costs_its_rank_alone() -> None:
    """Its rank starts again elsewhere, and what lives on behind the cut takes part in nothing once it is back.

    A cut that cut nothing proves nothing: it ends in an error.
    """
    # A cluster made by a fixture counts as there before the test; a raylet's successor would count as left behind.
    with embedded_site(RANKS, 256 * MIB, has_links=True) as site:
        options = Options(seed=7, ranks_count=RANKS, nbytes=2 * MIB, config=site.config)
        report = run_drill("in-place-cut-link", site, options)
        assert report.outcome == PASS, report.words
        assert (report.is_verified, report.rpo_steps) == (True, 0)
        assert f"{RANKS - 1} of {RANKS} ranks kept their processes" in report.words
        assert {"woken", "fenced"} <= {line.label for line in report.timeline}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(NamespaceRig, "cut", lambda _rig, _host: None)
            report = run_drill("in-place-cut-link", site, options)
        assert (report.outcome, report.error) == (ERROR, "DrillError"), report.words
        assert "still answers" in report.words
