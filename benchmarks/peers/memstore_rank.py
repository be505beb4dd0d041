"""memstore itself, as a rank's process: put, then wait until the copy is sealed on the peer, or committed."""

from __future__ import annotations

import os

from benchmarks.peers.contestant import Contestant, Stamps, Task, now
from benchmarks.rigs import gpt_tensors
from memstore.client.connect import connect, reader
from memstore.config import Config

HOSTS = ("near", "far")


class MemstoreRank(Contestant):
    """Ways: the ticket's level that ends the round, "replicated" or "committed"."""

    def __init__(self, task: Task) -> None:
        """Join the store that the benchmark started; rank 0 runs on "near", rank 1 on "far"."""
        self._task = task
        self._config = Config(**task.options["config"])
        self._job = str(task.options["job"])
        os.environ["MEMSTORE_HOST"] = HOSTS[task.rank]
        self._store = connect(self._job, rank=task.rank, world_size=task.world_size, config=self._config)
        self._step = -1
        if task.options["prepare"]:
            self._store.prepare(task.state).wait(timeout_s=120.0)

    def run(self, way: str, step: int) -> Stamps:
        """Put and wait."""
        started = now()
        ticket = self._store.put(step, self._task.state)
        released = now()
        ticket.wait(way)
        ended = now()
        ticket.wait("committed")
        self._step = step
        return Stamps(started, released, ended)

    def is_same(self, way: str) -> bool:
        """Read this rank's shard as a process on the other host would, from that host's own copy."""
        os.environ["MEMSTORE_HOST"] = HOSTS[1 - self._task.rank]
        try:
            with reader(self._job, config=self._config) as source:
                got = source.get(self._step, rank=self._task.rank)
        finally:
            os.environ["MEMSTORE_HOST"] = HOSTS[self._task.rank]
        return got is not None and got.source == "local" and gpt_tensors.is_same(got.state, self._task.state)

    def close(self) -> None:
        """Leave the job."""
        self._store.close()
