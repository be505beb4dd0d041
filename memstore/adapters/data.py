"""The place in the data as part of a step's state, divided among any number of ranks: no sample twice, none missing.

How to use it: docs/guide/data.md. The position is the one after the batches that the loop took from `Batches`; what
workers have prefetched does not count. At the end of an epoch it is that of the old epoch with nothing left. A loader
that need not change its number of ranks is torchdata's StatefulDataLoader, which keeps its own position.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import GeneratorType
from typing import Any

import numpy as np
import torch
from torch.utils.data import Sampler

from memstore.config import check_whole
from memstore.errors import ConfigError

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
        self,
        length: int,
        *,
        global_batch: int,
        rank: int,
        world_size: int,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = True,
    ) -> None:
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
    batches of an epoch. To begin at a position loads nothing, and changes no random state of the process: what the
    loader draws then, such as its workers' seed, follows from torch's initial seed and the epoch.

    Args:
        loader: A DataLoader with a `SampleOrder` as batch_sampler.

    Raises:
        ConfigError: It is another one, such as torchdata's StatefulDataLoader, which is a part of a state by itself.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        order = getattr(loader, "batch_sampler", None)
        if hasattr(loader, "base_dataloader"):
            raise ConfigError(
                f"a {type(loader).__name__} of Accelerate takes a batch ahead, and deals batches to the ranks: give "
                "Batches the DataLoader from before accelerator.prepare(), and move its batches to accelerator.device"
            )
        if not isinstance(order, SampleOrder):
            raise ConfigError(
                f"Batches takes a DataLoader(dataset, batch_sampler=SampleOrder(...)), not a {type(loader).__name__} "
                "without one. torchdata's StatefulDataLoader needs no Batches: it is a part of the state by itself"
            )
        self.epoch = 0  # of the last batch
        self._taken = 0  # batches of the running iterator that the loop took
        self._iterator: Iterator[Any] | None = None  # by this name Lightning ends it, and its workers, with a fit
        self._loader, self._order = loader, order
        order.go_to(0, 0)

    def __next__(self) -> Any:
        for _ in range(2):  # an epoch that was restored at its end has no batch left; the next one has
            if self._iterator is None:
                if self._taken:  # Lightning ended it
                    self.load_state_dict(self.state_dict())
                with _apart(self.epoch):
                    self._order.go_to(self.epoch, self._order.consumed)
                    self._iterator = _begun(self._loader)
            batch = next(self._iterator, _END)
            if batch is not _END:
                self._taken += 1
                return batch
            self._iterator, self._taken, self.epoch, self._order.consumed = None, 0, self.epoch + 1, 0
        raise ConfigError(f"epochs {self.epoch - 2} and {self.epoch - 1} have no batch: the loader yields none")

    def __len__(self) -> int:
        return self._order.epoch_batches

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch that the loop took."""
        order = self._order
        consumed = min(order.length, order.consumed + self._taken * order.global_batch)
        return {"epoch": self.epoch, "consumed": consumed, "order": order.name}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a position; whatever was prefetched is dropped.

        Raises:
            ConfigError: It is a position in another order.
        """
        if state.get("order") != self._order.name:
            raise ConfigError(
                f"the position was stored in an order of {state.get('order')}, and this one is of {self._order.name}: "
                "its samples are others. Use the same data and seed, or begin a job of another name"
            )
        self._iterator, self._taken, self.epoch = None, 0, int(state["epoch"])
        self._order.go_to(self.epoch, int(state["consumed"]))


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
