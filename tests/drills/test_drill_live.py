"""Drills and a suite beside live jobs on one cluster: what is not theirs stays as it was."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from memstore.config import MIB
from memstore.core.report.page import drills
from memstore.core.wire.calls import AskEvents
from memstore.core.wire.status_rows import StepRow
from memstore.drills.model.catalogue import EMBEDDED, Options, find
from memstore.drills.model.report import PASS
from memstore.drills.run.page import page
from memstore.drills.run.runner import check_last_copies, run_drill
from memstore.drills.run.suite import Play, Suite, record
from memstore.drills.sites.scratch import ScratchJob
from memstore.drills.sites.site import EmbeddedSite
from memstore.errors import DrillError

NBYTES = 2 * MIB
SEED = 7
pytestmark = [pytest.mark.ray, pytest.mark.drill, pytest.mark.slow, pytest.mark.timeout(600)]


@contextlib.contextmanager
def live_job(site: EmbeddedSite, name: str, replicas: int, last: int = 3) -> Iterator[ScratchJob]:
    """A job of two ranks on h2 and h3 that has put the steps 0 to `last`."""
    job = ScratchJob(site, name, site.config.with_fields({"replicas": replicas}), seed=1, nbytes=NBYTES)
    try:
        job.start(["h2", "h3"])
        job.put(0, last)
        job.wait("committed", "commit")
        job.wait_redundant()
        yield job
    finally:
        job.remove()


def copies(job: ScratchJob) -> list[StepRow]:
    """Everything the store says of the job's steps, but their age."""
    return [replace(row, age_s=None) for row in job.site.job(job.name).steps]


def test_the_last_copy_of_a_live_job_is_not_destroyed(site: EmbeddedSite) -> None:
    """kill-host names the job that would lose its only copy and leaves everything alone; two copies are enough."""
    options = Options(seed=SEED, ranks_count=2, nbytes=NBYTES, config=site.config, victim="h2")
    with live_job(site, "single", 1) as single, live_job(site, "double", 2) as double:
        before, pid = copies(single), site.record("h2")["pid"]
        report = run_drill("kill-host", site, options)
        assert (report.error, report.exit_code) == ("DrillError", 1), report.words
        assert f"{single.name}: committed step 3 could not be restored" in report.words
        assert double.name not in report.words
        assert "--allow-data-loss" in report.words
        assert report.timeline == []
        assert copies(single) == before
        assert site.record("h2")["pid"] == pid
        check_last_copies(site, ["h2"], own_job=single.name, allows_data_loss=False)
        check_last_copies(site, ["h2"], own_job="", allows_data_loss=True)
        with pytest.raises(DrillError, match=double.name):
            check_last_copies(site, ["h2", "h3"], own_job=single.name, allows_data_loss=False)


def test_a_suite_plays_drills_on_one_cluster_and_a_seed_chooses_the_same_victims(site: EmbeddedSite) -> None:
    """Two drills pass with all phases on the same cluster; the one with another copy to hit hits the same one again."""
    opened: list[str] = []

    @contextlib.contextmanager
    def opener() -> Iterator[EmbeddedSite]:
        opened.append("")
        yield site

    options = Options(seed=SEED, ranks_count=2, nbytes=NBYTES, config=site.config)
    suite = Suite({EMBEDDED: opener}, options, durable=None, timeout_s=600.0, print_line=lambda line: None)
    result = suite.run([Play(find("kill-rank")), Play(find("corrupt-chunk"))])
    assert [row["outcome"] for row in result.drills] == [PASS, PASS], [row["words"] for row in result.drills]
    assert opened == [""]
    found = record("standard", SEED, result, nbytes=NBYTES)
    assert found["outcome"] == PASS
    assert all(len(row["phases"]) == 7 and row["verified"] and row["rpo_steps"] == 0 for row in found["drills"])
    assert "kill-rank" in page(found)
    told = [drill["told"] for drill in drills(site.ask(AskEvents()).events)][:2]  # as `memstore page` shows them
    for lines, row in zip(reversed(told), found["drills"], strict=True):
        labels = [label for _, label, _ in lines]
        assert set(labels) >= {phase["phase"] for phase in row["phases"]}
        assert [text for _, _, text in row["timeline"]] == [t for _, _, t in lines[:-1] if t != "begins"]
        assert lines[-1][1:] == [PASS, row["words"]]
    again = run_drill("corrupt-chunk", site, options)
    assert again.victims == found["drills"][1]["victims"]
