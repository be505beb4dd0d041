"""Starting an absent store through Ray beside the rank that waits for its holder, which may give it up any time (R4).

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
from typing import Any, cast

from memstore import errors
from memstore.config import Config
from memstore.errors import MemstoreError, PeerUnreachable

log = logging.getLogger("memstore")

_MAIN = "from memstore.client.store_start import main; main()"  # not -m: Ray's workers would get this folder as a path


class StoreStart:
    """A start under way. `doing` names what it waits for; once `poll()` is true, `error` has its error or None."""

    def __init__(self, doing: str) -> None:
        self.doing = doing
        self.error: MemstoreError | None = None
        self.node_labels: dict[str, str] | None = None  # of the Ray node that this process would belong to

    def poll(self) -> bool:
        """Return whether it is over."""
        raise NotImplementedError

    def give_up(self) -> None:
        """Forget the start; processes that it has started go on by themselves."""


class StartInChild(StoreStart):
    """A start by a child process, which joins the Ray cluster, or waits for its GCS, for at most `limit_s`."""

    def __init__(self, config: Config, *, address: str | None, place: str, limit_s: float) -> None:
        super().__init__(f"Ray's GCS at {place} is being asked")
        self._unread = b""
        self._is_over = False
        self._child = subprocess.Popen(
            [sys.executable, "-c", _MAIN],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        spec = {"config": config.start_fields(), "address": address, "limit_s": limit_s, "argv": sys.argv[:1]}
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
        self._is_over = "error" in said or "labels" in said

    def give_up(self) -> None:
        """End the child."""
        self._child.kill()
        self._child.wait()
        self._words.close()


class StartInThread(StoreStart):
    """A start through the Ray that this process has joined."""

    def __init__(self, config: Config) -> None:
        super().__init__("the store's holders are being started")
        self._thread = threading.Thread(target=self._run, args=(config,), name="memstore-start", daemon=True)
        self._thread.start()

    def _run(self, config: Config) -> None:
        from memstore.admin.cluster import ensure_started

        try:
            ensure_started(config)
        except MemstoreError as error:
            self.error = error
        except Exception as error:  # Ray's own, such as a GCS that is gone
            self.error = PeerUnreachable(f"Ray could not start the store: {type(error).__name__}: {error}")

    def poll(self) -> bool:
        """Return whether it is over."""
        return not self._thread.is_alive()


def begin_start(config: Config, *, address: str | None, may_create: bool, limit_s: float) -> StoreStart:
    """Start the store; several ranks must find a Ray cluster, a single one may bring its own."""
    ray = sys.modules.get("ray")
    if ray is not None and getattr(ray, "is_initialized", lambda: False)():
        return StartInThread(config)
    from memstore.shell.on_ray.reach import gcs_address

    try:
        place = gcs_address(address)
    except ConnectionError:  # there is none
        if may_create:
            from memstore.admin.cluster import create_local_ray

            create_local_ray()
            log.warning(
                "memstore: no Ray cluster runs on this machine, so this process has started one for the store. Both "
                "end with this process; the arena stays under %s, and the next start adopts it. For a store that "
                "outlives the process: %s",
                config.arena_dir, config.commands("`ray start --head`, then `memstore up`"),
            )  # fmt: skip
            return StartInThread(config)
        place = None
    return StartInChild(config, address=address, place=place or "the address given", limit_s=limit_s)


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
        report(labels=_start(spec, report))
    except MemstoreError as error:
        report(error=type(error).__name__, message=str(error))
    except Exception as error:  # Ray's own, such as a GCS that is gone
        report(error="PeerUnreachable", message=f"Ray could not start the store: {type(error).__name__}: {error}")


def _start(spec: dict[str, Any], report: Any) -> dict[str, str]:
    import ray

    from memstore.admin.cluster import ensure_started, join_ray
    from memstore.shell.host.identity import current_node_labels

    def say(text: str) -> None:
        log.warning("memstore: %s", text)
        report(doing=text)

    config = Config().with_fields(spec["config"])
    join_ray(spec["address"], may_create=False, limit_s=spec["limit_s"], say=say, config=config)
    report(doing="the store's holders are being started")
    try:
        ensure_started(config)
        return current_node_labels() or {}
    finally:
        ray.shutdown()
