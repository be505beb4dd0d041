"""FSDP2 and AdamW that live on in the ranks that stay, with a fault at a step: for tests of in-place recovery."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import memstore
from memstore.inplace import generation, reentrant, reuse

STEPS, FAULT_AT, WIDTH = 16, 6, 32


@dataclass(frozen=True)
class ReuseEnd:
    """What a rank returns.

    Attributes:
        pid: Its process.
        generation: The last one.
        losses: Of the steps that it trained in that.
        restored_step: What get() returned.
        kept_count: Tensors of model and optimizer that are where they were when the last generation broke off.
        tensors_count: All of them.
    """

    pid: int
    generation: int
    losses: dict[int, str]
    restored_step: int | None
    kept_count: int
    tensors_count: int


def build(device: str) -> tuple[nn.Sequential, torch.optim.AdamW]:
    """Return a model, the same on every rank, and its optimizer."""
    torch.manual_seed(3)
    model = nn.Sequential(
        *[nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True) for _ in range(3)]
    ).to(device)
    for block in model:
        fully_shard(block)
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


@reentrant
def train(store_name: str, job: str, lost: Sequence[int] = (), device: str = "cpu") -> ReuseEnd:
    """Train to the end; ranks in `lost` end their processes at step FAULT_AT of generation 0, in a backward."""
    now = generation()
    if now is None:
        raise RuntimeError("the function is to be called in a generation")
    torch.set_num_threads(1)
    losses: dict[int, str] = {}
    config = memstore.Config(store=store_name, interface="127.0.0.1", connect_timeout_s=60)
    with memstore.connect(job, config=config) as store:
        model, optimizer = reuse(lambda: build(device), store)
        state = {"model": model, "optim": optimizer}
        got = store.get(into=state)
        there = pointers(model, optimizer)
        kept_count = len(there & now.kept.get("pointers", set()))
        for step in range(got.step + 1 if got else 0, STEPS):
            torch.manual_seed(step * store.world_size + store.rank)
            inputs = torch.randn(2, 4, WIDTH).to(device)
            if now.number == 0 and step == FAULT_AT and store.rank in lost:
                store.flush()
                model[1].register_full_backward_pre_hook(lambda *_: os._exit(1))
            loss = (model(inputs) - inputs).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[step] = float(loss.detach()).hex()
            now.kept["pointers"] = pointers(model, optimizer)
            store.put(step, state)
        dist.barrier()
    return ReuseEnd(os.getpid(), now.number, losses, got.step if got else None, kept_count, len(there))


def pointers(model: nn.Module, optimizer: torch.optim.Optimizer) -> set[int]:
    """Return where this rank's tensors of the model and the optimizer lie, but for AdamW's scalars."""
    states = [value for state in optimizer.state.values() for value in state.values() if value.dim()]
    return {
        (tensor.to_local() if isinstance(tensor, DTensor) else tensor).data_ptr()
        for tensor in [*model.parameters(), *states]
    }
