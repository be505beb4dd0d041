"""A training under Ray Train with torchft: replicas of the whole model; if one is lost the others go on without it.

What they train meanwhile lacks the samples of the lost one, whose successor gets the model from another replica.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import torch
import torchft
from ray import train
from torch import nn
from torch.utils.data import DataLoader
from torchft.checkpointing.pg_transport import PGTransport

from benchmarks.rigs.in_place_training import (
    BLOCKS,
    GLOBAL_BATCH,
    PAUSE_S,
    RANKS,
    SAMPLES,
    Announced,
    Block,
    Settings,
    StepDone,
    Values,
)
from memstore.adapters.data import SampleOrder
from memstore.drills.ranks.in_place import Gate

GROUP_S, QUORUM_S = timedelta(seconds=30), timedelta(seconds=60)  # as in Ray's own example


def train_replica(here: Announced, settings: dict[str, Any]) -> None:
    """Train one replica to the last step that the gate allows; Ray Train passes {"settings": ...}."""
    s: Settings = settings["settings"]
    torch.set_num_threads(1)
    torch.manual_seed(7)
    entered_s, rank = time.monotonic(), train.get_context().get_world_rank()
    bare = nn.Sequential(*(Block() for _ in range(BLOCKS)))
    adam = torch.optim.AdamW(bare.parameters(), lr=1e-3, foreach=False)

    def load(state: dict[str, Any]) -> None:
        bare.load_state_dict(state["model"])
        adam.load_state_dict(state["optimizer"])

    group = torchft.ProcessGroupGloo(timeout=GROUP_S)
    manager = torchft.Manager(
        pg=group,
        min_replica_size=1,
        load_state_dict=load,
        timeout=QUORUM_S,
        world_size=1,
        rank=0,
        state_dict=lambda: {"model": bare.state_dict(), "optimizer": adam.state_dict()},
        replica_id=f"rank-{rank}",
        checkpoint_transport=PGTransport(group, timeout=GROUP_S, device=torch.device("cpu")),
    )
    model, optimizer = torchft.DistributedDataParallel(manager, bare), torchft.Optimizer(manager, adam)
    order = SampleOrder(SAMPLES, global_batch=GLOBAL_BATCH, rank=rank, world_size=RANKS, seed=7)
    data, gate = iter(DataLoader(Values(), batch_sampler=order)), Gate(s.folder)
    with Path(s.folder, f"{rank}-{os.getpid()}.steps").open("ab", buffering=0) as file:
        while gate.wait(manager.current_step()):
            indices, values = next(data)
            before = manager.current_step()
            optimizer.zero_grad()
            loss = (model(values) - values.roll(1, 1)).square().mean()
            loss.backward()
            optimizer.step()
            if manager.current_step() > before:  # else it is not counted, because a replica was lost in it
                done = StepDone(
                    rank,
                    os.getpid(),
                    entered_s,
                    time.monotonic(),
                    time.process_time(),
                    manager.current_step() - 1,
                    float(loss).hex(),
                    tuple(indices.tolist()),
                )
                file.write(msgspec.json.encode(done) + b"\n")
            time.sleep(PAUSE_S)
    manager.shutdown()
