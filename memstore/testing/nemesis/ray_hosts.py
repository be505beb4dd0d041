"""The hosts of a round as raylets of a real Ray cluster on this machine; Ray starts holders and controller.

Ranks are processes of their own, as with torchrun, and outlive raylets.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Any, cast

from memstore.config import Config
from memstore.shell.arena.lock import owner
from memstore.testing.clusters.embedded import EmbeddedCluster
from memstore.testing.clusters.store_name import scratch_store_name
from memstore.testing.nemesis.hosts import Hosts
from memstore.testing.nemesis.ledger import Ledger
from memstore.testing.nemesis.schedule import Scenario
from memstore.testing.nemesis.story import Story

CHUNK_BYTES = 64 << 10


class Raylets:
    """A cluster of raylets with the methods that `Hosts` uses of a cluster of processes."""

    def __init__(self, config: Config, labels: dict[str, dict[str, str]], folder: Path) -> None:
        self.config, self.labels, self.folder = config, labels, folder
        self.ray = EmbeddedCluster(labels, cpus_per_host=1, config=config)
        self.controller = None
        self.holders: dict[str, Any] = {}
        self.replaced: list[Any] = []
        self.proxies: dict[str, Any] = {}

    def arena(self, host: str) -> Path:
        """Return a host's folder."""
        return self.ray.arena(host)

    def restart(self) -> None:
        """Start a new Ray cluster over the memory of the last one."""
        self.ray = EmbeddedCluster(self.labels, cpus_per_host=1, config=self.config)
        self.ray.start()


class RayHosts(Hosts):
    """The hosts on Ray; the first one carries its head and cannot be lost."""

    raylets: Raylets

    @classmethod
    def of(
        cls, scenario: Scenario, ledger: Ledger, story: Story, folder: Path, arena_dir: Path, arena_bytes: int
    ) -> RayHosts:
        """Return the hosts of a scenario; `open` starts them."""
        config = Config(
            store=scratch_store_name("n"), arena_bytes=arena_bytes, arena_dir=str(arena_dir),
            chunk_bytes=CHUNK_BYTES, interface="127.0.0.1", **scenario.store_fields,
        )  # fmt: skip
        raylets = Raylets(config, scenario.hosts, folder / "cluster")
        hosts = cls(cast(Any, raylets), ledger, story, scenario.domains())
        hosts.raylets = raylets
        hosts.undying = {next(iter(scenario.hosts))}
        return hosts

    def open(self) -> None:
        """Start Ray and the store."""
        self.raylets.ray.start()

    def close(self) -> None:
        """Stop Ray and the store."""
        self.raylets.ray.stop()

    def pid(self, host: str) -> int | None:
        """Return the pid of the holder that has the lock of a host's folder."""
        with contextlib.suppress(Exception):
            holding = owner(self.arena(host))
            if holding is not None and holding.is_alive():
                return holding.pid
        return None

    def _controller_pid(self) -> int | None:
        for host in self.raylets.ray.nodes:
            for pid, _ in self.raylets.ray.node_processes(host):
                with contextlib.suppress(OSError):
                    if b"ControllerActor" in Path(f"/proc/{pid}/cmdline").read_bytes():
                        return pid
        return None

    def start_holder(self, host: str) -> None:
        """Replace a lost machine by a blank one; Ray and the store start the holder of a host that lives."""
        with self.lock:
            if host in self.down and self.raylets.ray.nodes:
                self.down.discard(host)
                self.raylets.ray.add_node(host, self.raylets.labels[host])

    def kill_holder(self, host: str, *, is_lost: bool = False) -> None:
        """Kill the actor's process, or the whole machine."""
        with self.lock:
            self.mark_away(host)
            if is_lost:
                self.down.add(host)
                self.stopped.discard(host)
                if host in self.raylets.ray.nodes:
                    self.raylets.ray.lose_host(host)
                self.ledger.harmed(self.domain[host], "lost", time.monotonic())
            else:
                self._signal(self.pid(host), signal.SIGKILL)

    def stop_holder(self, host: str) -> None:
        """Stop a holder with SIGSTOP; the controller may replace it meanwhile."""
        with self.lock:
            pid = self.pid(host)
            if pid is not None:
                self.stopped.add(host)
                self.mark_away(host)
                self.frozen[host] = pid
                self._signal(pid, signal.SIGSTOP)

    def continue_holder(self, host: str) -> None:
        """Let the process that was stopped go on."""
        with self.lock:
            self.stopped.discard(host)
            self._signal(self.frozen.pop(host, None), signal.SIGCONT)

    def start_controller(self) -> None:
        """Do nothing: Ray starts the controller again."""
        self.is_controller_down = self.is_controller_stopped = False

    def kill_controller(self) -> None:
        """Kill the controller."""
        self._signal(self._controller_pid(), signal.SIGKILL)

    def signal_controller(self, sig: signal.Signals) -> None:
        """Send the controller SIGSTOP or SIGCONT."""
        self.is_controller_stopped = sig == signal.SIGSTOP
        self._signal(self._controller_pid(), sig)

    def signal_gcs(self, sig: signal.Signals) -> None:
        """Send Ray's head service SIGSTOP or SIGCONT."""
        head = self.raylets.ray.nodes.get(next(iter(self.undying)))  # none while all of Ray is down
        for infos in head.all_processes.get("gcs_server", []) if head is not None else ():
            self._signal(infos.process.pid, sig)

    def replace_raylet(self, host: str) -> None:
        """Kill a raylet with its holder; a new one joins over the same memory."""
        with self.lock:
            self.mark_away(host)
            self.stopped.discard(host)
            if host in self.raylets.ray.nodes:
                self.raylets.ray.replace_raylet(host)

    def kill_everything(self) -> None:
        """Kill all of Ray."""
        with self.lock:
            for host in self:
                self.mark_away(host)
            self.down.update(self)
            self.raylets.ray.kill_everything()

    def start_everything(self, order: list[str]) -> None:
        """Start a new Ray cluster unless one runs; hosts that the old one had lost join it."""
        with self.lock:
            if not self.raylets.ray.nodes:
                self.down.clear()
                self.raylets.restart()

    def supervise(self) -> None:
        """Do nothing: Ray and the store's own supervisor start processes again."""

    def heal(self) -> None:
        """Let every stopped process go on."""
        for host in list(self.stopped):
            self.continue_holder(host)
        self.start_everything([])
        for host in list(self.down):
            self.start_holder(host)
        if self.is_controller_stopped:
            self.signal_controller(signal.SIGCONT)

    def _signal(self, pid: int | None, sig: signal.Signals) -> None:
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, sig)
