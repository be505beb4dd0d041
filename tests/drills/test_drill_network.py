"""Drills of the network: real ones on namespaces where that is allowed, and what is said where it is not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import asdict
from typing import Any, ClassVar

import msgspec
import pytest
from click.testing import CliRunner

from memstore.config import MIB, Config
from memstore.drills.cli import drill as drill_command
from memstore.drills.model.catalogue import DRILLS, EMBEDDED, GOES_ON, NAMESPACES, REFUSED, Options
from memstore.drills.model.report import ERROR, PASS, Report
from memstore.drills.ranks.ranks import collect
from memstore.drills.run.runner import run_drill
from memstore.drills.run.suite import Play, Suite
from memstore.drills.sites import site_options
from memstore.drills.sites.site_namespaces import NamespacesSite, namespaces_site
from memstore.errors import ConfigError, DrillError
from memstore.testing.clusters import namespaces
from memstore.testing.ranks.rank import Restored, config_from

NETWORK = [name for name, drill in DRILLS.items() if drill.runs_on == (NAMESPACES,)]
NO_ROOT = "network namespaces need root"


@pytest.fixture
def no_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine where no namespace can be made."""
    monkeypatch.setattr(namespaces, "available", lambda: NO_ROOT)


def test_every_network_drill_is_listed_with_where_it_runs(no_root: None) -> None:
    """Without root they are still in the list, with their place and promise."""
    rows = json.loads(CliRunner().invoke(drill_command, ["list", "--json"]).stdout)
    found = {row["drill"]: row for row in rows if row["family"] == "network"}
    assert set(found) == set(NETWORK)
    assert len(found) >= 6
    assert all(row["runs_on"] == [NAMESPACES] and row["promised"] for row in found.values())


@pytest.mark.parametrize("arguments", [["slow-link"], ["partition-half", "--beyond"]])
def test_without_root_a_network_drill_says_by_name_why_it_cannot_run(no_root: None, arguments: list[str]) -> None:
    """Exit code 1 and one sentence with the drill and the reason; nothing is started."""
    result = CliRunner().invoke(drill_command, [*arguments, "--embedded"])
    assert result.exit_code == 1
    assert arguments[0] in result.stderr
    assert NO_ROOT in result.stderr


def test_on_a_running_cluster_a_network_drill_is_refused() -> None:
    """No process's own links are cut: exit code 2."""
    result = CliRunner().invoke(drill_command, ["slow-link", "--yes"])
    assert result.exit_code == 2
    assert "--embedded only" in result.stderr


def test_a_suite_without_root_skips_them_with_the_reason(no_root: None) -> None:
    """They are listed as not played, each with the reason, and none as passed; nothing played is no pass."""
    problems = {NAMESPACES: str(site_options.place_problem(NAMESPACES))}
    suite = Suite(
        {EMBEDDED: lambda: pytest.fail("no cluster is needed")},
        Options(seed=7),
        durable=None,
        timeout_s=60.0,
        print_line=lambda line: None,
        problems=problems,
    )
    result = suite.run([Play(DRILLS[name]) for name in NETWORK])
    assert result.drills == []
    assert [row["drill"] for row in result.skipped] == NETWORK
    assert all(NO_ROOT in row["why"] for row in result.skipped)


def test_values_cross_to_a_rank_process_and_back() -> None:
    """What ranks answer is the same on both ends of the pipe, and so is a Config."""
    found = Restored(1, 4, "peer", "why", 8, 7, ("one",), (1, 2), {"peer": 8}, {"load": 0.1})
    assert msgspec.convert(json.loads(json.dumps(found.reply())), Restored) == found
    config = Config(replicas=3, arena_dir="/dev/shm")
    assert config_from(json.loads(json.dumps(asdict(config)))) == config


@pytest.mark.parametrize(
    ("problem", "raised"), [(ConfigError("no"), ConfigError), (ConnectionError("gone"), DrillError)]
)
def test_a_rank_process_that_fails_is_reported_as_an_actor_is(problem: Exception, raised: type[Exception]) -> None:
    """A wrong value of the user's stays a ConfigError; every other error becomes a DrillError."""
    call: Future[Any] = Future()
    call.set_exception(problem)
    with pytest.raises(raised):
        collect([call], "put", 1.0)
    with pytest.raises(DrillError, match="did not answer"):
        collect([Future()], "put", 0.01)


@pytest.fixture(scope="module")
def site() -> Iterator[NamespacesSite]:
    """Four hosts, as the smallest that makes two halves with two copies each."""
    with namespaces_site(4, arena_bytes=128 * MIB) as site:
        yield site


class TestOnNamespaces:
    """One cluster of four hosts in namespaces for the drills below."""

    pytestmark: ClassVar[list[Any]] = [
        pytest.mark.root,
        pytest.mark.drill,
        pytest.mark.slow,
        pytest.mark.timeout(600),
        pytest.mark.skipif(namespaces.available() is not None, reason=str(namespaces.available())),
    ]

    def play(self, site: NamespacesSite, name: str, **options: Any) -> Report:
        """Run a drill with small states."""
        return run_drill(name, site, Options(seed=7, ranks_count=4, nbytes=MIB, config=site.config, **options))

    def test_a_bit_that_flips_on_the_way_is_sent_again(self, site: NamespacesSite) -> None:
        """Each flipped bit is counted as one digest error, none is stored, and commits go on (R14)."""
        report = self.play(site, "flip-in-transit")
        assert report.outcome == PASS, report.words
        assert (report.verdict, report.is_verified, report.rpo_steps) == (GOES_ON, True, 0)

    @pytest.mark.long
    def test_half_a_network_commits_nothing_and_the_other_half_does(self) -> None:
        """Split in halves no step is committed twice; with every copy of a shard away, get refuses (R17, R23)."""
        with namespaces_site(4, arena_bytes=128 * MIB) as site:
            report, beyond = self.play(site, "partition-half"), self.play(site, "partition-half", is_beyond=True)
        assert report.outcome == PASS, report.words
        assert {"minority", "majority", "resumed", "redundant"} <= {line.label for line in report.timeline}
        assert report.is_verified
        assert beyond.outcome == PASS, beyond.words
        assert (beyond.verdict, beyond.error) == (REFUSED, "RecoveryError")

    def test_a_link_that_still_works_is_an_error(self, site: NamespacesSite, monkeypatch: pytest.MonkeyPatch) -> None:
        """A cut that did not take effect proves nothing, so it is no pass."""
        monkeypatch.setattr(site.rig, "block", lambda *hosts, one_way: None)
        report = self.play(site, "partition-one-way")
        assert (report.outcome, report.error) == (ERROR, "DrillError")
        assert "did not take effect" in report.words
