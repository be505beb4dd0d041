"""Drills of recovery in place, played: faults that cost nothing, a refusal beyond, and plays that must fail."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("ray")

import memstore.drills.scenes.scene as scene_module
from memstore.config import MIB
from memstore.drills.model.catalogue import IN_PLACE, REFUSED, Options
from memstore.drills.model.report import BROKEN, ERROR, PASS, PHASES, Report
from memstore.drills.run.runner import run_drill
from memstore.drills.sites.site import EmbeddedSite
from memstore.testing.faults import processes

RANKS = 3
pytestmark = [pytest.mark.ray, pytest.mark.drill, pytest.mark.long, pytest.mark.timeout(600)]


def play(site: EmbeddedSite, name: str, **options: Any) -> Report:
    return run_drill(name, site, Options(seed=7, ranks_count=RANKS, nbytes=2 * MIB, config=site.config, **options))


def test_a_pause_costs_no_rank(site: EmbeddedSite) -> None:
    """A rank that stood still for 2 s goes on, and so do all others, in the same processes."""
    report = play(site, "in-place-pause")
    assert report.outcome == PASS, report.words
    assert (report.verdict, report.is_verified, report.rpo_steps) == (IN_PLACE, True, None)
    assert f"{RANKS} of {RANKS} ranks kept their processes" in report.words


def test_a_replacement_that_is_killed_is_replaced(site: EmbeddedSite) -> None:
    """A rank, and its replacement while the others wait for it: they stay, no loss and no sample changes."""
    report = play(site, "in-place-kill-replacement")
    assert report.outcome == PASS, report.words
    assert (report.is_verified, report.rpo_steps, report.exit_code) == (True, 0, 0)
    assert f"0 steps lost · training again {report.rto_s:.1f} s after the fault" in report.words
    assert f"{RANKS - 1} of {RANKS} ranks kept their processes" in report.words
    assert [phase.name for phase in report.phases] == list(PHASES)
    assert [line.label for line in report.timeline].count("effect") == 2


def test_one_altered_bit_breaks_the_promise(site: EmbeddedSite) -> None:
    """A restored state that differs in one bit fails the drill, whatever the store says."""
    report = play(site, "in-place-kill-rank", is_altered=True)
    assert (report.outcome, report.exit_code, report.is_verified) == (BROKEN, 3, False), report.words
    assert "bytes differ" in report.words


def test_a_victim_that_lives_on_is_an_error(site: EmbeddedSite, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill that did not kill proves nothing."""
    monkeypatch.setattr(scene_module, "kill", lambda victims: len(victims))
    monkeypatch.setattr(scene_module, "wait_gone", lambda victims: processes.wait_gone(victims, 0.2))
    report = play(site, "in-place-kill-rank")
    assert (report.outcome, report.error) == (ERROR, "DrillError"), report.words
    assert "still run" in report.words


def test_a_host_that_is_lost_costs_its_rank_alone(site: EmbeddedSite) -> None:
    """Its rank starts again elsewhere; beyond, with every copy of its shard, all ranks are refused."""
    site.heals_at_once = False
    report = play(site, "in-place-kill-host")
    assert report.outcome == PASS, report.words
    assert (report.is_verified, report.rpo_steps) == (True, 0)
    beyond = play(site, "in-place-kill-rank", is_beyond=True)
    assert beyond.outcome == PASS, beyond.words
    assert (beyond.verdict, beyond.error) == (REFUSED, "RecoveryError")
