"""After any failures the samples of the committed history are those of an unbroken run, in order."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from memstore.adapters.data import Batches, SampleOrder
from memstore.errors import ConfigError

SEED, AHEAD = 7, 3
# Of each start of the job: steps that it trains, how far before the newest one the restored step is, whether its
# loaders are kept for the next start, and a number that chooses how many ranks that has.
Start = tuple[int, int, bool, int]
STARTS = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 15), st.booleans(), st.integers(0, 9)), max_size=6)
Source = Any
Position = list[str]  # by rank, as text: what was stored is not what lives on


class Ahead:
    """A loader that has taken some batches more from its sampler than it has handed out, as one with workers has."""

    def __init__(self, order: SampleOrder) -> None:
        self.batch_sampler = order

    def __iter__(self) -> Iterator[list[int]]:
        batches = iter(self.batch_sampler)
        taken = list(itertools.islice(batches, AHEAD))
        while taken:
            taken += itertools.islice(batches, 1)
            yield taken.pop(0)


def epochs_batches(length: int, global_batch: int, *, drop_last: bool) -> Iterator[list[int]]:
    """Yield the batches of an unbroken run: what `SampleOrder` promises, by other means."""
    for epoch in itertools.count():
        order = torch.randperm(length, generator=torch.Generator().manual_seed(SEED + epoch)).tolist()
        for first in range(0, length, global_batch):
            if first + global_batch <= length or not drop_last:
                yield order[first : first + global_batch]


def history(starts: list[Start], steps: int, source: Callable[[int, int], Source], sizes: list[int]) -> list[list[int]]:
    """Return the batches of the committed history, over all ranks, of a job that fails after each of these starts."""
    trained: list[list[int]] = []
    positions: list[Position] = []
    kept: list[Source] = []
    for count, back, keeps, choice in [*starts, (steps, 0, False, 0)]:
        world_size = len(kept) or sizes[choice % len(sizes)]
        loaders = kept or [source(rank, world_size) for rank in range(world_size)]
        ranks = [Batches(loader) for loader in loaders]
        if positions:
            for rank, data in enumerate(ranks):
                data.load_state_dict(json.loads(positions[-1][rank % len(positions[-1])]))
        first = len(trained)  # once a step was restored there is one, perhaps an older one
        for _ in range(min(count, steps - len(trained))):
            trained.append([sample for data in ranks for sample in next(data)])
            positions.append([json.dumps(data.state_dict()) for data in ranks])
        newest = max(min(first, 1), len(trained) - back) if len(trained) < steps else steps
        del trained[newest:], positions[newest:]
        kept = loaders if keeps else []
    return trained


@given(
    STARTS,
    st.integers(4, 40),
    st.integers(1, 4),
    st.integers(0, 8),
    st.lists(st.integers(1, 4), min_size=1),
    st.booleans(),
)
def test_samples_are_numbered_globally_whatever_the_number_of_ranks(
    starts: list[Start], length: int, batches: int, rest: int, sizes: list[int], drop_last: bool
) -> None:
    """With loaders that ran ahead and are kept or new, and restored steps that lie before the newest one."""
    global_batch = max(4, length // batches)
    assume(length >= global_batch and (drop_last or not 0 < length % global_batch < max(sizes)))

    def source(rank: int, world_size: int) -> Ahead:
        return Ahead(
            SampleOrder(
                length, global_batch=global_batch, rank=rank, world_size=world_size, seed=SEED, drop_last=drop_last
            )
        )

    unbroken = list(itertools.islice(epochs_batches(length, global_batch, drop_last=drop_last), 30))
    assert history(starts, 30, source, sizes) == unbroken


def test_the_same_object_goes_back_too() -> None:
    """As after a rewind: what its running iterator would have yielded next does not come."""
    data = Batches(Ahead(SampleOrder(9, global_batch=2, rank=0, world_size=1)))
    next(data)
    position = json.loads(json.dumps(data.state_dict()))
    after = [next(data) for _ in range(8)]
    data.load_state_dict(position)
    assert data.state_dict() == position
    assert [next(data) for _ in range(8)] == after


def test_a_new_one_begins_at_the_beginning() -> None:
    """Whatever was taken from its loader before, and wherever that was loaded to."""
    source = Ahead(SampleOrder(9, global_batch=2, rank=0, world_size=1))
    data = Batches(source)
    first = [next(data) for _ in range(8)]
    data.load_state_dict(data.state_dict())
    again = Batches(source)
    assert [next(again) for _ in range(8)] == first


@given(st.integers(1, 60), st.integers(1, 12), st.integers(1, 5), st.booleans(), st.booleans())
def test_each_epoch_has_each_sample_once(
    length: int, global_batch: int, world_size: int, shuffle: bool, drop_last: bool
) -> None:
    """No rank is short of a batch, and parts are one sample apart at most."""
    rest = length % global_batch
    assume(world_size <= global_batch and (global_batch <= length if drop_last else not 0 < rest < world_size))
    ranks = [
        SampleOrder(
            length, global_batch=global_batch, rank=rank, world_size=world_size, shuffle=shuffle, drop_last=drop_last
        )
        for rank in range(world_size)
    ]
    parts = list(zip(*ranks, strict=True))
    assert {len(order) for order in ranks} == {len(parts)}
    assert all(max(map(len, batch)) - min(map(len, batch)) <= 1 for batch in parts)
    assert all(min(map(len, batch)) > 0 for batch in parts)
    dealt = [sample for batch in parts for part in batch for sample in part]
    assert len(dealt) == (length - rest if drop_last else length)
    assert dealt == list(range(len(dealt))) if not shuffle else len(set(dealt)) == len(dealt)


def test_another_global_batch_goes_on_at_the_same_sample() -> None:
    """So a launch of another size may keep its batch per rank."""
    data = Batches(Ahead(SampleOrder(20, global_batch=4, rank=0, world_size=1, seed=SEED)))
    first = [next(data) for _ in range(2)]
    position = data.state_dict()
    ranks = [Batches(Ahead(SampleOrder(20, global_batch=6, rank=rank, world_size=2, seed=SEED))) for rank in (0, 1)]
    for rank in ranks:
        rank.load_state_dict(position)
    rest = [next(rank) for _ in range(2) for rank in ranks]
    assert sorted(itertools.chain(*first, *rest)) == list(range(20))


def test_positions_are_those_of_what_the_loop_took() -> None:
    """A stored position does not move on with the loader, and does not count what that has prefetched."""
    data = Batches(Ahead(SampleOrder(10, global_batch=2, rank=0, world_size=2)))
    assert data.state_dict() == {"epoch": 0, "consumed": 0, "order": "10 samples, shuffled by seed 0"}
    for _ in range(5):
        next(data)
    before = data.state_dict()
    assert (before["epoch"], before["consumed"]) == (0, 10)
    next(data)
    assert (before["epoch"], before["consumed"]) == (0, 10)
    assert (data.state_dict()["epoch"], data.state_dict()["consumed"]) == (1, 2)
    data = Batches(Ahead(SampleOrder(9, global_batch=2, rank=0, world_size=1, drop_last=False)))
    assert sum(len(next(data)) for _ in range(5)) == data.state_dict()["consumed"] == 9


def test_a_position_of_other_data_is_refused() -> None:
    """Each would double samples or leave some out, and nothing else would tell."""
    stored = Batches(Ahead(SampleOrder(10, global_batch=2, rank=0, world_size=1, seed=1))).state_dict()
    for length, seed, shuffle in ((11, 1, True), (10, 2, True), (10, 1, False)):
        other = Batches(Ahead(SampleOrder(length, global_batch=2, rank=0, world_size=1, seed=seed, shuffle=shuffle)))
        with pytest.raises(ConfigError, match="10 samples, shuffled by seed 1, and this one is of"):
            other.load_state_dict(stored)
    with pytest.raises(ConfigError, match="an order of None"):
        other.load_state_dict({"epoch": 0, "loader": {}})


def test_a_loader_without_an_order_is_refused() -> None:
    """The remedy for one that keeps its own position is to put it as it is."""
    for loader in ([[1], [2]], DataLoader(range(10), shuffle=True)):  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="StatefulDataLoader needs no Batches: it is a part of the state by its"):
            Batches(loader)


def test_batches_that_cannot_be_dealt_are_refused() -> None:
    """A rank without a sample would leave the others waiting in a collective; no data would be asked for ever."""
    with pytest.raises(ConfigError, match="global_batch=2 has to be from world_size=3"):
        SampleOrder(10, global_batch=2, rank=0, world_size=3)
    with pytest.raises(ConfigError, match="to length=10, a batch in each epoch"):
        SampleOrder(10, global_batch=11, rank=0, world_size=3)
    with pytest.raises(ConfigError, match="the last batch of epoch 0 has 1 samples for 2 ranks"):
        SampleOrder(10, global_batch=3, rank=0, world_size=2, drop_last=False)

    class Silent(Ahead):
        def __iter__(self) -> Iterator[list[int]]:
            return iter(())

    with pytest.raises(ConfigError, match="epochs 0 and 1 have no batch"):
        next(Batches(Silent(SampleOrder(10, global_batch=2, rank=0, world_size=1))))
