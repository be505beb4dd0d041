"""The hosts of a round as raylets of a real Ray cluster on this machine; Ray starts holders and controller.

Ranks are processes of their own, as with torchrun, and outlive raylets.
"""

from __future__ import annotations

import contextlib
import signal
import time
from pathlib import Path
from typing import Any, cast

from memstore.config import Config
from memstore.testing.clusters.embedded import EmbeddedCluster
from memstore.testing.clusters.scratch import scratch_store_name
from memstore.testing.faults.arena_files import holder_process
from memstore.testing.faults.processes import Process, kill, process_of, send
from memstore.testing.nemesis.hosts import Hosts
from memstore.testing.nemesis.ledger import Ledger, Story
from memstore.testing.nemesis.schedule import NemesisScenario

CHUNK_BYTES = 64 << 10


class RayHosts(Hosts):
    """The hosts on Ray; the first one carries its head and cannot be lost."""

    def __init__(
        self, scenario: NemesisScenario, ledger: Ledger, story: Story, arena_dir: Path, arena_bytes: int
    ) -> None:
        config = Config(
            store=scratch_store_name("n"),
            arena_bytes=arena_bytes,
            arena_dir=str(arena_dir),
            chunk_bytes=CHUNK_BYTES,
            interface="127.0.0.1",
            **scenario.store_fields,
        )
        self.ray = EmbeddedCluster(scenario.hosts, cpus_per_host=1, config=config)
        super().__init__(cast(Any, self.ray), ledger, story, scenario.domains())
        self.labels = dict(self.ray.labels)
        self.undying = {next(iter(scenario.hosts))}

    def open(self) -> None:
        """Start Ray and the store."""
        self.ray.start()

    def holder(self, host: str) -> Process | None:
        """Return the holder that has the lock of a host's folder."""
        with contextlib.suppress(Exception):
            return holder_process(str(self.arena(host)))
        return None

    def controller(self) -> Process | None:
        """Return the process of the controller's actor."""
        for process in [p for host in list(self.ray.nodes) for p in self.ray.node_processes(host)]:
            with contextlib.suppress(OSError):
                if b"ControllerActor" in Path(f"/proc/{process[0]}/cmdline").read_bytes():
                    return process
        return None

    def outranked(self) -> list[Any]:
        """Return nothing: Ray ends what it replaces."""
        return []

    def start_holder(self, host: str) -> None:
        """Replace a lost machine by a blank one; Ray and the store start the holder of a host that lives."""
        with self.lock:
            if host in self.down and self.ray.nodes:
                self.down.discard(host)
                self.ray.add_node(host, self.labels[host])

    def kill_holder(self, host: str, *, is_lost: bool = False) -> None:
        """Kill the actor's process, or the whole machine."""
        with self.lock:
            self.mark_away(host)
            if is_lost:
                self.down.add(host)
                self.stopped.pop(host, None)
                if host in self.ray.nodes:
                    self.ray.lose_host(host)
                self.ledger.harmed(self.domain[host], "lost", time.monotonic())
            else:
                kill(filter(None, [self.holder(host)]))

    def start_controller(self) -> None:
        """Do nothing: Ray starts the controller again."""
        self.is_controller_down = self.is_controller_stopped = False

    def kill_controller(self) -> None:
        """Kill the controller."""
        kill(filter(None, [self.controller()]))

    def signal_gcs(self, sig: signal.Signals) -> None:
        """Send Ray's head service SIGSTOP or SIGCONT."""
        head = self.ray.nodes.get(next(iter(self.undying)))  # none while all of Ray is down
        for infos in head.all_processes.get("gcs_server", []) if head is not None else ():
            send(process_of(infos.process.pid), sig)

    def replace_raylet(self, host: str) -> None:
        """Kill a raylet with its holder; a new one joins over the same memory."""
        with self.lock:
            self.mark_away(host)
            self.stopped.pop(host, None)
            if host in self.ray.nodes:
                self.ray.replace_raylet(host)

    def kill_everything(self) -> None:
        """Kill all of Ray."""
        with self.lock:
            for host in self:
                self.mark_away(host)
            self.down.update(self)
            self.ray.kill_everything()

    def start_everything(self, order: list[str]) -> None:
        """Start Ray again unless it runs, with the hosts that were lost; else let those of `order` join."""
        with self.lock:
            if not self.ray.nodes:
                self.down.clear()
                self.ray.labels = dict(self.labels)
                self.ray.start()
            for host in order:
                self.start_holder(host)

    def supervise(self) -> None:
        """Do nothing: Ray and the store's own supervisor start processes again."""
