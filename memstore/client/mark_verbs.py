"""Verbs of a Store that mark collectives and iterations, so that a put's copies travel between them (D87)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from memstore.shell.rank.collective_marks import CollectiveMarks

if TYPE_CHECKING:
    import torch


class MarkVerbs:
    """Part of Store."""

    marks: CollectiveMarks

    @contextlib.contextmanager
    def collective(self) -> Iterator[None]:
        """Hold the copies of puts back while a collective runs inside; at most `collective_hold_max_s` (D87)."""
        self.marks.begin()
        try:
            yield
        finally:
            self.marks.end()

    def mark_iteration(self) -> None:
        """Mark that the next iteration begins; without it every put does, where collectives are marked."""
        self.marks.has_iterations = True
        self.marks.iteration()

    def instrument_ddp(self, module: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Mark the gradient all-reduces of a DistributedDataParallel, and iterations by the optimizer's steps.

        For others use `busy`, or `memstore.adapters.torch.watch_collectives(store)`. ConfigError if it is not DDP.
        """
        from memstore.client.collective_hooks import watch_module, watch_optimizer

        watch_module(self.marks, module)
        if optimizer is not None:
            watch_optimizer(self.marks, optimizer)
