"""A training loop in torchtitan's shape, its checkpointer in the memory of the hosts through torch's DCP.

    torchrun --standalone --nproc-per-node 2 examples/torchtitan_style.py --steps 40

The states are those of torchtitan's CheckpointManager: model, optimizer, schedule, data loader, progress, each with
state_dict and load_state_dict. Saved by DCP, a step can also be loaded by another number of ranks.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import memstore
from memstore.adapters.torch import NamedOptimizer, load_dcp


@dataclass
class TrainState:
    """Progress."""

    step: int = 0

    def state_dict(self) -> dict:
        return {"step": torch.tensor(self.step)}

    def load_state_dict(self, state: dict) -> None:
        self.step = int(state["step"])


class Tokens:
    """The data of one rank, and its place in it; every rank has its own key in the checkpoint."""

    def __init__(self, rank: int) -> None:
        self.rank, self.position = rank, 0

    def __next__(self) -> torch.Tensor:
        self.position += 1
        return torch.randn(16, 64, generator=torch.Generator().manual_seed(1000 * self.rank + self.position))

    def state_dict(self) -> dict:
        return {f"rank_{self.rank}": torch.tensor(self.position)}

    def load_state_dict(self, state: dict) -> None:
        self.position = int(state[f"rank_{self.rank}"])


class Checkpointer:
    """What torchtitan's CheckpointManager is to its Trainer: load once, save every step."""

    def __init__(self, store: memstore.Store, states: dict) -> None:
        self.store, self.states = store, states

    def load(self) -> bool:
        """Adopt the newest whole step, the same on all ranks; False on a job without history."""
        step = self.store.agree_on_step()
        if step is not None:
            load_dcp(self.states, self.store.dcp_reader(step))
        return step is not None

    def save(self, step: int) -> None:
        """Returns after one memory copy; replication and commit go on behind it."""
        dcp.save(self.states, storage_writer=self.store.dcp_writer(step, wait=None))


def train(args: argparse.Namespace) -> None:
    """What runs on every rank."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with memstore.connect(args.job, config=memstore.Config(store=args.store)) as store:
        mesh = init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("dp_shard",))
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64)).to(device)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters())
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5))
        progress, tokens = TrainState(), Tokens(store.rank)
        optim = NamedOptimizer(model, optimizer)  # for DCP, which may give any rank any part
        states = {"model": model, "optim": optim, "train_state": progress, "dataloader": tokens}
        checkpointer = Checkpointer(store, states)
        checkpointer.load()
        schedule.last_epoch = progress.step - 1
        schedule.step()
        print(f"rank {store.rank}: first step {progress.step + 1}", flush=True)
        while progress.step < args.steps:
            progress.step += 1
            batch = next(tokens).to(device)
            loss = (model(batch) - batch).square().mean()
            loss.backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            checkpointer.save(progress.step)
            print(f"rank {store.rank}: step {progress.step} loss {float(loss.detach()):.9f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--job", default="torchtitan-example")
    parser.add_argument("--store", default="default")
    parser.add_argument("--steps", type=int, default=200)
    dist.init_process_group("cuda:nccl,cpu:gloo" if torch.cuda.is_available() else "gloo")
    train(parser.parse_args())
    dist.destroy_process_group()
