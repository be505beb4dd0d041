"""`memstore drill canary`: check that a lost copy of real size comes back on this cluster."""

from __future__ import annotations

from typing import Any

import click

from memstore.cli.output import print_json
from memstore.config import MIB, Config, bytes_from_text
from memstore.drills.model.promises import EMBEDDED
from memstore.drills.sites.site_options import (
    HOSTS_MAX,
    cluster_options,
    line_printer,
    own_site,
    prepare_ray,
    quiet,
    running_site,
)
from memstore.errors import ConfigError

EMBEDDED_NBYTES = 64 * MIB
TOUCHES = (
    "a scratch job of its own with one rank per host, which takes memory, network and processor for its puts and one "
    "restore; it kills nothing and drops only its own copies"
)


def _size(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    if value is None:
        return None
    try:
        return bytes_from_text("--nbytes", int(value) if value.isdigit() else value)
    except ConfigError as error:
        raise click.BadParameter(str(error)) from error


@click.command(short_help="Safe in production: lose and restore a copy of a scratch job, at real size.")
@click.option("--nbytes", callback=_size, metavar="SIZE",
              help='Per rank, such as "3.5GiB"; default: as the largest shard in the store, else 64 MiB.')  # fmt: skip
@click.option("--replicas", type=click.IntRange(2, 8), help="Copies of each shard; default: as the store's jobs have.")
@click.option("--hosts", "hosts_count", type=click.IntRange(2, HOSTS_MAX), default=3, show_default=True,
              help="With --embedded: its hosts.")  # fmt: skip
@cluster_options
def canary(config: Config, as_json: bool, **given: Any) -> None:
    """Put a scratch job on the real hosts, drop one copy of each of its shards, restore from the others, compare.

    Looks for room first and refuses without touching anything if there is none. Exits with 0 if every byte came back,
    1 if it was refused or did not work, 3 if a byte differs.
    """
    print_line = line_printer(as_json)
    if given["embedded"]:
        prepare_ray()
    nbytes = given["nbytes"]
    with quiet():
        sized = {**given, "replicas": given["replicas"] or 2}
        with (
            own_site(EMBEDDED, sized, 2 * (nbytes or EMBEDDED_NBYTES))
            if given["embedded"]
            else running_site(config, given, TOUCHES)
        ) as site:
            from memstore.drills.canary.canary import CanaryOptions, run_canary

            where = "a cluster of its own" if given["embedded"] else "your cluster"
            print_line(f"canary · seed {given['seed']} · {where}")
            report = run_canary(site, CanaryOptions(given["seed"], nbytes, given["replicas"]), print_line)
    if as_json:
        print_json(report.to_dict())
    print_line(f"{report.outcome}  {report.words}")
    click.get_current_context().exit(report.exit_code)
