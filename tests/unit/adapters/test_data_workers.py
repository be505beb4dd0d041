"""Positions of real loaders with worker processes."""

from __future__ import annotations

import copy
import itertools
import os
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from memstore.adapters.data import Batches, RandomStates, SampleOrder
from memstore.errors import ConfigError

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
    """The loader begins at the position."""
    data = Batches(ordered())
    samples_of(data, 2)
    loader = ordered()
    again = Batches(loader)
    again.load_state_dict(data.state_dict())
    assert samples_of(again, 1) == unbroken[2:3]
    assert loader.dataset.loaded == BATCH  # type: ignore[attr-defined]


class Noisy(Dataset[torch.Tensor]):
    """Samples that are loaded with noise from the generators of the process that loads them."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> torch.Tensor:
        if get_worker_info() is not None:
            return torch.tensor(float(index))
        return index + torch.rand(()) + random.random() + float(np.random.random())


def in_order(workers: int) -> Any:
    order = SampleOrder(LENGTH, global_batch=BATCH, rank=0, world_size=1)
    return DataLoader(Noisy(), batch_sampler=order, num_workers=workers)


class BegunLate:
    """A loader below which another one is begun with the first batch."""

    def __init__(self, loader: Any) -> None:
        self.loader, self.batch_sampler = loader, loader.batch_sampler

    def __iter__(self) -> Iterator[Any]:
        yield from self.loader


@pytest.mark.parametrize("workers", [0, 1])
def test_a_restored_step_is_trained_with_the_random_numbers_of_an_unbroken_run(workers: int) -> None:
    """Dropout, and noise that the loading process draws: the way to a position takes none of their numbers."""
    check_losses(lambda: in_order(workers))


def test_a_loader_that_is_begun_late_takes_no_random_number_of_training() -> None:
    check_losses(lambda: BegunLate(in_order(1)))


def check_losses(source: Callable[[], Any]) -> None:
    """Compare from every step on: within epochs and at their ends, which are after steps 2 and 5."""

    def loss(data: Batches) -> tuple[float, ...]:
        dropped = torch.nn.functional.dropout(next(data), 0.5)
        return (*dropped.tolist(), random.random(), float(np.random.random()))

    torch.manual_seed(1)
    data, losses, stored = Batches(source()), [], []
    for _ in range(8):
        losses.append(loss(data))
        stored.append(copy.deepcopy((data.state_dict(), RandomStates().state_dict())))
    for step in (1, 2, 4):
        position, random_states = stored[step]
        data = Batches(source())
        data.load_state_dict(position)
        RandomStates().load_state_dict(random_states)
        assert [loss(data) for _ in range(step + 1, 8)] == losses[step + 1 :]


def test_workers_draw_other_numbers_in_each_epoch() -> None:
    """Though nothing else of the process draws any."""

    class Random(Noisy):
        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.rand(())

    order = SampleOrder(LENGTH, global_batch=LENGTH, rank=0, world_size=1)
    before = torch.get_rng_state()
    epochs = list(itertools.islice(Batches(DataLoader(Random(), batch_sampler=order, num_workers=1)), 3))
    assert len({float(epoch[0]) for epoch in epochs}) == 3
    assert torch.equal(torch.get_rng_state(), before)


def test_the_length_is_that_of_a_whole_epoch() -> None:
    """Wherever the position is: a trainer that knows it does not take a batch ahead."""
    data = Batches(ordered())
    samples_of(data, 5)
    again = Batches(ordered())
    again.load_state_dict(data.state_dict())
    assert (len(data), len(again)) == (4, 4)


def test_what_accelerate_has_prepared_is_refused() -> None:
    """It would deal each rank a share of the rank's own share; the remedy is the loader that it was given."""
    accelerate = pytest.importorskip("accelerate", reason="pip install -e '.[frameworks]'")
    accelerator, loader = accelerate.Accelerator(cpu=True), ordered()
    with pytest.raises(ConfigError, match=r"a DataLoaderShard of Accelerate .* before accelerator.prepare\(\)"):
        Batches(accelerator.prepare(loader))
    assert next(Batches(loader))[0].to(accelerator.device).tolist() == samples_of(Batches(ordered()), 1)[0]


def test_torchdata_s_loader_with_workers_and_a_generator_needs_no_batches() -> None:
    """As the guide says: samples and losses are those of an unbroken run, within an epoch and at its end."""
    stateful = pytest.importorskip("torchdata.stateful_dataloader", reason="pip install -e '.[frameworks]'")

    def begin() -> tuple[Any, Iterator[Any]]:
        generator = torch.Generator().manual_seed(3)
        loader = stateful.StatefulDataLoader(
            Noisy(), batch_size=BATCH, shuffle=True, drop_last=True, generator=generator, num_workers=1
        )
        return loader, itertools.chain.from_iterable(itertools.repeat(loader))

    def loss(batches: Iterator[Any]) -> list[float]:
        dropped: list[float] = torch.nn.functional.dropout(next(batches), 0.5).tolist()
        return dropped

    torch.manual_seed(1)
    (loader, batches), losses, stored = begin(), [], []
    for _ in range(8):
        losses.append(loss(batches))
        stored.append(copy.deepcopy((loader.state_dict(), RandomStates().state_dict())))
    for step in (1, 2, 4):
        loader, batches = begin()
        loader.load_state_dict(copy.deepcopy(stored[step][0]))
        RandomStates().load_state_dict(stored[step][1])
        assert [loss(batches) for _ in range(step + 1, 8)] == losses[step + 1 :]
