"""Runs core/holder/reads/stage.py, which brings shards, or parts of them, to this host, on threads (R23-R25)."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from memstore.core.holder.reads import stage as procedure
from memstore.core.holder.reads.stage import BringOrder
from memstore.shell.holder.context import HolderContext
from memstore.shell.holder.runner import Runner

STAGE_THREADS = 8


class Stager:
    """Staging of one holder."""

    def __init__(self, context: HolderContext, runner: Runner) -> None:
        self.context, self.runner = context, runner
        self.workers = ThreadPoolExecutor(STAGE_THREADS, thread_name_prefix="memstore-stage")

    def order(self, order: BringOrder) -> None:
        """Stage in the background; the end is reported."""
        with self.runner.state():
            procedure.begin(self.context.state, order)
        self.workers.submit(self.runner.run, procedure.run(self.context.state, order))

    def close(self) -> None:
        """Stop taking work."""
        self.workers.shutdown(wait=False, cancel_futures=True)
