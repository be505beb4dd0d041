"""Marks a rank's collectives for its host's holder by hooks of torch, so that copies travel between them (D87).

Marks are of the host's clock. A collective of a CPU backend ends when its future does. One on a GPU is only queued by
then: its future says nothing about the network, so hooks mark nothing for tensors of a device; `Store.collective()`
can still be used around code that waits for them.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from memstore.errors import ConfigError
from memstore.shell.rank.collective_marks import CollectiveMarks

_T = TypeVar("_T")

WRAPPED = (
    "all_reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter", "reduce_scatter_tensor", "all_to_all",
    "all_to_all_single", "broadcast", "reduce",
)  # fmt: skip
"""Functions of torch.distributed that move bulk bytes; barriers and object collectives are small."""


def watch_module(marks: CollectiveMarks, module: torch.nn.Module) -> None:
    """Have DDP reduce its gradients by a hook that marks them, in `marks` only from now on.

    Raises:
        ConfigError: It is not DDP, or has a hook already: DDP takes only one.
    """
    if not isinstance(module, DistributedDataParallel):
        raise ConfigError(
            f"instrument_ddp() hooks DistributedDataParallel, not {type(module).__name__}: use store.collective() "
            "around its collectives, or memstore.adapters.torch.watch_collectives(store)"
        )
    if module not in _WATCHED:
        if module._comm_hooks:
            raise ConfigError(
                "instrument_ddp() needs DistributedDataParallel's communication hook, and this module has another one: "
                "use memstore.adapters.torch.watch_collectives(store), which marks what that hook sends"
            )
        _WATCHED[module] = watched = _Watched()
        module.register_comm_hook(watched, _reduced)
    _WATCHED[module].marks = marks


class _Watched:
    """What a module's hook knows: whose marks, as stores come and go. Not the module, which would never be freed."""

    marks: CollectiveMarks


_WATCHED: weakref.WeakKeyDictionary[DistributedDataParallel, _Watched] = weakref.WeakKeyDictionary()


def _reduced(watched: _Watched, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    if bucket.buffer().device.type != "cpu":
        return allreduce_hook(None, bucket)  # type: ignore[arg-type]  # None: of the default group
    return _marked(watched.marks, lambda: allreduce_hook(None, bucket), lambda reduced: reduced)  # type: ignore[arg-type]


_reduced.__annotations__.clear()  # DDP compares them with classes, and here they are text


def _marked(marks: CollectiveMarks, start: Callable[[], _T], future_of: Callable[[_T], Any]) -> _T:
    """Start a collective; it is over when its future is done, or now if it has none."""
    marks.begin()
    future = None
    try:
        started = start()
        with contextlib.suppress(RuntimeError, TypeError):  # a backend without futures: its end is unknown
            future = future_of(started)
    finally:
        if future is None:
            marks.end()
    if future is not None:
        future.add_done_callback(lambda _: marks.end())
    return started


def watch_optimizer(marks: CollectiveMarks, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Mark an iteration after each step of the optimizer; return the function that ends this."""
    marks.has_iterations = True
    handle = optimizer.register_step_post_hook(lambda *_: marks.iteration())
    return handle.remove


class WatchedCollectives:
    """Functions of torch.distributed, wrapped until `close`. A context manager."""

    def __init__(self, marks: CollectiveMarks) -> None:
        self._marks = marks
        self._originals = {name: getattr(dist, name) for name in WRAPPED}
        for name, function in self._originals.items():
            setattr(dist, name, self._wrapped(function))

    def _wrapped(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def marked(*args: Any, **kwargs: Any) -> Any:
            if not _is_on_cpu(args, kwargs):
                return function(*args, **kwargs)
            return _marked(self._marks, lambda: function(*args, **kwargs), lambda work: work and work.get_future())

        return marked

    def __enter__(self) -> WatchedCollectives:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Put the functions back."""
        for name, function in self._originals.items():
            setattr(dist, name, function)


def _is_on_cpu(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    for value in (*args, *kwargs.values()):
        first = value[0] if isinstance(value, list) and value else value
        if isinstance(first, torch.Tensor):
            return first.device.type == "cpu"
    return False
