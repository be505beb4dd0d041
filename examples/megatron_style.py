"""Megatron-LM's non-persistent local checkpoints in the memory of the hosts: the calls that Megatron makes.

    python examples/megatron_style.py --steps 40

In Megatron itself (`--non-persistent-ckpt-type local --non-persistent-save-interval 1`) only this changes, where
`checkpointing_context` is made in megatron/training/training.py:

    manager = LocalCheckpointManager(memstore.connect("job"), encode=pickle.dumps, decode=pickle.loads)
    checkpointing_context = {"local_checkpoint_manager": manager}
"""

from __future__ import annotations

import argparse
import pickle

import torch

import memstore
from memstore.adapters.megatron import LocalCheckpointManager


class Tensors:
    """A state with its tensors apart, as Megatron-core's MCoreTensorAwareStateDict is."""

    def __init__(self, values: dict) -> None:
        self.values = values

    def pop_tensors(self) -> list[torch.Tensor]:
        tensors = [value for value in self.values.values() if isinstance(value, torch.Tensor)]
        self.values = {name: None if isinstance(x, torch.Tensor) else x for name, x in self.values.items()}
        return tensors

    def insert_tensors(self, tensors: list[torch.Tensor]) -> None:
        left = iter(tensors)
        self.values = {name: next(left) if value is None else value for name, value in self.values.items()}

    def restore_tensor_device(self, non_blocking: bool = True) -> None:
        """On a GPU: back to where each tensor was."""


def load_checkpoint(context: dict, weights: torch.Tensor) -> int:
    """Return the iteration to go on from; Megatron takes the newer of this and its persistent checkpoint."""
    manager = context["local_checkpoint_manager"]
    if manager.find_latest() == -1:
        return 0
    state, name = manager.load()
    print(f"rank {manager.store.rank}: loaded {name}")
    weights.copy_(state.values["weights"])
    return state.values["iteration"]


def save_checkpoint(context: dict, weights: torch.Tensor, iteration: int) -> None:
    """As Megatron does between two iterations."""
    state = Tensors({"iteration": iteration, "args": argparse.Namespace(tensor_parallel=1), "weights": weights})
    context["local_checkpoint_manager"].save(state, iteration, is_async=False)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--job", default="megatron-example")
    parser.add_argument("--store", default="default")
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    with memstore.connect(args.job, rank=0, world_size=1, config=memstore.Config(store=args.store)) as store:
        context = {"local_checkpoint_manager": LocalCheckpointManager(store, encode=pickle.dumps, decode=pickle.loads)}
        weights = torch.zeros(64, 64)
        done = load_checkpoint(context, weights)
        print(f"rank {store.rank}: first step {done + 1}", flush=True)
        for iteration in range(done + 1, args.steps + 1):
            torch.manual_seed(iteration)  # the same data for the same iteration
            gradient = weights - torch.randn(64, 64)
            weights -= 0.1 * gradient
            print(f"rank {store.rank}: step {iteration} loss {gradient.square().mean().item():.9f}", flush=True)
            save_checkpoint(context, weights, iteration)
