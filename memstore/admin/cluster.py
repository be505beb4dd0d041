"""start, status, stop: the store as a whole on a Ray cluster (R3, R5)."""

from __future__ import annotations

import contextlib
import logging
import random
import secrets
import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar, cast

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from memstore.config import Config, check_config, check_seconds
from memstore.core.arena.claimed_memory import gib
from memstore.core.durable.checks import CHECK_DEADLINE_S
from memstore.core.report.problems import with_commands
from memstore.core.wire.calls import AskLastCopies, AskStatus
from memstore.core.wire.codec import Request
from memstore.core.wire.replies import status_fields
from memstore.distribution import VERSION
from memstore.errors import CapacityError, ConfigError, MemstoreError, PeerTimeout, PeerUnreachable
from memstore.shell.arena.arena import Arena
from memstore.shell.arena.folder import held_bytes, read_secret
from memstore.shell.arena.lock import is_held, owner
from memstore.shell.identity import HOST_LABEL
from memstore.shell.net.tls import Tls
from memstore.shell.on_ray.actors import (
    NAMESPACE,
    ControllerActor,
    controller_name,
    gcs_storage,
    live_nodes,
    may_lose_head,
)
from memstore.shell.on_ray.reach import REACH_S, wait_for_gcs, wants_token
from memstore.shell.rank.admin_link import any_tool, host_folders, store_root

R = TypeVar("R")
log = logging.getLogger("memstore")
START_S = 90.0
POLL_S = 0.1
LEAST_S = 0.1  # for the last part of an operation with one limit
ASK_S = 30.0
LOOK_S = 3.0  # for all other stores, which are asked beside one another
OURS = "Name the right cluster in RAY_ADDRESS or address=, or the right host in MEMSTORE_HOST"


@dataclass(frozen=True)
class ClusterStatus:
    """What the store knows of itself; `to_dict()` is what `memstore status --json` prints."""

    store: str
    hosts: list[dict[str, Any]] = field(default_factory=list)
    jobs: list[dict[str, Any]] = field(default_factory=list)
    term: int = 0
    gcs_storage: str = ""
    failure_domains: list[str] = field(default_factory=list)
    problems: list[dict[str, Any]] = field(default_factory=list)
    ray: str = ""
    version: str = ""
    job_defaults: dict[str, Any] = field(default_factory=dict)
    launches: list[dict[str, Any]] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)


def start(
    config: Config | None = None,
    *,
    address: str | None = None,
    timeout_s: float | None = None,
    on_hosts: Callable[..., object] | None = None,
) -> ClusterStatus:
    """Start one holder per host and the controller; calling it again is fine (R3).

    Args:
        config: Store fields; they must equal the running store's (R5). Job fields that are given are defaults for the
            store's jobs: each field that a job's own Config does not give.
        address: Ray cluster; default: the one this process is connected to, one found on this machine, or a
            new local one that lives as long as this process.
        timeout_s: For Ray to answer and every holder to be up; default: `connect_timeout_s` for Ray, then 90 s.
        on_hosts: Takes `done=` and `total=`, the hosts that are up and those that will be, while it waits for them.

    Raises:
        ConfigError: the running store has other fields, or a holder cannot start; says which and why.
        PeerUnreachable, PeerTimeout: no Ray cluster is at `address`, or it is silent for `connect_timeout_s`; the
            controller does not answer.
    """
    config, began_s = check_config(config), time.monotonic()
    timeout_s = None if timeout_s is None else check_seconds("timeout_s", timeout_s)
    join_ray(address, limit_s=config.connect_timeout_s if timeout_s is None else timeout_s, config=config)
    limit_s = START_S if timeout_s is None else max(LEAST_S, began_s + timeout_s - time.monotonic())
    deadline_s = time.monotonic() + limit_s
    running = _controller(config)
    actor = running or _create(config)
    _check_fields(config, _describe(actor, deadline_s, limit_s)["fields"])
    try:
        _wait_started(actor, deadline_s, limit_s, config, on_hosts)
    except ConfigError as error:
        if running is None and getattr(error, "hosts", None) == []:
            _close(actor, discard=False)  # unused so far; closed, so that the user can try what the error advises
        raise
    return status(config=config)


def ensure_started(config: Config, hosts: Collection[str] = ()) -> None:
    """Start the store unless it runs. A rank checks the configuration's fields later. Needs a joined Ray.

    Raises:
        PeerUnreachable: No node of the cluster on this machine can be one of `hosts`, so nothing was started; or none
            of the hosts that run is.
    """
    actor = _controller(config)
    if actor is None:
        _refuse_elsewhere(config, hosts)
        actor = _create(config)
    _wait_started(actor, time.monotonic() + START_S, START_S, config)
    up = sorted({*_describe(actor, time.monotonic() + ASK_S, ASK_S)["hosts"].values()})
    if hosts and not {*hosts} & {*up}:
        raise PeerUnreachable(
            f"store {config.store!r} runs there on {', '.join(up[:10])}{' and more' if len(up) > 10 else ''}, and none "
            f"of them is this process's host {' or '.join(sorted(hosts)[:10])}. {OURS}"
        )


def _refuse_elsewhere(config: Config, hosts: Collection[str]) -> None:
    """Raise PeerUnreachable if the `host` labels of this machine's nodes say that each is another host than `hosts`."""
    nodes = live_nodes()
    here = {n["NodeManagerHostname"] for n in nodes if n["NodeID"] == ray.get_runtime_context().get_node_id()}
    labels = [(n.get("Labels") or {}).get(HOST_LABEL) for n in nodes if n["NodeManagerHostname"] in here]
    names = sorted(label for label in labels if label)
    if hosts and labels and len(names) == len(labels) and not {*hosts} & {*names}:
        raise PeerUnreachable(
            f"store {config.store!r} was not started there: the cluster's nodes on this machine are "
            f"{', '.join(names[:10])}, and this process's host is {' or '.join(sorted(hosts)[:10])}. {OURS}"
        )


def is_on_ray(config: Config) -> bool:
    """Say whether the store runs on the joined cluster."""
    return _controller(config) is not None


def joined_address() -> str:
    """Return the address of the joined cluster's GCS."""
    return str(ray.get_runtime_context().gcs_address)


def join_ray(
    address: str | None,
    *,
    may_create: bool = True,
    limit_s: float = REACH_S,
    say: Callable[[str], None] = log.warning,
    logging_level: int = logging.INFO,
    config: Config | None = None,
) -> None:
    """Connect this process to a Ray cluster unless it is connected already; create a local one if allowed.

    Raises:
        PeerUnreachable: No cluster is there, or its GCS has not answered within `limit_s`; `say` names it while it is
            waited for. Ray is asked only once it has answered: ray.init() has no limit.
    """
    if ray.is_initialized():
        return
    where = f"at {address}" if address is not None else "on this machine"
    remedy = "start one with `ray start --head`, join one with `ray start --address=HOST:6379`, or name its address"
    try:
        wait_for_gcs(address, limit_s, say)
        ray.init(address=address or "auto", namespace=NAMESPACE, log_to_driver=False, logging_level=logging_level)
    except ConnectionError as error:
        if wants_token(error):
            raise PeerUnreachable(
                f"the Ray cluster {where} answers and refuses this process: Ray's token authentication is on there. "
                "With an address given, Ray uses a token only if asked to: set RAY_AUTH_MODE=token here, and have the "
                "cluster's token in ~/.ray/auth_token or RAY_AUTH_TOKEN; or start the cluster with "
                "RAY_AUTH_MODE=disabled",
                address=address,
            ) from error
        if address is not None or not may_create:
            then = (config or Config()).commands("then `memstore up`")
            raise PeerUnreachable(f"no Ray cluster answers {where}: {remedy}, {then}") from None
        create_local_ray()
    except (RuntimeError, ValueError) as error:
        raise PeerUnreachable(f"the Ray cluster {where} cannot be joined: {error}", address=address) from error


def create_local_ray() -> None:
    """Start a Ray cluster that lives as long as this process; its processes die with the thread that calls this."""
    drawn = random.getstate()  # Ray draws ports from the random state that the caller may have seeded for training
    try:
        ray.init(address="local", include_dashboard=False, namespace=NAMESPACE, log_to_driver=False)
    finally:
        random.setstate(drawn)


def running_controller(config: Config) -> Any:
    """Return the actor of the store's controller; ConfigError if the store does not run on the joined cluster."""
    actor = _controller(config)
    if actor is None:
        there = ", ".join(stores_on_ray()) or "none"
        raise ConfigError(
            f"store {config.store!r} does not run on the Ray cluster at {joined_address()}, which runs {there}: name "
            f"its cluster with --address, or start it with {config.commands('`memstore up`')}",
            field="store",
        )
    return actor


def _controller(config: Config) -> Any:
    try:
        return ray.get_actor(controller_name(config.store), namespace=NAMESPACE)
    except ValueError:
        return None


def _create(config: Config) -> Any:
    Tls.load(config)  # raise faults of the files here, not in an actor
    others = stores_on_ray()
    if others:
        log.warning(
            "memstore: starting a new store %r on the Ray cluster at %s, which runs %s",
            config.store,
            joined_address(),
            ", ".join(others),
        )
    return (
        ray.remote(ControllerActor)
        .options(
            name=controller_name(config.store),
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            # One byte, because Ray places an actor that asks for nothing at random and ignores a soft affinity.
            num_cpus=0,
            memory=1,
            max_restarts=-1,
            max_concurrency=16,
            scheduling_strategy=NodeAffinitySchedulingStrategy(_controller_node(), soft=True),
        )
        .remote(config.start_fields(), _secret(config))
    )


def _controller_node() -> str:
    """Return the Ray node on which a controller is to start: the head; another one if the head may be lost."""
    nodes = [node for node in ray.nodes() if node["Alive"]]
    heads = [node["NodeID"] for node in nodes if "node:__internal_head__" in node["Resources"]]
    others = sorted({node["NodeID"] for node in nodes} - {*heads})
    chosen = others if others and may_lose_head(gcs_storage()) else heads
    return str(next(iter(chosen), ray.get_runtime_context().get_node_id()))


def nodes_by_host(config: Config) -> dict[str, int]:
    """Return how many Ray nodes each host's holder serves: several of one machine share one unless labels name them."""
    actor = _controller(config)
    described = ray.get(actor.describe.remote(), timeout=ASK_S) if actor is not None else {"hosts": {}}
    return dict(Counter(described["hosts"].values()))


def store_facts(config: Config) -> dict[str, Any]:
    """Return what `ClusterFacts` has of the store, if it runs on the joined cluster; else nothing."""
    actor = _controller(config)
    if actor is None:
        return {}
    facts: dict[str, Any] = {"is_running": True}
    try:
        seen = _describe(actor, time.monotonic() + ASK_S, ASK_S)
        running = facts["config"] = config.with_fields(seen["fields"])
        missing = [node for node in seen["nodes"] if seen["hosts"].get(node) not in seen["connected"]]
        facts["without_holder"] = {node: seen["errors"].get(node, "it is being started") for node in missing}
        _check_fields(config, seen["fields"])
        facts["problems"] = dict(Counter(row.severity for row in ask(AskStatus(), config=running).problems))
    except MemstoreError as error:
        facts["store_problem"] = str(error)
    return facts


def stores_on_ray() -> list[str]:
    """Return the names of the stores whose controller runs on the Ray cluster."""
    actors = ray.util.list_named_actors(all_namespaces=True)
    names = [str(actor["name"]) for actor in actors if actor["namespace"] == NAMESPACE]
    ends = controller_name("/").split("/")
    return sorted(name[len(ends[0]) : -len(ends[1])] for name in names if name.endswith(ends[1]))


def stores_having(job: str, config: Config) -> list[str]:
    """Return the other stores of the Ray cluster that know a job, of those that answer within `LOOK_S`."""
    names = [name for name in stores_on_ray() if name != config.store]
    actors = {name: _controller(config.with_fields({"store": name})) for name in names}
    asked = {a.ask.remote(AskStatus(), LOOK_S): name for name, a in actors.items() if a is not None}
    answered = ray.wait(list(asked), num_returns=len(asked), timeout=LOOK_S)[0] if asked else []
    found = []
    for answer in answered:
        with contextlib.suppress(Exception):  # no holder of it answers
            found += [asked[answer]] if job in [row.job for row in ray.get(answer).jobs] else []
    return sorted(found)


def _secret(config: Config) -> bytes:
    """Return the secret an earlier life of the store left on this machine, else a new one (R4)."""
    for folder in host_folders(config):
        with contextlib.suppress(MemstoreError, OSError):
            found = read_secret(folder)
            if found is not None:
                return found
    return secrets.token_bytes(32)


def _check_fields(config: Config, running: dict[str, Any]) -> None:
    """Raise ConfigError, with every difference, if a field that is given is not the running store's (R5)."""
    mine = {name: value for name, value in config.start_fields().items() if name in config.given}
    unset = Config().job_fields()
    differing = [
        f"{k}: {_said(k, running[k])} runs, {_said(k, mine[k])} asked"
        if k in running
        else f"{k}: no default of the store ({unset[k]!r}), {mine[k]!r} asked"
        for k in mine
        if k not in running or mine[k] != running[k]
    ]
    if differing:
        there = config.with_fields({"arena_dir": running["arena_dir"]})  # where `down` finds the leftovers
        raise ConfigError(
            f"store {config.store!r} runs with other settings: {'; '.join(differing)}. Use the running ones, another "
            f"store name, or stop it first: {there.commands('`memstore down`')}; what is stored stays in memory"
        )


def _said(name: str, value: Any) -> str:
    is_round = name.endswith("_bytes") and isinstance(value, int) and value % (1 << 20) == 0
    return gib(value) if is_round else repr(value)


def _describe(actor: Any, deadline_s: float, limit_s: float) -> dict[str, Any]:
    """Return the controller actor's description; PeerTimeout at the deadline, `limit_s` after the start."""
    try:
        said = ray.get(actor.describe.remote(), timeout=max(LEAST_S, deadline_s - time.monotonic()))
    except ray.exceptions.GetTimeoutError:
        raise PeerTimeout(
            f"the store's controller did not answer within {limit_s:.3g} s: Ray has not started its process yet, or it "
            "hangs; `ray list actors` shows it. Call it again, with more time",
            operation="start",
            limit_s=limit_s,
        ) from None
    return dict(said)


def _wait_started(
    actor: Any, deadline_s: float, limit_s: float, config: Config, on_hosts: Callable[..., object] | None = None
) -> None:
    """Wait until every node has a holder that the controller talks to.

    Raises:
        ConfigError: one says why it cannot start, `hosts` then being those that run; or one is silent.
    """
    while True:
        seen = _describe(actor, deadline_s, limit_s)
        missing = [n for n in seen["nodes"] if seen["hosts"].get(n) not in seen["connected"]]
        if on_hosts is not None:
            on_hosts(done=len(seen["nodes"]) - len(missing), total=len(seen["nodes"]))
        if not missing and seen["nodes"] and seen["is_serving"]:
            return
        failed = next(((n, seen["errors"][n]) for n in missing if n in seen["errors"]), None)
        if failed is not None:
            hosts = sorted(seen["connected"])
            words = f"the holder of Ray node {failed[0][:12]} did not start: {config.commands(failed[1])}"
            if hosts:
                others = f"{', '.join(hosts[:5])}{f' and {len(hosts) - 5} more' if len(hosts) > 5 else ''}"
                words += f". The store runs on {others}; {config.commands('`memstore down`')} stops it"
            raise ConfigError(words, nodes=missing, hosts=hosts)
        if time.monotonic() > deadline_s:
            node = missing[0][:12] if missing else "none"
            raise ConfigError(f"the holder of Ray node {node} did not start: silent for {limit_s:.3g} s", nodes=missing)
        time.sleep(POLL_S)


def ask(
    request: Request[R], *, config: Config | None = None, timeout_s: float = ASK_S, avoid: Collection[str] = ()
) -> R:
    """Ask the controller through a holder on this machine, else through Ray if this process is connected to it.

    `avoid` names hosts whose holder is known not to answer, such as one that a drill has frozen.
    """
    config = check_config(config)
    try:
        with any_tool(config, avoid) as tool:
            return tool.ask(request, timeout_s)
    except PeerUnreachable:
        actor = _controller(config) if ray.is_initialized() else None
        if actor is None:
            raise
    return cast(R, ray.get(actor.ask.remote(request, timeout_s), timeout=timeout_s + ASK_S))


def status(*, address: str | None = None, config: Config | None = None) -> ClusterStatus:
    """Return the store's status of its hosts and jobs; works with Ray's control plane down (R4)."""
    config = check_config(config)
    if address is not None:
        join_ray(address, limit_s=config.connect_timeout_s, config=config)
    fields = status_fields(with_commands(ask(AskStatus(), config=config), config))
    ray_address = joined_address() if ray.is_initialized() else ""
    del fields["serving_s"]
    return ClusterStatus(store=config.store, ray=ray_address, version=VERSION, **fields)


def stop(
    *,
    address: str | None = None,
    config: Config | None = None,
    keep_data: bool = True,
    force: bool = False,
    on_hosts: Callable[..., object] | None = None,
) -> None:
    """Stop the controller and every holder. With keep_data the arenas stay for a later start (R5).

    Where nothing runs this does nothing; it starts no Ray. `on_hosts` as in `start`: those that have stopped.

    Raises:
        CapacityError: keep_data=False while a committed step lives only in RAM, or durable storage, looked at now,
            cannot be read or lacks some of it; unless `force`.
        PeerUnreachable, PeerTimeout: No Ray cluster is at `address`, or it is silent for `connect_timeout_s`.
    """
    config = check_config(config)
    try:
        join_ray(address, may_create=False, limit_s=config.connect_timeout_s, config=config)
    except PeerUnreachable:
        if address is not None:
            raise
        return
    actor = _controller(config)
    if actor is None:
        return
    if not keep_data and not force:
        refuse_last_copies(config)
    _close(actor, discard=not keep_data, on_hosts=on_hosts)


def _close(actor: Any, *, discard: bool, on_hosts: Callable[..., object] | None = None) -> None:
    def connected_count() -> int:
        with contextlib.suppress(Exception):
            return len(_describe(actor, time.monotonic() + ASK_S, ASK_S)["connected"])
        return 0

    total, until_s = connected_count() if on_hosts is not None else 0, time.monotonic() + START_S
    with contextlib.suppress(Exception):
        closing = actor.close_holders.remote(discard)
        while not ray.wait([closing], timeout=POLL_S)[0] and time.monotonic() < until_s:
            if on_hosts is not None:
                on_hosts(done=max(0, total - connected_count()), total=total)
    with contextlib.suppress(Exception):
        ray.get(actor.close.remote(), timeout=ASK_S)
    ray.kill(actor, no_restart=True)


def refuse_last_copies(config: Config) -> None:
    """Raise CapacityError, naming every job with its step and pins, if freeing the RAM would lose a committed step.

    What is durable is looked for on the storage, now.
    """
    found = ask(AskLastCopies(job=None), config=config, timeout_s=CHECK_DEADLINE_S + ASK_S).lost
    lost = [f"job {name!r}: {' and '.join(words)}" for name, words in found.items()]
    if lost:
        more = f"; and {len(lost) - 10} more jobs" if len(lost) > 10 else ""
        raise CapacityError(
            f"{'; '.join(lost[:10])}{more}. Freeing the memory would lose it: keep the arenas (the default), make it "
            "durable, or say that it is not needed "
            f"({config.commands('`memstore down --discard --yes`')}; in Python stop(keep_data=False, force=True))",
            jobs_count=len(lost),
        )


def leftovers(config: Config | None = None) -> list[dict[str, Any]]:
    """List the arenas of this store on this machine, with or without Ray (R5)."""
    found = []
    for folder in host_folders(config or Config()):
        holding = owner(folder)
        found.append(
            {
                "host": folder.name,
                "folder": str(folder),
                "is_live": is_held(folder),
                "pid": holding.pid if holding is not None else None,
                "nbytes": held_bytes(folder),
            }
        )
    return found


def remove_leftovers(config: Config | None = None, hosts: list[str] | None = None) -> list[str]:
    """Remove arenas that no live holder owns; return their hosts. ConfigError if a named one is live."""
    removed = []
    for row in leftovers(config):
        if hosts is not None and row["host"] not in hosts:
            continue
        if row["is_live"]:
            if hosts is not None:
                raise ConfigError(
                    f"the arena of host {row['host']} belongs to a live holder, pid {row['pid']}: stop it first"
                )
            continue
        Arena.destroy(row["folder"])
        removed.append(row["host"])
    with contextlib.suppress(OSError):
        store_root(config or Config()).rmdir()
    return removed
