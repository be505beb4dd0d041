"""The cluster for drills of scarce memory: arenas on a small file system, and one host with little memory left.

The last host's raylet is started after all others. Its limit for Ray's memory monitor is a little above what the
machine uses then; so Ray kills a process that takes more on that host, long before the machine runs out of memory.
Read `scenes_storage.py` next.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from memstore.config import MIB, Config
from memstore.drills.sites.site import EmbeddedSite
from memstore.errors import DrillError
from memstore.shell.arena.memory_limits import measure
from memstore.testing.clusters.embedded import EmbeddedCluster
from memstore.testing.clusters.scratch import racks, scratch_store_name
from memstore.testing.faults.mounts import mount_tmpfs, unmount

BESIDE_BYTES = 4 * MIB  # per host, beside its arena, for slot table, manifests and journal
HOST_BYTES = 384 * MIB  # what raylet, holder and rank of a host still take after the limit was computed
HOG_BYTES = 1536 * MIB  # what the task that takes too much can take before Ray kills it
MONITOR_MS = 100
# Ray kills until memory is this far below the limit. The default, 5 % of the memory, would cost more processes.
KILL_BUFFER_BYTES = 16 * MIB


class TightSite(EmbeddedSite):
    """An embedded cluster with a file system for its arenas, and a host whose raylet has a low memory limit."""

    def __init__(self, cluster: EmbeddedCluster, pressed: str, threshold: float) -> None:
        super().__init__(cluster)
        self.pressed, self.threshold = pressed, threshold

    @property
    def arenas(self) -> Path:
        """Return the folder over which the file system of the arenas is mounted."""
        return Path(self.config.arena_dir)


def memory_in_use(folder: Path) -> tuple[int, int]:
    """Return (bytes in use, bytes in all) of this machine or of our cgroup, counted as Ray's memory monitor does."""
    found = measure(folder)
    if found.cgroup_limit_bytes is not None and found.cgroup_limit_bytes <= found.ram_total_bytes:
        return found.cgroup_used_bytes or 0, found.cgroup_limit_bytes
    return found.ram_used_bytes, found.ram_total_bytes


def low_threshold(used: int, total: int, hosts_count: int) -> float:
    """Return the share of the machine's memory at which Ray has to kill.

    Raises:
        DrillError: the machine has too little memory left for the drill.
    """
    limit = used + hosts_count * HOST_BYTES + HOG_BYTES
    if limit > 0.9 * total:
        raise DrillError(
            f"{used >> 20} MiB of {total >> 20} MiB are in use: there is no room for {hosts_count} hosts and for "
            f"{HOG_BYTES >> 20} MiB that are taken until Ray kills who takes them; try again when less is in use"
        )
    return limit / total


@contextlib.contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables of this process for the time of the block."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextlib.contextmanager
def arenas_mounted(nbytes: int) -> Iterator[Path]:
    """Mount a memory file system for arenas over a new folder; raise DrillError if that fails."""
    with tempfile.TemporaryDirectory(prefix="memstore-drill-") as made:
        folder = Path(made)
        mount_tmpfs(folder, nbytes)
        try:
            yield folder
        finally:
            unmount(folder)


@contextlib.contextmanager
def tight_site(hosts_count: int, *, arena_bytes: int) -> Iterator[TightSite]:
    """Open a site with hosts h1, h2, ... by turns in two racks: first Ray's head, last the low limit. Needs root.

    Raises:
        DrillError: no file system can be mounted, or the machine has too little memory left.
    """
    labels = racks(hosts_count)
    *others, pressed = labels
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(arenas_mounted(hosts_count * (arena_bytes + BESIDE_BYTES)))
        config = Config(
            store=scratch_store_name("drill"),
            arena_dir=str(folder),
            arena_bytes=arena_bytes,
            chunk_bytes=MIB,
            interface="127.0.0.1",
        )
        # Ray would restart a task that it killed for lack of memory, without an error; so switch that off.
        cluster = stack.enter_context(
            EmbeddedCluster({h: labels[h] for h in others}, config=config, ray_settings={"task_oom_retries": 0})
        )
        threshold = low_threshold(*memory_in_use(folder), hosts_count)
        limits = {
            "RAY_memory_usage_threshold": f"{threshold:.6f}",
            "RAY_memory_monitor_refresh_ms": str(MONITOR_MS),
            "RAY_max_kill_memory_buffer_bytes": str(KILL_BUFFER_BYTES),
        }
        with environment(limits):
            cluster.add_node(pressed, labels[pressed])
        site = stack.enter_context(contextlib.closing(TightSite(cluster, pressed, threshold)))
        site.wait_hosts_live(list(labels))
        yield site
