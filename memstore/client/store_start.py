"""Starting an absent store through Ray beside the rank that waits for its holder, which may give it up any time (R4).

A store is started on the cluster that the process was given, or on the one in which this host's folder lived; a single
process may bring a cluster of its own. On another cluster of this machine a store is found, never started (D289).

Ray is asked in a process of its own: ray.init() has no limit, and half done it cannot be taken back. A process that has
joined Ray already asks in a thread, for nothing of Ray is left half done then.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, cast

from memstore import errors
from memstore.config import Config
from memstore.errors import MemstoreError, PeerUnreachable
from memstore.shell.arena.lock import owner
from memstore.shell.identity import HOST_VARIABLE, holder_hosts, local_identity, rank_host
from memstore.shell.rank.admin_link import store_root

log = logging.getLogger("memstore")

_MAIN = "from memstore.client.store_start import main; main()"  # not -m: Ray's workers would get this folder as a path


class StoreStart:
    """A start under way. `doing` names what it waits for; once `poll()` is true, `error` has its error or None.

    `where` names the Ray cluster, with its address; `then` begins what follows where a store was looked for in vain.
    """

    def __init__(self, doing: str, where: str = "") -> None:
        self.doing, self.where = doing, where
        self.error: MemstoreError | None = None
        self.then: Callable[[], StoreStart] | None = None
        self.node_labels: dict[str, str] | None = None  # of the Ray node that this process would belong to

    def poll(self) -> bool:
        """Return whether it is over."""
        raise NotImplementedError

    def give_up(self) -> None:
        """Forget the start; processes that it has started go on by themselves."""


class NoStart(StoreStart):
    """Nothing is started, for `error`; where one host is named the rank waits for its holder all the same."""

    def __init__(self, error: MemstoreError, hosts: Collection[str]) -> None:
        super().__init__(str(error))
        self._may_come = len(hosts) == 1
        self.error = None if self._may_come else error

    def poll(self) -> bool:
        """Return whether it is over."""
        return not self._may_come


class StartInChild(StoreStart):
    """A start by a child process, which joins the Ray cluster, or waits for its GCS, for at most `limit_s`."""

    def __init__(
        self,
        config: Config,
        *,
        address: str | None,
        where: str,
        hosts: Collection[str],
        limit_s: float,
        otherwise: Callable[[], StoreStart] | None = None,
    ) -> None:
        """With `otherwise` the child only looks for a running store; that begins where there is none."""
        super().__init__("Ray's GCS there is being asked", where)
        self._otherwise = otherwise
        self._unread = b""
        self._is_over = False
        self._child = subprocess.Popen(
            [sys.executable, "-c", _MAIN],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        spec = {
            "config": config.start_fields(),
            "address": address,
            "limit_s": limit_s,
            "argv": sys.argv[:1],
            "hosts": list(hosts),
            "may_create": otherwise is None,
        }
        stdin = cast(Any, self._child.stdin)
        with contextlib.suppress(BrokenPipeError), stdin:
            stdin.write(json.dumps(spec).encode())
        self._words = cast(Any, self._child.stdout)
        os.set_blocking(self._words.fileno(), False)

    def poll(self) -> bool:
        """Read the child's output; return whether it is over."""
        while not self._is_over and (data := self._words.read()) is not None:
            *lines, self._unread = (self._unread + data).split(b"\n")
            for line in lines:
                self._take(json.loads(line))
            if not data and not self._is_over:
                self._is_over = True
                self.error = PeerUnreachable(f"the process that asked Ray has ended with {self._child.wait()}")
        return self._is_over

    def _take(self, said: dict[str, Any]) -> None:
        self.doing = said.get("doing", self.doing)
        if "error" in said:
            self.error = getattr(errors, said["error"])(said["message"])
        self.node_labels = said.get("labels")
        self.then = self._otherwise if "absent" in said else None
        self._is_over = bool({"absent", "error", "labels"} & said.keys())

    def give_up(self) -> None:
        """End the child."""
        self._child.kill()
        self._child.wait()
        self._words.close()


class StartInThread(StoreStart):
    """A start through the Ray that this process has joined."""

    def __init__(self, config: Config, hosts: Collection[str] = ()) -> None:
        from memstore.admin.cluster import joined_address

        super().__init__("the store's holders are being started", f"the Ray cluster at {joined_address()}")
        self._thread = threading.Thread(target=self._run, args=(config, hosts), name="memstore-start", daemon=True)
        self._thread.start()

    def _run(self, config: Config, hosts: Collection[str]) -> None:
        from memstore.admin.cluster import ensure_started

        try:
            ensure_started(config, hosts)
        except MemstoreError as error:
            self.error = error
        except Exception as error:  # Ray's own, such as a GCS that is gone
            self.error = PeerUnreachable(f"Ray could not start the store: {type(error).__name__}: {error}")

    def poll(self) -> bool:
        """Return whether it is over."""
        return not self._thread.is_alive()


def begin_start(config: Config, *, address: str | None, may_create: bool, limit_s: float) -> StoreStart:
    """Start the store where it may be started (D289); `may_create` says that one rank is alone and may bring a cluster.

    The cluster is the one that this process has joined, else `address`, else RAY_ADDRESS, else the one in which the
    folder of this host lived.
    """
    found = holder_hosts(store_root(config))
    mine = os.environ.get(HOST_VARIABLE)
    hosts = [mine] if mine else list(found)
    ray = sys.modules.get("ray")
    if ray is not None and getattr(ray, "is_initialized", lambda: False)():
        labels = ray.get_runtime_context().get_node_labels()
        return StartInThread(config, [rank_host(os.environ, store_root(config), labels)])
    from memstore.shell.on_ray.reach import gcs_address, is_there

    named = address or os.environ.get("RAY_ADDRESS")
    if named == "local" and may_create:
        return _start_own(config, None)
    if named:
        source = "the address given" if address else "from RAY_ADDRESS"
        with contextlib.suppress(ConnectionError):  # "auto", and there is none
            named = gcs_address(address) or named
        where = f"the Ray cluster at {named} ({source})"
        return StartInChild(config, address=address, where=where, hosts=hosts, limit_s=limit_s)
    lived = {host: _last_cluster(store_root(config) / host) for host in hosts if host in found}
    for host, place in lived.items():
        if place and is_there(place):
            where = f"the Ray cluster at {place}, in which {host} lived"
            return StartInChild(config, address=place, where=where, hosts=hosts, limit_s=limit_s)
    own_host = local_identity({}, os.environ).host_id
    may_create = (
        may_create and not any(found.values()) and "" not in lived.values() and (not hosts or own_host in hosts)
    )
    other: str | None = None  # a cluster that may run the store: this host may just have lost its memory
    if not found:
        with contextlib.suppress(ConnectionError):
            other = gcs_address(None)

    def begin_here() -> StoreStart:
        return _start_own(config, other) if may_create else NoStart(_not_given(config, lived, other), hosts)

    if other is None or not is_there(other):
        other = None
        return begin_here()
    where = f"the Ray cluster at {other}, found on this machine"
    return StartInChild(config, address=other, where=where, hosts=hosts, limit_s=limit_s, otherwise=begin_here)


def _last_cluster(folder: Path) -> str | None:
    """Return the address of the Ray cluster whose holder died on the folder; "" if it was none of Ray's, None if it
    gave the folder up.
    """
    holding = owner(folder)
    return holding.cluster if holding is not None else None


def _start_own(config: Config, other: str | None) -> StoreStart:
    """Start the store on a Ray cluster of this process; `other` is one that runs here and is not this process's."""
    from memstore.admin.cluster import create_local_ray

    create_local_ray()
    here = "no Ray cluster was given to this process (RAY_ADDRESS, address=)"
    if other is not None:
        here += f", and the one at {other} on this machine does not run the store"
    log.warning(
        "memstore: %s: it has started one for the store. Both end with this process; the arena stays "
        "under %s, and the next start adopts it. For a store that outlives the process: %s",
        here,
        config.arena_dir,
        config.commands("`ray start --head`, then `memstore up`"),
    )
    return StartInThread(config)


def _not_given(config: Config, lived: dict[str, str | None], other: str | None) -> PeerUnreachable:
    """Return the error of a process that has no Ray cluster to start the store on."""
    folders = [f"{host} lived in the Ray cluster at {place}, which is gone" for host, place in lived.items() if place]
    more = f"; the one at {other} on this machine does not run it" if other else ""
    return PeerUnreachable(
        f"no Ray cluster was given to this process to start store {config.store!r} on"
        f"{''.join(f'; {text}' for text in folders)}{more}: "
        f"{config.commands('run `memstore up`')} once, or name the cluster in RAY_ADDRESS or address="
    )


def main() -> None:
    """Join Ray and start the store as the JSON on stdin says; report progress on stdout, line by line."""
    spec = json.load(sys.stdin)
    signal.alarm(math.ceil(spec["limit_s"]) + 1)  # the process that asked has given up by then, or is dead
    sys.argv = spec["argv"]  # Ray's workers get the folder of the caller's script
    words = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")

    def report(**said: Any) -> None:
        print(json.dumps(said), file=words)

    try:
        labels = _start(spec, report)
        report(**({"absent": True} if labels is None else {"labels": labels}))
    except MemstoreError as error:
        report(error=type(error).__name__, message=str(error))
    except Exception as error:  # Ray's own, such as a GCS that is gone
        report(error="PeerUnreachable", message=f"Ray could not start the store: {type(error).__name__}: {error}")


def _start(spec: dict[str, Any], report: Any) -> dict[str, str] | None:
    """Return this machine's Ray node's labels once the store runs; None if it does not and must not be started."""
    import ray

    from memstore.admin.cluster import ensure_started, is_on_ray, join_ray
    from memstore.shell.identity import current_node_labels

    def say(text: str) -> None:
        log.warning("memstore: %s", text)
        report(doing=text)

    config = Config().with_fields(spec["config"])
    join_ray(spec["address"], may_create=False, limit_s=spec["limit_s"], say=say, config=config)
    try:
        if not spec["may_create"] and not is_on_ray(config):
            return None
        report(doing="the store's holders are being started")
        ensure_started(config, spec["hosts"])
        return current_node_labels() or {}
    finally:
        ray.shutdown()
