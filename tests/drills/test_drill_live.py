"""Drills, the canary and a suite beside live jobs on one cluster: what is not theirs stays as it was."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator

import pytest
from click.testing import CliRunner, Result
from msgspec.structs import replace

from memstore.config import MIB
from memstore.core.wire.status_rows import StepRow
from memstore.drills.cli.group import drill as drill_command
from memstore.drills.model.catalogue import find
from memstore.drills.model.options import Options
from memstore.drills.model.promises import EMBEDDED
from memstore.drills.model.report import PASS
from memstore.drills.ranks.ranks import PutRow, collect
from memstore.drills.run.page import page
from memstore.drills.run.runner import run_drill
from memstore.drills.run.safety import check_last_copies
from memstore.drills.run.suite import Play, Suite
from memstore.drills.run.suite_record import record
from memstore.drills.sites.scratch import ScratchJob
from memstore.drills.sites.site import EmbeddedSite
from memstore.errors import DrillError

NBYTES = 2 * MIB
BILL = (2 * 2 + 1) * 3 * MIB  # what a host reserves for one of the live jobs' ranks: a state of 2 MiB is 3 chunks
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


def wait_reserved(site: EmbeddedSite, jobs_count: int) -> None:
    """Wait until the hosts report the room of so many live jobs and no more; heartbeats carry it."""
    wanted = {"h1": 0, "h2": jobs_count * BILL, "h3": jobs_count * BILL}

    def look() -> bool:
        return {row.host: row.stats and row.stats.reserved_bytes for row in site.status().hosts} == wanted

    site.wait_for(f"reservations of {wanted}", look, timeout_s=20.0)


def invoke(site: EmbeddedSite, *arguments: str) -> Result:
    return CliRunner().invoke(drill_command, [*arguments, "--store", site.config.store])


def test_a_canary_leaves_live_jobs_alone(site: EmbeddedSite) -> None:
    """A job at rest keeps exactly its copies; one that trains puts and commits every step; the room is given back."""
    with live_job(site, "rest", 2) as rest, live_job(site, "train", 2) as train:
        wait_reserved(site, 2)
        before = copies(rest)
        puts = train.begin_puts(4, 23, 0.2)
        result = invoke(site, "canary", "--yes", "--json", "--nbytes", "8MiB", "--seed", str(SEED))
        rows: list[PutRow] = [row for mine in collect(puts, "puts") for row in mine]
        assert result.exit_code == 0, result.output
        found = json.loads(result.stdout)
        assert (found["outcome"], found["verified"], found["replicas"]) == (PASS, True, 2)
        assert found["hosts"] == ["h1", "h2", "h3"]
        assert found["bytes"]["local"] == 0, "the copy that was dropped was still used"
        assert found["bytes"]["peer"] >= 3 * 8 * MIB
        speeds = {row["phase"] for row in found["phases"] if row["gbytes_per_s"]}
        assert speeds == {"first put", "put", "committed", "transfer", "load"}
        assert copies(rest) == before
        assert not [row for row in rows if row.error]
        assert max(row.stall_s for row in rows) < site.config.stall_budget_s
        train.wait("committed", "the last step")
        status = train.wait_redundant()
        assert (status.committed_step, status.skipped, status.degraded) == (23, 0, "")
        read = [*train.read(23, 1), *rest.read(3, 1)]
        assert not [r for r in read if r.error or r.differences or r.bytes_equal != r.nbytes]
        assert found["job"] not in {row.job for row in site.status().jobs}
        wait_reserved(site, 2)


def test_a_canary_that_does_not_fit_or_is_not_allowed_touches_nothing(site: EmbeddedSite) -> None:
    """No room: exit 1 with the numbers. No process to ask: exit 2. No job appears and no room is claimed."""
    with live_job(site, "rest", 2) as rest:
        wait_reserved(site, 1)
        before = copies(rest)
        too_large = invoke(site, "canary", "--yes", "--nbytes", "1GiB")
        assert too_large.exit_code == 1
        assert "h2 has " in too_large.stdout
        assert "Nothing was touched" in too_large.stdout
        unasked = invoke(site, "canary", "--nbytes", "1MiB")
        assert unasked.exit_code == 2
        assert "jobs: rest-" in unasked.stderr
        assert "Pass --yes" in unasked.stderr
        assert copies(rest) == before
        wait_reserved(site, 1)
        assert [row.job for row in site.status().jobs] == [rest.name]


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
    suite = Suite({EMBEDDED: opener}, options, durable=None, timeout_s=60.0, print_line=lambda line: None)
    result = suite.run([Play(find("kill-rank")), Play(find("corrupt-chunk"))])
    assert [row["outcome"] for row in result.drills] == [PASS, PASS], [row["words"] for row in result.drills]
    assert opened == [""]
    found = record("standard", SEED, result, nbytes=NBYTES)
    assert found["outcome"] == PASS
    assert all(len(row["phases"]) == 7 and row["verified"] and row["rpo_steps"] == 0 for row in found["drills"])
    assert "kill-rank" in page(found)
    again = run_drill("corrupt-chunk", site, options)
    assert again.victims == found["drills"][1]["victims"]
