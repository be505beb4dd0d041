"""`memstore status`: the loss if something dies now, the hosts' copies, and the problems."""

from __future__ import annotations

import sys
import time
from typing import Any

import click
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from memstore.cli.options import Where, address_option, store_options
from memstore.cli.output import (
    ExitCode,
    age_text,
    count_text,
    data_console,
    plain_table,
    plural,
    print_json,
    size_text,
)
from memstore.config import Config
from memstore.core.cluster.text import listed
from memstore.core.report.problems import DEGRADED, UNRECOVERABLE, drain_text, is_over_limit, worst
from memstore.errors import MemstoreError

WATCH_S = 1.0


@click.command(short_help="What would be lost now, the hosts, every problem with its remedy.")
@click.option("--watch", is_flag=True, help="Refresh it every second until Ctrl-C.")
@click.option("--check", is_flag=True, help="Exit with 4 if something is degraded, 3 if something is lost.")
@address_option
@store_options
@click.pass_context
def status(ctx: click.Context, config: Config, address: str | None, watch: bool, check: bool, as_json: bool) -> None:
    """Show what would be lost if something died now, the hosts, and every problem with its remedy."""
    if watch and check:
        raise click.UsageError("--check exits with what it found, --watch never ends: give one of them")
    where = Where(config, address)
    if watch:
        _watch(where, as_json)
        return
    body = status_body(where)
    if as_json:
        print_json(body)
    else:
        data_console().print(screen(body))
    if check:
        ctx.exit(check_code(body))


def status_body(where: Where) -> dict[str, Any]:
    """Return what --json prints: the controller's answer, with the version and the Ray cluster it runs on."""
    from memstore.distribution import installed_version

    answer = where.status()
    return {
        "version": installed_version(), "store": where.config.store, "ray": ray_address(where.config), **answer,
    }  # fmt: skip


def ray_address(config: Config) -> str:
    """Return the address of the Ray cluster, as the holders of this machine wrote it beside their arenas."""
    from memstore.shell.arena.lock import owner
    from memstore.shell.rank.admin_link import host_folders

    for folder in host_folders(config):
        holding = owner(folder)
        if holding is not None and holding.cluster:
            return holding.cluster
    return ""


def check_code(body: dict[str, Any]) -> ExitCode:
    """Return the exit code of --check: the worst problem decides, notes do not count."""
    codes = {UNRECOVERABLE: ExitCode.UNRECOVERABLE, DEGRADED: ExitCode.DEGRADED}
    return codes.get(worst(body["problems"]) or "", ExitCode.FINE)


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
                body: dict[str, Any] = status_body(where)
            except MemstoreError as error:
                body = {"error": str(error)}
            if as_json:
                print_json(body)
            elif live is not None:
                live.update(Text(body["error"]) if "error" in body else screen(body), refresh=True)
            else:
                console.print(body["error"] if "error" in body else screen(body))
            time.sleep(WATCH_S)
    except KeyboardInterrupt:
        return
    finally:
        if live is not None:
            live.stop()


# -- the screen -------------------------------------------------------------------------------


def screen(body: dict[str, Any]) -> RenderableType:
    """Return the whole screen: one line, jobs, hosts, problems."""
    parts: list[RenderableType] = [Text(headline(body)), Text()]
    has_rows = body["jobs"] or body["launches"]
    parts += [job_table(body["jobs"], body["launches"]) if has_rows else Text("no job has put anything yet"), Text()]
    parts += [Text(line) for line in map(writers_line, body["jobs"]) if line]
    parts.append(host_table(body["hosts"], body["failure_domains"]))
    if body["problems"]:
        parts += [Text(), *(Text(problem_line(row)) for row in by_cause(body["problems"]))]
    return Group(*parts)


def headline(body: dict[str, Any]) -> str:
    """Return the first line: version, store, hosts, failure domains, Ray."""
    hosts = body["hosts"]
    machines = {host["machine"] for host in hosts if host["machine"]}
    words = f"{plural(len(hosts), 'host')} ({sum(h['status'] != 'live' for h in hosts)} degraded)"
    if machines and len(machines) < len(hosts):
        words += f" on {plural(len(machines), 'machine')}"
    parts = [f"memstore {body['version']}", f"store {body['store']}", words]
    for level in body["failure_domains"]:
        values = {host["labels"][level] for host in hosts if level in host["labels"]}
        parts += [plural(len(values), level)] if values else []
    if body.get("job_defaults"):
        parts.append("jobs get " + ", ".join(f"{name}={value}" for name, value in body["job_defaults"].items()))
    return " · ".join([*parts, *([f"ray at {body['ray']}"] if body["ray"] else [])])


def job_table(jobs: list[dict[str, Any]], launches: list[dict[str, Any]]) -> Table:
    """Return the table that answers: what do I lose if something dies now?"""
    table = plain_table(
        "JOB", ">ATT", ">RANKS", ">TRAINING", "NEWEST COMMITTED", "AT RISK NOW", "COPIES", "SURVIVES", "DURABLE"
    )
    begun = {row["job"]: f"{row['phase']} {row['ranks']}/{row['world_size']}" for row in launches}
    for name in sorted(begun.keys() - {job["job"] for job in jobs}):
        table.add_row(name, "-", begun[name], *["-"] * 6)
    for job in jobs:
        if job["attempt"] is None:
            table.add_row(job["job"], "-", begun.get(job["job"], "-"), *["-"] * 6)
            continue
        is_open, step = job["phase"] != "closed", job["committed_step"]
        is_short = step is not None and job["copies"] < job["replicas"]
        table.add_row(
            job["job"], str(job["attempt"]),
            begun.get(job["job"]) or (f"{job['ranks_alive']}/{job['world_size']}" if is_open else "closed"),
            count_text(job["training_step"]) if job["training_step"] >= 0 else "-",
            "nothing yet" if step is None else f"{step:,} ({age_text(job['committed_s'])} ago)",
            at_risk(job) if is_open else "-",
            "-" if step is None else f"{job['copies']} of {job['replicas']}{' !' if is_short else ''}",
            "-" if step is None else survives_text(job["survives"]) ,
            durable_text(job),
        )  # fmt: skip
    return table


def writers_line(job: dict[str, Any]) -> str:
    """Return "train: ranks 0, 2 copy for 4 ranks of 1 shard", or "" where every rank copies."""
    writers = job.get("writers") or []
    if len(writers) in (0, job["world_size"]):
        return ""
    who = f"rank {writers[0]} copies" if len(writers) == 1 else f"ranks {listed(writers)} copy"
    return f"{job['job']}: {who} for {plural(job['world_size'], 'rank')} of {plural(job['shards'], 'shard')}\n"


def at_risk(job: dict[str, Any]) -> str:
    """Return the cost of a death of every rank now, in steps put and in time."""
    if job["committed_step"] is None:
        return "everything so far"
    steps = max(0, job["training_step"] - job["committed_step"])
    return f"{plural(steps, 'step')} / {age_text(job['committed_s'])}"


def survives_text(rows: list[dict[str, Any]]) -> str:
    """Return "any 1 rack, any 1 host", from the copies that are there."""
    held = [f"any {plural(row['tolerated'], row['level'])}" for row in rows if row["tolerated"] > 0]
    if held:
        return ", ".join(held)
    return "the processes only" if rows[-1]["tolerated"] == 0 else "not whole in RAM !"


def durable_text(job: dict[str, Any]) -> str:
    """Return the newest durable step and when it was last seen there, "off" or "none yet"; "!" needs attention."""
    if job["durable"] is None:
        return "off !"
    text, seen_s = "none yet", job["durable_seen_s"]
    if job["durable_step"] is not None:
        text = f"{job['durable_step']:,} ({f'seen {age_text(seen_s)} ago' if seen_s is not None else 'not seen yet'})"
    return f"{text} !" if job["durable_problem"] or job["durable_unseen"] else text


def host_table(hosts: list[dict[str, Any]], failure_domains: list[str]) -> Table:
    """Return the table of hosts; a failure domain that labels none of them has no column."""
    levels = [level for level in failure_domains if any(level in host["labels"] for host in hosts)]
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
        is_dead, stats = host["status"] == "dead", host["stats"]
        sizes = [size_text(stats.get(f"{key}_bytes")) for key in ("used", "reserved", "claimed", "limit")]
        table.add_row(
            host["host"], *(host["labels"].get(level, "-") for level in levels),
            "down" if is_dead else f"up {age_text(host['up_s'])}",
            "-" if is_dead or not stats else " / ".join(sizes), host["address"],
            holds_text(host), state_text(host),
        )  # fmt: skip
    return table


def holds_text(host: dict[str, Any]) -> str:
    """Return whose newest committed shards lie there: "own + h02"."""
    return " + ".join("own" if owner == host["host"] else owner for owner in host["holds"]) or "-"


def state_text(host: dict[str, Any]) -> str:
    """Return "ok", its present work, its notice, or since when and why it is not live."""
    if host["status"] != "live":
        return f"{host['status']} {age_text(host['status_s'])}: {host['why']} !"
    if host["drains_s"] is not None:
        if host["drain_may_come"]:
            return f"draining: {plural(host['drain_left'], 'shard')} to copy"
        return f"draining: {drain_text(host)} !" if host["drain_left"] else "draining: can go"
    fine = "over its limit !" if is_over_limit(host) else "ok"
    return f"repairing: sending {plural(host['pushes'], 'shard')}" if host["pushes"] else fine


def by_cause(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows with those of one cause and remedy as one, about all of them: "train, eval and 4 more"."""
    together: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for row in rows:
        together.setdefault((row["severity"], row["cause"], row["remedy"]), []).append(row)
    found = []
    for same in together.values():
        about = [row["about"] for row in same]
        more = f" and {len(about) - 3} more" if len(about) > 3 else ""
        ages_s = [row["since_s"] for row in same if row["since_s"] is not None]
        found.append({**same[0], "about": ", ".join(about[:3]) + more, "since_s": max(ages_s, default=None)})
    return found


def problem_line(row: dict[str, Any]) -> str:
    """Return one "!" line: about what, cause, time, remedy."""
    since = f" ({age_text(row['since_s'])} ago)" if row["since_s"] is not None else ""
    return f"! {row['about']}: {row['cause']}{since}." + (f"  Remedy: {row['remedy']}" if row["remedy"] else "")
