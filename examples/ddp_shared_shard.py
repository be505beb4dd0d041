"""DDP in which one rank for each copy puts the model, and every rank what is its own: shared shards (R34).

    ray start --head                                      # once per machine; --address=HEAD on the others
    memstore up                                           # the store outlives the ranks
    torchrun --standalone --nproc-per-node 2 examples/ddp_shared_shard.py

All ranks of DDP hold the same model and optimizer and say so: shard 0 of 1. Only `replicas` of them copy that, each on
another host (on one machine a single rank); the others' put costs where they are in their data. Kill it at any moment,
even with SIGKILL, and start it again: every rank gets the model and its own place in its own data.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import memstore


class Batches:
    """A rank's data, drawn from a stream that no other rank knows."""

    def __init__(self, rank: int) -> None:
        self.random = torch.Generator().manual_seed(rank)
        self.count = 0

    def __next__(self) -> torch.Tensor:
        self.count += 1
        return torch.randn(16, 512, generator=self.random)

    def state_dict(self) -> dict[str, Any]:
        return {"random": self.random.get_state(), "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.random.set_state(state["random"])
        self.count = state["count"]


def train(job: str, store_name: str, steps: int) -> None:
    """What runs on every rank."""
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(512, 512))
    optimizer = torch.optim.AdamW(model.parameters())
    batches = Batches(dist.get_rank())
    state, own = {"model": model, "optim": optimizer}, {"batches": batches}
    with memstore.connect(job, shard_rank=0, shard_count=1, config=memstore.Config(store=store_name)) as store:
        # With another number of ranks than before the state alone comes back: got.rank_state is None.
        got = store.get(into=state, rank_state_into=own)
        first = got.step + 1 if got else 0
        print(f"rank {store.rank}: first step {first}, {got.source_reason if got else 'a new job'}", flush=True)
        for step in range(first, steps):
            x = next(batches)
            loss = (model(x) - x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            ticket = store.put(step, state, rank_state=own)
            if step == first:
                print(f"rank {store.rank}: a put copies {ticket.nbytes:,} bytes", flush=True)
            print(f"rank {store.rank}: step {step} loss {float(loss.detach()):.9f} batch {batches.count}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--job", default="ddp-shared-shard-example")
    parser.add_argument("--store", default="default")
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    train(args.job, args.store, args.steps)
    dist.destroy_process_group()
