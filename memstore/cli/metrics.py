"""`memstore metrics`: where a store's gauges stand, what Prometheus can read of it, and the dashboard and rules."""

from __future__ import annotations

from dataclasses import asdict
from importlib.resources import files
from typing import Any

import click

from memstore.cli.options import Where, where_options
from memstore.cli.output import data_console, plain_table, print_json
from memstore.core.report.metrics import METRICS, exported_names, holder_gauges, status_gauges
from memstore.core.wire.calls import AskEvents
from memstore.core.wire.ids import UNSIGNED_LIMIT


@click.command(short_help="Values of the gauges now; the list of metrics; the Grafana dashboard, the alert rules.")
@click.option("--list", "is_list", is_flag=True, help="Every metric that is exported, and what it says.")
@click.option("--dashboard", is_flag=True, help="The Grafana dashboard, as JSON to import.")
@click.option("--alerts", is_flag=True, help="The Prometheus alert rules, as YAML.")
@where_options
def metrics(where: Where, is_list: bool, dashboard: bool, alerts: bool, as_json: bool) -> None:
    """Print where the gauges of controller and holders stand now, or what goes with all metrics.

    Counters and histograms are in Prometheus alone, which finds the endpoints in the file that Ray's head node writes:
    prom_metrics_service_discovery.json in Ray's temporary folder (file_sd_configs).
    """
    if is_list + dashboard + alerts > 1 or (as_json and (dashboard or alerts)):
        raise click.UsageError(
            "--list, --dashboard and --alerts print a document each, and the last two are no --json: ask for one"
        )
    if dashboard or alerts:
        file = "dashboard.json" if dashboard else "alerts.yaml"
        click.echo((files("memstore.grafana") / file).read_text(encoding="utf-8"), nl=False)
    elif is_list:
        _print_list(as_json=as_json)
    else:
        _print_values(where, as_json=as_json)


def _print_list(*, as_json: bool) -> None:
    if as_json:
        print_json([{**asdict(metric), "exported": exported_names(metric)} for metric in METRICS.values()])
        return
    table = plain_table("METRIC", "KIND", "TAGS", "FROM", "WHAT IT SAYS")
    for metric in METRICS.values():
        tags = ", ".join(("store", *metric.tags))
        table.add_row(f"ray_{metric.name}", metric.kind, tags, metric.source, metric.text)
    data_console().print(table)


def _print_values(where: Where, *, as_json: bool) -> None:
    status = where.status()
    samples = status_gauges(status, unwritten_count=where.ask(AskEvents(since=UNSIGNED_LIMIT - 1)).unwritten)
    for row in status.hosts:
        if row.status != "dead" and row.stats is not None:
            samples += holder_gauges(row.host, row.stats)
    rows: list[dict[str, Any]] = [
        {
            "metric": f"ray_{each.name}",
            "tags": dict(zip(METRICS[each.name].tags, each.tags, strict=True)),
            "value": each.value,
        }
        for each in samples
    ]
    if as_json:
        print_json(rows)
        return
    table = plain_table("METRIC", "TAGS", ">VALUE")
    for values in rows:
        tags = ", ".join(f"{name}={value}" for name, value in values["tags"].items())
        table.add_row(values["metric"], tags, f"{values['value']:,.10g}")
    data_console().print(table)


VERBS = (metrics,)
