"""Ray's own object store between two nodes: put by an actor on one, fetched by an actor on the other."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from benchmarks.report.harness import MIB, Took
from benchmarks.rigs.process_costs import cpu_seconds, descendants

TIMEOUT_S = 120.0


class RayObjects:
    """Two raylets on this machine, each with an object store that holds the object 1.5 times.

    The object is one contiguous array, the kindest case for Ray: one buffer, no serialization.
    """

    def __init__(self, path: Path) -> None:
        os.environ.setdefault("RAY_AUTH_MODE", "disabled")
        import ray
        from ray.cluster_utils import Cluster

        self._ray = ray
        self._path = path
        # Ray takes no store below 75 MiB.
        store_bytes = max(int(1.5 * path.stat().st_size), 128 * MIB)
        others = set(descendants(os.getpid()))
        self._cluster = Cluster()
        try:
            for resources in ({"near": 1}, {"far": 1}):
                self._cluster.add_node(
                    num_cpus=1, resources=resources, object_store_memory=store_bytes, include_dashboard=False
                )
            ray.init(address=self._cluster.address, log_to_driver=False, logging_level="warning")
            self._near = ray.remote(_Near).options(num_cpus=0, resources={"near": 1}).remote(str(path))
            self._far = ray.remote(_Far).options(num_cpus=0, resources={"far": 1}).remote()
            ray.get([self._near.node.remote(), self._far.node.remote()], timeout=TIMEOUT_S)
            self._pids = sorted(set(descendants(os.getpid())) - others)
        except BaseException:
            self._stop()
            raise

    def __enter__(self) -> RayObjects:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def _stop(self) -> None:
        self._ray.shutdown()
        self._cluster.shutdown()

    def send(self) -> tuple[Took, float, bool]:
        """Put and fetch once; return what both took, seconds of the fetch alone, and whether the bytes are the same."""
        self._ray.get(self._near.refresh.remote(), timeout=TIMEOUT_S)
        used_s, started_s = cpu_seconds(self._pids), time.perf_counter()
        references = self._ray.get(self._near.put.remote(), timeout=TIMEOUT_S)
        put_s = time.perf_counter() - started_s
        self._ray.get(self._far.fetch.remote(references), timeout=TIMEOUT_S)
        both = Took(time.perf_counter() - started_s, cpu_seconds(self._pids) - used_s)
        del references
        self._ray.get(self._near.drop.remote(), timeout=TIMEOUT_S)
        is_same = self._ray.get(self._far.compare.remote(str(self._path)), timeout=TIMEOUT_S)
        return both, both.wall_s - put_s, bool(is_same)


class _Near:
    """The actor that puts."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._source = np.array(np.memmap(path, np.uint8, mode="r"))
        self._references: list[Any] = []

    def node(self) -> str:
        """Answer, so that the actor is known to be up."""
        return "near"

    def refresh(self) -> None:
        """Take the round's bytes into this process's memory."""
        self._source[:] = np.memmap(self._path, np.uint8, mode="r")

    def put(self) -> list[Any]:
        """Put them into this node's store."""
        import ray

        self._references = [ray.put(self._source)]
        return self._references

    def drop(self) -> None:
        """Let go of the object."""
        self._references = []


class _Far:
    """The actor on the other node."""

    def __init__(self) -> None:
        self._got: Any = None

    def node(self) -> str:
        """Answer, so that the actor is known to be up."""
        return "far"

    def fetch(self, references: list[Any]) -> int:
        """Pull the object into this node's store."""
        import ray

        self._got = ray.get(references[0])
        return int(self._got.size)

    def compare(self, path: str) -> bool:
        """Compare what was fetched with the bytes that were put, then let go of it."""
        is_same = bool(np.array_equal(self._got, np.memmap(path, np.uint8, mode="r")))
        self._got = None
        return is_same
