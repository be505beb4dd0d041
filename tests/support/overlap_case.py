"""What the tests of overlapped puts share: a training, one host, one rank, and copies that are left to the fence."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from memstore.client.connect import connect
from memstore.client.store import Store
from memstore.shell.codec.encode import StatePlan, plan_state
from memstore.shell.tensors.memory import TensorSource
from memstore.shell.tensors.placed_sources import PlacedSources
from memstore.testing.clusters.processes import ProcessCluster

WAIT_S = 60.0
WIDTH = 256  # a weight is 256 KiB
_jobs = itertools.count()


class Training:
    """A model with BatchNorm, an optimizer, and the state that is put."""

    def __init__(self, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1, **options)
        self.forward_backward()
        self.optimizer.step()
        self.seen = 0

    def forward_backward(self) -> None:
        self.model(torch.randn(8, WIDTH)).square().mean().backward()

    def state(self) -> dict[str, Any]:
        self.seen += 1
        return {
            "model": self.model.state_dict(),
            "optim": self.optimizer.state_dict(),
            "rng": torch.get_rng_state(),
            "seen": [self.seen],
        }

    def copy(self) -> dict[str, Any]:
        """What a put of now must store."""
        state = self.state()
        self.seen -= 1
        return _cloned(state)


def _cloned(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: _cloned(item) for key, item in value.items()}
    return [_cloned(item) for item in value] if isinstance(value, list) else value


def is_same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(is_same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(is_same, one, other))
    return bool(one == other)


def one_host(folder: Path, arena_bytes: int = 256 << 20) -> ProcessCluster:
    """Return a cluster of one host, h1, that is yet to start."""
    return ProcessCluster(folder, {"h1": {}}, arena_bytes=arena_bytes, keep_steps=3, stall_budget_s=WAIT_S)


@contextlib.contextmanager
def one_rank(cluster: ProcessCluster, **fields: Any) -> Iterator[Store]:
    """Join a job of its own on h1, with these job fields; conftest.py gives the environment back."""
    os.environ["MEMSTORE_HOST"] = "h1"
    with connect(f"overlap{next(_jobs)}", rank=0, world_size=1, config=replace(cluster.config, **fields)) as joined:
        yield joined


@contextlib.contextmanager
def one_device_rank(cluster: ProcessCluster, **fields: Any) -> Iterator[Store]:
    """Join as `one_rank` does; plans every tensor as if it lay on a device: to be copied by that, not by the host."""
    with one_rank(cluster, **fields) as joined:
        on_device_of(joined)
        yield joined


def on_device_of(store: Store) -> None:
    """From now on the store plans every tensor as if it lay on a device."""
    store.puts.planned = lambda state, own: on_device(plan_state(state))  # type: ignore[method-assign]


def on_device(plan: StatePlan) -> StatePlan:
    return replace(plan, placed=PlacedSources.of((offset, _flat(source)) for offset, source in plan.placed))


def _flat(source: TensorSource) -> TensorSource:
    if source.address is None or not isinstance(source.owner, torch.Tensor):
        return source
    storage = source.owner.untyped_storage()
    flat = torch.empty(0, dtype=torch.uint8).set_(storage, source.address - storage.data_ptr(), (source.nbytes,), (1,))
    return TensorSource(source.nbytes, None, flat)


def hold(store: Store) -> None:
    """From now on the copy thread orders nothing: all is left to the fence, and the arrival to `arrive`."""
    store.puts.overlap._start = lambda copy: None  # type: ignore[method-assign]


def arrive(store: Store) -> None:
    """Do what the copy thread does with a copy, to its end."""
    late = store.puts.overlap._late
    if late is not None:
        late[0].work()


def stored(store: Store, step: int) -> Any:
    """Return the state of a step."""
    got = store.get(step, rank=0)
    assert got is not None
    return got.state
