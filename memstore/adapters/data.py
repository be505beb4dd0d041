"""The place in the data as part of a step's state: after a recovery no sample comes twice and none is missing.

How to use it, and what each kind of loader needs: docs/guide/data.md. The position is the one after the batches that
the loop took from `Batches`; what workers have prefetched does not count. At the end of an epoch it is that of the old
epoch with nothing left.
"""

from __future__ import annotations

import copy
import itertools
import random
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import GeneratorType
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import RandomSampler, Sampler, SubsetRandomSampler, WeightedRandomSampler

from memstore.config import check_whole
from memstore.errors import ConfigError

_UNSEEDED = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
_beginnings: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()  # loader -> state before its first batch
_END = object()


class SampleOrder(Sampler[list[int]]):
    """Deals the samples of each epoch's order to the ranks, batch by batch: a DataLoader's `batch_sampler`.

    Batch k of an epoch has the samples from k * global_batch on in an order that depends on seed and epoch only; each
    rank has a neighbouring part of it, all of equal size or one sample apart. Keeps 8 bytes a sample.

    Args:
        length: Number of samples, such as len(dataset).
        global_batch: Samples of a batch over all ranks together.
        rank: This process's.
        world_size: Number of ranks that share a batch.
        seed: Of the shuffle: epoch e is shuffled by seed + e.
        shuffle: False: by index, in every epoch.
        drop_last: Leave out what fills no global batch at the end of an epoch; False: a smaller batch.

    Raises:
        ConfigError: Some rank would have no sample in some batch, or no batch fits.
    """

    def __init__(
        self, length: int, *, global_batch: int, rank: int, world_size: int, seed: int = 0, shuffle: bool = True,
        drop_last: bool = True,
    ) -> None:  # fmt: skip
        self.length, self.global_batch = check_whole("length", length, low=1), check_whole("global_batch", global_batch)
        self.rank, self.world_size = check_whole("rank", rank), check_whole("world_size", world_size, low=rank + 1)
        self.seed, self.shuffle, self.drop_last = check_whole("seed", seed), shuffle, drop_last
        self.epoch = self.consumed = 0
        if global_batch < world_size or (drop_last and length < global_batch):
            raise ConfigError(
                f"global_batch={global_batch} has to be from world_size={world_size}, a sample for each rank, to "
                f"length={length}, a batch in each epoch"
            )
        self.go_to(0, 0)

    @property
    def name(self) -> str:
        """Tell which order it is: positions in it mean nothing in another one."""
        return f"{self.length} samples, " + (f"shuffled by seed {self.seed}" if self.shuffle else "by index")

    def go_to(self, epoch: int, consumed: int) -> None:
        """Let the next iteration begin after so many samples of an epoch.

        Raises:
            ConfigError: The last batch of the epoch would have no sample for some rank.
        """
        rest = (self.length - consumed) % self.global_batch
        if not self.drop_last and 0 < rest < self.world_size:
            raise ConfigError(
                f"the last batch of epoch {epoch} has {rest} samples for {self.world_size} ranks ({self.length} "
                f"samples, global_batch={self.global_batch}): set drop_last=True, or another global_batch"
            )
        self.epoch, self.consumed = epoch, consumed

    def __len__(self) -> int:
        """Return how many batches the epoch has left where an iteration begins."""
        return self._count_batches(self.length - self.consumed)

    @property
    def epoch_batches(self) -> int:
        """Count the batches of a whole epoch."""
        return self._count_batches(self.length)

    def _count_batches(self, samples: int) -> int:
        return samples // self.global_batch if self.drop_last else -(-samples // self.global_batch)

    def __iter__(self) -> Iterator[list[int]]:
        """Yield this rank's indices of each batch."""
        end = self.consumed + len(self) * self.global_batch
        return self._batches(self.epoch, range(self.consumed, end, self.global_batch))

    def _batches(self, epoch: int, firsts: range) -> Iterator[list[int]]:
        shuffled = torch.randperm(self.length, generator=torch.Generator().manual_seed(self.seed + epoch), device="cpu")
        indices = shuffled if self.shuffle else torch.arange(self.length)
        for first in firsts:
            count = min(self.global_batch, self.length - first)
            low, high = (first + count * rank // self.world_size for rank in (self.rank, self.rank + 1))
            yield indices[low:high].tolist()


class Batches(Iterator[Any]):
    """The batches of a loader, epoch after epoch without end, with the position for `put` and `get(into=)`.

    Make a new one at each start, and at each entry of a function that recovers in place. `len()` is the number of
    batches of an epoch, where the source has one. To begin at a position changes no random state of the process: what
    the loader draws then, such as its workers' seed, follows from torch's initial seed and the epoch.

    Args:
        source: A DataLoader with a `SampleOrder`; or a loader with state_dict(); or an iterable that can be begun
            again; or a function of the epoch's number that returns such an iterable.

    Raises:
        ConfigError: The source cannot be begun again, draws its order from a generator that no position has, or is of
            Accelerate.
    """

    def __init__(self, source: Iterable[Any] | Callable[[int], Iterable[Any]]) -> None:
        self.epoch = 0  # of the last batch
        self._taken = 0  # batches of the running iterator that the loop took
        self._iterator: Iterator[Any] | None = None  # by this name Lightning ends it, and its workers, with a fit
        self._source = _source_of(source)

    def __next__(self) -> Any:
        for _ in range(2):  # an epoch that was restored at its end has no batch left; the next one has
            if self._iterator is None:
                if self._taken:  # Lightning ended it
                    self.load_state_dict(self.state_dict())
                with _apart(self.epoch):
                    self._iterator = self._source.begin(self.epoch)
            batch = next(self._iterator, _END)
            if batch is not _END:
                self._taken += 1
                return batch
            self._iterator, self._taken, self.epoch = None, 0, self.epoch + 1
            with _apart(self.epoch):
                self._source.begin_next()
        raise ConfigError(f"epochs {self.epoch - 2} and {self.epoch - 1} have no batch: the data is empty")

    def __len__(self) -> int:
        return len(self._source)

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch that the loop took."""
        return {"epoch": self.epoch, **self._source.position(self._taken)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a position; whatever was prefetched is dropped.

        Raises:
            ConfigError: It is a position in another order, or of another kind of source.
        """
        if (key := self._source.key) not in state:
            found = ", ".join(name for name in state if name != "epoch")
            raise ConfigError(
                f"a position in the data was stored with {found}, and this source needs {key!r}: it was stored with "
                "another kind of source. Use that kind, or begin a job of another name"
            )
        self._iterator, self._taken, self.epoch = None, 0, int(state["epoch"])
        self._source.go_to(self.epoch, state)


class RandomStates:
    """The random states of a process, for `put` and `get(into=)`: of Python, numpy, torch and its CUDA device.

    With it a restored step draws the dropout that it would have drawn anyway. It is a rank's own: where ranks share a
    shard it goes into `rank_state=`.
    """

    def state_dict(self) -> dict[str, Any]:
        """Return the states as they are now."""
        cuda = {"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {}
        return {**host_random_states(), **cuda}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the states; a CUDA device's where there is one."""
        set_host_random_states(state)
        if "cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state(state["cuda"])


def host_random_states() -> dict[str, Any]:
    """Return the states of Python, numpy and torch's CPU generator, named as Transformers names them."""
    return {"python": random.getstate(), "numpy": np.random.get_state(), "cpu": torch.get_rng_state()}


def set_host_random_states(states: dict[str, Any]) -> None:
    """Set what `host_random_states` returned."""
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["cpu"])


class _Source(Protocol):
    """How a kind of source is begun at a position; `key` is an entry of its positions."""

    key: str

    def __len__(self) -> int: ...
    def begin(self, epoch: int) -> Iterator[Any]: ...
    def begin_next(self) -> None: ...
    def position(self, taken: int) -> dict[str, Any]: ...
    def go_to(self, epoch: int, position: dict[str, Any]) -> None: ...


def _source_of(source: Any) -> _Source:
    if hasattr(source, "base_dataloader"):
        raise ConfigError(
            f"a {type(source).__name__} of Accelerate takes a batch ahead, and deals batches to the ranks: give "
            "Batches the DataLoader from before accelerator.prepare(), and move its batches to accelerator.device"
        )
    order = getattr(source, "batch_sampler", None)
    if isinstance(order, SampleOrder):
        return _Ordered(source, order)
    for sampler in _parts(source):
        if isinstance(sampler, _UNSEEDED):
            raise ConfigError(
                f"the order of a {type(sampler).__name__} comes from a generator that no position has: use "
                "memstore.adapters.data.SampleOrder as batch_sampler, a DistributedSampler, or torchdata's "
                "StatefulDataLoader with shuffle=True"
            )
    if callable(getattr(source, "state_dict", None)) and callable(getattr(source, "load_state_dict", None)):
        return _Stateful(source)
    if isinstance(source, Iterator):
        raise ConfigError(
            f"a {type(source).__name__} cannot be begun again: give Batches the iterable, or a function of the epoch's "
            "number that returns the epoch's batches"
        )
    return _Counted(source)


class _Ordered:
    """A DataLoader with a `SampleOrder`: nothing is loaded to get to a position."""

    key = "consumed"

    def __init__(self, loader: Iterable[Any], order: SampleOrder) -> None:
        self._loader, self._order = loader, order
        order.go_to(0, 0)

    def __len__(self) -> int:
        return self._order.epoch_batches

    def begin(self, epoch: int) -> Iterator[Any]:
        self._order.go_to(epoch, self._order.consumed)
        return _begun(self._loader)

    def begin_next(self) -> None:
        self._order.consumed = 0

    def position(self, taken: int) -> dict[str, Any]:
        order = self._order
        return {"consumed": min(order.length, order.consumed + taken * order.global_batch), "order": order.name}

    def go_to(self, epoch: int, position: dict[str, Any]) -> None:
        if position["order"] != self._order.name:
            raise ConfigError(
                f"the position was stored in an order of {position['order']}, and this one is of {self._order.name}: "
                "its samples are others. Use the same data and seed, or begin a job of another name"
            )
        self._order.go_to(epoch, int(position["consumed"]))


class _Stateful:
    """A loader that keeps its own position, of what the loop took."""

    key = "loader"

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._at: dict[str, Any] = {}  # its state where the epoch's iteration begins; {}: as it is
        if loader in _beginnings:  # it was begun before: in place, in a former generation
            loader.load_state_dict(copy.deepcopy(_beginnings[loader]))

    def __len__(self) -> int:
        return len(self._loader)

    def begin(self, epoch: int) -> Iterator[Any]:
        _set_epoch(self._loader, epoch)
        if self._loader not in _beginnings:
            _beginnings[self._loader] = copy.deepcopy(self._loader.state_dict())
        return _begun(self._loader)

    def begin_next(self) -> None:
        self._at = self._loader.state_dict()

    def position(self, taken: int) -> dict[str, Any]:
        return {"loader": self._loader.state_dict() if taken else self._at}

    def go_to(self, epoch: int, position: dict[str, Any]) -> None:
        self._at = position["loader"]
        if self._at:
            self._loader.load_state_dict(self._at)


class _Counted:
    """An iterable, or a function of the epoch: batches up to the position are loaded and dropped."""

    key = "batches"

    def __init__(self, source: Any) -> None:
        self._source, self._skipped = source, 0

    def __len__(self) -> int:
        return len(self._source)

    def begin(self, epoch: int) -> Iterator[Any]:
        _set_epoch(self._source, epoch)
        batches: Iterator[Any] = iter(self._source(epoch) if callable(self._source) else self._source)
        for _ in itertools.islice(batches, self._skipped):
            pass
        return batches

    def begin_next(self) -> None:
        self._skipped = 0

    def position(self, taken: int) -> dict[str, Any]:
        return {"batches": self._skipped + taken}

    def go_to(self, epoch: int, position: dict[str, Any]) -> None:
        self._skipped = int(position["batches"])


@contextmanager
def _apart(epoch: int) -> Iterator[None]:
    """Give the block random states of its own, and the process its own ones back: a put may have stored them."""
    before, seed = host_random_states(), (torch.initial_seed() + epoch) % 2**32
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        set_host_random_states(before)


def _begun(loader: Iterable[Any]) -> Iterator[Any]:
    """Begin to iterate; a generator, such as one that moves batches to a device, begins with its first batch."""
    batches: Iterator[Any] = iter(loader)
    if isinstance(batches, GeneratorType):
        return itertools.chain(list(itertools.islice(batches, 1)), batches)
    return batches


def _parts(loader: Any) -> list[Any]:
    """Return what of a loader may follow the epoch, or shuffle."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    parts = (loader, batch_sampler, *(getattr(loader, name, None) for name in ("sampler", "dataset")))
    return [*parts, getattr(batch_sampler, "sampler", None)]


def _set_epoch(loader: Any, epoch: int) -> None:
    for part in _parts(loader):
        if callable(getattr(part, "set_epoch", None)):
            part.set_epoch(epoch)
