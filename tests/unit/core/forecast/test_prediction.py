"""Rules that foretell faults, replayed on a trace: alarms, true alarms and foreseen faults as counted by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.prediction import FAILED_S, MOVED_S, Fault, Rule, faults_of, main, score

DAY_S = 86_400.0


def event(server: str, at_days: float, kind: str, what: str = "GPU") -> dict[str, Any]:
    """A row of the trace."""
    return {"node_id": server, "event_time": at_days, "event_type": f"fault_{kind}", "fault_type": {"Class": what}}


def test_faults_of_a_server_that_overlap_are_one_and_stress_tests_are_none() -> None:
    """A server that is out of service cannot fail once more."""
    rows = [
        event("a", 1, "start"),
        event("a", 2, "start"),
        event("a", 3, "end"),
        event("a", 4, "end"),
        event("b", 1, "start", "Stress Test Failure"),
        event("b", 2, "end", "Stress Test Failure"),
    ]
    assert faults_of(rows) == {"a": [Fault(DAY_S, 4 * DAY_S)]}


def test_alarms_and_faults_are_counted() -> None:
    """Server a fails on days 0, 3 and 20, b once: after its second fault within a week a is expected to fail again."""
    servers = {
        "a": [Fault(0, 60), Fault(3 * DAY_S, 3 * DAY_S + 60), Fault(20 * DAY_S, 20 * DAY_S + 60)],
        "b": [Fault(5 * DAY_S, 5 * DAY_S + 60)],
    }
    each = score(servers, Rule(1, 0, 7))
    assert (each.alarms, each.true_alarms, each.foreseen, each.precision, each.recall) == (4, 1, 1, 0.25, 0.25)
    assert each.moving_saves_s == pytest.approx(FAILED_S - MOVED_S - 3 * MOVED_S)
    second = score(servers, Rule(2, 7, 30))
    assert (second.alarms, second.true_alarms, second.foreseen) == (1, 1, 1)
    soon = score({"a": [Fault(0, 60), Fault(100, 200), Fault(500, 600)]}, Rule(1, 0, 1))
    assert (soon.within_put, soon.within_durable) == (1, 2)


def test_the_command_prints_a_row_for_each_rule(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As docs/guide/which-interval.md quotes it."""
    path = tmp_path / "trace.json"
    path.write_text(
        json.dumps([event("a", 1, "start"), event("a", 2, "end"), event("a", 2.5, "start"), event("a", 3, "end")])
    )
    main([str(path)])
    out = capsys.readouterr().out
    assert "2 faults in service on 1 servers" in out
    assert "each: again within 1 d" in out
