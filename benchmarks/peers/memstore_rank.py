"""memstore itself, as a rank's process: put, then wait until the copy is sealed on the peer, or committed; or get."""

from __future__ import annotations

import os
from typing import Any

from benchmarks.peers.contestant import Contestant, Stamps, Task, now
from benchmarks.rigs import gpt_tensors
from memstore.client.connect import connect
from memstore.client.reader import reader
from memstore.config import Config

HOSTS = ("near", "far")


class MemstoreRank(Contestant):
    """Ways: the ticket's level that ends the round, "replicated" or "committed"; "get", which puts first, untimed."""

    def __init__(self, task: Task) -> None:
        """Join the store that the benchmark started; rank 0 runs on "near", rank 1 on "far"."""
        self._task = task
        self._config = Config(**task.options["config"])
        self._job = str(task.options["job"])
        os.environ["MEMSTORE_HOST"] = HOSTS[task.rank]
        self._store = connect(self._job, rank=task.rank, world_size=task.world_size, config=self._config)
        self._step = -1
        self._got: Any = None
        if task.options["prepare"]:
            self._store.prepare(task.state).wait(timeout_s=120.0)

    def run(self, way: str, step: int) -> Stamps:
        """Put and wait, or get into tensors that are there."""
        if way == "get":
            return self._get(step)
        started = now()
        ticket = self._store.put(step, self._task.state)
        released = now()
        ticket.wait(way)
        ended = now()
        ticket.wait("committed")
        self._step = step
        return Stamps(started, released, ended)

    def _get(self, step: int) -> Stamps:
        self._store.put(step, self._task.state).wait("committed")
        if self._got is None:
            self._got = gpt_tensors.empty_like(self._task.state)
        started = now()
        self._store.get(step, rank=self._task.rank, into=self._got)
        ended = now()
        return Stamps(started, ended, ended)

    def is_same(self, way: str) -> bool:
        """Compare what was got; after a put, what the other host has, read from there as a process on it would."""
        if way == "get":
            is_same = gpt_tensors.is_same(self._got, self._task.state)
            gpt_tensors.wipe(self._got)
            return is_same
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
