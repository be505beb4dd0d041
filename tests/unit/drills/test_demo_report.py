"""What the demo says at the end: the verdict follows the checks, and a control run that passes is a failure."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("ray.train.torch", reason="the demo runs under Ray Train")

from memstore.demo.records import JoinedRecord, Kill, RestoredRecord, RunRecord, StepRun, check_all, check_in_place
from memstore.demo.report import as_dict, draw, seconds, table, verdict
from memstore.demo.run import DemoOptions, DemoOutcome, LostHostRun

STEPS, KILL = 8, Kill("h2", 3, 100.0)


def ran(attempt: int, steps: range, start_s: float) -> list[StepRun]:
    return [StepRun(attempt, 0, s, (1.0 / (s + 3)).hex(), s - 1, 0.001, start_s + i) for i, s in enumerate(steps)]


def joined(attempt: int, rank: int, host: str, entered_s: float, pid: int = 0) -> JoinedRecord:
    return JoinedRecord(attempt, rank, host, pid or 100 * attempt + rank, entered_s, 0.25, entered_s + 1)


def lost(*, is_restoring: bool) -> LostHostRun:
    tiers, phases = {"local": 3 << 20, "peer": 1 << 20, "durable": 0}, {"gather": 9.0, "transfer": 0.3, "load": 0.2}
    run = RunRecord(
        joined=[
            joined(1, 0, "h1", 89.0),
            joined(1, 1, "h2", 89.0),
            joined(2, 0, "h1", 108.0),
            joined(2, 1, "h3", 109.0),
        ],
        restored=[
            RestoredRecord(2, r, 3, 100, "peer", 0, (1,), tiers, phases, 0.5, 110.5) for r in (0, 1) if is_restoring
        ],
        steps=[*ran(1, range(4), 96.0), *ran(2, range(4 if is_restoring else 0, STEPS), 112.0)],
    )
    return LostHostRun(
        run, KILL, check_all(run, RunRecord(steps=ran(1, range(STEPS), 0.0)), KILL, STEPS), 0.05, "reset", "gone"
    )


def lost_in_place(pid: int = 100) -> LostHostRun:
    """A loss of which rank 0 is back in its function after 2 s, by default in its process."""
    run = RunRecord(
        joined=[
            joined(1, 0, "h1", 89.0),
            joined(1, 1, "h2", 89.0),
            joined(2, 0, "h1", 102.0, pid),
            joined(2, 1, "h3", 102.0),
        ],
        restored=lost(is_restoring=True).run.restored,
        steps=[*ran(1, range(4), 96.0), *ran(2, range(4, STEPS), 103.0)],
    )
    checks = check_in_place(run, RunRecord(steps=ran(1, range(STEPS), 0.0)), KILL, STEPS)
    return LostHostRun(run, KILL, checks, 0.05, "reset", "gone")


def outcome(tmp_path: Path, *, is_restoring: bool = True, control: LostHostRun | None = None) -> DemoOutcome:
    options = DemoOptions(tmp_path, steps=STEPS, kill_after=3, is_restoring=is_restoring)
    in_place = lost_in_place() if is_restoring else None
    undisturbed = RunRecord(steps=ran(1, range(STEPS), 0.0))
    return DemoOutcome(options, undisturbed, lost(is_restoring=is_restoring), in_place, control, 60.0)


def test_pass_needs_a_control_that_fails(tmp_path: Path) -> None:
    """All checks pass on the run and the three that need restore fail on the control; else the demo fails."""
    good = outcome(tmp_path, control=lost(is_restoring=False))
    assert good.is_ok
    assert verdict(good).startswith("PASS")
    toothless = replace(good, control=lost(is_restoring=True))
    assert not toothless.is_ok
    assert "prove nothing" in verdict(toothless)
    moved = replace(good, in_place=lost_in_place(pid=200))
    assert not moved.is_ok
    assert "processes-kept failed" in verdict(moved)
    blind = replace(good, disturbed=replace(good.disturbed, run=lost_in_place().run))
    assert not blind.is_ok
    assert "prove nothing" in verdict(blind)
    bad = outcome(tmp_path, is_restoring=False)
    assert not bad.is_ok
    assert "resumed, nothing-redone, from-peer failed" in verdict(bad)


def test_table_shows_measured_numbers(tmp_path: Path) -> None:
    """Every number of the table follows from the records."""
    text = table(outcome(tmp_path, control=lost(is_restoring=False)), "demo.png")
    assert "loss at steps 4-7     4 of 4 equal" in text
    assert "every 50 steps would have redone 4" in text
    assert "3.0 MiB local · 1.0 MiB peer · 0 B durable" in text
    assert "time lost             12.0 s, of which Ray's restart 9.0 s, memstore connect + get 0.8 s" in text
    assert (
        "time lost in place    3.0 s, 0.25 of the ordinary restart; all ranks in their function again after 2.0 s"
        in text
    )
    assert "1 of 1 survivors kept their process (rank 0: 100 and 100, rank 1: 101 and 201)" in text
    assert "3 of 3 must-fail checks failed" in text
    assert seconds(lost(is_restoring=True))["restore"] == pytest.approx(0.5)


def test_json_and_plot(tmp_path: Path) -> None:
    """The JSON object is plain and the plot is drawn, restored or not."""
    for is_restoring in (True, False):
        shown = outcome(tmp_path, is_restoring=is_restoring)
        body = json.loads(json.dumps(as_dict(shown, "demo.png")))
        assert body["ok"] is is_restoring
        assert body["demo"]["step_restored"] == (3 if is_restoring else None)
        assert body["demo"]["steps_redone"] == ([] if is_restoring else [0, 1, 2, 3])
        draw(shown, tmp_path / "plot.png")
        assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
