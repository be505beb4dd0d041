"""NVIDIA Resiliency Extension keeps the processes and assigns ranks; memstore has the newest committed step for each.

    pip install nvidia-resiliency-ext
    export MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 WORLD_SIZE=3
    for rank in 0 1 2; do RANK=$rank python examples/nvrx_inprocess.py --ranks 2 --die-at 20 & done; wait

Two of the three processes train and the third one waits. Its launcher must not end the others when one ends, as
torchrun does. NVRx's own store is in the process of rank 0, which cannot be lost.
"""

import argparse
import os
import signal
from datetime import timedelta

import nvidia_resiliency_ext.inprocess as nvrx
import torch
import torch.distributed as dist
from nvidia_resiliency_ext.inprocess.rank_assignment import FillGaps, MaxActiveWorldSize

import memstore

parser = argparse.ArgumentParser()
parser.add_argument("--job", default="nvrx-example")
parser.add_argument("--store", default="default")
parser.add_argument("--launch", default=str(os.getppid()), help="equal on all ranks, another one at each launch")
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--ranks", type=int, default=2, help="that train; the other processes wait")
parser.add_argument("--die-at", type=int, help="rank 1 dies after this step")
ARGS = parser.parse_args()
FIRST_RANK = int(os.environ["RANK"])
GROUPS = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]) + 1, is_master=FIRST_RANK == 0)


@nvrx.Wrapper(
    rank_assignment=nvrx.Compose(MaxActiveWorldSize(ARGS.ranks), FillGaps()),
    monitor_thread_interval=timedelta(seconds=0.1),
    monitor_process_interval=timedelta(seconds=0.1),
    last_call_wait=timedelta(seconds=0.1),
)
def train(call: nvrx.CallWrapper | None = None) -> None:
    """What runs on every rank, again in the same process after each loss; NVRx finds its own argument by its class."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])  # by NVRx
    group = dist.PrefixStore(str(call.iteration), GROUPS)
    dist.init_process_group("gloo", store=group, rank=rank, world_size=world_size)
    weights = torch.zeros(64, 64)
    attempt, config = f"{ARGS.launch}:{call.iteration}", memstore.Config(store=ARGS.store)
    with memstore.connect(ARGS.job, rank=rank, world_size=world_size, attempt=attempt, config=config) as store:
        got = store.get(into={"weights": weights})
        first = got.step + 1 if got else 0
        print(f"rank {rank}, pid {os.getpid()}: iteration {call.iteration} begins with step {first}", flush=True)
        for step in range(first, ARGS.steps):
            torch.manual_seed(step * world_size + rank)  # the same data for the same step
            gradient = weights - torch.randn(64, 64)
            dist.all_reduce(gradient)
            weights -= 0.1 * gradient / world_size
            store.put(step, {"weights": weights})
            print(f"rank {rank}: step {step} loss {gradient.square().mean().item():.9f}", flush=True)
            if (step, FIRST_RANK) == (ARGS.die_at, 1):
                store.flush()
                os.kill(os.getpid(), signal.SIGKILL)
    dist.destroy_process_group()


train()
