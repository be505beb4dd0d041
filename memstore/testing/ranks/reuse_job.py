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


def build(device: str) -> tuple[nn.Sequential, torch.optim.AdamW, torch.amp.GradScaler]:
    """Return a model, the same on every rank, its optimizer, and the optimizer's scaler."""
    torch.manual_seed(3)
    model = nn.Sequential(
        *[nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.1, batch_first=True) for _ in range(3)]
    ).to(device)
    for block in model:
        fully_shard(block)
    fully_shard(model)
    scaler = torch.amp.GradScaler(torch.device(device).type, init_scale=8.0)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3), scaler


@reentrant
def train(store_name: str, job: str, lost: int = -1, at: Sequence[str] = (), device: str = "cpu") -> ReuseEnd:
    """Train to the end.

    Args:
        store_name: The store to put into.
        job: The job's name.
        lost: Rank that ends its process in each of the first generations, at step FAULT_AT in the first, at the next
            one in the second.
        at: By generation, where: in the "backward"; "clip": before the gradients' norm, which follows unscale_(); in
            the "evaluation" after the step.
        device: Where the model lies.
    """
    now = generation()
    if now is None:
        raise RuntimeError("the function is to be called in a generation")
    torch.set_num_threads(1)
    losses: dict[int, str] = {}
    config = memstore.Config(store=store_name, interface="127.0.0.1", connect_timeout_s=60)
    with memstore.connect(job, config=config) as store:
        model, optimizer, scaler = reuse(lambda: build(device), store)
        state = {"model": model, "optim": optimizer, "scaler": scaler}
        got = store.get(into=state)
        there = pointers(model, optimizer)
        kept_count = len(there & now.kept.get("pointers", set()))
        for step in range(got.step + 1 if got else 0, STEPS):
            torch.manual_seed(step * store.world_size + store.rank)
            inputs = torch.randn(2, 4, WIDTH).to(device)
            fault = at[now.number] if step == FAULT_AT + now.number < FAULT_AT + len(at) else ""
            is_lost = store.rank == lost
            if is_lost and fault == "backward":
                store.flush()
                model[1].register_full_backward_pre_hook(lambda *_: os._exit(1))
            loss = (model(inputs) - inputs).square().mean()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            if is_lost and fault == "clip":
                store.flush()
                os._exit(1)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            losses[step] = float(loss.detach()).hex()
            now.kept["pointers"] = pointers(model, optimizer)
            store.put(step, state)
            if step % 2 == 0:
                _evaluate(model, inputs, store if is_lost and fault == "evaluation" else None)
        dist.barrier()
    return ReuseEnd(os.getpid(), now.number, losses, got.step if got else None, kept_count, len(there))


def _evaluate(model: nn.Module, inputs: torch.Tensor, lost: memstore.Store | None) -> None:
    """Evaluate without a `finally`: what the forward raises when a rank is lost leaves the others in eval mode."""
    model.eval()
    torch.set_grad_enabled(False)
    if lost is not None:
        lost.flush()
        os._exit(1)
    model(inputs)
    torch.set_grad_enabled(True)
    model.train()


def pointers(model: nn.Module, optimizer: torch.optim.Optimizer) -> set[int]:
    """Return where this rank's tensors of the model and the optimizer lie, but for AdamW's scalars."""
    states = [value for state in optimizer.state.values() for value in state.values() if value.dim()]
    return {
        (tensor.to_local() if isinstance(tensor, DTensor) else tensor).data_ptr()
        for tensor in [*model.parameters(), *states]
    }
