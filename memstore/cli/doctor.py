"""`memstore doctor`: what is wrong with a Ray cluster for a store, before the first job and while it runs (D303)."""

from __future__ import annotations

import textwrap
from collections import Counter
from dataclasses import asdict, replace
from typing import Any

import click

from memstore.cli.lifecycle import start_options, store_config
from memstore.cli.options import Seconds, join_ray_for_verb, store_options
from memstore.cli.output import ExitCode, data_console, for_this_store, plain_table, plural, print_json
from memstore.config import Config
from memstore.core.report.findings import Finding, findings

INDENT = 6  # behind "FAIL"
STYLES = {"FAIL": "bold red", "WARN": "yellow"}


@click.command(short_help="Examine the hosts of a Ray cluster: what is wrong, each with a remedy.")
@click.option("--verbose", is_flag=True, help="List what is well, too.")
@click.option("--timeout-s", type=Seconds(1.0), default=15.0, show_default=True, help="Longest wait for a host.")
@start_options
@store_options
@click.pass_context
def doctor(
    ctx: click.Context,
    /,
    config: Config,
    address: str | None,
    verbose: bool,
    timeout_s: float,
    as_json: bool,
    **fields: Any,
) -> None:
    """Examine every host of a Ray cluster, the links between them and durable storage.

    Neither a job nor a store is needed; give it the options that `memstore up` will get. Of a store that runs its own
    settings count. Exit code 0 unless something FAILs.
    """
    config = store_config(config, fields)
    join_ray_for_verb(address)
    from memstore.admin.cluster import store_facts
    from memstore.shell.on_ray.examination import examine

    store = store_facts(config)
    facts = replace(examine(store.get("config", config), limit_s=timeout_s), **store)
    found = [replace(row, what=for_this_store(row.what), remedy=for_this_store(row.remedy)) for row in findings(facts)]
    counts = Counter(row.level for row in found)
    if as_json:
        rows = [asdict(row) for row in found]
        print_json({"store": config.store, "counts": counts, "findings": rows, "facts": asdict(facts)})
    else:
        _print(found, len(facts.hosts), verbose=verbose)
    ctx.exit(ExitCode.ERROR if counts["FAIL"] else ExitCode.FINE)


def _print(found: list[Finding], hosts_count: int, *, verbose: bool) -> None:
    """Print what is wrong, the worst first, with its remedy below it; then how much is well."""
    console, table = data_console(), plain_table("HOST", "EXAMINED", "SEEN")
    alike: dict[tuple[str, str, str], list[Finding]] = {}
    for row in found:
        if row.level == "OK":
            table.add_row(row.host or "-", row.subject, row.what)
        else:
            about = row.remedy if row.host else row.what  # of the whole cluster each stands for itself
            alike.setdefault((row.level, row.subject, about), []).append(row)
    for first, *others in alike.values():
        subject = f"{first.subject}, {first.host}" if first.host else first.subject
        more = f" (alike: {', '.join(row.host for row in others[:5])})" if others else ""
        more = f"{more[:-1]} and {len(others) - 5} more)" if len(others) > 5 else more
        said = _wrapped(f"{subject}: {first.what}{more}", console.width)
        console.print(first.level + said[len(first.level) :], style=STYLES[first.level])
        console.print(_wrapped(f"Remedy: {first.remedy}", console.width))
    words = f"{plural(table.row_count, 'examination')} of {plural(hosts_count, 'host')} OK"
    console.print(words if verbose else f"{words}; --verbose lists them")
    if verbose:
        console.print(table)


def _wrapped(text: str, width: int) -> str:
    """Return a text beside a column for its level; long words, such as paths, are not broken."""
    begin = " " * INDENT
    lines = textwrap.wrap(
        text, width, initial_indent=begin, subsequent_indent=begin, break_long_words=False, break_on_hyphens=False
    )
    return "\n".join(lines)


VERBS = (doctor,)
