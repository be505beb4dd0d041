"""Positions of real loaders with worker processes: torch's DataLoader, torchdata's StatefulDataLoader."""

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
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, get_worker_info

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


def by_sampler(workers: int) -> Any:
    sampler = DistributedSampler(Noisy(), 1, 0, drop_last=True)
    return DataLoader(Noisy(), batch_size=BATCH, sampler=sampler, num_workers=workers)


def by_function(workers: int) -> Any:
    """The loader is made, and begun, with the first batch."""

    def epoch(number: int) -> Iterator[Any]:
        yield from DataLoader(Noisy(), batch_size=BATCH, num_workers=workers)

    return epoch


def with_a_state(workers: int) -> Any:
    stateful = pytest.importorskip("torchdata.stateful_dataloader", reason="pip install -e '.[frameworks]'")
    return stateful.StatefulDataLoader(Noisy(), batch_size=BATCH, shuffle=workers > 0, num_workers=workers)


class BegunLate:
    """A loader below which another one is begun with the first batch."""

    def __init__(self, loader: Any) -> None:
        self.loader, self.batch_sampler = loader, loader.batch_sampler

    def __iter__(self) -> Iterator[Any]:
        yield from self.loader


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("source", [in_order, by_sampler, by_function, with_a_state])
def test_a_restored_step_is_trained_with_the_random_numbers_of_an_unbroken_run(
    source: Callable[[int], Any], workers: int
) -> None:
    """Dropout, and noise that the loading process draws: the way to a position takes none of their numbers."""
    check_losses(lambda: source(workers))


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
    """Wherever the position is: a trainer that knows it does not take a batch ahead. Without one there is none."""
    data = Batches(ordered())
    samples_of(data, 5)
    again = Batches(ordered())
    again.load_state_dict(data.state_dict())
    assert (len(data), len(again), len(Batches(by_sampler(0)))) == (4, 4, 4)
    with pytest.raises(TypeError, match="has no len"):
        len(Batches(by_function(0)))


def test_what_accelerate_has_prepared_is_refused() -> None:
    """It would deal each rank a share of the rank's own share; the remedy is the loader that it was given."""
    accelerate = pytest.importorskip("accelerate", reason="pip install -e '.[frameworks]'")
    accelerator, loader = accelerate.Accelerator(cpu=True), ordered()
    with pytest.raises(ConfigError, match=r"a DataLoaderShard of Accelerate .* before accelerator.prepare\(\)"):
        Batches(accelerator.prepare(loader))
    assert next(Batches(loader))[0].to(accelerator.device).tolist() == samples_of(Batches(ordered()), 1)[0]
