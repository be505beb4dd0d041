"""Plain Ray actors that stay when another one is lost: it is replaced, and all go on from the newest committed step.

    python examples/in_place_actors.py --ranks 2 --die-at 20

The driver replaces a lost actor; memstore leaves the training function on the others and enters it again, in the same
processes, with a new process group.
"""

from __future__ import annotations

import argparse
import os

import ray
import torch
import torch.distributed as dist

import memstore
from memstore.inplace import generation
from memstore.inplace.ray_actors import InPlaceGroup


def train(args: argparse.Namespace) -> int:
    """What runs on every rank, once in each generation; torch.distributed is there."""
    weights = torch.zeros(64, 64)
    now, first = generation(), 0
    with memstore.connect(args.job, config=memstore.Config(store=args.store)) as store:
        got = store.get(into={"weights": weights})  # None only on a job without history, or after fresh=True
        first = got.step + 1 if got else 0
        print(f"rank {store.rank}, pid {os.getpid()}: generation {now.number} begins with step {first}", flush=True)
        for step in range(first, args.steps):
            torch.manual_seed(step * store.world_size + store.rank)  # the same data for the same step
            gradient = weights - torch.randn(64, 64)
            dist.all_reduce(gradient)
            weights -= 0.1 * gradient / store.world_size
            store.put(step, {"weights": weights})  # returns after one memory copy
            print(f"rank {store.rank}: step {step} loss {gradient.square().mean().item():.9f}", flush=True)
            if (step, store.rank, now.number) == (args.die_at, 0, 0):
                store.flush()
                os._exit(1)  # as if its process had been killed
    return os.getpid()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--job", default="in-place-example")
    parser.add_argument("--store", default="default")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--spares", type=int, default=0)
    parser.add_argument("--die-at", type=int, help="rank 0 dies after this step of the first generation")
    args = parser.parse_args()
    ray.init(address=os.environ.get("RAY_ADDRESS"), ignore_reinit_error=True)
    print("pids at the end:", *InPlaceGroup(args.ranks, spares=args.spares).run(train, args))
