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
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler

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


class OwnPosition:
    """A loader that keeps its own position, and whose order only it knows."""

    def __init__(self, length: int) -> None:
        self.length, self.round, self.taken, self.is_loaded = length, 0, 0, False

    def __iter__(self) -> Iterator[list[int]]:
        if not self.is_loaded or self.taken == self.length:
            self.round, self.taken = self.round + 1, 0
        self.is_loaded = False
        order = torch.randperm(self.length, generator=torch.Generator().manual_seed(self.round)).tolist()
        for sample in order[self.taken :]:
            self.taken += 1
            yield [sample]

    def state_dict(self) -> dict[str, int]:
        return {"round": self.round, "taken": self.taken}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.round, self.taken, self.is_loaded = state["round"], state["taken"], state["round"] > 0


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
    STARTS, st.integers(4, 40), st.integers(1, 4), st.integers(0, 8), st.lists(st.integers(1, 4), min_size=1),
    st.booleans(),
)  # fmt: skip
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


def by_function(rank: int, world_size: int) -> Source:
    def epochs(epoch: int) -> Iterator[list[int]]:
        order = torch.randperm(11, generator=torch.Generator().manual_seed(epoch)).tolist()
        return ([sample] for sample in order[rank::world_size])

    return epochs


def by_sampler(rank: int, world_size: int) -> Source:
    sampler = DistributedSampler(range(12), world_size, rank, seed=SEED)  # type: ignore[arg-type]
    return DataLoader(range(12), batch_size=2, sampler=sampler, collate_fn=list)  # type: ignore[arg-type]


def by_state(rank: int, world_size: int) -> Source:
    return OwnPosition(5 + rank)


def functions_batches() -> Iterator[list[int]]:
    """Yield the batches of two ranks, each of which begins its next epoch when it has no more."""
    ranks = [itertools.chain.from_iterable(map(by_function(rank, 2), range(99))) for rank in (0, 1)]
    return (first + second for first, second in zip(*ranks, strict=False))


def samplers_batches() -> Iterator[list[int]]:
    samplers = [by_sampler(rank, 2).sampler for rank in (0, 1)]
    for epoch in itertools.count():
        for sampler in samplers:
            sampler.set_epoch(epoch)
        shares = [list(sampler) for sampler in samplers]
        for first in range(0, 6, 2):
            yield [sample for share in shares for sample in share[first : first + 2]]


def states_batches() -> Iterator[list[int]]:
    orders = [
        [torch.randperm(5 + rank, generator=torch.Generator().manual_seed(n)).tolist() for n in range(1, 99)]
        for rank in (0, 1)
    ]
    return (list(pair) for pair in zip(*(itertools.chain(*order) for order in orders), strict=False))


@pytest.mark.parametrize(
    ("source", "unbroken"),
    [(by_function, functions_batches), (by_sampler, samplers_batches), (by_state, states_batches)],
)
@given(starts=STARTS)
def test_other_sources_go_on_where_the_position_is(
    source: Callable[[int, int], Source], unbroken: Callable[[], Iterator[list[int]]], starts: list[Start]
) -> None:
    """Also if nothing was committed: a kept loader that keeps its own position goes back to its beginning."""
    assert history(starts, 30, source, [2]) == list(itertools.islice(unbroken(), 30))


@pytest.mark.parametrize("source", [lambda: Ahead(SampleOrder(9, global_batch=2, rank=0, world_size=1)),
                                    lambda: OwnPosition(5), lambda: [[1], [2], [3]]])  # fmt: skip
def test_the_same_object_goes_back_too(source: Callable[[], Source]) -> None:
    """As after a rewind: what its running iterator would have yielded next does not come."""
    data = Batches(source())
    next(data)
    position = json.loads(json.dumps(data.state_dict()))
    after = [next(data) for _ in range(8)]
    data.load_state_dict(position)
    assert data.state_dict() == position
    assert [next(data) for _ in range(8)] == after


@pytest.mark.parametrize("source", [Ahead(SampleOrder(9, global_batch=2, rank=0, world_size=1)), [[1], [2], [3]]])
def test_a_new_one_begins_at_the_beginning(source: Source) -> None:
    """Whatever was taken from its loader before, and wherever that was loaded to."""
    data = Batches(source)
    first = [next(data) for _ in range(8)]
    data.load_state_dict(data.state_dict())
    again = Batches(source)
    assert [next(again) for _ in range(8)] == first


def test_a_loader_is_not_asked_for_its_position_before_it_is_begun() -> None:
    """StatefulDataLoader starts its workers for that, and a get() that loads a position would end them at once."""

    class Unasked(OwnPosition):
        def state_dict(self) -> dict[str, int]:
            raise AssertionError("it was asked")

    data = Batches(Unasked(5))
    assert data.state_dict() == {"epoch": 0, "loader": {}}
    data.load_state_dict({"epoch": 3, "loader": {"round": 4, "taken": 2}})
    assert data.state_dict() == {"epoch": 3, "loader": {"round": 4, "taken": 2}}


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


def test_a_position_of_other_data_or_of_another_kind_of_source_is_refused() -> None:
    """Each would double samples or leave some out, and nothing else would tell."""
    stored = Batches(Ahead(SampleOrder(10, global_batch=2, rank=0, world_size=1, seed=1))).state_dict()
    for length, seed, shuffle in ((11, 1, True), (10, 2, True), (10, 1, False)):
        other = Batches(
            Ahead(SampleOrder(length, global_batch=2, rank=0, world_size=1, seed=seed, shuffle=shuffle))
        )  # fmt: skip
        with pytest.raises(ConfigError, match="10 samples, shuffled by seed 1, and this one is of"):
            other.load_state_dict(stored)
    with pytest.raises(ConfigError, match="stored with consumed, order, and this source needs 'batches'"):
        Batches([1, 2]).load_state_dict(stored)


def test_what_has_no_position_is_refused() -> None:
    """A generator that was begun, and orders that come from a generator of torch's."""
    with pytest.raises(ConfigError, match="a generator cannot be begun again"):
        Batches(sample for sample in [1, 2])
    data: Any = range(10)
    for loader in (
        DataLoader(data, shuffle=True),
        DataLoader(data, batch_sampler=torch.utils.data.BatchSampler(RandomSampler(data), 2, drop_last=False)),
    ):
        with pytest.raises(ConfigError, match="the order of a RandomSampler comes from a generator"):
            Batches(loader)


def test_batches_that_cannot_be_dealt_are_refused() -> None:
    """A rank without a sample would leave the others waiting in a collective; no data would be asked for ever."""
    with pytest.raises(ConfigError, match="global_batch=2 has to be from world_size=3"):
        SampleOrder(10, global_batch=2, rank=0, world_size=3)
    with pytest.raises(ConfigError, match="to length=10, a batch in each epoch"):
        SampleOrder(10, global_batch=11, rank=0, world_size=3)
    with pytest.raises(ConfigError, match="the last batch of epoch 0 has 1 samples for 2 ranks"):
        SampleOrder(10, global_batch=3, rank=0, world_size=2, drop_last=False)
    with pytest.raises(ConfigError, match="epochs 0 and 1 have no batch"):
        next(Batches([]))
