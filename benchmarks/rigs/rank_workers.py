"""Ranks that are processes of their own, one a host, each with a GPT's state, on a store of plain processes."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from benchmarks.report.harness import MIB, Options
from benchmarks.rigs import gpt_tensors
from benchmarks.rigs.rig import JOB
from memstore.client.connect import connect
from memstore.client.reader import reader
from memstore.client.store import Store
from memstore.config import Config
from memstore.errors import MemstoreError
from memstore.testing.clusters.processes import ProcessCluster

READY_S, ANSWER_S, STOP_S = 120.0, 120.0, 10.0


@contextlib.contextmanager
def ranks_on_hosts(
    options: Options, nbytes: int, *, count: int = 4, shards: int | None = None, niceness: int = 0
) -> Iterator[tuple[ProcessCluster, RankWorkers]]:
    """Yield a store on `count` hosts in as many racks, two copies, and a connected rank of `nbytes` on each host.

    With `shards=1` all ranks have the same state, as under data parallelism, and say so (R34). All processes are of
    this one's session, as under Ray; `niceness` is added to those of the store.
    """
    hosts = {f"h{number}": {"rack": f"r{number}"} for number in range(count)}
    make_state = functools.partial(gpt_tensors.gpt_state, nbytes)
    with tempfile.TemporaryDirectory() as folder:
        # replicas x (keep_steps + 1) x the bytes of a rank, and what a put of this size rounds up to
        cluster = ProcessCluster(
            Path(folder),
            hosts,
            arena_bytes=int(4.5 * nbytes) + 64 * MIB,
            chunk_bytes=options.chunk_bytes,
            detect="normal",
            replicas=2,
        )
        cluster.niceness = niceness
        with cluster, RankWorkers(cluster.config, list(hosts), make_state, shards=shards) as workers:
            yield cluster, workers


class RankWorkers:
    """Ranks, each a process on one of the hosts of a list. A context manager: ends them all.

    Args:
        hosts: Of each rank.
        make_state: Makes a rank's state out of its seed, in its process: pickled.
        shards: So many states there are, which ranks share in turn (R34); None: every rank has its own.
    """

    def __init__(
        self, config: Config, hosts: Sequence[str], make_state: Callable[[int], Any], *, shards: int | None = None
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank, host in enumerate(hosts):
            mine, theirs = context.Pipe()
            seed = rank if shards is None else rank % shards
            arguments = (theirs, config, rank, len(hosts), host, functools.partial(make_state, seed), shards)
            process = context.Process(target=serve, args=arguments, daemon=True)
            process.start()
            self._pipes.append(mine)
            self._processes.append(process)

    def __enter__(self) -> RankWorkers:
        self._gather(range(len(self._pipes)), READY_S)
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(("stop", ()))
        for process in self._processes:
            process.join(STOP_S)
            if process.is_alive():
                process.kill()
                process.join(STOP_S)

    @property
    def pids(self) -> list[int]:
        """Return the ranks' processes."""
        return [process.pid for process in self._processes if process.pid is not None]

    def ask(self, verb: str, *arguments: Any, ranks: Sequence[int] | None = None) -> list[Any]:
        """Let ranks (all of them) do the same at once; return their answers, by rank."""
        asked = range(len(self._pipes)) if ranks is None else ranks
        for rank in asked:
            self._pipes[rank].send((verb, arguments))
        return self._gather(asked, ANSWER_S)

    def _gather(self, ranks: Sequence[int], limit_s: float) -> list[Any]:
        found = []
        for rank in ranks:
            if not self._pipes[rank].poll(limit_s):
                raise MemstoreError(f"rank {rank} of the benchmark did not answer within {limit_s:g} s")
            found.append(self._pipes[rank].recv())
        failed = [answer for answer in found if isinstance(answer, BaseException)]
        if failed:
            raise failed[0]
        return found


def serve(
    pipe: Connection,
    config: Config,
    rank: int,
    world_size: int,
    host: str,
    make_state: Callable[[], Any],
    shards: int | None,
) -> None:
    """Be one rank until ordered to stop."""
    os.environ["MEMSTORE_HOST"] = host
    state = make_state()
    shard = None if shards is None else rank % shards
    with connect(JOB, rank=rank, world_size=world_size, config=config, shard_rank=shard, shard_count=shards) as store:
        worker = Worker(store, state, rank, config)
        pipe.send("ready")
        while True:
            verb, arguments = pipe.recv()
            if verb == "stop":
                return
            try:
                pipe.send(getattr(worker, verb)(*arguments))
            except MemstoreError as exc:
                pipe.send(exc)


class Worker:
    """What one rank does on command."""

    def __init__(self, store: Store, state: Any, rank: int, config: Config) -> None:
        self.store, self.state, self.rank, self.config = store, state, rank, config
        self._warm: Any = None  # where plain copies go

    def nbytes(self) -> int:
        """Bytes of the state."""
        return gpt_tensors.total_nbytes(self.state)

    def threads(self, count: int) -> None:
        """Copy with so many threads from now on."""
        torch.set_num_threads(count)

    def touch(self) -> None:
        """Change every chunk."""
        gpt_tensors.touch(self.state)

    def put(self, step: int) -> dict[str, float]:
        """Put; return when it was called, replicated and committed, on the machine's one monotonic clock."""
        begun_s = time.monotonic()
        own = {"position": step, "rank": self.rank} if self.store.shared_shard is not None else None
        ticket = self.store.put(step, self.state, rank_state=own)
        ticket.wait("replicated")
        replicated_s = time.monotonic()
        ticket.wait("committed")
        return {"begun": begun_s, "replicated": replicated_s, "committed": time.monotonic(), "stall": ticket.stall_s}

    def is_writer(self) -> bool:
        """Whether this rank copies the state that it shares (R34)."""
        return self.store.shared_shard is not None and self.store.shared_shard.is_writer

    def copy(self) -> float:
        """Copy all tensors into memory that stays; return the seconds. The first copy is not into warm memory."""
        if self._warm is None:
            self._warm = gpt_tensors.empty_like(self.state)
        pairs = list(zip(gpt_tensors.tensors(self._warm), gpt_tensors.tensors(self.state), strict=True))
        begun_s = time.perf_counter()
        for target, source in pairs:
            target.copy_(source)
        return time.perf_counter() - begun_s

    def is_same(self, step: int, host: str) -> bool:
        """Compare every byte of this rank's shard, read on another host, with the state."""
        mine = os.environ["MEMSTORE_HOST"]
        os.environ["MEMSTORE_HOST"] = host
        try:
            with reader(JOB, config=self.config) as source:
                got = source.get(step, rank=self.rank)
        finally:
            os.environ["MEMSTORE_HOST"] = mine
        return got is not None and gpt_tensors.is_same(got.state, self.state)
