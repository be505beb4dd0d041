"""The options that choose the cluster of a drill, and the functions that open it: embedded, or the running one.

A cluster that the drill did not start is touched only after its user has agreed.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import click

from memstore.cli.options import check_host, config_or_usage, store_options
from memstore.config import MIB, Config
from memstore.drills.model.catalogue import (
    APART,
    DURABLE_EVERY,
    KEPT_HEAD,
    NAMESPACES,
    PLACES,
    RAY_NAMESPACES,
    RUNNING,
    TIGHT,
    Drill,
    Options,
)
from memstore.errors import PeerUnreachable

if TYPE_CHECKING:
    from memstore.drills.sites.site import EmbeddedSite, Site

SEED_LIMIT = 1 << 31
HOSTS_MAX = 16  # raylets on one machine; the start of each takes half a second of a core
ROOM = 8  # arena bytes per byte of state: 2 copies x 2 versions + 1 repair, and slack for a neighbour's ranks
HEAD_AWAY_S = 600  # Ray's 60 s may be over before a busy machine has started a head again
# Ray reads these when it is imported. A private cluster needs neither tokens nor usage reports.
RAY_ENVIRONMENT = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_IGNORE_UNHANDLED_ERRORS": "1",  # of ranks that a drill kills: the timeline has them
}

Verb = Callable[..., Any]


def with_options(*options: Callable[[Verb], Verb]) -> Callable[[Verb], Verb]:
    """Return a decorator that adds options in this order."""
    return lambda verb: functools.reduce(lambda found, option: option(found), reversed(options), verb)


#: Options of every command that needs a cluster.
cluster_options = with_options(
    click.option("--embedded", is_flag=True, help="Bring a cluster of its own: raylets on this machine, in two racks."),
    click.option(
        "--seed",
        type=click.IntRange(0, SEED_LIMIT),
        default=lambda: random.randrange(SEED_LIMIT),
        help="Chooses victims and states; default: a random one.",
    ),
    click.option("--address", metavar="ADDRESS", help="Ray cluster; default: the one this machine belongs to."),
    click.option("--yes", is_flag=True, help="Do not ask before touching a cluster that the drill did not start."),
    store_options,
)
#: Those, and the options of the scratch job and its victim.
play_options = with_options(
    click.option(
        "--hosts",
        "hosts_count",
        type=click.IntRange(2, HOSTS_MAX),
        default=4,
        show_default=True,
        help="Ranks, one per host; with --embedded also the hosts.",
    ),
    click.option("--replicas", type=click.IntRange(1, 8), default=2, show_default=True, help="Copies of each shard."),
    click.option(
        "--mbytes", type=click.IntRange(1, 65_536), default=8, show_default=True, help="MiB per rank and step."
    ),
    click.option("--durable", metavar="DIR", help="Durable tier of the scratch job."),
    click.option("--victim", metavar="HOST", help="Host to hit; needed where a drill hits what is not its own."),
    click.option(
        "--allow-data-loss",
        is_flag=True,
        help="Even if another job has its last copy of something on the hosts that lose their memory.",
    ),
    cluster_options,
)


def options_from(given: dict[str, Any], config: Config, **job_fields: Any) -> Options:
    """Return the options of a drill as the command line has them; `job_fields` are of the scratch job's Config."""
    fields = {"replicas": given["replicas"], "durable_every": DURABLE_EVERY, **job_fields}
    return Options(
        seed=given["seed"],
        is_beyond=given.get("beyond", False),
        ranks_count=given["hosts_count"],
        nbytes=given["mbytes"] * MIB,
        config=config.with_fields(fields),
        victim=given["victim"],
        allows_data_loss=given["allow_data_loss"],
    )


def prepare_ray() -> None:
    """Set Ray's environment for a cluster of our own, before Ray is imported; keep what the user has set."""
    for variable, value in RAY_ENVIRONMENT.items():
        os.environ.setdefault(variable, value)


@contextlib.contextmanager
def embedded_site(
    hosts_count: int,
    arena_bytes: int,
    *,
    racks_count: int = 2,
    has_links: bool = False,
    gpus_per_host: int = 0,
    keeps_head: bool = False,
    **fields: Any,
) -> Iterator[EmbeddedSite]:
    """Open an embedded cluster with hosts h1, h2, ... by turns in some racks; the first is Ray's head.

    Args:
        has_links: Each host but the head has a network namespace of its own, and a link to cut; needs root.
        gpus_per_host: For Ray; all hosts have the same ones.
        keeps_head: Ray's head keeps its tables on disk, and ranks are processes that Ray did not start.
        fields: Of the cluster's Config.
    """
    from memstore.drills.ranks.ranks import ForkedPool
    from memstore.drills.sites.site import EmbeddedSite
    from memstore.testing.clusters.embedded import EmbeddedCluster
    from memstore.testing.clusters.namespaces import NamespaceRig
    from memstore.testing.clusters.scratch import racks, scratch_store_name
    from memstore.testing.ranks.rank_process import LOG_VARIABLE, RankNursery

    labels = racks(hosts_count, racks_count)
    with contextlib.ExitStack() as stack:
        rig = stack.enter_context(NamespaceRig(list(labels)[1:])) if has_links else None
        config = config_or_usage(
            store=scratch_store_name("drill"),
            arena_bytes=arena_bytes,
            chunk_bytes=MIB,
            interface=str(rig.network) if rig is not None else "127.0.0.1",
            **fields,
        )
        settings, pool = {}, None
        if keeps_head:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="memstore-head-"))
            settings = {
                "gcs_storage": "rocksdb",
                "gcs_storage_path": f"{folder}/gcs",
                "gcs_rpc_server_reconnect_timeout_s": HEAD_AWAY_S,
            }
            nursery = stack.enter_context(RankNursery())
            nursery.env[LOG_VARIABLE] = f"{folder}/ranks.log"
            pool = ForkedPool(nursery, lambda _host: "")
        cluster = stack.enter_context(
            EmbeddedCluster(labels, config=config, rig=rig, gpus_per_host=gpus_per_host, ray_settings=settings)
        )
        yield stack.enter_context(contextlib.closing(EmbeddedSite(cluster, pool)))


def place_problem(place: str) -> str | None:
    """Return why a cluster for this place cannot be started here, or None; plain raylets can always be started."""
    from memstore.testing.clusters.namespaces import available
    from memstore.testing.faults.mounts import mount_problem

    if place in (NAMESPACES, RAY_NAMESPACES):
        return available()
    if place == KEPT_HEAD:
        from ray._private.node import Node

        return None if hasattr(Node, "_is_rocksdb_gcs") else "this Ray's head cannot keep its tables on disk"
    return mount_problem() if place == TIGHT else None


@contextlib.contextmanager
def own_site(place: str, given: dict[str, Any], nbytes: int, *, name: str = "the suite") -> Iterator[Site]:
    """Open a cluster of the drill's own: raylets, with much or little memory, or processes in network namespaces.

    Raises:
        click.ClickException: such a cluster cannot be started here; `name` is the drill or suite that needs it.
    """
    why = place_problem(place)
    if why is not None:
        raise click.ClickException(f"{name} plays on {PLACES[place]}: it cannot be played here, because {why}")
    hosts_count, room = given["hosts_count"], ROOM * given["replicas"] * nbytes
    opened: contextlib.AbstractContextManager[Site]
    if place == NAMESPACES:
        from memstore.drills.sites.site_namespaces import namespaces_site

        # Room for two jobs: a network drill may have one more on each side of a cut.
        opened = namespaces_site(hosts_count, arena_bytes=max(256 * MIB, 2 * room))
    elif place == TIGHT:
        from memstore.drills.sites.site_tight import tight_site

        opened = tight_site(hosts_count, arena_bytes=max(64 * MIB, room))
    else:
        # Lost shards and their parity are made again on the two hosts more; beside another rank they wait for a put.
        hosts_count, racks_count = (hosts_count + 2,) * 2 if place == APART else (hosts_count, 2)
        opened = embedded_site(
            hosts_count,
            max(256 * MIB, room),
            racks_count=racks_count,
            has_links=place == RAY_NAMESPACES,
            keeps_head=place == KEPT_HEAD,
        )
    with opened as site:
        yield site


@contextlib.contextmanager
def running_site(config: Config, given: dict[str, Any], touches: str) -> Iterator[Site]:
    """Open the user's cluster, after showing what will be touched and asking.

    Raises:
        PeerUnreachable: there is no Ray cluster; names --embedded too.
        TransportError: it does not answer, or has no such store.
    """
    from memstore.drills.sites.site import Site

    try:
        opened = Site(config, given["address"])
    except PeerUnreachable as error:
        raise PeerUnreachable(f"{error}; or play on a cluster that is started for it: --embedded") from error
    with contextlib.closing(opened) as site:
        status, victim = site.status(), given.get("victim")
        if victim is not None:
            check_host(status, victim)
        hosts = [row.host for row in status.hosts if row.status == "live"]
        jobs = ", ".join(job.job for job in status.jobs) or "none"
        confirm(
            f"this touches, on store {config.store!r} ({len(hosts)} hosts, jobs: {jobs}): {touches}"
            + (f"; victim: {victim}" if victim else ""),
            is_agreed=given["yes"],
        )
        yield site


def confirm(words: str, *, is_agreed: bool) -> None:
    """Show what will be touched, and return only if the user agrees.

    Raises:
        click.UsageError: there is no terminal to ask on, and --yes was not given.
    """
    click.echo(words, err=True)
    if is_agreed:
        return
    if not sys.stdin.isatty():
        raise click.UsageError(
            "the drill did not start this cluster and there is no terminal to ask on: nothing was touched. Pass --yes "
            "to agree to the above, or --embedded for a cluster of its own"
        )
    click.confirm("Go on?", abort=True, err=True)


def check_usage(entry: Drill, given: dict[str, Any]) -> None:
    """Refuse a drill that may not be played with these options, before anything is started.

    Raises:
        click.UsageError: names the option to add or to leave out.
    """
    name, is_beyond, durable = entry.name, given["beyond"], given["durable"]
    if durable and os.path.exists(durable) and not os.path.isdir(durable):
        raise click.UsageError(f"--durable {durable} is no directory")
    if is_beyond and entry.beyond is None:
        raise click.UsageError(f"{name} has no play beyond the tolerance: leave --beyond out")
    if entry.needs_root and os.geteuid() != 0:
        raise click.UsageError(f"{name} mounts a file system of its own: it needs root")
    if given["embedded"]:
        return
    if RUNNING not in entry.runs_on:
        raise click.UsageError(f"{name} runs with --embedded only: it takes away what a cluster in use needs")
    if is_beyond and RUNNING not in entry.beyond_runs_on:
        raise click.UsageError(f"--beyond {name} destroys the memory of several hosts: it runs with --embedded only")
    if entry.needs_victim and given["victim"] is None:
        raise click.UsageError(f"{name} on a running cluster hits what is not its own: name the host with --victim")
    if entry.needs_durable and durable is None:
        raise click.UsageError(f"{name} needs a directory that every host reaches: name it with --durable")


@contextlib.contextmanager
def durable_directory(given: dict[str, Any], *, is_needed: bool) -> Iterator[str | None]:
    """Yield the directory that was named; else a new one if it is needed, or None."""
    if given["durable"] or not is_needed:
        yield os.path.abspath(given["durable"]) if given["durable"] else None
        return
    with tempfile.TemporaryDirectory(prefix="memstore-drill-") as made:
        yield made


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Discard what Ray prints to stdout about a dead host: stdout carries the drill's own lines."""
    log = logging.getLogger("memstore")
    before = log.level
    log.setLevel(logging.ERROR)  # a fault makes the driver's own link log warnings
    try:
        with open(os.devnull, "w", encoding="utf-8") as noise, contextlib.redirect_stdout(noise):
            yield
    finally:
        log.setLevel(before)


def line_printer(as_json: bool) -> Callable[[str], None]:
    """Return a function that prints a line for people; it goes to stderr if stdout carries JSON."""
    words = sys.stderr if as_json else sys.stdout

    def print_line(line: str) -> None:
        click.echo(line, file=words)

    return print_line
