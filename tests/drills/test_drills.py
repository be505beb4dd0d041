"""Every drill and its play beyond the tolerance end as promised, and a drill that lies or broke nothing does not
pass.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from variants import later

import memstore.drills.scenes.scene as scene_module
from memstore.config import MIB
from memstore.drills.cli import drill as drill_command
from memstore.drills.model.catalogue import (
    DRILLS,
    DURABLE_EVERY,
    EMBEDDED,
    FAMILIES,
    GOES_ON,
    PLACES,
    REFUSED,
    RESTART,
    Options,
)
from memstore.drills.model.report import BROKEN, ERROR, PASS, PHASES, Report, verdict_line
from memstore.drills.run.runner import SCENES, run_drill
from memstore.drills.sites.site import EmbeddedSite
from memstore.shell.rank.admin_link import store_root
from memstore.testing.clusters.scratch import scratch_folder
from memstore.testing.faults import arena_files, processes
from memstore.testing.ranks.states import alter, compare, make_state

RANKS = 2  # on h2 and h3; starting a rank's process is what a drill takes longest for


def on_ray(test: Any) -> Any:
    """Mark a test or class that plays drills on the module's cluster."""
    for mark in (pytest.mark.ray, pytest.mark.drill, pytest.mark.slow, pytest.mark.timeout(600)):
        test = mark(test)
    return test


@pytest.fixture(scope="class")
def losing_site(site: EmbeddedSite) -> Iterator[EmbeddedSite]:
    """The same cluster for a class that loses hosts; their successors start when the class has ended."""
    site.heals_at_once = False
    yield site
    site.heals_at_once = True
    site.heal()


def play(site: EmbeddedSite, name: str, **options: Any) -> tuple[Report, list[str]]:
    """Run a drill with small states; return its report and what it reported."""
    reported: list[str] = []
    config = site.config.with_fields(options.pop("job_fields", {}))
    return run_drill(
        name, site, Options(seed=7, ranks_count=RANKS, nbytes=2 * MIB, config=config, **options), reported.append
    ), reported


def labels(report: Report) -> list[str]:
    return [line.label for line in report.timeline]


def check_kept(site: EmbeddedSite, name: str) -> None:
    report, reported = play(site, name)
    assert report.outcome == PASS, report.words
    assert report.words.startswith("0 steps lost (promised 0)")
    assert (report.is_verified, report.rpo_steps, report.exit_code) == (True, 0, 0)
    is_repaired = "repaired" in labels(report)  # the restart was so slow that repair had brought the copy before
    assert report.verdict in DRILLS[name].promise.verdicts | ({"local"} if is_repaired else set())
    assert report.bytes_by_tier["durable"] == 0
    assert report.bytes_by_tier["peer"] > 0 or name != "kill-host" or is_repaired
    assert report.bytes_by_tier["peer"] == 0 or DRILLS[name].promise.verdicts != {"local"}
    assert report.bytes_compared > RANKS * 2 * MIB
    noticed = {"detected"} if SCENES[name].is_noticed else set()
    assert {"before", "inject", "effect", "planned", "restored", "compared", "redundant"} | noticed <= {*labels(report)}
    assert reported[0].startswith(f"drill {name} · seed 7 · the drill's own cluster (3 hosts) · victim ")
    if name in ("kill-holder", "kill-controller"):
        assert report.stall_s is not None
        assert report.stall_s <= site.config.stall_budget_s + 1


def check_refused(site: EmbeddedSite, name: str) -> None:
    report, _ = play(site, name, is_beyond=True)
    assert report.outcome == PASS, report.words
    assert (report.verdict, report.error) == (REFUSED, "RecoveryError")
    assert report.step_restored is None
    assert verdict_line(report).startswith("PASS  refused: ")
    assert not report.is_verified


# The others are played by `memstore drill run --suite full`.
STANDARD = [drill for drill in DRILLS.values() if drill.is_standard and EMBEDDED in drill.runs_on]
LOSING = ("kill-host", "preempt-host", "restart-ray")  # what comes after is not what was before: classes of their own
OTHERS = [drill.name for drill in STANDARD if drill.name not in LOSING and drill.flow == RESTART]
QUICK = ("kill-holder", "kill-controller")  # test_drill_live plays kill-rank and corrupt-chunk


@on_ray
@pytest.mark.parametrize("name", [*QUICK, *later(*(name for name in OTHERS if name not in QUICK))])
def test_a_drill_ends_as_promised(site: EmbeddedSite, name: str) -> None:
    """Within the tolerance nothing committed is lost, and every byte of every rank equals a state made again."""
    check_kept(site, name)


@on_ray
@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in OTHERS if DRILLS[name].beyond])
def test_its_beyond_play_is_refused(site: EmbeddedSite, name: str) -> None:
    """Beyond the tolerance every rank gets a RecoveryError that names ranks and hosts, and no byte."""
    check_refused(site, name)


@on_ray
@pytest.mark.long
@pytest.mark.parametrize("name", [drill.name for drill in STANDARD if drill.flow == GOES_ON])
def test_training_goes_on_through_it(site: EmbeddedSite, name: str, tmp_path: Path) -> None:
    """No put raises nor stalls beyond its budget, commits go on, every byte is right, no rank is restarted (1.5)."""
    fields = {"durable": str(tmp_path)} if DRILLS[name].needs_durable else {}
    report, _ = play(site, name, job_fields=fields)
    assert report.outcome == PASS, report.words
    assert (report.verdict, report.is_verified, report.rpo_steps) == (GOES_ON, True, 0)
    assert [phase.name for phase in report.phases] == list(PHASES)
    noticed = {"detected"} if SCENES[name].is_noticed else set()
    assert {"effect", "training", "resumed", "redundant", "compared"} | noticed <= {*labels(report)}
    assert report.stall_s is not None
    assert report.stall_s <= site.config.stall_budget_s + 1
    assert report.rto_s is not None
    assert report.bytes_compared > 2 * RANKS * 2 * MIB  # every shard twice, once by a rank of another host


@on_ray
class TestLosingAHost:
    """One host, within the tolerance."""

    def test_kill_host_ends_as_promised(self, losing_site: EmbeddedSite) -> None:
        """A host dies with its memory: 0 steps lost, its rank restored from a peer, every byte equal (R13, R18)."""
        check_kept(losing_site, "kill-host")


@on_ray
@pytest.mark.long
class TestPreemption:
    """A host goes some time after it was reported."""

    def test_preempt_host_ends_as_promised(self, losing_site: EmbeddedSite) -> None:
        """What it holds is elsewhere before it goes: every copy is there when its death is noticed (R29)."""
        check_kept(losing_site, "preempt-host")


@on_ray
@pytest.mark.long
class TestLosingTwoHosts:
    """Both hosts with a copy, beyond the tolerance."""

    def test_its_beyond_play_is_refused(self, losing_site: EmbeddedSite) -> None:
        """Both holders of a shard lost: every rank gets a RecoveryError that names ranks and hosts (R23)."""
        check_refused(losing_site, "kill-host")


@on_ray
@pytest.mark.long
class TestKeepingTheMemory:
    """A host that dies but keeps its memory."""

    def test_a_host_that_keeps_its_memory_is_no_lost_host(
        self, losing_site: EmbeddedSite, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """If the arena was not destroyed, kill-host is an error, not a pass."""
        remove, root = shutil.rmtree, str(store_root(losing_site.config))
        monkeypatch.setattr(shutil, "rmtree", lambda path, *a, **k: str(path).startswith(root) or remove(path, *a, **k))
        report, _ = play(losing_site, "kill-host")
        monkeypatch.undo()
        assert (report.outcome, report.error, report.exit_code) == (ERROR, "DrillError", 1), report.words
        assert "is still there" in report.words
        assert "restored" not in labels(report)


@on_ray
@pytest.mark.long
def test_with_a_durable_tier_the_beyond_play_gets_the_durable_step(site: EmbeddedSite, tmp_path: Path) -> None:
    """All copies of a shard lost: the durable step comes back, older, equal in every byte (R24, R31)."""
    fields = {"durable": str(tmp_path), "durable_every": DURABLE_EVERY}
    report, _ = play(site, "kill-rank", is_beyond=True, job_fields=fields)
    assert report.outcome == PASS, report.words
    assert (report.step_restored, report.is_verified) == (0, True)
    assert report.rpo_steps == report.step_before
    assert report.bytes_by_tier["durable"] > 0
    assert not list(tmp_path.iterdir()), "the scratch job's durable parts are removed"


@on_ray
def test_one_altered_bit_breaks_the_promise(site: EmbeddedSite) -> None:
    """A restored state that differs in one bit fails the drill with exit code 3, regardless of what the store says."""
    report, reported = play(site, "corrupt-chunk", is_altered=True)
    assert (report.outcome, report.exit_code, report.is_verified) == (BROKEN, 3, False), report.words
    assert "1 of " in report.words
    assert "bytes differ" in report.words
    assert any("DIFFERENT" in line for line in reported)


@on_ray
def test_a_victim_that_lives_on_is_an_error(site: EmbeddedSite, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill that did not kill ends in an error: nothing is proved by recovering from nothing."""
    monkeypatch.setattr(scene_module, "kill", lambda victims: len(victims))
    monkeypatch.setattr(scene_module, "wait_gone", lambda victims: processes.wait_gone(victims, 0.2))
    report, _ = play(site, "kill-rank")
    assert (report.outcome, report.error) == (ERROR, "DrillError"), report.words
    assert "still run" in report.words


def test_comparison_sees_one_bit_a_key_an_order_and_a_type() -> None:
    """Anything that is not the same in every byte, name, order and type differs."""

    def changed(change: str) -> dict[str, Any]:
        state = make_state(1, "train", 1, 0, 0, 4096)
        if change == "bit":
            alter(state)
        elif change == "key":
            del state["rng"]
        elif change == "order":
            state["model"] = dict(reversed(state["model"].items()))
        elif change == "type":
            state["where"]["step"] = 0.0
        elif change == "shape":
            state["empty"] = state["empty"].reshape(3, 0)
        return state

    fresh = make_state(1, "train", 1, 0, 0, 4096)
    assert not compare(changed(""), fresh)[1]
    for change in ("bit", "key", "order", "type", "shape"):
        assert compare(changed(change), fresh)[1], change


def test_a_destroyed_arena_is_reported_from_one_that_is_still_there() -> None:
    """The same file is a DrillError; another file in its place, or none, is a loss."""
    with scratch_folder() as folder:
        (folder / "arena").write_bytes(b"x" * 4096)
        before = arena_files.arena_identity(str(folder))
        with pytest.raises(arena_files.DrillError, match="is still there"):
            arena_files.check_destroyed(str(folder), before)
        assert arena_files.destroy_arena(str(folder)) >= 4096
        arena_files.check_destroyed(str(folder), before)
        with pytest.raises(arena_files.DrillError, match="nothing to lose"):
            arena_files.check_destroyed(str(folder), None)
        assert not list(folder.parent.iterdir())


def test_the_catalogue_lists_every_drill_with_its_promise() -> None:
    """`drill list --json` names what each drill breaks, touches and promises."""
    result = CliRunner().invoke(drill_command, ["list", "--json"], standalone_mode=False)
    rows = json.loads(result.stdout)
    assert [row["drill"] for row in rows] == list(DRILLS)
    assert all(row["breaks"] and row["touches"] and row["promised"] and row["runs_on"] for row in rows)
    assert {row["family"] for row in rows} == {row["family"] for row in rows if row["beyond"]}, (
        "each has a play beyond the tolerance"
    )


def test_every_entry_of_the_catalogue_has_its_scene() -> None:
    """A drill is an entry and a scene of the same name, of a family and places that `drill list` knows."""
    assert set(SCENES) == set(DRILLS)
    assert {d.family for d in DRILLS.values()} <= set(FAMILIES)
    assert {place for d in DRILLS.values() for place in (*d.runs_on, *d.beyond_runs_on)} <= set(PLACES)
    text = CliRunner().invoke(drill_command, ["list"]).stdout
    assert all(f"{name}  (" in text for name in DRILLS)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["kill-hots"], "no drill is called 'kill-hots': did you mean kill-host"),
        (["unplug"], "no drill is called 'unplug': it is not one of list, run, kill-rank, "),
        (["canary"], "no drill is called 'canary': "),
        (["kill-host"], "--victim"),
        (["kill-holder", "--yes"], "--victim"),
        (["kill-rank", "--beyond"], "--embedded only"),
        (["kill-rank", "--embedded", "--hosts", "1"], "--hosts"),
    ],
)
def test_wrong_usage_is_reported_before_anything_is_touched(arguments: list[str], words: str) -> None:
    """An unknown drill, a victim that was not named, a loss that a running cluster must not suffer: exit code 2."""
    result = CliRunner().invoke(drill_command, arguments)
    assert result.exit_code == 2
    assert words in result.stderr
