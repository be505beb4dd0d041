"""start, status, stop: the store as a whole on a Ray cluster (DESIGN 5, R3, R5)."""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from memstore.config import Config
from memstore.core.cadence import parse_put_every
from memstore.core.durable_schedule import parse_every
from memstore.core.problems import only_in_ram
from memstore.distribution import installed_version
from memstore.errors import CapacityError, ConfigError, MemstoreError, PeerTimeout, PeerUnreachable
from memstore.shell.actors import NAMESPACE, ControllerActor, controller_name
from memstore.shell.arena import Arena
from memstore.shell.arena_folder import read_secret
from memstore.shell.arena_lock import is_held, owner
from memstore.shell.ray_reach import REACH_S, wait_for_gcs
from memstore.shell.tls import Tls
from memstore.shell.tool import any_tool, host_folders, store_root

log = logging.getLogger("memstore")
START_S = 90.0
POLL_S = 0.1
LEAST_S = 0.1  # for the last part of what has one limit
ASK_S = 30.0


@dataclass(frozen=True)
class ClusterStatus:
    """What the store knows of itself; `to_dict()` is what `memstore status --json` prints."""

    store: str
    hosts: list[dict[str, Any]] = field(default_factory=list)
    jobs: list[dict[str, Any]] = field(default_factory=list)
    term: int = 0
    failure_domains: list[str] = field(default_factory=list)
    problems: list[dict[str, Any]] = field(default_factory=list)
    ray: str = ""
    version: str = ""
    job_defaults: dict[str, Any] = field(default_factory=dict)
    launches: list[dict[str, Any]] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, JSON-able."""
        return {
            "version": self.version, "store": self.store, "ray": self.ray, "term": self.term,
            "failure_domains": self.failure_domains, "hosts": self.hosts, "jobs": self.jobs, "problems": self.problems,
            "job_defaults": self.job_defaults, "launches": self.launches,
        }  # fmt: skip


def start(config: Config | None = None, *, address: str | None = None, timeout_s: float | None = None) -> ClusterStatus:
    """Start one holder per host and the controller; calling it again is fine (R3).

    Args:
        config: Store fields; they must equal the running store's (R5). Job fields that are given are defaults for the
            store's jobs: each field that a job's own Config does not give.
        address: Ray cluster; default: the one this process is connected to, one found on this machine, or a
            new local one that lives as long as this process.
        timeout_s: For Ray to answer and every holder to be up; default: `connect_timeout_s` for Ray, then 90 s.

    Raises:
        ConfigError: the running store has other fields, or a holder cannot start; says which and why.
        PeerUnreachable, PeerTimeout: no Ray cluster is at `address`, or it is silent for `connect_timeout_s`; the
            controller does not answer.
    """
    config, began_s = config or Config(), time.monotonic()
    join_ray(address, limit_s=config.connect_timeout_s if timeout_s is None else timeout_s)
    limit_s = START_S if timeout_s is None else max(LEAST_S, began_s + timeout_s - time.monotonic())
    deadline_s = time.monotonic() + limit_s
    actor = _controller(config) or _create(config)
    _check_fields(config, _describe(actor, deadline_s, limit_s)["fields"])
    _wait_started(actor, deadline_s, limit_s)
    return status(config=config)


def ensure_started(config: Config) -> None:
    """Start the store unless it runs, with whatever fields: a rank says later which it minds. Needs a joined Ray."""
    _wait_started(_controller(config) or _create(config), time.monotonic() + START_S, START_S)


def join_ray(
    address: str | None, *, may_create: bool = True, limit_s: float = REACH_S,
    say: Callable[[str], None] = log.warning, logging_level: int = logging.INFO,
) -> None:  # fmt: skip
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
    except ConnectionError:
        if address is not None or not may_create:
            raise PeerUnreachable(f"no Ray cluster answers {where}: {remedy}, then `memstore up`") from None
        create_local_ray()
    except (RuntimeError, ValueError) as error:
        raise PeerUnreachable(f"the Ray cluster {where} cannot be joined: {error}", address=address) from error


def create_local_ray() -> None:
    """Start a Ray cluster that lives as long as this process; its processes die with the thread that calls this."""
    ray.init(address="local", include_dashboard=False, namespace=NAMESPACE, log_to_driver=False)


def _controller(config: Config) -> Any:
    try:
        return ray.get_actor(controller_name(config.store), namespace=NAMESPACE)
    except ValueError:
        return None


def _create(config: Config) -> Any:
    parse_put_every(config.put_every)
    parse_every(config.durable_every)
    Tls.load(config)  # what is wrong with the files is said here, not in an actor that dies of it
    others = _stores_on_ray()
    if others:
        log.warning("memstore: starting a new store %r on a Ray cluster that runs %s", config.store, ", ".join(others))
    head = ray.get_runtime_context().get_node_id()
    for node in ray.nodes():
        if node["Alive"] and "node:__internal_head__" in node["Resources"]:
            head = node["NodeID"]
    return (
        ray.remote(ControllerActor)
        .options(
            name=controller_name(config.store), namespace=NAMESPACE, lifetime="detached", get_if_exists=True,
            # One byte, because Ray places an actor that asks for nothing at random and ignores a soft affinity.
            num_cpus=0, memory=1, max_restarts=-1, max_concurrency=16,
            scheduling_strategy=NodeAffinitySchedulingStrategy(head, soft=True),
        )
        .remote(config.start_fields(), _secret(config))
    )  # fmt: skip


def nodes_by_host(config: Config) -> dict[str, int]:
    """Return how many Ray nodes each host's holder serves: several of one machine share one unless labels name them."""
    actor = _controller(config)
    described = ray.get(actor.describe.remote(), timeout=ASK_S) if actor is not None else {"hosts": {}}
    return dict(Counter(described["hosts"].values()))


def _stores_on_ray() -> list[str]:
    """Return the names of the stores whose controller runs on the Ray cluster."""
    actors = ray.util.list_named_actors(all_namespaces=True)
    names = [str(actor["name"]) for actor in actors if actor["namespace"] == NAMESPACE]
    ends = controller_name("/").split("/")
    return sorted(name[len(ends[0]) : -len(ends[1])] for name in names if name.endswith(ends[1]))


def _secret(config: Config) -> bytes:
    """Return the secret an earlier life of the store left on this machine, else a new one (R4)."""
    for folder in host_folders(config):
        with contextlib.suppress(MemstoreError, OSError):
            found = read_secret(folder)
            if found is not None:
                return found
    return secrets.token_bytes(32)


def _check_fields(config: Config, running: dict[str, Any]) -> None:
    mine, unset = config.start_fields(), Config().job_fields()
    differing = [
        f"{k}: {running[k]!r} runs, {mine[k]!r} asked"
        if k in running
        else f"{k}: no default of the store ({unset[k]!r}), {mine[k]!r} asked"
        for k in mine
        if k not in running or mine[k] != running[k]
    ]
    if differing:
        raise ConfigError(
            f"store {config.store!r} runs with other settings: {'; '.join(differing)}. Use the running ones, another "
            "store name, or stop it first (memstore down)"
        )


def _describe(actor: Any, deadline_s: float, limit_s: float) -> dict[str, Any]:
    """Return what the controller's actor says of itself; PeerTimeout at the deadline, `limit_s` after the start."""
    try:
        said = ray.get(actor.describe.remote(), timeout=max(LEAST_S, deadline_s - time.monotonic()))
    except ray.exceptions.GetTimeoutError:
        raise PeerTimeout(
            f"the store's controller did not answer within {limit_s:.3g} s: Ray has not started its process yet, or it "
            "hangs; `ray list actors` shows it. Call it again, with more time",
            operation="start", limit_s=limit_s,
        ) from None  # fmt: skip
    return dict(said)


def _wait_started(actor: Any, deadline_s: float, limit_s: float) -> None:
    """Wait until every node has a holder that the controller talks to, or one says why it cannot."""
    while True:
        seen = _describe(actor, deadline_s, limit_s)
        missing = [n for n in seen["nodes"] if seen["hosts"].get(n) not in seen["connected"]]
        if not missing and seen["nodes"] and seen["is_serving"]:
            return
        failed = {n: seen["errors"][n] for n in missing if n in seen["errors"]}
        if failed or time.monotonic() > deadline_s:
            node, why = next(iter(failed.items()), (missing[0] if missing else "none", f"silent for {limit_s:.3g} s"))
            raise ConfigError(f"the holder of Ray node {node[:12]} did not start: {why}", nodes=missing)
        time.sleep(POLL_S)


def ask(
    verb: str,
    body: dict[str, Any] | None = None,
    *,
    config: Config | None = None,
    timeout_s: float = ASK_S,
    avoid: Collection[str] = (),
) -> dict[str, Any]:
    """Ask the controller through a holder on this machine, else through Ray if this process is connected to it.

    `avoid` names hosts whose holder is known not to answer, such as one that a drill has frozen.
    """
    config = config or Config()
    try:
        with any_tool(config, avoid) as tool:
            answer: dict[str, Any] = tool.ask(verb, body, timeout_s)
            return answer
    except PeerUnreachable:
        actor = _controller(config) if ray.is_initialized() else None
        if actor is None:
            raise
    return dict(ray.get(actor.ask.remote(verb, body or {}, timeout_s), timeout=timeout_s + ASK_S))


def status(*, address: str | None = None, config: Config | None = None) -> ClusterStatus:
    """Return what the store knows of its hosts and jobs; works with Ray's control plane down (R4)."""
    config = config or Config()
    if address is not None:
        join_ray(address, limit_s=config.connect_timeout_s)
    body = ask("status", config=config)
    ray_address = ray.get_runtime_context().gcs_address if ray.is_initialized() else ""
    return ClusterStatus(
        config.store, body["hosts"], body["jobs"], body["term"], body["failure_domains"], body["problems"], ray_address,
        installed_version(), job_defaults=body["job_defaults"], launches=body["launches"],
    )  # fmt: skip


def stop(
    *, address: str | None = None, config: Config | None = None, keep_data: bool = True, force: bool = False
) -> None:
    """Stop the controller and every holder. With keep_data the arenas stay for a later start (R5).

    Where nothing runs this does nothing; it starts no Ray.

    Raises:
        CapacityError: keep_data=False while a committed step lives only in RAM, unless `force`.
        PeerUnreachable, PeerTimeout: No Ray cluster is at `address`, or it is silent for `connect_timeout_s`.
    """
    config = config or Config()
    try:
        join_ray(address, may_create=False, limit_s=config.connect_timeout_s)
    except PeerUnreachable:
        if address is not None:
            raise
        return
    actor = _controller(config)
    if actor is None:
        return
    if not keep_data and not force:
        refuse_last_copies(config)
    with contextlib.suppress(Exception):
        ray.get(actor.close_holders.remote(not keep_data), timeout=START_S)
    with contextlib.suppress(Exception):
        ray.get(actor.close.remote(), timeout=ASK_S)
    ray.kill(actor, no_restart=True)


def refuse_last_copies(config: Config) -> None:
    """Raise CapacityError, naming every job with its step and pins, if freeing the RAM would lose a committed step."""
    found = {job["job"]: only_in_ram(job) for job in status(config=config).jobs}
    lost = [f"job {name!r}: {' and '.join(words)}" for name, words in found.items() if words]
    if lost:
        more = f"; and {len(lost) - 10} more jobs" if len(lost) > 10 else ""
        raise CapacityError(
            f"{'; '.join(lost[:10])}{more}. Freeing the memory would lose it: keep the arenas (the default), make it "
            "durable, or say that it is not needed (`memstore down --discard --yes`, stop(force=True))",
            jobs_count=len(lost),
        )


def leftovers(config: Config | None = None) -> list[dict[str, Any]]:
    """List the arenas of this store on this machine, with or without Ray (R5)."""
    found = []
    for folder in host_folders(config or Config()):
        holding = owner(folder)
        arena = folder / "arena"
        found.append(
            {
                "host": folder.name, "folder": str(folder), "is_live": is_held(folder),
                "pid": holding.pid if holding is not None else None,
                "nbytes": arena.stat().st_blocks * 512 if arena.exists() else 0,
            }
        )  # fmt: skip
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
    root = store_root(config or Config())
    if hosts is None and not host_folders(config or Config()):
        for story in root.glob(".dropped-*"):  # of hosts whose folders were gone already
            story.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        root.rmdir()
    return removed
