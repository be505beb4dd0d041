"""Drills that start Ray's processes again: each has a cluster of its own.

A cluster made by a fixture counts as there before the test; the successors of its raylets would count as left behind.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

pytest.importorskip("ray")

from memstore.config import MIB
from memstore.drills.model.catalogue import KEPT_HEAD, REFUSED, Options
from memstore.drills.model.report import BROKEN, ERROR, PASS
from memstore.drills.run.runner import run_drill
from memstore.drills.scenes.scenes_hosts import LoseHostParity
from memstore.drills.sites.site import EmbeddedSite
from memstore.drills.sites.site_options import embedded_site, place_problem
from memstore.errors import DrillError
from memstore.testing.clusters.embedded import EmbeddedCluster
from memstore.testing.clusters.namespaces import NamespaceRig, available
from memstore.testing.clusters.scratch import racks

NO_NAMESPACES = available()
NO_KEPT_HEAD = place_problem(KEPT_HEAD)
RANKS = 4


@pytest.mark.ray
@pytest.mark.drill
@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.skipif(NO_NAMESPACES is not None, reason=str(NO_NAMESPACES))
def test_a_host_that_is_cut_off_costs_its_rank_alone() -> None:
    """Its rank starts again elsewhere, and what lives on behind the cut takes part in nothing once it is back.

    A cut that cut nothing proves nothing: it ends in an error.
    """
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


@pytest.mark.ray
@pytest.mark.drill
@pytest.mark.long
@pytest.mark.timeout(400)
def test_ray_restarted_with_a_late_host_ends_as_promised() -> None:
    """Every process killed at once, one host late: the newest step comes back from arenas that were adopted."""
    with EmbeddedCluster(racks(3)) as cluster:
        site = EmbeddedSite(cluster)
        report = run_drill("restart-ray", site, Options(seed=7, ranks_count=2, nbytes=2 * MIB, config=site.config))
        site.close()
    assert report.outcome == PASS, report.words
    assert (report.rpo_steps, report.is_verified, report.bytes_by_tier["durable"]) == (0, True, 0)
    assert {"started", "joined"} <= {line.label for line in report.timeline}


@pytest.mark.ray
@pytest.mark.drill
@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_host_of_a_job_with_parity_is_decoded_from_the_others() -> None:
    """As many hosts as parity survives cost nothing, one more is refused; a job with copies proves nothing of it."""
    with embedded_site(RANKS + 2, 256 * MIB, racks_count=RANKS + 2) as site:
        options = Options(seed=7, ranks_count=RANKS, nbytes=2 * MIB, config=site.config)
        report = run_drill("lose-host-parity", site, options)
        assert (report.outcome, report.rpo_steps, report.is_verified) == (PASS, 0, True), report.words
        is_repaired = "repaired" in {line.label for line in report.timeline}  # decoded before the slow restart asked
        assert report.bytes_by_tier["peer"] > 0 or is_repaired
        report = run_drill("lose-host-parity", site, replace(options, is_beyond=True))
        assert (report.outcome, report.verdict) == (PASS, REFUSED), report.words
        report = run_drill("lose-two-hosts-parity", site, options)
        assert (report.outcome, report.rpo_steps, report.is_verified) == (PASS, 0, True), report.words
        report = run_drill("lose-two-hosts-parity", site, replace(options, is_beyond=True))
        assert (report.outcome, report.verdict) == (PASS, REFUSED), report.words
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(LoseHostParity, "job_fields", {"replicas": 2})
            report = run_drill("lose-host-parity", site, options)
        assert report.outcome == BROKEN
        assert "no chunk was decoded from parity" in report.words


@pytest.mark.ray
@pytest.mark.drill
@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.skipif(NO_KEPT_HEAD is not None, reason=str(NO_KEPT_HEAD))
def test_a_head_that_keeps_its_tables_comes_back_to_the_others() -> None:
    """Twice, the second time without the controller: nothing of the other hosts ends, and commits go on."""
    with embedded_site(RANKS, 256 * MIB, keeps_head=True) as site:
        options = Options(seed=7, ranks_count=RANKS - 1, nbytes=2 * MIB, config=site.config)
        for _ in range(2):
            report = run_drill("lose-head", site, options)
            assert (report.outcome, report.is_verified) == (PASS, True), report.words
            assert {"adopted", "resumed", "supervised"} <= {line.label for line in report.timeline}


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
