"""`memstore metrics`: what Prometheus can read of a store, and the dashboard and rules that go with it."""

from __future__ import annotations

from dataclasses import asdict
from importlib.resources import files

import click

from memstore.cli.output import data_console, plain_table, print_json
from memstore.core.metrics import METRICS, exported_names


@click.command(short_help="List the metrics; print the Grafana dashboard or the alert rules.")
@click.option("--dashboard", is_flag=True, help="The Grafana dashboard, as JSON to import.")
@click.option("--alerts", is_flag=True, help="The Prometheus alert rules, as YAML.")
@click.option("--json", "as_json", is_flag=True, help="The list as one JSON document.")
def metrics(dashboard: bool, alerts: bool, as_json: bool) -> None:
    """List what controller and holders export through Ray, or print the files that go with it.

    Prometheus finds the endpoints in the file that Ray's head node writes, prom_metrics_service_discovery.json in Ray's
    temporary folder (file_sd_configs).
    """
    if dashboard + alerts + as_json > 1:
        raise click.UsageError("--dashboard, --alerts and --json print a document each: ask for one at a time")
    if dashboard or alerts:
        file = "dashboard.json" if dashboard else "alerts.yaml"
        click.echo((files("memstore.grafana") / file).read_text(encoding="utf-8"), nl=False)
    elif as_json:
        print_json([{**asdict(metric), "exported": exported_names(metric)} for metric in METRICS.values()])
    else:
        table = plain_table("METRIC", "KIND", "TAGS", "FROM", "WHAT IT SAYS")
        for metric in METRICS.values():
            tags = ", ".join(("store", *metric.tags))
            table.add_row(f"ray_{metric.name}", metric.kind, tags, metric.source, metric.text)
        data_console().print(table)
