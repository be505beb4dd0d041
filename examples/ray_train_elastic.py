"""FSDP2 under elastic Ray Train: a host is lost, training goes on with fewer; one comes, it goes on with more.

    python examples/ray_train_elastic.py --min-ranks 2 --max-ranks 4

Every step is saved through torch.distributed.checkpoint into the memory of the hosts, so that any number of ranks
can load it: DCP reshards, memstore brings the ranges. On the Ray cluster of this machine (`ray start`), else on a
local one.
"""

from __future__ import annotations

import argparse
import hashlib
import time

import ray.train.torch
import torch
import torch.distributed.checkpoint as dcp
from ray.train import FailureConfig, RunConfig, ScalingConfig
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import memstore
from memstore.adapters.torch import NamedOptimizer, load_dcp

GLOBAL_BATCH = 24  # divided among however many ranks there are


def state_digest(model: torch.nn.Module) -> str:
    """Name the whole model, gathered from all ranks: the same for any number of them."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        digest.update(name.encode() + whole.numpy().tobytes())
    return digest.hexdigest()[:12]


def train(args: dict) -> None:
    """What runs on every rank."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 250), torch.nn.GELU(), torch.nn.Linear(250, 64))
    model = fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optim": NamedOptimizer(model, optimizer)}

    with memstore.connect(args["job"], config=memstore.Config(store=args["store"])) as store:
        step = store.agree_on_step()  # None only on a job without history, or after fresh=True
        if step is not None:
            load_dcp(state, store.dcp_reader(step))
        first = 0 if step is None else step + 1
        digest = state_digest(model)
        if store.rank == 0:
            print(f"{store.world_size} ranks: first step {first}, state {digest}", flush=True)
        for step in range(first, args["steps"]):
            torch.manual_seed(step)  # the same data for the same step, whichever rank gets which part
            x = torch.randn(GLOBAL_BATCH, 64).tensor_split(store.world_size)[store.rank]
            loss = (model(x) - x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            digest = state_digest(model)
            if store.rank == 0:
                print(
                    f"{store.world_size} ranks: step {step} loss {float(loss.detach()):.6f} state {digest}", flush=True
                )
            dcp.save(state, storage_writer=store.dcp_writer(step))  # returns when the step is committed
            time.sleep(args["pause_s"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--job", default="elastic-example")
    parser.add_argument("--store", default="default")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--min-ranks", type=int, default=2)
    parser.add_argument("--max-ranks", type=int, default=4)
    parser.add_argument("--pause-s", type=float, default=0.05, help="so that a person can watch")
    parser.add_argument("--look-every-s", type=float, default=5.0, help="how often Ray Train looks for new hosts")
    args = parser.parse_args()
    ray.train.torch.TorchTrainer(
        train,
        train_loop_config=vars(args),
        scaling_config=ScalingConfig(
            num_workers=(args.min_ranks, args.max_ranks),
            placement_strategy="SPREAD",
            elastic_resize_monitor_interval_s=args.look_every_s,
        ),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=5)),
    ).fit()
