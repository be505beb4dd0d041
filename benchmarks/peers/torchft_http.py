"""torchft's HTTPTransport: rank 0 offers its state over HTTP, rank 1 fetches it. No digest, no stored copy."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torchft.checkpointing.http_transport import HTTPTransport

from benchmarks.peers.contestant import Contestant, Stamps, Task, now
from benchmarks.rigs import gpt_tensors

LIMIT = timedelta(seconds=60)


class TorchftHttp(Contestant):
    """Ways: the number of chunks fetched at once; "0" is a single stream."""

    def __init__(self, task: Task) -> None:
        """Start a server for each way on rank 0, and tell rank 1 where they listen."""
        self._task = task
        self._transports = {way: HTTPTransport(LIMIT, num_chunks=int(way)) for way in task.options["ways"]}
        self._addresses: list[Any] = [{way: one.metadata() for way, one in self._transports.items()}]
        dist.broadcast_object_list(self._addresses, src=0)
        self._got: Any = None

    def run(self, way: str, step: int) -> Stamps:
        """Offer on rank 0, which is free at once; fetch on rank 1."""
        transport = self._transports[way]
        started = now()
        if self._task.rank == 0:
            transport.send_checkpoint([1], step, self._task.state, LIMIT)
        else:
            self._got = transport.recv_checkpoint(0, self._addresses[0][way], step, LIMIT)
        ended = now()
        return Stamps(started, ended, ended)

    def is_same(self, way: str) -> bool:
        """Compare what rank 1 fetched with what rank 0 has; then rank 0 stops offering it."""
        if self._task.rank == 0:
            self._transports[way].disallow_checkpoint()
            return True
        is_same = gpt_tensors.is_same_but(self._got, self._task.state, self._task.peer)
        self._got = None
        return is_same

    def close(self) -> None:
        """Stop the servers."""
        for transport in self._transports.values():
            transport.shutdown(wait=False)
