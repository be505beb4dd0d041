"""Runs core/holder/stage.py, which brings shards, or parts of them, to this host, on threads (R23-R25)."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from memstore.core.arena.replica_index import StagedKey
from memstore.core.holder import stage as procedure
from memstore.core.holder.stage import BringOrder
from memstore.core.wire.orders import OrderCheck
from memstore.core.wire.reports import IntoChecked, IntoError
from memstore.errors import DigestMismatch
from memstore.shell.holder.context import HolderContext
from memstore.shell.holder.rank_connections import RankConnections
from memstore.shell.holder.runner import Runner

STAGE_THREADS = 8


class Stager:
    """Staging of one holder."""

    def __init__(self, context: HolderContext, connections: RankConnections, runner: Runner) -> None:
        self.context, self.vault, self.connections, self.runner = context, context.vault, connections, runner
        self.workers = ThreadPoolExecutor(STAGE_THREADS, thread_name_prefix="memstore-stage")

    def order(self, order: BringOrder) -> None:
        """Stage in the background; the end is reported."""
        with self.runner.state():
            procedure.begin(self.context.state, order)
        self.workers.submit(self.runner.run, procedure.run(self.context.state, order))

    def close(self) -> None:
        """Stop taking work."""
        self.workers.shutdown(wait=False, cancel_futures=True)

    def check(self, order: OrderCheck) -> None:
        """Let the rank compare `into=` with what was staged for it; an order that cannot be done is answered (R26)."""
        found = self.vault.shelf.staged.get(StagedKey(order.job, order.rank, "round", order.round))
        why = f"what was staged for rank {order.rank} on host {self.context.host_id} is gone: call get() again"
        try:
            if found is not None:
                self.connections.check(order, found[0])
                return
        except DigestMismatch as exc:
            why = str(exc)
        error = IntoError(error="RecoveryError", message=why)
        self.context.report(IntoChecked(job=order.job, round=order.round, rank=order.rank, error=error))
