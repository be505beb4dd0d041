"""Marks a rank's collectives for its host's holder by hooks of torch, so that copies travel between them (D87).

Marks are of the host's clock. A collective of a CPU backend ends when its future does. One on a GPU is only queued by
then: its future says nothing about the network, so hooks mark nothing for tensors of a device; `Store.busy()` can still
be used around code that waits for them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from memstore.errors import ConfigError
from memstore.shell.marks import Marks

WRAPPED = (
    "all_reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter", "reduce_scatter_tensor", "all_to_all",
    "all_to_all_single", "broadcast", "reduce",
)  # fmt: skip
"""Functions of torch.distributed that move bulk bytes; barriers and object collectives are small."""


def watch_module(
    marks: Marks, module: torch.nn.Module, hook: Callable[[Any, Any], Any] = allreduce_hook, state: Any = None
) -> None:
    """Have DDP reduce its gradients by `hook`, marked; ConfigError for what is not DDP."""
    if not isinstance(module, DistributedDataParallel):
        raise ConfigError(
            f"watch() hooks DistributedDataParallel, not {type(module).__name__}: use store.busy() around its "
            "collectives, or memstore.adapters.torch.watch_collectives(store)"
        )

    def marked(state: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        if bucket.buffer().device.type != "cpu":
            reduced: torch.futures.Future[torch.Tensor] = hook(state, bucket)
            return reduced
        marks.begin()
        try:
            reduced = hook(state, bucket)
            reduced.add_done_callback(lambda _: marks.end())
        except BaseException:
            marks.end()
            raise
        return reduced

    marked.__annotations__.clear()  # DDP compares them with classes, and here they are text
    module.register_comm_hook(state, marked)


def watch_optimizer(marks: Marks, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """An iteration begins after each step of the optimizer; return what ends this."""
    marks.has_iterations = True
    handle = optimizer.register_step_post_hook(lambda *_: marks.iteration())
    return handle.remove


class WatchedCollectives:
    """Functions of torch.distributed, wrapped until `close`. A context manager."""

    def __init__(self, marks: Marks) -> None:
        self._marks = marks
        self._originals = {name: getattr(dist, name) for name in WRAPPED}
        for name, function in self._originals.items():
            setattr(dist, name, self._wrapped(function))

    def _wrapped(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def marked(*args: Any, **kwargs: Any) -> Any:
            if not _is_on_cpu(args, kwargs):
                return function(*args, **kwargs)
            self._marks.begin()
            work = None
            try:
                work = function(*args, **kwargs)
                if work is not None:
                    work.get_future().add_done_callback(lambda _: self._marks.end())
            except BaseException:
                self._marks.end()
                raise
            if work is None:
                self._marks.end()
            return work

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
