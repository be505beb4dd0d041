"""One rank of a training with gloo, for bench_sharing.py: reads a JSON line for each command, answers with one.

An iteration is spans of computing of a fixed length, each followed by an all-reduce, then a put. Computing is matrix
products until the time is over, so that a processor which is shared does not lengthen it: what is measured is the link.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

from memstore.client.connect import connect
from memstore.client.store import Store
from memstore.config import Config

WAIT_S = 60.0


class Trainer:
    """A rank: its process group, its state, and a store for every contender that puts."""

    def __init__(self, spec: dict[str, Any]) -> None:
        torch.set_num_threads(1)
        self.rank, world = int(spec["rank"]), int(spec["world"])
        keys = dist.FileStore(spec["meeting"], world)
        dist.init_process_group("cpu:gloo", store=keys, rank=self.rank, world_size=world)
        self.spans_s, self.nbytes = list(spec["spans_s"]), int(spec["nbytes"])
        self.gradients = torch.zeros(int(spec["reduce_bytes"]) // 4)
        self.state = torch.zeros(self.nbytes // 4)
        self.is_on_processor = bool(spec["is_on_processor"])
        self.factor = torch.rand(256, 256)
        self.stores: dict[str, Store] = {
            name: connect("train", rank=self.rank, world_size=world, config=Config(**fields))
            for name, fields in spec["stores"].items()
        }

    def compute(self, length_s: float) -> None:
        """Keep one processor busy, or none: an accelerator computes."""
        end_s = time.perf_counter() + length_s
        if not self.is_on_processor:
            time.sleep(length_s)
        while time.perf_counter() < end_s:
            torch.mm(self.factor, self.factor)

    def run(self, name: str, first_step: int, iterations: int, is_marked: bool) -> dict[str, Any]:
        """Train; return the seconds of each iteration and how long its put blocked."""
        store = self.stores.get(name)
        took_s, stalls_s, tickets = [], [], []
        dist.barrier()
        for step in range(first_step, first_step + iterations):
            began_s = time.perf_counter()
            self.state.fill_(step + self.rank / 8)
            for length_s in self.spans_s:
                self.compute(length_s)
                with store.collective() if store is not None and is_marked else contextlib.nullcontext():
                    dist.all_reduce(self.gradients)
            if store is not None:
                tickets.append(store.put(step, {"state": self.state}))
                stalls_s.append(tickets[-1].stall_s)
            took_s.append(time.perf_counter() - began_s)
        if tickets:
            tickets[-1].wait("committed", WAIT_S)
        return {"took_s": took_s, "stalls_s": stalls_s, "levels": [ticket.level for ticket in tickets]}


def main() -> None:
    """Serve commands until the input ends."""
    trainer = Trainer(json.loads(sys.stdin.readline()))
    print(json.dumps({}), flush=True)
    for line in sys.stdin:
        print(json.dumps(trainer.run(**json.loads(line))), flush=True)
    for store in trainer.stores.values():
        store.close()


if __name__ == "__main__":
    main()
