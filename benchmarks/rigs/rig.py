"""A store of plain processes for the benchmarks: holders and a controller, product settings, two virtual hosts."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.report.harness import MIB, Options, Took
from benchmarks.rigs.cores import SHARED, Cores, on_core
from benchmarks.rigs.stopwatch import timed
from memstore.client.checkpoint import Checkpoint
from memstore.client.connect import connect
from memstore.client.reader import Reader, reader
from memstore.client.store import Store
from memstore.config import Config
from memstore.errors import MemstoreError
from memstore.testing.clusters.processes import ProcessCluster

JOB = "bench"
NEAR, FAR = "near", "far"


class TwoHosts(ProcessCluster):
    """NEAR and FAR, whose holders run on the core of their host; the controller runs where this process does."""

    cores: Cores = SHARED

    def start_holder(self, host: str) -> None:
        """Start a holder on the core of its host."""
        with on_core(self.cores.far if host == FAR else self.cores.near):
            super().start_holder(host)


@contextlib.contextmanager
def two_hosts(
    options: Options, *, replicas: int, versions: float = 3.5, cores: Cores = SHARED
) -> Iterator[ProcessCluster]:
    """Yield a cluster of two hosts that holds `versions` of the state on each; its ranks are yet to come.

    For one rank: keep_steps + 1 versions, one for staging, and half a one for what a put of this size rounds up to.
    Its processes are of the caller's session, as under Ray: else their nice value would not count beside training's.
    """
    labels = {"memstore": "replica"}
    with tempfile.TemporaryDirectory() as folder:
        cluster = TwoHosts(
            Path(folder),
            {NEAR: {"rack": "r1", **labels}, FAR: {"rack": "r2", **labels}},
            arena_bytes=int(versions * options.nbytes) + 64 * MIB,
            chunk_bytes=options.chunk_bytes,
            detect="normal",
            replicas=replicas,
        )
        cluster.niceness = 0
        cluster.cores = cores
        with cluster:
            yield cluster


def pids_of(cluster: ProcessCluster) -> list[int]:
    """Return the processes of a store: its holders and its controller."""
    return [process.pid for process in (*cluster.holders.values(), cluster.controller) if process is not None]


@contextlib.contextmanager
def store_on_two_hosts(
    options: Options, *, replicas: int, cores: Cores = SHARED
) -> Iterator[tuple[ProcessCluster, Store]]:
    """Yield a cluster of two hosts and the only rank's store, which runs on NEAR; FAR takes copies only."""
    with (
        two_hosts(options, replicas=replicas, cores=cores) as cluster,
        on_host(NEAR),
        connect(JOB, rank=0, world_size=1, config=cluster.config) as store,
    ):
        yield cluster, store


def put_committed(cluster: ProcessCluster, store: Store, step: int, state: object) -> Took:
    """Put and wait for the commit; return what it took of this process and the store's."""
    return timed(lambda: store.put(step, state).wait("committed"), pids_of(cluster))[0]


@contextlib.contextmanager
def on_host(name: str) -> Iterator[None]:
    """Make this process, and those it starts, ranks and readers of a host."""
    before = os.environ.get("MEMSTORE_HOST")
    os.environ["MEMSTORE_HOST"] = name
    try:
        yield
    finally:
        if before is None:
            del os.environ["MEMSTORE_HOST"]
        else:
            os.environ["MEMSTORE_HOST"] = before


@contextlib.contextmanager
def rank_at(host: str, job: str, config: Config) -> Iterator[Store]:
    """Yield the store of the only rank of a job, as a process on `host` would connect it."""
    with on_host(host):
        store = connect(job, rank=0, world_size=1, config=config)
    with store:
        yield store


@contextlib.contextmanager
def reader_at(host: str, config: Config, job: str = JOB) -> Iterator[Reader]:
    """Yield a reader as a process on `host` would open it, for several reads."""
    with on_host(host):
        source = reader(job, config=config)
    with source:
        yield source


def read_at(host: str, config: Config, step: int, into: object = None, job: str = JOB) -> Checkpoint:
    """Read rank 0's shard as a process on `host` would; its verdict says where the bytes lay."""
    with on_host(host), reader(job, config=config) as source:
        got = source.get(step, rank=0, into=into)
    if got is None:
        raise MemstoreError(f"step {step} of job {job!r} is gone: retention was faster than the benchmark")
    return got
