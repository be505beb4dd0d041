"""A training function that is entered again after a loss, and whose state says which samples each step trained on."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

import memstore
from memstore.adapters.data import Batches, SampleOrder
from memstore.inplace import generation

STEPS, LENGTH, GLOBAL_BATCH = 24, 20, 6  # an epoch has three whole batches; two samples are left out
SEED = 5


@dataclass(frozen=True)
class DataEnd:
    """What a rank returns: each step's samples in the state that it has at the end, and where they were loaded."""

    trained: list[list[int]]
    generation: int
    first_step: int  # of the last generation
    kept_worker_pids: frozenset[int]  # that loaded in the last generation and in one before it


class IndexedSamples(Dataset[tuple[int, int]]):
    """Samples that tell which process loaded them."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> tuple[int, int]:
        return index, os.getpid()


def ordered_loader(rank: int, world_size: int) -> Any:
    """Return a DataLoader whose workers live as long as it does."""
    order = SampleOrder(LENGTH, global_batch=GLOBAL_BATCH, rank=rank, world_size=world_size, seed=SEED)
    return DataLoader(IndexedSamples(), batch_sampler=order, num_workers=1, persistent_workers=True)


def stateful_loader(rank: int, world_size: int) -> Any:
    """Return torchdata's loader, over this rank's share of each epoch."""
    from torchdata.stateful_dataloader import StatefulDataLoader
    from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

    sampler = StatefulDistributedSampler(IndexedSamples(), world_size, rank, seed=SEED, drop_last=True)
    return StatefulDataLoader(
        IndexedSamples(), batch_size=GLOBAL_BATCH // world_size, sampler=sampler, num_workers=1, drop_last=True
    )


def epochs_of(loader: Any, first_step: int) -> Iterator[Any]:
    """Yield torchdata's batches from this step's on, whose sampler is told the epoch."""
    for epoch in itertools.count(first_step // (LENGTH // GLOBAL_BATCH)):
        loader.sampler.set_epoch(epoch)
        yield from loader


def train(store_name: str, job: str, kind: str, faults: Mapping[tuple[int, int], int]) -> DataEnd:
    """Train to the end, with the loader that a former generation kept, or a new one of torchdata's.

    Args:
        store_name: The store to put into.
        job: The job's name.
        kind: "ordered" or "stateful".
        faults: (generation, rank) -> the step that this rank trains and does not put, because it is killed.
    """
    now = generation()
    if now is None:
        raise RuntimeError("the function is to be called in a generation")
    trained = torch.full((STEPS, GLOBAL_BATCH), -1)
    pids: set[int] = set()
    config = memstore.Config(store=store_name, interface="127.0.0.1", connect_timeout_s=60)
    with memstore.connect(job, config=config) as store:
        if not now.kept:
            now.kept.update(loader=ordered_loader(store.rank, store.world_size), pids=set())
        is_ordered = kind == "ordered"
        data = Batches(now.kept["loader"]) if is_ordered else stateful_loader(store.rank, store.world_size)
        state = {"trained": trained, "data": data}
        got = store.get(into=state)
        first = got.step + 1 if got else 0
        batches = data if is_ordered else epochs_of(data, first)
        before = set(now.kept["pids"])
        for step in range(first, STEPS):
            indices, loaded_by = next(batches)
            pids.update(loaded_by.tolist())
            now.kept["pids"].update(pids)
            batch = torch.zeros(store.world_size, len(indices), dtype=torch.long)
            batch[store.rank] = indices
            dist.all_reduce(batch)
            trained[step] = batch.flatten()
            if faults.get((now.number, store.rank)) == step:
                os.kill(os.getpid(), signal.SIGKILL)
            store.put(step, state)
    return DataEnd(trained.tolist(), now.number, first, frozenset(before & pids))
