"""`memstore up`, `down`, `stores` and `drain`: stores that begin and end, and hosts that leave them (R3, R5)."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from typing import Any, TypeVar

import click

from memstore.cli.bill import Terms, bill_json, bill_of, limit_lines, show_bill
from memstore.cli.options import (
    Seconds,
    Where,
    check_host,
    config_or_usage,
    join_ray_for_verb,
    store_options,
    where_options,
)
from memstore.cli.output import (
    ExitCode,
    count_text,
    data_console,
    plain_table,
    plural,
    print_json,
    progress_bar,
    say,
    size_text,
    words_console,
)
from memstore.config import Config
from memstore.core.report.problems import drain_remedies, drain_text
from memstore.core.wire.calls import DrainHost
from memstore.core.wire.replies import Status, host_fields
from memstore.core.wire.status_rows import HostRow
from memstore.errors import ConfigError, MemstoreError, PeerTimeout, PeerUnreachable

POLL_S = 0.2
BEAT_S = 5.0  # a new holder reports its memory limit within this
RELEASE_S = 10.0  # a holder that is stopping gives its lock up within this


# -- up ---------------------------------------------------------------------------------------


R = TypeVar("R")


def start_options(verb: Callable[..., R]) -> Callable[..., R]:
    """Add --address and the settings that a store is started with; the verb gets them for `store_config`."""
    for option in reversed(START_OPTIONS):
        verb = option(verb)
    return verb


START_OPTIONS = (
    click.option("--address", metavar="ADDRESS", help="Ray cluster; default: the one this machine belongs to."),
    click.option("--arena-bytes", metavar="SIZE", help='Memory per host, such as "64GiB"; default: measured.'),
    click.option(
        "--quota", multiple=True, metavar="[JOB=]SIZE", help="Most of it for any job, or for JOB alone. Repeatable."
    ),
    click.option("--chunk-bytes", metavar="SIZE", help='Unit of storage and transfer, such as "4MiB".'),
    click.option("--interface", metavar="NAME", help="Network of copies: a name or a CIDR; or several, with commas."),
    click.option("--port", type=int, metavar="PORT", help="Port of every holder; default: any free one."),
    click.option("--failure-domains", metavar="LABELS", help='Node labels, coarsest first, such as "zone,rack".'),
    click.option(
        "--tls-dir", envvar="MEMSTORE_TLS_DIR", metavar="DIR", help="TLS: cert.pem, key.pem and ca.pem in it."
    ),
    click.option("--replicas", type=int, metavar="N", help="Copies of each shard, for jobs that do not say."),
    click.option("--keep-steps", type=int, metavar="N", help="Committed steps kept, for jobs that do not say."),
    click.option("--durable", metavar="DIR", help="Durable storage (a path or URL), for jobs that do not say."),
)


@click.command(short_help="Start the store on a Ray cluster.")
@start_options
@click.option("--durable-check", metavar="DIR", help="Refuse to start if DIR (or a URL) cannot be written from here.")
@click.option("--wait", "hosts_count", type=click.IntRange(min=1), metavar="N", help="Wait until N hosts are up.")
@click.option("--timeout-s", type=Seconds(), default=120.0, show_default=True, help="Longest wait for all of it.")
@store_options
def up(
    config: Config,
    address: str | None,
    durable_check: str | None,
    hosts_count: int | None,
    timeout_s: float,
    as_json: bool,
    **fields: Any,
) -> None:
    """Start one holder per host and the controller on a Ray cluster; on a running store, check that it fits.

    Arenas of an earlier life of the store are adopted with their contents.
    """
    config = store_config(config, fields)
    if durable_check is not None:
        check_writable(durable_check)
    deadline_s = time.monotonic() + timeout_s
    join_ray_for_verb(address, timeout_s)
    from memstore.admin.cluster import LEAST_S, start

    with progress_bar("starting", hosts_count, "hosts") as tell:
        start(config, timeout_s=max(LEAST_S, deadline_s - time.monotonic()), on_hosts=tell)
        where = Where(config, address)
        body = where.status() if hosts_count is None else _wait_hosts(where, hosts_count, deadline_s, timeout_s, tell)
    beat_s = time.monotonic() + BEAT_S
    while any(h.stats is None for h in body.hosts if h.status == "live") and time.monotonic() < beat_s:
        time.sleep(POLL_S)
        body = where.status()
    live = [host.host for host in body.hosts if host.status == "live"]
    terms = Terms.of(body.job_defaults)
    rows = bill_of(body.hosts, body.failure_domains, terms)
    if as_json:
        jobs = [job.job for job in body.jobs]
        print_json({"store": config.store, "hosts": live, "jobs": jobs, "bill": bill_json(rows, terms)})
        return
    words = f"store {config.store} is up on {plural(len(live), 'host')}: {', '.join(live[:10])}"
    say(words + (f" and {len(live) - 10} more" if len(live) > 10 else ""))
    for line in limit_lines(body.hosts, terms):
        say(line)
    if config.quotas:
        quotas = (f"{job or 'any other job'} {size_text(nbytes)}" for job, nbytes in config.quotas.items())
        say(f"at most of it, by their quotas: {', '.join(quotas)}")
    possible = [row for row in rows if not row.unmet or row.scheme == terms.scheme]
    show_bill(words_console(), possible, terms)
    if others := ", ".join(row.scheme.name for row in rows if row not in possible):
        say(config.commands(f"These hosts cannot keep what {others} promise: `memstore plan --bill` says why."))
    adopted = [job.job for job in body.jobs]
    if adopted:
        say(f"it holds {plural(len(adopted), 'job')}: {', '.join(adopted[:10])}")


def store_config(config: Config, fields: dict[str, Any]) -> Config:
    """Return the config with the fields that were given; a bad one is wrong usage."""
    given = {name: value for name, value in fields.items() if value not in (None, ())}
    for name in {"failure_domains", "interface"} & given.keys():
        given[name] = tuple(part.strip() for part in given[name].split(",") if part.strip())
    if "chunk_bytes" in given:
        from memstore.config import bytes_from_text

        try:
            given["chunk_bytes"] = bytes_from_text("chunk_bytes", _number(given["chunk_bytes"]))
        except ConfigError as error:
            raise click.UsageError(str(error)) from error
    return config_or_usage(store=config.store, arena_dir=config.arena_dir, **given)


def _number(text: str) -> int | str:
    return int(text) if text.isdigit() else text


def check_writable(directory: str) -> None:
    """Raise ConfigError unless a file can be written in the directory, or an object at the URL, from this machine."""
    from memstore.shell.durable.tier import files_from_url  # numpy, which --help need not load

    if "://" in directory:
        files_from_url(directory).probe()
        return
    try:
        with tempfile.NamedTemporaryFile(dir=directory, prefix=".memstore-check-") as file:
            file.write(b"memstore")
            file.flush()
    except OSError as error:
        raise ConfigError(
            f"the durable directory {directory} cannot be written from this machine: {error.strerror}. "
            "Create it, mount it, or fix its permissions; every host must reach it",
            field="durable",
            value=directory,
        ) from error


def sharing_words(nodes: dict[str, int]) -> str:
    """Return words about hosts that several Ray nodes of one machine share, given the nodes of each; "" if none is."""
    shared = [f"{host} serves {count} Ray nodes" for host, count in sorted(nodes.items()) if count > 1]
    if not shared:
        return ""
    return f". {', '.join(shared)}: for a holder each, start every node with a name, `ray start --labels host=NAME`"


def _wait_hosts(where: Where, count: int, deadline_s: float, timeout_s: float, tell: Callable[..., object]) -> Status:
    from memstore.admin.cluster import nodes_by_host

    while True:
        body = where.status()
        live = sum(row.status == "live" for row in body.hosts)
        tell(done=live, total=count)
        if live >= count:
            return body
        if time.monotonic() > deadline_s:
            raise PeerTimeout(
                f"{live} of the {count} hosts asked for are up after {timeout_s:g} s; the store runs. "
                "`memstore status` names them, `ray status` the nodes; raise --timeout-s if they are merely slow"
                + sharing_words(nodes_by_host(where.config)),
                operation="up",
                waited_s=timeout_s,
                limit_s=timeout_s,
            )
        time.sleep(POLL_S)


# -- down -------------------------------------------------------------------------------------


@click.command(short_help="Stop the store; its arenas stay in memory unless --discard.")
@click.option("--address", metavar="ADDRESS", help="Ray cluster; default: the one this machine belongs to.")
@click.option("--discard", is_flag=True, help="Free the memory too: every step that lives only in RAM is lost.")
@click.option("--yes", is_flag=True, help="With --discard: even if a committed step is only in RAM.")
@click.option("--leftovers", is_flag=True, help="No Ray: list this machine's arenas; with --discard remove dead ones.")
@click.option("--host", "hosts", multiple=True, metavar="HOST", help="With --leftovers: only this host. Repeatable.")
@store_options
def down(
    config: Config,
    address: str | None,
    discard: bool,
    yes: bool,
    leftovers: bool,
    hosts: tuple[str, ...],
    as_json: bool,
) -> None:
    """Stop the store. Its arenas stay in memory for the next `memstore up`, unless --discard."""
    if leftovers and (yes or address is not None):
        raise click.UsageError("--leftovers looks at this machine's arenas alone: --yes and --address are not for it")
    if leftovers:
        _leftovers(config, hosts, discard=discard, as_json=as_json)
        return
    if hosts:
        raise click.UsageError("--host goes with --leftovers; without it the whole store stops")
    if yes and not discard:
        raise click.UsageError("--yes goes with --discard; without it nothing is lost")
    try:
        join_ray_for_verb(address)
        from memstore.admin.cluster import stop

        _refuse_unknown(config)
        with progress_bar("stopping", unit="hosts") as tell:
            stop(config=config, keep_data=not discard, force=yes, on_hosts=tell)
            kept = _released(config)
    except (PeerUnreachable, PeerTimeout) as error:
        raise type(error)(f"{error}. What the store left here: `memstore down --leftovers`") from error
    _report_down(config, kept, discard=discard, as_json=as_json)


def _refuse_unknown(config: Config) -> None:
    """Raise ConfigError if the joined cluster runs no store of the name, and nothing of it lies on this machine."""
    from memstore.admin.cluster import is_on_ray, joined_address, stores_on_ray
    from memstore.admin.stores import others_here
    from memstore.shell.rank.admin_link import host_folders

    if is_on_ray(config) or host_folders(config):
        return
    there = ", ".join(stores_on_ray()) or "none"
    others = others_here(config, "") or "none here"
    raise ConfigError(
        f"there is no store {config.store!r}: the Ray cluster at {joined_address()} runs {there}; on this machine "
        f"{others}",
        field="store",
    )


def _released(config: Config) -> list[dict[str, Any]]:
    """Wait until no holder runs on this machine, and return the arenas that are left; one that runs is an error."""
    from memstore.admin.cluster import leftovers

    deadline_s = time.monotonic() + RELEASE_S
    rows = leftovers(config)
    while any(row["is_live"] for row in rows) and time.monotonic() < deadline_s:
        time.sleep(POLL_S)
        rows = leftovers(config)
    running = [f"{row['host']} (pid {row['pid']})" for row in rows if row["is_live"]]
    if running:
        raise MemstoreError(
            f"the holder of {', '.join(running)} still runs: it belongs to another Ray cluster, see --address"
        )
    return rows


def _report_down(config: Config, rows: list[dict[str, Any]], *, discard: bool, as_json: bool) -> None:
    """Say that the store is down, and what is left on this machine."""
    if as_json:
        print_json({"store": config.store, "discarded": discard, "kept": rows})
        return
    say(f"store {config.store} is down")
    if rows:
        nbytes = sum(row["nbytes"] for row in rows)
        say(
            f"{size_text(nbytes)} on {plural(len(rows), 'host')} of this machine stay in memory: `memstore up` adopts "
            "them, `memstore down --leftovers --discard` frees them"
        )


def _leftovers(config: Config, hosts: tuple[str, ...], *, discard: bool, as_json: bool) -> None:
    """List the arenas of this machine; remove those whose holder is gone."""
    from memstore.admin.cluster import leftovers, remove_leftovers

    rows = leftovers(config)
    for host in hosts:
        if host not in {row["host"] for row in rows}:
            have = ", ".join(row["host"] for row in rows) or "none"
            raise ConfigError(f"store {config.store!r} has no arena of host {host!r} on this machine: it has {have}")
    rows = [row for row in rows if not hosts or row["host"] in hosts]
    removed = remove_leftovers(config, list(hosts) or None) if discard else []
    rows = [{**row, "is_removed": row["host"] in removed} for row in rows]
    if as_json:
        print_json({"store": config.store, "arenas": rows})
    elif not rows:
        say(f"store {config.store} has left nothing on this machine")
    else:
        table = plain_table("HOST", ">BYTES", "HOLDER", "FOLDER")
        for row in rows:
            state = f"runs, pid {row['pid']}" if row["is_live"] else "gone"
            table.add_row(
                row["host"], size_text(row["nbytes"]), "removed" if row["is_removed"] else state, row["folder"]
            )
        data_console().print(table)
        idle = [row for row in rows if not row["is_live"] and not row["is_removed"]]
        if idle:
            say("add --discard to remove those without a holder; `memstore up` would adopt them")
    if discard and any(row["is_live"] for row in rows):
        say("arenas of running holders were left alone: `memstore down --discard` stops the store and frees them")
        raise click.exceptions.Exit(ExitCode.ERROR)


# -- drain, stores -----------------------------------------------------------------------------


@click.command(short_help="Give notice of a host's end, and wait until the store can do without it.")
@click.argument("host")
@click.option("--within", "within_s", default=120.0, show_default=True, metavar="SECONDS", help="Until it is gone.")
@click.option("--cancel", is_flag=True, help="It stays: take the notice back.")
@where_options
@click.pass_context
def drain(ctx: click.Context, where: Where, host: str, within_s: float, cancel: bool, as_json: bool) -> None:
    """Copy what HOST holds to hosts that stay, and wait for it; for preemption notices and maintenance.

    Nothing is stopped: its ranks go on putting. Where too few hosts stay for all copies, a job with durable= has its
    kept steps written there at once. Exit code 0 once every kept step has all its copies on hosts that stay, or is
    durable; 4 if the time ran out first, or at once if neither can be. Nodes that Ray drains are noticed without this
    command.
    """
    host = check_host(where.status(), host)
    if not 0 < within_s < float("inf"):
        raise click.UsageError(f"--within {within_s:g}: the notice must leave some time, in seconds")
    until_s = time.monotonic() + within_s
    where.ask(DrainHost(host=host, within_s=None if cancel else within_s))
    row = _await_copies(where, host, is_draining=not cancel, until_s=until_s)
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
        say("; ".join([f"host {host} must not go yet, after {within_s:g} s: {remains}", *drain_remedies(row)]))
    elif row.drain_short:
        say("; ".join([f"host {host} must not go: {remains}", *drain_remedies(row)]))
    else:
        say(f"host {host} can go: {remains}")
    ctx.exit(ExitCode.DEGRADED if row.drain_short else ExitCode.FINE)


def _await_copies(where: Where, host: str, *, is_draining: bool, until_s: float) -> HostRow:
    """Return the host's status row once the notice is replicated and no more copies can come, or at the timeout."""
    with progress_bar("copying", unit="shards") as tell:
        most = 0
        while True:
            row = next(row for row in where.status().hosts if row.host == host)
            is_known = (row.drains_s is not None) == is_draining
            if row.status == "dead" or (is_known and not row.drain_may_come) or time.monotonic() > until_s:
                return row
            most = max(most, row.drain_left)
            tell(done=most - row.drain_left, total=most)
            time.sleep(POLL_S)


@click.command(short_help="This user's stores on this machine, live or left over.")
@store_options
def stores(config: Config, as_json: bool) -> None:
    """List this user's stores on this machine, with the jobs and newest committed steps of live ones.

    What a left-over one holds shows once `memstore up` has adopted it. --store is not used: all are listed.
    """
    from memstore.admin.stores import stores_here

    found = stores_here(config)
    if as_json:
        print_json({"stores": [store.to_dict() for store in found]})
        return
    if not found:
        say(f"no store of this user lies under {config.arena_dir}")
        return
    table = plain_table("STORE", "STATE", "HOSTS", ">BYTES", "JOBS (newest committed step)")
    for store in found:
        jobs = ", ".join(f"{job} ({count_text(step)})" for job, step in store.jobs.items()) or "-"
        if not store.is_live:
            jobs = config.with_fields({"store": store.store}).commands("not known until `memstore up` adopts it")
        state = "live" if store.is_live else "left over"
        table.add_row(store.store, state, ", ".join(store.hosts), size_text(store.nbytes), jobs)
    data_console().print(table)


# -- upgrade -----------------------------------------------------------------------------------


@click.command(short_help="Restart the store's processes with what is installed now, host by host.")
@click.option("--address", metavar="ADDRESS", help="Ray cluster; default: the one this machine belongs to.")
@click.option("--check", "is_check", is_flag=True, help="Only say what would be restarted, or why nothing may be.")
@click.option("--restart", "is_restart", is_flag=True, help="Also what runs the installed version already.")
@click.option("--host", "hosts", multiple=True, metavar="HOST", help="Only this host, not the controller. Repeatable.")
@click.option("--timeout-s", type=Seconds(), default=120.0, show_default=True, help="Longest wait for each host.")
@store_options
def upgrade(
    config: Config,
    address: str | None,
    is_check: bool,
    is_restart: bool,
    hosts: tuple[str, ...],
    timeout_s: float,
    as_json: bool,
) -> None:
    """Restart holders one by one with the memstore that is installed on their hosts, then the controller.

    Training goes on: arenas stay, and the next host's turn is once no job lacks copies for it. Install the new version
    on every host first. Where running ranks or arenas would not be understood, it says so before it touches anything,
    and exits with 1. A second call goes on where the first one stopped.
    """
    join_ray_for_verb(address)
    from memstore.admin.upgrade import CONTROLLER, plan_upgrade
    from memstore.admin.upgrade import upgrade as restart_all

    plan = plan_upgrade(config, chosen=hosts, is_restart=is_restart)
    turns = [*plan.hosts, *([CONTROLLER] if plan.has_controller else [])]
    if not as_json:
        table = plain_table("HOST", "RUNS", "INSTALLED", "")
        for host, build in sorted(plan.running.items(), key=lambda item: (item[0] == CONTROLLER, item[0])):
            then = "is restarted" if host in turns and not plan.refusal else "stays"
            table.add_row(host, build.version, plan.installed[host].version, then)
        data_console().print(table)
    if plan.refusal:
        raise ConfigError(plan.refusal)
    if not turns:
        say("what is installed runs already; --restart restarts it all the same")
    elif not is_check:
        restart_all(config, plan, timeout_s=timeout_s, say=say)
    if as_json:
        rows = {
            host: {"running": b.version, "installed": plan.installed[host].version} for host, b in plan.running.items()
        }
        print_json({"store": config.store, "hosts": rows, "restarted": [] if is_check else turns, "planned": turns})


VERBS = (up, down, stores, drain, upgrade)
