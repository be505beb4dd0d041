"""Ray actors around the holder and the controller, and the supervision of holders (R1-R4, R17).

Ray starts, finds and names processes; their messages go over memstore's own sockets.
Holders have max_restarts=0: the controller's supervisor starts a successor, which adopts the arena.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar, cast

import ray
from ray.experimental import internal_kv
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from memstore.config import Config
from memstore.core.format.releases import FORMATS
from memstore.core.wire.codec import Request
from memstore.core.wire.handshake import ProbeIdentity
from memstore.distribution import VERSION
from memstore.errors import ConfigError, MemstoreError, PeerTimeout, TransportError
from memstore.shell.arena.arena import Arena
from memstore.shell.arena.folder import arena_folder
from memstore.shell.arena.lock import is_held, owner
from memstore.shell.arena.memory_limits import arena_limit
from memstore.shell.controller import Controller, collect_rarely
from memstore.shell.holder.holder import Holder, collect_only_new
from memstore.shell.identity import HostIdentity, local_identity
from memstore.shell.net.listener import connect_tcp
from memstore.shell.net.tls import Tls
from memstore.shell.on_ray.metrics import feed_from_controller, feed_from_holder
from memstore.shell.rank.admin_link import Tool

# -- membership ---------------------------------------------------------------------------------------
# Membership in Ray's GCS key-value store (R3, R17). Ray finds and names processes; nothing else goes through it.


NAMESPACE = "memstore"
KV_NAMESPACE = NAMESPACE.encode()


def gcs_storage() -> str:
    """Return where Ray's GCS keeps its tables, as the head notes when it starts: "memory", "rocksdb" or "redis".

    "" if it noted nothing, or does not answer.
    """
    with contextlib.suppress(Exception):
        found = internal_kv._internal_kv_get(b"extra_usage_tag_gcs_storage", namespace=b"usage_stats")
        return found.decode() if found else ""
    return ""


def may_lose_head(storage: str) -> bool:
    """Return whether Ray's head may be lost: it is started again with its tables, and all other hosts live on."""
    return storage not in ("", "memory")


class RayMembership:
    """Records of one store under `<store>/hosts/` and `<store>/terms/`."""

    def __init__(self, store: str) -> None:
        self.store = store

    def announce(self, host_id: str, record: dict[str, Any]) -> None:
        """Register a holder's address."""
        self._put(f"hosts/{host_id}", json.dumps(record).encode(), overwrite=True)

    def hosts(self) -> dict[str, dict[str, Any]]:
        """Return every announced holder by host id."""
        keys = [self._key(f"hosts/{name}") for name in self._list("hosts/")]
        gcs = internal_kv.internal_kv_get_gcs_client()
        if gcs is None:  # through ray://
            found = {key: self._call(internal_kv._internal_kv_get, key, namespace=KV_NAMESPACE) for key in keys}
        else:  # one question, or a controller would ask 10,000 a second for 2,048 hosts
            found = self._call(gcs.internal_kv_multi_get, keys, KV_NAMESPACE)
        return {key.decode().rpartition("/")[2]: json.loads(data) for key, data in found.items() if data is not None}

    def withdraw(self, host_id: str) -> None:
        """Remove a host that left for good."""
        self._call(internal_kv._internal_kv_del, self._key(f"hosts/{host_id}"), namespace=KV_NAMESPACE)

    def claim_term(self, above: int) -> int:
        """Take a term above every one claimed: put if absent (R17)."""
        term = max(above, self.newest_term()) + 1
        while self._put(f"terms/{term:012d}", b"1", overwrite=False):
            term += 1
        return term

    def newest_term(self) -> int:
        """Return the highest term claimed so far."""
        return max((int(name) for name in self._list("terms/")), default=0)

    def _key(self, name: str) -> bytes:
        return f"{self.store}/{name}".encode()

    def _put(self, name: str, value: bytes, *, overwrite: bool) -> bool:
        """Store a value; True if the key was there already."""
        return bool(
            self._call(
                internal_kv._internal_kv_put, self._key(name), value, overwrite=overwrite, namespace=KV_NAMESPACE
            )
        )

    def _list(self, prefix: str) -> list[str]:
        keys = self._call(internal_kv._internal_kv_list, self._key(prefix), namespace=KV_NAMESPACE)
        return sorted(key.decode().removeprefix(f"{self.store}/{prefix}") for key in keys)

    def _call(self, work: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return work(*args, **kwargs)
        except Exception as exc:
            raise TransportError(f"Ray's key-value store did not answer: {exc}") from exc


# -- parent watch -------------------------------------------------------------------------------------
# A process that Ray started ends when its raylet does (R3).


PARENT_POLL_S = 0.5


def end_with_parent(exit_now: Callable[[int], object] = os._exit) -> threading.Thread:
    """Watch the process that started this one, and exit with code 1 once it is gone; the arena outlives both (R2)."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_POLL_S)
        log.warning("the raylet (pid %d) that started this process has died: it ends too", parent)
        exit_now(1)

    thread = threading.Thread(target=watch, name="memstore-raylet-watch", daemon=True)
    thread.start()
    return thread


# -- actors -------------------------------------------------------------------------------------------


R = TypeVar("R")
log = logging.getLogger("memstore")
SUPERVISE_S = 0.5
DRAIN_LOOK = 4  # every so many looks at the nodes: a notice is given half a minute ahead, or more
RETRY_S = 5.0  # a node whose holder could not start is tried again after this
START_S = 60.0
DRAIN_S = 600.0  # for a node that Ray takes away without naming the moment
PROBE_S = 2.0
CLOSE_S = 15.0  # a holder that does not close within this is killed: its arena stays all the same
BEGUN_S = 10.0  # for holders whose start has begun when the store is stopped; then their processes are killed
POLL_S = 0.05


def this_build() -> dict[str, Any]:
    """Return the version and the formats of the code that this process runs; read from disk as the process began."""
    return {"version": VERSION, "formats": dict(FORMATS)}


def controller_name(store: str) -> str:
    """Return the Ray name of a store's controller."""
    return f"memstore-{store}-controller"


class HolderActor:
    """One host's holder in a Ray worker process."""

    def __init__(self, fields: dict[str, Any], secret: bytes, labels: dict[str, str], hosts_on_machine: int) -> None:
        logging.basicConfig(level=logging.INFO)
        end_with_parent()
        self.config = Config().with_fields(fields)
        self.secret = secret
        self.identity: HostIdentity = local_identity(labels, os.environ)
        self.hosts_on_machine = hosts_on_machine
        self.membership = RayMembership(self.config.store)
        self.holder: Holder | None = None

    def ready(self) -> dict[str, Any]:
        """Answer once everything is imported."""
        return this_build()

    def start(self) -> dict[str, Any]:
        """Take the arena and serve; or say that this host is served already by another node's holder (R1)."""
        host = self.identity.host_id
        self._refuse_double(host)
        folder = arena_folder(self.config.arena_dir, store=self.config.store, host=host)
        cluster = ray.get_runtime_context().gcs_address
        if folder.is_dir() and is_held(folder):
            holding = owner(folder)
            if holding is not None and holding.is_alive() and holding.cluster == cluster and self._answers():
                return {"host": host, "shared": True}
        limit = arena_limit(self.config, folder, hosts_on_machine=self.hosts_on_machine)
        self.holder = Holder(
            self.identity,
            self.config,
            secret=self.secret,
            cluster=cluster,
            on_fatal=lambda why: os._exit(1),
            arena_limit_bytes=limit.nbytes,
            limit_words=(limit.why, limit.warning),
        )
        feed_from_holder(self.holder)
        info = self.holder.state.info
        first = info.endpoints[0]
        record = {
            "address": first.address,
            "port": first.port,
            "incarnation": info.incarnation,
            "machine": info.machine,
            "node": ray.get_runtime_context().get_node_id(),
            "pid": os.getpid(),
            "actor": ray.get_runtime_context().get_actor_name(),
            **this_build(),
        }
        self.membership.announce(host, record)
        collect_only_new()
        return {"host": host, "shared": False, **record}

    def _answers(self) -> bool:
        """Say whether the announced holder of this host accepts connections: a frozen one does not (R2)."""
        record = self.membership.hosts().get(self.identity.host_id)
        try:
            if record is None:
                return False
            self._probe(self.identity.host_id, record)
            return True
        except TransportError:
            return False

    def _probe(self, host: str, record: dict[str, Any]) -> None:
        connect_tcp(
            str(record["address"]),
            int(record["port"]),
            secret=self.secret,
            store=self.config.store,
            identity=ProbeIdentity(),
            timeout_s=PROBE_S,
            host=host,
            tls=Tls.load(self.config),
        ).close()

    def _refuse_double(self, host: str) -> None:
        """Refuse two live holders of one id on different machines, with both addresses (R1)."""
        record = self.membership.hosts().get(host)
        if record is None or record.get("machine") in (None, self.identity.machine):
            return
        try:
            self._probe(host, record)
        except TransportError:
            return
        here = ray.util.get_node_ip_address()
        raise ConfigError(
            f"host id {host!r} is claimed by two machines: {record['address']}:{record['port']} and {here}. Give each "
            "its own `host` label (ray start --labels host=...)"
        )

    def ask(self, request: Request[R], timeout_s: float) -> R:
        """Ask the controller, for a process on a machine without a holder."""
        if self.holder is None:
            raise ConfigError("this holder has not started")
        with Tool(self.holder.folder) as tool:
            return tool.ask(request, timeout_s)

    def close(self, discard: bool) -> str:
        """Stop serving; with `discard` remove the arena and everything in it."""
        if self.holder is None:
            return self.identity.host_id
        folder = self.holder.folder
        self.holder.close()
        self.membership.withdraw(self.identity.host_id)
        if discard:
            Arena.destroy(folder)
        return self.identity.host_id


class ControllerActor:
    """The store's controller in a detached Ray actor, with the supervisor of its holders."""

    def __init__(self, fields: dict[str, Any], secret: bytes) -> None:
        logging.basicConfig(level=logging.INFO)
        end_with_parent()
        self.fields, self.secret = fields, secret
        config = Config().with_fields(fields)
        collect_rarely()
        self.membership = RayMembership(config.store)
        self.controller = Controller(
            config, self.membership, secret=secret, on_exit=lambda why: os._exit(0), gcs_storage=gcs_storage()
        )
        self.actors: dict[str, Any] = {}  # node id -> holder actor
        self.hosts: dict[str, str] = {}  # node id -> host id, once known
        self.errors: dict[str, str] = {}  # node id -> why its holder does not run
        self.retry_s: dict[str, float] = {}
        self.starting: dict[str, Any] = {}  # node id -> holder actor whose start has begun; None before it is made
        self.claiming = threading.Lock()
        self.drains: dict[str, float] = {}  # host -> when Ray takes its node away (wall clock)
        self.stopping = threading.Event()
        feed_from_controller(self.controller, self.stopping)
        threading.Thread(target=self._supervise, name="memstore-supervise", daemon=True).start()

    def describe(self) -> dict[str, Any]:
        """Return the store's fields and its holders' addresses."""
        return {
            "fields": self.fields,
            "hosts": dict(self.hosts),
            "errors": dict(self.errors),
            "pid": os.getpid(),
            "node": ray.get_runtime_context().get_node_id(),
            "connected": self.controller.connected(),
            "nodes": sorted(n["NodeID"] for n in live_nodes()),
            "is_serving": self.controller.is_serving(),
            **this_build(),
        }

    def close(self) -> None:
        """Stop supervising and deciding; holders keep everything."""
        self.stopping.set()
        self.controller.close()

    # -- supervision (R3) ---------------------------------------------------------------------

    def _supervise(self) -> None:
        for look in itertools.count():
            if self.stopping.wait(SUPERVISE_S):
                return
            try:
                self._start_missing(live_nodes())
                if look % DRAIN_LOOK == 0:
                    self._notice_drains()
            except Exception as exc:  # the GCS may be down: what runs goes on (R4)
                log.warning("memstore cannot supervise its holders now: %s", exc)

    def _notice_drains(self) -> None:
        """Report nodes that Ray will take away to the store: a spot node's preemption notice, the autoscaler (R29)."""
        moments_ms = ray._private.state.state.get_draining_nodes()
        last_s = time.time() + DRAIN_S
        self.drains = {
            host: moments_ms[node] / 1000 if moments_ms[node] else self.drains.get(host, last_s)
            for node, host in self.hosts.items()
            if node in moments_ms
        }
        if self.drains:
            self.controller.drains_seen(self.drains)

    def _start_missing(self, nodes: list[dict[str, Any]]) -> None:
        connected = self.controller.connected()
        alive = {node["NodeID"] for node in nodes}
        for node_id in [n for n in self.hosts if n not in alive]:
            self.hosts.pop(node_id)
            self.actors.pop(node_id, None)
        machines = Counter(node["NodeManagerAddress"] for node in nodes)
        for node in nodes:
            node_id = node["NodeID"]
            host = self.hosts.get(node_id)
            if (host is not None and host in connected) or time.monotonic() < self.retry_s.get(node_id, 0.0):
                continue
            if not self._claim(node_id):
                continue
            count = machines[node["NodeManagerAddress"]]
            threading.Thread(target=self._start, args=(node, count), daemon=True).start()

    def _claim(self, node_id: str) -> bool:
        """Begin a start on a node, unless one has begun: a supervisor and upgrades may want to at once."""
        with self.claiming:
            if node_id in self.starting:
                return False
            self.starting[node_id] = None
            return True

    def _start(self, node: dict[str, Any], hosts_on_machine: int) -> None:
        node_id = node["NodeID"]
        # Long enough for a new holder to be dialled before it counts as missing again.
        self.retry_s[node_id] = time.monotonic() + RETRY_S
        actor: Any = None
        try:
            if self.stopping.is_set():
                return
            actor = self.starting[node_id] = self._make_holder(node, hosts_on_machine)
            started = ray.get(actor.start.remote(), timeout=START_S)
            if started["shared"]:
                ray.kill(actor)
                record = self.membership.hosts().get(str(started["host"]), {})
                if record.get("node") == node_id:  # a former controller started it
                    self.actors[node_id] = ray.get_actor(str(record["actor"]), namespace=NAMESPACE)
            else:
                # The one before it is dead or frozen: its successor has the lock.
                old, self.actors[node_id] = self.actors.get(node_id), actor
                if old is not None:
                    ray.kill(old)
            self.errors.pop(node_id, None)
            self.hosts[node_id] = str(started["host"])  # last: from now on the store counts as started here
        except Exception as exc:
            if actor is not None:
                ray.kill(actor)  # a holder that could not start must not wait for ever beside the next try
            cause = getattr(exc, "cause", None) or exc
            self.errors[node_id] = f"{type(cause).__name__}: {cause}"
            log.warning("memstore: no holder on node %s: %s", node_id[:12], self.errors[node_id])
        finally:
            self.starting.pop(node_id, None)

    def _make_holder(self, node: dict[str, Any], hosts_on_machine: int) -> Any:
        """Start a process for a node's holder. Its arguments are part of the wire's version (R40)."""
        node_id = node["NodeID"]
        return (
            ray.remote(HolderActor)
            .options(
                name=f"memstore-{self.fields['store']}-{node_id[:12]}-{secrets.token_hex(6)}",
                namespace=NAMESPACE,
                lifetime="detached",
                num_cpus=0,
                max_restarts=0,
                max_concurrency=4,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
            )
            .remote(self.fields, self.secret, dict(node.get("Labels") or {}), hosts_on_machine)
        )

    def restart_holder(self, host: str) -> None:
        """Replace a host's holder by one that runs the code installed there, and adopts the arena (R40).

        Its process begins first: the host lacks a holder only while the arena changes hands. If it cannot begin, the
        old one goes on.
        """
        with ThreadPoolExecutor(1) as thread:  # else the next holder would end with the caller: it is made in its job
            thread.submit(self._replace_holder, host).result()

    def _replace_holder(self, host: str) -> None:
        node_id = str(self.membership.hosts()[host]["node"])
        until_s = time.monotonic() + START_S
        while not self._claim(node_id):  # from here on the supervisor leaves the node alone
            if time.monotonic() > until_s:
                raise PeerTimeout(
                    f"the holder of host {host} has been starting for {START_S:g} s: call it again once it runs",
                    operation="restart a holder",
                    waited_s=START_S,
                    limit_s=START_S,
                )
            time.sleep(POLL_S)
        successor = None
        try:
            record, nodes = self.membership.hosts()[host], live_nodes()
            node = next(node for node in nodes if node["NodeID"] == node_id)
            machine = node["NodeManagerAddress"]
            successor = self.starting[node_id] = self._make_holder(
                node, sum(other["NodeManagerAddress"] == machine for other in nodes)
            )
            ray.get(successor.ready.remote(), timeout=START_S)
            old = ray.get_actor(str(record["actor"]), namespace=NAMESPACE)
            with contextlib.suppress(ray.exceptions.RayError):
                ray.get(old.close.remote(False), timeout=CLOSE_S)
            ray.kill(old)
            self.retry_s[node_id] = time.monotonic() + RETRY_S
            ray.get(successor.start.remote(), timeout=START_S)
            self.actors[node_id], self.hosts[node_id] = successor, host
        except BaseException:
            if successor is not None:
                ray.kill(successor)
            raise
        finally:
            self.starting.pop(node_id, None)

    def close_holders(self, discard: bool) -> list[str]:
        """Close every holder, and those that are being started; return the hosts that did."""
        self.stopping.set()
        until_s = time.monotonic() + BEGUN_S
        while self.starting and time.monotonic() < until_s:  # one left out would outlive its store
            time.sleep(POLL_S)
        for actor in list(self.starting.values()):
            if actor is not None:
                ray.kill(actor)
        calls = {node: actor.close.remote(discard) for node, actor in self.actors.items()}
        closed = []
        for node, call in calls.items():
            try:
                closed.append(str(ray.get(call, timeout=START_S)))
            except Exception as exc:
                log.warning("memstore: holder of node %s did not close: %s", node[:12], exc)
        for actor in self.actors.values():
            ray.kill(actor)
        return closed

    def ask(self, request: Request[R], timeout_s: float) -> R:
        """Ask through any holder, for a process on a machine without one."""
        problems = []
        for actor in list(self.actors.values()):
            try:
                return cast(R, ray.get(actor.ask.remote(request, timeout_s), timeout=timeout_s + PROBE_S))
            except ray.exceptions.RayTaskError as exc:
                if isinstance(exc.cause, MemstoreError):
                    raise exc.cause from None
                problems.append(str(exc))
            except Exception as exc:
                problems.append(str(exc))
        raise TransportError(f"no holder answers: {problems[:3]}")


def live_nodes() -> list[dict[str, Any]]:
    """Return the Ray nodes that are alive and not labelled memstore=off (R1)."""
    return [n for n in ray.nodes() if n["Alive"] and (n.get("Labels") or {}).get("memstore") != "off"]
