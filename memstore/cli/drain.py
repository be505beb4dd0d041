"""`memstore drain`: notice that a host will be taken away; its copies are made elsewhere while it can still send."""

from __future__ import annotations

import time

import click

from memstore.cli.options import Where, address_option, check_host, store_options
from memstore.cli.output import ExitCode, print_json, say
from memstore.config import Config
from memstore.core.report.json_rows import host_fields
from memstore.core.report.problems import drain_text
from memstore.core.wire.calls import DrainHost
from memstore.core.wire.status_rows import HostRow

POLL_S = 0.2


@click.command(short_help="Give notice of a host's end, and wait until the store can do without it.")
@click.argument("host")
@click.option("--within", "within_s", default=120.0, show_default=True, metavar="SECONDS", help="Until it is gone.")
@click.option("--cancel", is_flag=True, help="It stays: take the notice back.")
@address_option
@store_options
@click.pass_context
def drain(
    ctx: click.Context, config: Config, address: str | None, host: str, within_s: float, cancel: bool, as_json: bool
) -> None:
    """Copy what HOST holds to hosts that stay, and wait for it; for preemption notices and maintenance.

    Nothing is stopped: its ranks go on putting. Where too few hosts stay for all copies, a job with durable= has its
    kept steps written there at once. Exit code 0 once every kept step has all its copies on hosts that stay, or is
    durable; 4 if the time ran out first, or at once if neither can be. Nodes that Ray drains are noticed without this
    command.
    """
    where = Where(config, address)
    host = check_host(where.status(), host)
    if not 0 < within_s < float("inf"):
        raise click.UsageError(f"--within {within_s:g}: the notice must leave some time, in seconds")
    until_s = time.monotonic() + within_s
    where.ask(DrainHost(host=host, within_s=None if cancel else within_s))
    row = _wait(where, host, is_draining=not cancel, until_s=until_s)
    if row.status == "dead":
        say(f"host {host} died before its copies were known to be elsewhere: `memstore status` says what is left")
        ctx.exit(ExitCode.DEGRADED)
    remains = drain_text(row.drain_short, row.drain_durable)
    if as_json:
        fields = host_fields(row)
        keys = ("left", "short", "durable")
        print_json({"host": host, "drains_s": row.drains_s, **{key: fields[f"drain_{key}"] for key in keys}})
    elif cancel:
        say(f"host {host} stays")
    elif row.drain_may_come:
        say(f"host {host} must not go yet, after {within_s:g} s: {remains}")
    elif row.drain_short:
        say(f"host {host} must not go: {remains}; add a host, or give the job durable=")
    else:
        say(f"host {host} can go: {remains}")
    ctx.exit(ExitCode.DEGRADED if row.drain_short else ExitCode.FINE)


def _wait(where: Where, host: str, *, is_draining: bool, until_s: float) -> HostRow:
    """Return the host's status row once the notice is replicated and no more copies can come, or at the timeout."""
    while True:
        row = next(row for row in where.status().hosts if row.host == host)
        is_known = (row.drains_s is not None) == is_draining
        if row.status == "dead" or (is_known and not row.drain_may_come) or time.monotonic() > until_s:
            return row
        time.sleep(POLL_S)
