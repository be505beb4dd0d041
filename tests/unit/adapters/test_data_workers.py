"""Positions of real loaders with worker processes: torch's DataLoader, torchdata's StatefulDataLoader."""

from __future__ import annotations

import copy
import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from memstore.adapters.data import Batches, SampleOrder

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # torchdata warns about itself
LENGTH, BATCH = 20, 6  # an epoch has three whole batches, and a smaller one where it is not dropped


class Pids(Dataset[tuple[int, int]]):
    """Samples that tell in which process they were loaded, and how many were loaded in this one."""

    loaded = 0

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> tuple[int, int]:
        self.loaded += 1
        return index, os.getpid()


def ordered(**options: Any) -> DataLoader[Any]:
    order = SampleOrder(LENGTH, global_batch=BATCH, rank=0, world_size=1, drop_last=False)
    return DataLoader(Pids(), batch_sampler=order, **options)


def samples_of(data: Batches, count: int) -> list[list[int]]:
    return [batch[0].tolist() for batch in itertools.islice(data, count)]


@pytest.fixture(scope="module")
def unbroken() -> list[list[int]]:
    return samples_of(Batches(ordered()), 15)


@pytest.mark.parametrize("is_kept", [True, False])
@pytest.mark.parametrize("persistent", [True, False])
def test_prefetched_batches_are_dropped(unbroken: list[list[int]], persistent: bool, is_kept: bool) -> None:
    """In mid-epoch and at an epoch's end, three batches before what the loop took: also with living workers."""
    loader = ordered(num_workers=2, persistent_workers=persistent)
    for position_at in (4, 6):
        data = Batches(loader)
        assert samples_of(data, position_at) == unbroken[:position_at]
        position = data.state_dict()
        before = {pid for batch in itertools.islice(data, 3) for pid in batch[1].tolist()}
        loader = loader if is_kept else ordered(num_workers=2, persistent_workers=persistent)
        again = Batches(loader)
        again.load_state_dict(position)
        first = next(again)
        assert [first[0].tolist(), *samples_of(again, 5)] == unbroken[position_at : position_at + 6]
        assert (set(first[1].tolist()) <= before) == (persistent and is_kept)


def test_nothing_is_loaded_to_get_to_a_position(unbroken: list[list[int]]) -> None:
    """A DataLoader with a `SampleOrder` begins at the position; another iterable loads what comes before it."""
    data = Batches(ordered())
    samples_of(data, 2)
    loader = ordered()
    again = Batches(loader)
    again.load_state_dict(data.state_dict())
    assert samples_of(again, 1) == unbroken[2:3]
    assert loader.dataset.loaded == BATCH  # type: ignore[attr-defined]


class Stream(IterableDataset[int]):
    """A worker's share of a stream, with a position of its own.

    It goes back when it is begun, not at its end: torchdata asks a stream that was restored at its end for more.
    """

    def __init__(self) -> None:
        self.at, self.is_loaded = 0, False

    def __iter__(self) -> Iterator[int]:
        self.at = self.at if self.is_loaded else 0
        self.is_loaded = False
        info = get_worker_info()
        return self._samples(*((info.id, info.num_workers) if info is not None else (0, 1)))

    def _samples(self, first: int, step: int) -> Iterator[int]:
        while self.at * step + first < LENGTH:
            self.at += 1
            yield (self.at - 1) * step + first

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at, self.is_loaded = state["at"], True


def shuffled(stateful: Any, workers: int) -> Any:
    generator = torch.Generator().manual_seed(3)
    return stateful.StatefulDataLoader(
        range(LENGTH), batch_size=BATCH, shuffle=True, generator=generator, num_workers=workers
    )


def distributed(stateful: Any, workers: int) -> Any:
    from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

    sampler = StatefulDistributedSampler(range(2 * LENGTH), 2, 1, seed=3)  # type: ignore[arg-type]
    return stateful.StatefulDataLoader(range(2 * LENGTH), batch_size=BATCH, sampler=sampler, num_workers=workers)


def streamed(stateful: Any, workers: int) -> Any:
    return stateful.StatefulDataLoader(
        Stream(), batch_size=BATCH, num_workers=workers, persistent_workers=workers > 0, snapshot_every_n_steps=3
    )


@pytest.mark.parametrize(
    ("loader", "workers"), [(shuffled, 2), (distributed, 0), (distributed, 2), (streamed, 0), (streamed, 2)]
)
def test_a_loader_with_a_state_of_its_own(loader: Callable[[Any, int], Any], workers: int) -> None:
    """A kept loader and a new one go on from before the first batch, in an epoch and at its end."""
    stateful = pytest.importorskip("torchdata.stateful_dataloader", reason="pip install -e '.[frameworks]'")

    def batches(data: Batches, count: int) -> list[list[int]]:
        return [batch.tolist() for batch in itertools.islice(data, count)]

    unbroken = batches(Batches(loader(stateful, workers)), 12)
    kept = loader(stateful, workers)
    for position_at in (0, 2, 4):
        data = Batches(kept)
        assert batches(data, position_at) == unbroken[:position_at]
        position = copy.deepcopy(data.state_dict())
        batches(data, 3)
        for taken in (kept, loader(stateful, workers)):
            again = Batches(taken)
            again.load_state_dict(copy.deepcopy(position))
            assert batches(again, 12 - position_at) == unbroken[position_at:]


def test_torchdata_without_workers_shuffles_later_epochs_otherwise() -> None:
    """As the module says of shuffle=True with generator=; the epoch that was broken off goes on as it was."""
    stateful = pytest.importorskip("torchdata.stateful_dataloader", reason="pip install -e '.[frameworks]'")
    whole = [batch.tolist() for batch in itertools.islice(Batches(shuffled(stateful, 0)), 8)]
    data, again = Batches(shuffled(stateful, 0)), Batches(shuffled(stateful, 0))
    next(data)
    again.load_state_dict(data.state_dict())
    rest = [batch.tolist() for batch in itertools.islice(again, 7)]
    assert rest[:3] == whole[1:4]
    assert sorted(itertools.chain(*rest[3:])) == list(range(LENGTH))
