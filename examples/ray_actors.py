"""Plain Ray actors with every step's checkpoint in the memory of the hosts: no Train, no torch.distributed.

    python examples/ray_actors.py --ranks 2

Nothing gives an actor its rank, so the driver does, and it names the launch: `attempt=` is equal on all ranks and new
for every launch (R20). An actor that dies takes the launch down; the driver starts the next one.
"""

from __future__ import annotations

import argparse
import os
import uuid

import ray
import torch

import memstore


@ray.remote(num_cpus=1)
class Worker:
    """One rank: its own weights, its own data."""

    def train(self, rank: int, world_size: int, launch: str, args: dict) -> int:
        weights = torch.zeros(64, 64)
        state = {"weights": weights}
        config = memstore.Config(store=args["store"])
        with memstore.connect(args["job"], rank=rank, world_size=world_size, attempt=launch, config=config) as store:
            got = store.get(into=state)  # None only on a job without history, or after fresh=True
            first = got.step + 1 if got else 0
            print(f"rank {rank}: first step {first}, {got.source_reason if got else 'a new job'}")
            for step in range(first, args["steps"]):
                torch.manual_seed(step * world_size + rank)  # the same data for the same step
                gradient = weights - torch.randn(64, 64)
                weights -= 0.1 * gradient
                store.put(step, state)  # returns after one memory copy
                print(f"rank {rank}: step {step} loss {gradient.square().mean().item():.9f}")
                if args["die_at"] is not None and (step, rank, first) == (args["die_at"], 0, 0):
                    store.flush()
                    os._exit(1)  # as if its host had died
        return args["steps"] - first


def run(args: argparse.Namespace) -> None:
    """Launch until one launch reaches the end."""
    for _ in range(1 + args.restarts):
        launch = uuid.uuid4().hex
        workers = [Worker.options(scheduling_strategy="SPREAD").remote() for _ in range(args.ranks)]
        try:
            done = ray.get([w.train.remote(r, args.ranks, launch, vars(args)) for r, w in enumerate(workers)])
        except ray.exceptions.RayActorError as error:
            print(f"a rank died, starting again: {type(error).__name__}")
            for worker in workers:
                ray.kill(worker)
        else:
            print(f"all ranks are done, this launch trained {done[0]} steps")
            return
    raise SystemExit(f"gave up after {1 + args.restarts} launches")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--job", default="ray-actors-example")
    parser.add_argument("--store", default="default")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--restarts", type=int, default=3)
    parser.add_argument("--die-at", type=int, help="rank 0 dies after this step of the first launch")
    run(parser.parse_args())
