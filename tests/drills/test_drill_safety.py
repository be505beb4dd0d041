"""What a drill refuses before it touches anything; plain values, no cluster."""

from __future__ import annotations

import io
from typing import Any

import click
import pytest
import ray
from click.testing import CliRunner
from msgspec.structs import replace

import memstore
import memstore.admin.cluster
from memstore.cli import main
from memstore.config import Config
from memstore.core.wire.replies import Plan
from memstore.core.wire.status_rows import BytesByTier, JobRow, StepRow
from memstore.drills.cli import drill as drill_command
from memstore.drills.run.runner import endangered
from memstore.drills.sites.site import Site
from memstore.drills.sites.site_options import confirm
from memstore.errors import PeerUnreachable
from memstore.testing.fuzz.messages import blank


def job(name: str = "llama") -> JobRow:
    steps = [replace(blank(StepRow), hosts=["h1", "h2"])]
    return replace(blank(JobRow), job=name, attempt=1, steps=steps)


def plan(step: int | None, committed: int | None, verdict: str = "local") -> Plan:
    return Plan(
        job="llama", lost_hosts=["h1"], verdict=verdict, why="rank 0 is nowhere", step=step, attempt=1,
        committed_step=committed, steps_lost=0, ranks_moved=[], world_size=1, step_world_size=1, moved_bytes=0,
        bytes=BytesByTier(local=0, peer=0, durable=0), transfers=[], rejected=[], gone=[], unlisted="", odds=[],
        starts_on={},
    )  # fmt: skip


def test_a_job_that_keeps_its_newest_step_is_not_endangered() -> None:
    """Another copy, or the same step on durable storage, is enough; a job that committed nothing loses nothing."""
    assert endangered([job()], {"llama": plan(7, 7)}, ["h1"]) == []
    assert endangered([job()], {"llama": plan(7, 7, "durable")}, ["h1"]) == []
    assert endangered([job()], {"llama": plan(None, None)}, ["h1"]) == []


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (plan(None, 7), "committed step 7 could not be restored any more (rank 0 is nowhere)"),
        (plan(5, 7), "fall back from committed step 7 to step 5"),
        (plan(7, 7, "wait"), "could not be restored"),
        (None, "no attempt of it is known, and h1 holds copies of it"),
    ],
)
def test_a_job_that_would_lose_its_newest_step_is(answer: Plan | None, words: str) -> None:
    """Nothing left, only an older step, not known, or copies that no process can plan for: named, with the reason."""
    plans = {"llama": answer} if answer is not None else {}
    found = endangered([job()], plans, ["h1"])
    assert len(found) == 1
    assert found[0].startswith("llama: ")
    assert words in found[0]
    assert answer is not None or endangered([job()], {}, ["h9"]) == []


def test_a_cluster_of_others_is_not_touched_without_a_yes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a terminal to ask on, --yes is needed; either way it is said first what will be touched."""
    monkeypatch.setattr("sys.stdin", io.StringIO())  # no terminal
    with pytest.raises(click.UsageError, match="Pass --yes"):
        confirm("touches h1", is_agreed=False)
    confirm("touches h2", is_agreed=True)
    assert capsys.readouterr().err.split("\n")[:2] == ["touches h1", "touches h2"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["freeze-holder", "--beyond", "--embedded"], "has no play beyond"),
        (["freeze-holder"], "--victim"),
        (["durable-error"], "--durable"),
        (["run", "--suite", "none"], "is not one of"),
    ],
)
def test_wrong_usage_is_reported_before_a_cluster_is_looked_for(arguments: list[str], words: str) -> None:
    """What cannot be played is exit code 2 with the option to change."""
    result = CliRunner().invoke(drill_command, arguments)
    assert result.exit_code == 2, result.output
    assert words in result.stderr


def test_no_ray_is_started_to_look_for_a_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """A drill typed on the wrong machine, or a stop of nothing, leaves the machine as it was."""
    asked: list[Any] = []

    def no_cluster(*args: Any, **options: Any) -> None:
        asked.append(options.get("address"))
        raise ConnectionError("could not find any running Ray instance")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", no_cluster)
    monkeypatch.setattr(memstore.admin.cluster, "wait_for_gcs", lambda *_: None)
    with pytest.raises(PeerUnreachable, match="no Ray cluster answers on this machine"):
        Site(Config())
    memstore.stop()
    with pytest.raises(PeerUnreachable, match="no Ray cluster answers at"):
        memstore.stop(address="10.0.0.1:6379")
    assert asked == ["auto", "auto", "10.0.0.1:6379"]  # None would start one


def test_a_suite_without_a_ray_cluster_plays_nothing_and_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every drill would end by the same error: the one remedy that needs no cluster is named."""
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    refused = CliRunner().invoke(main, ["drill", "run", "--yes", "--address", "127.0.0.1:9"])
    assert refused.exit_code == 1
    assert refused.stdout == ""
    assert refused.stderr.count("no Ray cluster answers at 127.0.0.1:9") == 1
    assert "`ray start --head`" in refused.stderr
    assert refused.stderr.endswith("or play on a cluster that is started for it: --embedded\n")
