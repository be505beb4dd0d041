"""DDP under plain torchrun with every step's checkpoint in the memory of the hosts. Ray only carries the store.

    ray start --head                                      # once per machine; --address=HEAD on the others
    memstore up                                           # the store outlives the ranks
    torchrun --standalone --nproc-per-node 2 examples/torchrun.py

Kill it at any moment, even with SIGKILL, and start it again: it goes on after the newest committed step. Without a
running store the first rank starts one through the machine's Ray; a rank needs Ray for nothing else.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import memstore


def train(job: str, store_name: str, steps: int) -> None:
    """What runs on every rank."""
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(64, 64))
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optim": optimizer}
    with memstore.connect(job, config=memstore.Config(store=store_name)) as store:
        got = store.get(into=state)  # None only on a job without history, or after fresh=True
        first = got.step + 1 if got else 0
        print(f"rank {store.rank}: first step {first}, {got.source_reason if got else 'a new job'}", flush=True)
        for step in range(first, steps):
            torch.manual_seed(step * store.world_size + store.rank)  # the same data for the same step
            x = torch.randn(16, 64)
            loss = (model(x) - x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            store.put(step, state)  # returns after one memory copy
            print(f"rank {store.rank}: step {step} loss {float(loss.detach()):.9f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--job", default="torchrun-example")
    parser.add_argument("--store", default="default")
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    train(args.job, args.store, args.steps)
    dist.destroy_process_group()
