"""`memstore status`: the loss if something dies now, the hosts' copies, and the problems."""

from __future__ import annotations

import sys
import time
from typing import Any

import click
from msgspec.structs import replace
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from memstore.cli.offline import offline_option, show_offline
from memstore.cli.options import Where, where_options
from memstore.cli.output import ExitCode, age_text, count_text, data_console, plain_table, plural, print_json, size_text
from memstore.config import Config
from memstore.core.cluster.text import listed, phases_text, replaced_text
from memstore.core.report.problems import DEGRADED, STOPPED, UNRECOVERABLE, drain_text, is_over_limit, worst
from memstore.core.report.redundancy import beyond_text
from memstore.core.wire.replies import Status, status_fields
from memstore.core.wire.status_rows import AttemptStatus, HostRow, JobRow, LaunchRow, ProblemRow, SurvivalRow
from memstore.errors import MemstoreError

WATCH_S = 1.0
CODES = {UNRECOVERABLE: ExitCode.UNRECOVERABLE, STOPPED: ExitCode.STOPPED, DEGRADED: ExitCode.DEGRADED}
STYLES = {UNRECOVERABLE: "bold red", STOPPED: "bold red", DEGRADED: "yellow"}


@click.command(short_help="What would be lost now, the hosts, every problem with its remedy.")
@click.option("--watch", is_flag=True, help="Refresh it every second until Ctrl-C.")
@click.option(
    "--check",
    is_flag=True,
    help="Exit with 5 if a job is not closed and does not train, 4 if something is degraded, 3 if something is lost.",
)
@offline_option
@where_options
@click.pass_context
def status(ctx: click.Context, where: Where, watch: bool, check: bool, offline: bool, as_json: bool) -> None:
    """Show what would be lost if something died now, the hosts, and every problem with its remedy."""
    if offline:
        if watch or check:
            raise click.UsageError("--offline reads files, once: --watch and --check ask the controller")
        ctx.exit(show_offline(where.config, None, as_json))
    if watch and check:
        raise click.UsageError("--check exits with what it found, --watch never ends: give one of them")
    if watch:
        _watch(where, as_json)
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
    from memstore.distribution import installed_version

    return {
        "version": installed_version(),
        "store": where.config.store,
        "ray": ray_address(where.config),
        **status_fields(status),
    }


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


def _watch(where: Where, as_json: bool) -> None:
    """Refresh until Ctrl-C; show a store that does not answer for a while as that, and go on."""
    is_screen = not as_json and sys.stdout.isatty()
    console = data_console()
    live = Live(console=console, screen=True, auto_refresh=False) if is_screen else None
    try:
        if live is not None:
            live.start()
        while True:
            try:
                shown: Any = (json_of if as_json else screen)(where.status(), where)
            except MemstoreError as error:
                shown = {"error": str(error)} if as_json else Text(str(error))
            if as_json:
                print_json(shown)
            elif live is not None:
                live.update(shown, refresh=True)
            else:
                console.print(shown)
            time.sleep(WATCH_S)
    except KeyboardInterrupt:
        return
    finally:
        if live is not None:
            live.stop()


# -- the screen -------------------------------------------------------------------------------


def screen(status: Status, where: Where) -> RenderableType:
    """Return the whole screen: one line, jobs, hosts, problems."""
    parts: list[RenderableType] = [Text(headline(status, where)), Text()]
    has_rows = status.jobs or status.launches
    parts += [job_table(status.jobs, status.launches) if has_rows else Text("no job has put anything yet"), Text()]
    parts += [Text(line) for job in status.jobs for line in (writers_line(job), generation_line(job)) if line]
    parts.append(host_table(status.hosts, status.failure_domains))
    if rows := by_cause(status.problems):
        parts.append(Text())
        parts += [Text.assemble(("!", STYLES.get(row.severity, "")), problem_line(row)[1:]) for row in rows]
        parts += [Text(f"--check: exit {code}, {code.name.lower()}")] if (code := check_code(status)) else []
    return Group(*parts)


def headline(status: Status, where: Where) -> str:
    """Return the first line: version, store, hosts, failure domains, Ray."""
    from memstore.distribution import installed_version

    hosts, ray = status.hosts, ray_address(where.config)
    machines = {row.machine for row in hosts if row.machine}
    away = ", ".join(f"{n} {word}" for word in ("suspect", "dead") if (n := sum(row.status == word for row in hosts)))
    words = plural(len(hosts), "host")
    if machines and len(machines) < len(hosts):
        words += f" on {plural(len(machines), 'machine')}"
    words += f", {away or ('live' if len(hosts) == 1 else 'all live')}"
    parts = [f"memstore {installed_version()}", f"store {where.config.store}", words]
    for level in status.failure_domains:
        values = {row.labels[level] for row in hosts if level in row.labels}
        parts += [plural(len(values), level)] if values else []
    if status.job_defaults:
        parts.append("jobs get " + ", ".join(f"{name}={value}" for name, value in status.job_defaults.items()))
    tables = f", tables in {status.gcs_storage}" if status.gcs_storage else ""
    return " · ".join([*parts, *([f"ray at {ray}{tables}"] if ray else [])])


def job_table(jobs: list[JobRow], launches: list[LaunchRow]) -> Table:
    """Return the table that answers: what do I lose if something dies now?"""
    table = plain_table(
        "JOB", ">ATT", ">RANKS", ">TRAINING", "NEWEST COMMITTED", "AT RISK NOW", "COPIES", "SURVIVES", "DURABLE"
    )
    begun = {row.job: f"{row.phase} {row.ranks}/{row.world_size}" for row in launches}
    for name in sorted(begun.keys() - {job.job for job in jobs}):
        table.add_row(name, "-", begun[name], *["-"] * 6)
    for job in jobs:
        newest, ranks = job.newest, begun.get(job.job)
        if newest is None:
            table.add_row(job.job, "-", ranks or "-", *["-"] * 6)
            continue
        is_open, step = newest.phase != "closed", newest.committed_step
        table.add_row(
            job.job,
            str(job.attempt),
            ranks or ranks_text(newest),
            count_text(newest.training_step) if newest.training_step >= 0 else "-",
            "nothing yet" if step is None else f"{step:,} ({age_text(newest.committed_s)} ago)",
            at_risk(newest) if is_open else "-",
            "-" if step is None else copies_text(newest),
            "-" if step is None else survives_text(newest.survives) + beyond_text(newest.odds),
            durable_text(newest),
        )
    return table


def ranks_text(newest: AttemptStatus) -> str:
    """Return "4/4", "3/4 !" where the job does not train, "ended !" by an exception, or "closed"."""
    training = newest.training
    if training is None or newest.phase == "closed":
        return "ended !" if newest.ended_by else newest.phase
    return f"{newest.ranks_alive}/{newest.world_size}{' !' if training.stopped_s else ''}"


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


def at_risk(newest: AttemptStatus) -> str:
    """Return the cost of a death of every rank now, in steps put and in time."""
    if newest.committed_step is None:
        return "everything so far"
    steps = max(0, newest.training_step - newest.committed_step)
    return f"{plural(steps, 'step')} / {age_text(newest.committed_s)}"


def copies_text(newest: AttemptStatus) -> str:
    """Return "2 of 2", "parity 4+1" by the sets that there are, or "parity 4+1, 1 of 2 !" where something lacks."""
    spare, is_short = newest.replicas - 1, newest.copies < newest.replicas
    found = [f"parity {size - spare}+{spare}" if size else "copies" for size in newest.set_sizes]
    if is_short or not found:
        found.append(f"{newest.copies} of {newest.replicas}{' !' if is_short else ''}")
    return ", ".join(found)


def survives_text(rows: list[SurvivalRow]) -> str:
    """Return "any 1 rack, any 1 host", from the copies that are there."""
    held = [f"any {plural(row.tolerated, row.level)}" for row in rows if row.tolerated > 0]
    if held:
        return ", ".join(held)
    return "the processes only" if rows[-1].tolerated == 0 else "not whole in RAM !"


def durable_text(newest: AttemptStatus) -> str:
    """Return the newest durable step and when it was last seen there, "off" or "none yet"; "!" needs attention."""
    if newest.durable is None:
        return "off !"
    text, seen_s = "none yet", newest.durable_seen_s
    if newest.durable_step is not None:
        text = f"{newest.durable_step:,} ({f'seen {age_text(seen_s)} ago' if seen_s is not None else 'not seen yet'})"
    return f"{text} !" if newest.durable_problem or newest.durable_unseen else text


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


def holds_text(host: HostRow) -> str:
    """Return whose newest committed shards lie there, or in parity: "own + h02", "own + parity of 4 hosts"."""
    found = ["own" if owner == host.host else owner for owner in host.holds]
    found += [f"parity of {plural(len(host.keeps_parity_of), 'host')}"] if host.keeps_parity_of else []
    return " + ".join(found) or "-"


def state_text(host: HostRow) -> str:
    """Return "ok", its present work, its notice, or since when and why it is not live."""
    if host.status != "live":
        return f"{host.status} {age_text(host.status_s)}: {host.why} !"
    if host.drains_s is not None:
        if host.drain_may_come:
            what = "make durable" if any(row.in_parity for row in host.drain_short) else "copy"
            return f"draining: {plural(host.drain_left, 'shard')} to {what}"
        return (
            f"draining: {drain_text(host.drain_short, host.drain_durable)} !" if host.drain_left else "draining: can go"
        )
    if host.pushes:
        return f"repairing: sending {plural(host.pushes, 'shard')}"
    if is_over_limit(host.stats):
        return "over its limit !"
    return "ok"


def by_cause(rows: list[ProblemRow]) -> list[ProblemRow]:
    """Return the rows with those of one cause and remedy as one, about all of them: "train, eval and 4 more"."""
    together: dict[tuple[str, str, str], list[ProblemRow]] = {}
    for row in rows:
        together.setdefault((row.severity, row.cause, row.remedy), []).append(row)
    found = []
    for same in together.values():
        about = [row.about for row in same]
        more = f" and {len(about) - 3} more" if len(about) > 3 else ""
        ages_s = [row.since_s for row in same if row.since_s is not None]
        found.append(replace(same[0], about=", ".join(about[:3]) + more, since_s=max(ages_s, default=None)))
    return found


def problem_line(row: ProblemRow) -> str:
    """Return one "!" line: about what, cause, time, remedy."""
    since = f" ({age_text(row.since_s)} ago)" if row.since_s is not None else ""
    return f"! {row.about}: {row.cause}{since}." + (f"  Remedy: {row.remedy}" if row.remedy else "")


VERBS = (status,)
