"""FSDP2 under Ray Train with every step's checkpoint in the memory of the hosts.

    python examples/ray_train.py --ranks 4

On the Ray cluster of this machine (`ray start`), else on a local one. Lose a host, or stop the script and start it
again: training goes on after the newest committed step. A node with notice of its end (preemption) is evacuated by the
store itself; `--preemption` has the ranks ask Ray Train for the notice and see to it that what they trained until then
is safe. `memstore status` shows what is stored; `memstore down --leftovers` frees it after a local run.
"""

from __future__ import annotations

import argparse

import ray
import ray.train.torch
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from torch.distributed.fsdp import fully_shard

import memstore


def train(args: dict) -> None:
    """What runs on every rank."""
    with memstore.connect(args["job"], config=memstore.Config(store=args["store"])) as store:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
        model = fully_shard(model.to(ray.train.torch.get_device()))
        optimizer = torch.optim.AdamW(model.parameters())
        state = {"model": model, "optim": optimizer}
        is_warned = False
        got = store.get(into=state)  # None only on a job without history, or after fresh=True
        print(
            f"rank {store.rank}: first step {got.step + 1 if got else 0}, {got.source_reason if got else 'a new job'}"
        )
        for step in range(got.step + 1 if got else 0, args["steps"]):
            torch.manual_seed(step * store.world_size + store.rank)  # the same data for the same step
            x = torch.randn(16, 64, device=ray.train.torch.get_device())
            loss = (model(x) - x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            store.put(step, state)  # returns after one memory copy
            print(f"rank {store.rank}: step {step} loss {float(loss.detach()):.9f}")
            # A barrier of all ranks: ask every step, or every few. Ray 2.60 or newer.
            notice = ray.train.get_preemption_info() if args["preemption"] and not is_warned else None
            if notice is not None:
                is_warned = True
                store.flush()  # this step is committed: nothing before it can be lost with the node
                print(f"rank {store.rank}: ranks {notice.preempted_ranks} lose their node, step {step} is safe")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--job", default="ray-train-example")
    parser.add_argument("--store", default="default")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--preemption", action="store_true", help="ask for notices of preemption")
    args = parser.parse_args()
    ray.train.torch.TorchTrainer(
        train,
        train_loop_config=vars(args),
        scaling_config=ScalingConfig(
            num_workers=args.ranks, use_gpu=torch.cuda.is_available(), placement_strategy="SPREAD"
        ),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=3)),  # preemptions are counted apart
    ).fit()
