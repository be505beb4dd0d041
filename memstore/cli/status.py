"""`memstore status`: the loss if something dies now, the hosts' copies, and the problems."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import click
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from memstore.cli.offline import offline_option, show_offline
from memstore.cli.options import Seconds, Where, where_options
from memstore.cli.output import (
    ExitCode,
    age_text,
    data_console,
    for_this_store,
    plain_table,
    plural,
    print_json,
    size_text,
)
from memstore.config import Config
from memstore.core.cluster.text import listed, phases_text, replaced_text
from memstore.core.report.cells import (
    JOB_HEADS,
    by_cause,
    goodput_text,
    holds_text,
    job_cells,
    problem_line,
    state_text,
)
from memstore.core.report.problems import DEGRADED, STOPPED, UNRECOVERABLE, worst
from memstore.core.wire.replies import Status, status_fields
from memstore.core.wire.status_rows import HostRow, JobRow
from memstore.errors import MemstoreError

WATCH_S = 1.0  # between two looks at least: each costs the controller an answer
CODES = {UNRECOVERABLE: ExitCode.UNRECOVERABLE, STOPPED: ExitCode.STOPPED, DEGRADED: ExitCode.DEGRADED}
STYLES = {UNRECOVERABLE: "bold red", STOPPED: "bold red", DEGRADED: "yellow"}


@click.command(short_help="What would be lost now, the hosts, every problem with its remedy.")
@click.option(
    "--watch",
    "watch_s",
    is_flag=False,
    flag_value=WATCH_S,
    type=Seconds(WATCH_S),
    metavar="[SECONDS]",
    help="Look again every so many seconds, 1 by default, until Ctrl-C; with --json one document a line.",
)
@click.option(
    "--check",
    is_flag=True,
    help="Exit with 5 if a job is not closed and does not train, 4 if something is degraded, 3 if something is lost.",
)
@offline_option
@where_options
@click.pass_context
def status(ctx: click.Context, where: Where, watch_s: float | None, check: bool, offline: bool, as_json: bool) -> None:
    """Show what would be lost if something died now, the hosts, and every problem with its remedy."""
    if offline:
        if watch_s or check:
            raise click.UsageError("--offline reads files, once: --watch and --check ask the controller")
        ctx.exit(show_offline(where.config, None, as_json))
    if watch_s and check:
        raise click.UsageError("--check exits with what it found, --watch never ends: give one of them")
    if watch_s:
        _watch(where, watch_s, as_json)
        return
    found = where.status()
    if as_json:
        print_json(json_of(found, where))
    else:
        data_console().print(screen(found, where))
    if check:
        ctx.exit(check_code(found))


def json_of(status: Status, where: Where) -> dict[str, Any]:
    """Return what --json prints: the controller's answer, with the version and the Ray cluster it runs on."""
    from memstore.distribution import VERSION

    return {"version": VERSION, "store": where.config.store, "ray": ray_address(where.config), **status_fields(status)}


def ray_address(config: Config) -> str:
    """Return the address of the Ray cluster, as the holders of this machine wrote it beside their arenas."""
    from memstore.shell.arena.lock import owner
    from memstore.shell.rank.admin_link import host_folders

    for folder in host_folders(config):
        holding = owner(folder)
        if holding is not None and holding.cluster:
            return holding.cluster
    return ""


def check_code(status: Status) -> ExitCode:
    """Return the exit code of --check: the worst problem decides, notes do not count."""
    return CODES.get(worst(status.problems) or "", ExitCode.FINE)


def _watch(where: Where, every_s: float, as_json: bool) -> None:
    """Look until Ctrl-C; a store that does not answer for a while is said to, and its last screen stays below that."""
    console = data_console()
    live = Live(console=console, auto_refresh=False) if not as_json and console.file.isatty() else None
    last: RenderableType = Text()
    with contextlib.suppress(KeyboardInterrupt), live or contextlib.nullcontext():
        while True:
            try:
                found = where.status()
                shown: Any = json_of(found, where) if as_json else screen(found, where, is_watched=live is not None)
                last = shown
            except (MemstoreError, OSError) as error:
                shown = {"error": str(error)} if as_json else Group(Text(for_this_store(str(error))), Text(), last)
            if as_json:
                print_json(shown)
            elif live is not None:
                live.update(shown, refresh=True)
            else:
                console.print(shown)
            time.sleep(every_s)


# -- the screen -------------------------------------------------------------------------------


def screen(status: Status, where: Where, *, is_watched: bool = False) -> RenderableType:
    """Return the whole screen: one line, jobs, hosts, problems; watched, hosts come last: a low terminal cuts them."""
    parts: list[RenderableType] = [Text(headline(status, where)), Text()]
    has_rows = status.jobs or status.launches
    parts += [job_table(status) if has_rows else Text("no job has put anything yet"), Text()]
    parts += [Text(line) for job in status.jobs for line in (writers_line(job), generation_line(job)) if line]
    goodput = [f"goodput {job.job}: {text}" for job in status.jobs if (text := goodput_text(job.goodput))]
    parts += [*map(Text, goodput), *([Text()] if goodput else [])]
    hosts = [host_table(status.hosts, status.failure_domains)]
    rows = by_cause(status.problems)
    problems = [Text.assemble(("!", STYLES.get(row.severity, "")), problem_line(row)[1:]) for row in rows]
    problems += (
        [Text(f"with --check the exit code would be {code} ({code.name.lower()})")]
        if (code := check_code(status))
        else []
    )
    first, last = (problems, hosts) if is_watched else (hosts, problems)
    return Group(*parts, *first, *([Text()] if problems else []), *last)


def headline(status: Status, where: Where) -> str:
    """Return the first line: version, store, hosts, failure domains, Ray."""
    from memstore.distribution import VERSION

    hosts, ray = status.hosts, ray_address(where.config)
    machines = {row.machine for row in hosts if row.machine}
    away = ", ".join(f"{n} {word}" for word in ("suspect", "dead") if (n := sum(row.status == word for row in hosts)))
    words = plural(len(hosts), "host")
    if machines and len(machines) < len(hosts):
        words += f" on {plural(len(machines), 'machine')}"
    words += f", {away or ('live' if len(hosts) == 1 else 'all live')}"
    parts = [f"memstore {VERSION}", f"store {where.config.store}", words]
    for level in status.failure_domains:
        values = {row.labels[level] for row in hosts if level in row.labels}
        parts += [plural(len(values), level)] if values else []
    if status.job_defaults:
        parts.append("jobs get " + ", ".join(f"{name}={value}" for name, value in status.job_defaults.items()))
    tables = f", tables in {status.gcs_storage}" if status.gcs_storage else ""
    return " · ".join([*parts, *([f"ray at {ray}{tables}"] if ray else [])])


def job_table(status: Status) -> Table:
    """Return the table that answers: what do I lose if something dies now?"""
    table = plain_table(*JOB_HEADS)
    for cells in job_cells(status.jobs, status.launches):
        table.add_row(*cells)
    return table


def writers_line(job: JobRow) -> str:
    """Return "train: ranks 0, 2 copy for 4 ranks of 1 shard", or "" where every rank copies."""
    newest = job.newest
    if newest is None or len(newest.writers) in (0, newest.world_size):
        return ""
    writers = newest.writers
    who = f"rank {writers[0]} copies" if len(writers) == 1 else f"ranks {listed(writers)} copy"
    return f"{job.job}: {who} for {plural(newest.world_size, 'rank')} of {plural(newest.shards, 'shard')}\n"


def generation_line(job: JobRow) -> str:
    """Return who was replaced before a generation of recovery in place and the seconds it took; "" for others."""
    newest = job.newest
    if newest is None or not newest.generation:
        return ""
    begin = f"{job.job}: generation {newest.generation}"
    if not newest.replaced:
        return f"{begin} of recovery in place\n"
    took_s = newest.recovery_s
    end = f"back after {sum(took_s.values()):.2f} s" if "first_step" in took_s else "nothing committed since"
    return f"{begin}: {replaced_text(newest.replaced)}\n  {end}: {phases_text(took_s)}\n"


def host_table(hosts: list[HostRow], failure_domains: list[str]) -> Table:
    """Return the table of hosts; a failure domain that labels none of them has no column."""
    levels = [level for level in failure_domains if any(level in host.labels for host in hosts)]
    table = plain_table(
        "HOST",
        *(level.upper() for level in levels),
        "HOLDER",
        "ARENA used/reserved/claimed/limit",
        "ADDRESS",
        "HOLDS",
        "STATE",
    )
    for host in hosts:
        is_dead, stats, sizes = host.status == "dead", host.stats, "-"
        if stats is not None and not is_dead:
            parts = (stats.used_bytes, stats.reserved_bytes, stats.claimed_bytes, stats.limit_bytes)
            sizes = " / ".join(map(size_text, parts))
        table.add_row(
            host.host,
            *(host.labels.get(level, "-") for level in levels),
            "down" if is_dead else f"up {age_text(host.up_s)}",
            sizes,
            host.address,
            holds_text(host),
            state_text(host),
        )
    return table


VERBS = (status,)
