"""One rank's way to the store in the cases of torch's (dcp_cases.py): `save` and `load`, each save at the next step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.tensor import DTensor

from memstore.client.dcp.reader import DcpReader
from memstore.client.dcp.writer import DcpWriter
from memstore.testing.ranks.dcp_ranks import DcpRank

State = dict[str, Any]


class Case:
    """One rank's way to the store."""

    def __init__(self, rank: DcpRank, step: int) -> None:
        self.store, self.step = rank.store, step

    def writer(self, kind: Callable[..., DcpWriter] = DcpWriter, **options: Any) -> DcpWriter:
        self.step += 1
        return kind(self.store.puts, self.step, **options)

    def reader(self) -> DcpReader:
        found: DcpReader = self.store.dcp_reader(self.step)
        return found

    def save(self, state: Any, **options: Any) -> Any:
        return dcp.save(state, storage_writer=self.writer(), **options)

    def save_async(self, state: Any, **options: Any) -> None:
        answer = dcp.async_save(state, storage_writer=self.writer(), **options)
        getattr(answer, "upload_completion", answer).result(120)

    def load(self, state: Any, **options: Any) -> Any:
        dcp.load(state, storage_reader=self.reader(), **options)
        return state


def raises(kind: type[BaseException], words: str, work: Callable[[], Any]) -> None:
    """The work must raise this, with these words."""
    try:
        work()
    except kind as error:
        if words in str(error):
            return
        raise AssertionError(f"{words!r} is not in {error}") from error
    raise AssertionError(f"nothing was raised: {kind.__name__} with {words!r} was expected")


def equal(one: Any, other: Any) -> bool:
    """Equal tensors, DTensors by their local part, or objects."""
    if isinstance(one, DTensor):
        return isinstance(other, DTensor) and torch.equal(one.to_local(), other.to_local())
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    return bool(one == other)


class Small(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.one, self.two = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.two(torch.relu(self.one(value)))
        return out
