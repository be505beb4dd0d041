"""Dashboard and alert rules name what is exported, and nothing else; the command prints them as they lie there."""

from __future__ import annotations

import json
import re
from importlib.resources import files
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from memstore.cli import main
from memstore.core.report.metrics import METRICS, exported_names

FOLDER = files("memstore.grafana")
DASHBOARD: dict[str, Any] = json.loads((FOLDER / "dashboard.json").read_text(encoding="utf-8"))
RULES = yaml.safe_load((FOLDER / "alerts.yaml").read_text(encoding="utf-8"))["groups"][0]["rules"]
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
EXPORTED = {name: metric for metric in METRICS.values() for name in exported_names(metric)}
PROMETHEUS_LABELS = {"le", "store"}


def complaints(expression: str) -> list[str]:
    """What is wrong with an expression: unknown metrics and labels, rates of gauges, counters without a rate."""
    found = []
    names = re.findall(r"\b(?:ray_)?memstore_\w+", expression)
    if not names:
        found.append("no metric")
    for name in names:
        if name not in EXPORTED:
            found.append(f"{name} is not exported")
            continue
        metric = EXPORTED[name]
        is_grown = re.search(rf"(rate|increase)\({name}\b", expression) is not None
        if metric.kind != "histogram" and (metric.kind == "gauge") == is_grown:
            found.append(f"{name} is a {metric.kind}")
    if "increase(" in expression and " unless " not in expression:
        found.append("increase() misses the event that a counter is born by")
    known = {tag for name in names if name in EXPORTED for tag in EXPORTED[name].tags} | PROMETHEUS_LABELS
    used = [label for group in re.findall(r"(?:by|on) \(([^)]*)\)", expression) for label in group.split(", ") if label]
    used += [label for group in re.findall(r"\{([^}]*)\}", expression) for label in re.findall(r"(\w+)=", group)]
    return found + [f"no metric here has the label {label}" for label in used if label not in known]


@pytest.mark.parametrize(
    ("expression", "complaint"),
    [
        ("max by (job_name) (ray_memstore_gone)", "is not exported"),
        ("max by (job_name) (memstore_commit_age_seconds)", "is not exported"),
        ("rate(ray_memstore_commit_age_seconds[5m])", "is a gauge"),
        ("sum by (job_name) (ray_memstore_skips_total)", "is a counter"),
        ("max by (job) (ray_memstore_commit_age_seconds)", "no metric here has the label job"),
        ('max (ray_memstore_commit_age_seconds{tier="peer"})', "no metric here has the label tier"),
        ("sum by (job_name) (increase(ray_memstore_skips_total[5m])) > 0", "is born by"),
        ("up == 0", "no metric"),
    ],
)
def test_a_wrong_expression_is_found(expression: str, complaint: str) -> None:
    """The check below can fail."""
    assert any(complaint in found for found in complaints(expression))


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_every_panel_asks_for_what_is_exported(panel: dict[str, Any]) -> None:
    """Metrics, labels and kinds fit; the panel has a place, a unit and a sentence."""
    assert panel["targets"]
    for target in panel["targets"]:
        assert complaints(target["expr"]) == []
        assert target["datasource"]["uid"] == "${datasource}"
        shown = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
        assert shown <= set(re.findall(r"\w+", " ".join(re.findall(r"by \(([^)]*)\)", target["expr"]))))
    assert panel["fieldConfig"]["defaults"]["unit"]
    assert panel["description"]


def test_the_dashboard_can_be_imported() -> None:
    """What Grafana needs: ids of its own, places that do not overlap, and variables that the expressions use."""
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken = [
        (panel["gridPos"]["x"] + x, panel["gridPos"]["y"] + y)
        for panel in panels
        for x in range(panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["h"])
    ]
    assert len(taken) == len(set(taken))
    assert max(x for x, _ in taken) < 24
    assert DASHBOARD["schemaVersion"] >= 39
    variables = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
    assert set(variables) == {"datasource", "store", "job"}
    assert complaints(variables["job"]["definition"]) == complaints(variables["store"]["definition"]) == []
    used = set(re.findall(r"\$(\w+)", " ".join(t["expr"] for panel in PANELS for t in panel["targets"])))
    assert used == {"store", "job", "__rate_interval"}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_every_rule_asks_for_what_is_exported_and_says_what_to_do(rule: dict[str, Any]) -> None:
    """Metrics and labels fit, also those the words name; a runbook sentence tells the person on call what to run."""
    assert complaints(rule["expr"]) == []
    assert rule["labels"]["severity"] in ("critical", "warning")
    words = rule["annotations"]
    assert "`memstore " in words["runbook"]
    named = set(re.findall(r"\$labels\.(\w+)", words["summary"] + words["runbook"]))
    assert named <= set(re.findall(r"\w+", " ".join(re.findall(r"by \(([^)]*)\)", rule["expr"]))))
    verbs = set(re.findall(r"`memstore (\w+)", words["runbook"]))
    assert verbs <= set(main.commands)


def test_every_metric_that_alarms_is_also_drawn() -> None:
    """Who is woken by a number finds its course on the dashboard."""
    drawn = " ".join(target["expr"] for panel in PANELS for target in panel["targets"])
    alarmed = {name for rule in RULES for name in re.findall(r"ray_memstore_\w+", rule["expr"])}
    assert {name for name in alarmed if name not in drawn} == set()


def test_the_command_prints_both_files_and_the_list() -> None:
    """As they lie in the wheel; without an option what there is to draw."""
    runner = CliRunner()
    assert json.loads(runner.invoke(main, ["metrics", "--dashboard"]).stdout) == DASHBOARD
    assert yaml.safe_load(runner.invoke(main, ["metrics", "--alerts"]).stdout)["groups"][0]["rules"] == RULES
    listed = json.loads(runner.invoke(main, ["metrics", "--list", "--json"]).stdout)
    assert {name for row in listed for name in row["exported"]} == set(EXPORTED)
    text = runner.invoke(main, ["metrics", "--list"]).stdout
    assert all(f"ray_{name}" in text for name in METRICS)
