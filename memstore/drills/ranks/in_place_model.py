"""What ranks train that recover in place, and the same training in one process, without store, network or fault.

Each rank has layers of its own and layers that all share. Gradients of the shared ones are summed in the order of the
ranks; so one process, which trains all ranks in turn, has the same losses in every bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.data import Dataset

WIDTH = 8
SAMPLES_PER_RANK = 2  # of each step
BATCHES_PER_EPOCH = 3


class Samples(Dataset[tuple[int, torch.Tensor, torch.Tensor]]):
    """Samples that follow from their index; an epoch leaves one out."""

    def __init__(self, world_size: int) -> None:
        self.global_batch = SAMPLES_PER_RANK * world_size

    def __len__(self) -> int:
        return BATCHES_PER_EPOCH * self.global_batch + 1

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        values = torch.randn(WIDTH + 1, generator=torch.Generator().manual_seed(index))
        return index, values[:WIDTH], values[WIDTH:]


def build(seed: int, rank: int) -> tuple[nn.ModuleDict, torch.optim.AdamW]:
    """Return a rank's model and its optimizer."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        shared = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, 1))
        torch.manual_seed(seed + 1 + rank)
        own = nn.Linear(WIDTH, WIDTH)
    model = nn.ModuleDict({"own": own, "shared": shared})
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def backward(model: nn.ModuleDict, inputs: torch.Tensor, targets: torch.Tensor) -> tuple[str, torch.Tensor]:
    """Return a rank's loss, in every bit, and its gradient of the shared layers as one vector."""
    loss = (model["shared"](model["own"](inputs)) - targets).square().mean()
    loss.backward()
    return float(loss.detach()).hex(), torch.cat([_gradient(p).reshape(-1) for p in model["shared"].parameters()])


def step(model: nn.ModuleDict, optimizer: torch.optim.AdamW, gradients: Sequence[torch.Tensor]) -> None:
    """Change a rank's model by its own gradient and the mean of all ranks' gradients, which are in their order."""
    total = gradients[0].clone()
    for gradient in gradients[1:]:
        total += gradient
    parts = (total / len(gradients)).split([p.numel() for p in model["shared"].parameters()])
    for parameter, part in zip(model["shared"].parameters(), parts, strict=True):
        _gradient(parameter).copy_(part.reshape(parameter.shape))
    optimizer.step()
    optimizer.zero_grad()


def _gradient(parameter: nn.Parameter) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad


@dataclass(frozen=True)
class Unbroken:
    """A training without a fault: `losses[rank][step]`, and `batches[step]` of all ranks, in their order."""

    losses: list[list[str]]
    batches: list[list[int]]


def unbroken(seed: int, world_size: int, steps_count: int) -> Unbroken:
    """Train all ranks in this process."""
    samples = Samples(world_size)
    ranks = [build(seed, rank) for rank in range(world_size)]
    losses: list[list[str]] = [[] for _ in ranks]
    batches = [batch for batch, _ in zip(_batches(seed, samples), range(steps_count), strict=False)]
    for batch in batches:
        gradients = []
        for rank, (model, _) in enumerate(ranks):
            mine = [samples[i] for i in batch[rank * SAMPLES_PER_RANK : (rank + 1) * SAMPLES_PER_RANK]]
            _, inputs, targets = zip(*mine, strict=True)
            loss, gradient = backward(model, torch.stack(inputs), torch.stack(targets))
            losses[rank].append(loss)
            gradients.append(gradient)
        for model, optimizer in ranks:
            step(model, optimizer, gradients)
    return Unbroken(losses, batches)


def _batches(seed: int, samples: Samples) -> Iterator[list[int]]:
    """Yield the samples of each step, as `memstore.adapters.data.SampleOrder` promises them."""
    epoch = 0
    while True:
        order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(seed + epoch)).tolist()
        for first in range(0, BATCHES_PER_EPOCH * samples.global_batch, samples.global_batch):
            yield order[first : first + samples.global_batch]
        epoch += 1
