"""The rank of the nemesis: a program of its own, forked from a process that has imported torch.

It trains on command, one step at a time, overwrites its tensors in place as an optimizer does, and compares restored
bytes with those of the oracle. It reports only what differs.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
import time
from typing import Any

from memstore.testing.clusters.stepped_clock import CLOCK_VARIABLE, shift_clock
from memstore.testing.nemesis import oracle
from memstore.testing.ranks.rank_process import CommandedRank, config_from, nursery_main

LOG_VARIABLE = "NEMESIS_LOG"  # the file into which a rank prints and logs
TICKETS_MAX = 64


class Rank(CommandedRank):
    """A rank that carries out the commands of one round."""

    def __init__(self, channel: socket.socket) -> None:
        log = os.open(os.environ[LOG_VARIABLE], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(process)d %(message)s", stream=sys.stderr)
        shift_clock(float(os.environ.get(CLOCK_VARIABLE, "0")))
        super().__init__(channel)
        self.seed, self.kib = 0, 64
        self.tensors: dict[str, Any] = {}
        self.reported: dict[int, tuple[Any, ...]] = {}
        self.has_put = False

    def do_connect(
        self, job: str, rank: int, world_size: int, config: dict[str, Any], seed: int, kib: int, key: str | None,
    ) -> dict[str, Any]:  # fmt: skip
        """Join the job."""
        from memstore.client.connect import connect

        self.seed, self.kib = seed, kib
        self.store = connect(job, rank=rank, world_size=world_size, attempt=key, config=config_from(config))
        return {"attempt": self.store.attempt, **self.do_counts()}

    def do_get(self, limit_s: float) -> dict[str, Any]:
        """Restore, and compare with the oracle."""
        began_s = time.monotonic()
        got = self.store.get(timeout_s=limit_s)
        times = {"began_s": began_s, "ended_s": time.monotonic()}
        if got is None:
            return {"step": None, **times}
        problem, nbytes = self._compare(self.store.job, got, self.store.rank)
        return {
            "step": got.step, "attempt": got.attempt, "problem": problem, "nbytes": nbytes, "verdict": got.source,
            "why": got.source_reason, "steps_lost": got.steps_lost, **times,
        }  # fmt: skip

    def _compare(self, job: str, got: Any, rank: int) -> tuple[str, int]:
        wanted = oracle.arrays(self.seed, job, got.attempt, rank, got.step, self.kib)
        found = {name: tensor.numpy() for name, tensor in got.state["model"].items()}
        words = oracle.tag(self.seed, job, got.attempt, rank, got.step)
        return oracle.difference(wanted, words, found, got.state["tag"]), sum(a.nbytes for a in found.values())

    def do_put(self, step: int) -> dict[str, Any]:
        """Train one step, then put it; an exception of put is part of the answer."""
        import torch

        made = oracle.arrays(self.seed, self.store.job, self.store.attempt, self.store.rank, step, self.kib)
        began_s = time.monotonic()
        raised = ""
        stall_s = 0.0
        try:
            for name, value in made.items():
                if name not in self.tensors:
                    self.tensors[name] = torch.from_numpy(value.copy())
                elif name != "frozen":
                    self.tensors[name].copy_(torch.from_numpy(value.copy()))
            words = oracle.tag(self.seed, self.store.job, self.store.attempt, self.store.rank, step)
            ticket = self.store.put(step, {"model": self.tensors, "tag": words})
            self.tickets[step] = ticket
            stall_s = float(ticket.stall_s)
            while len(self.tickets) > TICKETS_MAX:
                self.tickets.pop(min(self.tickets))
        except Exception as exc:
            raised = f"{type(exc).__name__}: {exc}"[:1000]
        is_first, self.has_put = not self.has_put, True
        return {
            "raised": raised, "stall_s": stall_s, "began_s": began_s, "ended_s": time.monotonic(),
            "is_first": is_first, "levels": self._levels(),
        }  # fmt: skip

    def do_levels(self) -> dict[str, Any]:
        """Return the tickets that have changed since the last call."""
        return {"levels": self._levels()}

    def _levels(self) -> list[list[Any]]:
        changed = []
        for step, ticket in list(self.tickets.items()):
            now = (ticket.level, bool(ticket.degraded), str(ticket.reason)[:200])
            if self.reported.get(step) != now:
                self.reported[step] = now
                changed.append([step, *now])
        return changed

    def do_counts(self) -> dict[str, Any]:
        """Return how many descriptors and threads this process has."""
        return {"fds": len(os.listdir("/proc/self/fd")), "threads": threading.active_count()}

    def do_read(
        self, job: str, config: dict[str, Any], seed: int, kib: int, ranks: list[int], step: int | None
    ) -> dict[str, Any]:
        """Read shards of some ranks as a reader, which joins no job, and compare them."""
        from memstore.client.reader import reader

        self.seed, self.kib = seed, kib
        rows = []
        with reader(job, config=config_from(config)) as found:
            for rank in ranks:
                try:
                    got = found.get(step, rank=rank, timeout_s=20.0)
                except Exception as exc:
                    rows.append({"rank": rank, "error": f"{type(exc).__name__}: {exc}"[:400]})
                    continue
                problem, nbytes = self._compare(job, got, rank)
                rows.append({"rank": rank, "step": got.step, "attempt": got.attempt, "problem": problem,
                             "nbytes": nbytes, "why": got.source_reason})  # fmt: skip
        return {"rows": rows}


if __name__ == "__main__":
    import torch  # noqa: F401  (imported before the first fork)

    nursery_main(Rank)
