"""The partial reads that this host's readers hold; core/holder/partial_read.py explains them."""

from __future__ import annotations

from memstore.core.holder import partial_read as procedure
from memstore.core.holder.state import Excerpt
from memstore.shell.holder.context import HolderContext
from memstore.shell.holder.runner import Runner


class Excerpts:
    """The partial reads of one holder; any thread may use it."""

    def __init__(self, context: HolderContext, runner: Runner) -> None:
        self.context, self.runner = context, runner

    def take(self, number: int) -> Excerpt:
        """Return the replica that was staged for a read. IntegrityError if it is gone."""
        with self.runner.state():
            return procedure.take(self.context.state, number)

    def release(self, number: int) -> None:
        """Release a partial read: its reader has copied it, or is gone."""
        with self.runner.state():
            procedure.release(self.context.state, number)

    def expire(self) -> None:
        """Release reads that were kept for too long (R7)."""
        with self.runner.state():
            procedure.expire(self.context.state)
