"""`memstore drill NAME`: break a cluster in a chosen way and prove the promise on the bytes.

Exit codes: 0 the promised outcome, 1 the drill did not work, 2 wrong usage, 3 the promise is broken.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import click

from memstore.cli.options import check_host, check_reachable, config_or_usage, store_options
from memstore.config import MIB, Config
from memstore.drills.catalogue import DRILLS, find

if TYPE_CHECKING:
    from memstore.drills.report import Report
    from memstore.drills.runner import Options
    from memstore.drills.site import Site

LIST = "list"
SEED_LIMIT = 1 << 31
HOSTS_MAX = 16  # raylets on one machine; each takes half a second of a core to start
ROOM = 8  # arena bytes per byte of state: (2 copies x 2 versions + 1 repair), and slack for a neighbour's ranks
# Read by Ray when it is imported; what the user has set wins. A private cluster needs neither tokens nor usage reports.
RAY_ENVIRONMENT = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}


@click.command()
@click.argument("name", metavar="NAME", type=click.Choice([LIST, *DRILLS]))
@click.option("--embedded", is_flag=True, help="Bring a cluster of its own: raylets on this machine, in two racks.")
@click.option("--seed", type=click.IntRange(0, SEED_LIMIT), help="Chooses victims and states; default: a random one.")
@click.option(
    "--beyond", is_flag=True, help="Lose more than is tolerated: a refusal (or the durable step) is promised."
)
@click.option("--hosts", "hosts_count", type=click.IntRange(2, HOSTS_MAX), default=4, show_default=True,
              help="Ranks, one per host; with --embedded also the hosts.")  # fmt: skip
@click.option("--replicas", type=click.IntRange(1, 8), default=2, show_default=True, help="Copies of each shard.")
@click.option("--mbytes", type=click.IntRange(1, 65_536), default=8, show_default=True, help="MiB per rank and step.")
@click.option("--durable", metavar="DIR", help="Durable tier of the scratch job.")
@click.option("--victim", metavar="HOST", help="Host to hit; needed where a drill kills what is not its own.")
@click.option("--allow-data-loss", is_flag=True, help="kill-host: even if other jobs have copies on the victim.")
@click.option("--address", metavar="ADDRESS", help="Ray cluster; default: the one this machine belongs to.")
@click.option("--yes", is_flag=True, help="Do not ask before touching a cluster that the drill did not start.")
@store_options
def drill(name: str, config: Config, as_json: bool, **given: Any) -> int:
    """Break something, wait until it is broken, recover, and compare every byte with states made without the store.

    NAME is one of the drills, or `list`. Without --embedded it runs a scratch job on your running store, says first
    what it will touch, and asks.
    """
    if name == LIST:
        _list(as_json)
        return 0
    if given["embedded"]:
        for variable, value in RAY_ENVIRONMENT.items():
            os.environ.setdefault(variable, value)
    logging.getLogger("memstore").setLevel(logging.ERROR)  # what the fault makes the driver's own link say

    words = sys.stderr if as_json else sys.stdout

    def tell(line: str) -> None:
        click.echo(line, file=words)

    # Ray prints to stdout what its raylets say of a dead host; stdout is for the drill.
    with open(os.devnull, "w", encoding="utf-8") as noise, contextlib.redirect_stdout(noise):
        report = _run(name, config, given, tell)
    from memstore.drills.report import verdict_line

    if as_json:
        click.echo(json.dumps(report.to_dict(), ensure_ascii=False))
    tell(verdict_line(report))
    return report.exit_code


def _list(as_json: bool) -> None:
    if as_json:
        rows = [{"drill": d.name, "breaks": d.breaks, "touches": d.touches, "promised": d.promise.words,
                 "beyond": d.beyond} for d in DRILLS.values()]  # fmt: skip
        click.echo(json.dumps(rows, ensure_ascii=False))
        return
    for entry in DRILLS.values():
        click.echo(entry.name)
        for what, text in (("breaks", entry.breaks), ("touches", entry.touches), ("promised", entry.promise.words),
                           ("beyond", f"{entry.beyond}; promised: a refusal, or the durable step")):  # fmt: skip
            click.echo(f"  {what:<10}{text}")


def _run(name: str, config: Config, given: dict[str, Any], tell: Callable[[str], None]) -> Report:
    from memstore.drills.runner import DURABLE_EVERY, Options, run_drill

    seed = given["seed"] if given["seed"] is not None else random.randrange(SEED_LIMIT)
    durable = os.path.abspath(given["durable"]) if given["durable"] else None
    job_fields = {"replicas": given["replicas"], "durable": durable, "durable_every": DURABLE_EVERY}
    nbytes = given["mbytes"] * MIB
    with _embedded(given, nbytes) if given["embedded"] else _running(name, config, given) as site:
        options = Options(
            seed=seed, is_beyond=given["beyond"], ranks_count=given["hosts_count"], nbytes=nbytes,
            config=site.config.with_fields(job_fields), victim=given["victim"],
            allows_data_loss=given["allow_data_loss"],
        )  # fmt: skip
        report = run_drill(name, site, options, tell)
    report.replay = _replay(name, given, options, config)
    return report


def _replay(name: str, given: dict[str, Any], options: Options, config: Config) -> str:
    """The command that plays the same drill again."""
    defaults = {"hosts_count": 4, "replicas": 2, "mbytes": 8}
    words = ["memstore drill", name, f"--seed {options.seed}"]
    words += [f"--{flag}" for flag in ("embedded", "beyond") if given[flag]]
    words += [f"--{key.removesuffix('_count')} {given[key]}" for key, usual in defaults.items() if given[key] != usual]
    words += [f"--{key} {given[key]}" for key in ("durable", "victim") if given[key]]
    words += [f"--store {config.store}"] if config.store != Config.store else []
    return " ".join(words)


@contextlib.contextmanager
def _embedded(given: dict[str, Any], nbytes: int) -> Iterator[Site]:
    """Hosts h1, h2, ... by turns in two racks; the first is Ray's head."""
    import secrets

    from memstore.drills.site import EmbeddedSite
    from memstore.testing.embedded import EmbeddedCluster

    config = config_or_usage(
        store=f"drill{secrets.token_hex(4)}", arena_bytes=max(256 * MIB, ROOM * given["replicas"] * nbytes),
        chunk_bytes=MIB, interface="127.0.0.1",
    )  # fmt: skip
    labels = {f"h{i + 1}": {"rack": f"r{i % 2 + 1}"} for i in range(given["hosts_count"])}
    with EmbeddedCluster(labels, config=config) as cluster:
        site = EmbeddedSite(cluster)
        try:
            yield site
        finally:
            site.close()


@contextlib.contextmanager
def _running(name: str, config: Config, given: dict[str, Any]) -> Iterator[Site]:
    """The user's cluster: say what will be touched, ask, and touch no more than that."""
    victim, entry = given["victim"], find(name)
    if given["beyond"] and name != "corrupt-chunk":
        raise click.UsageError(f"--beyond {name} destroys the memory of several hosts: it runs with --embedded only")
    if name in ("kill-host", "kill-holder") and victim is None:
        raise click.UsageError(f"{name} on a running cluster kills what is not its own: name the host with --victim")
    check_reachable(given["address"])
    from memstore.drills.site import Site

    site = Site(config, given["address"])
    try:
        status = site.status()
        hosts = [row["host"] for row in status["hosts"] if row["status"] == "live"]
        if victim is not None:
            check_host(status, victim)
        jobs = ", ".join(job["job"] for job in status["jobs"]) or "none"
        click.echo(
            f"drill {name} will touch, on store {config.store!r} ({len(hosts)} hosts, jobs: {jobs}): {entry.touches}; "
            f"besides, room for a scratch job of {given['mbytes']} MiB per rank"
            + (f"; victim: {victim}" if victim else ""),
            err=True,
        )
        if not given["yes"]:
            click.confirm("Go on?", abort=True, err=True)
        yield site
    finally:
        site.close()
