"""Runs core/holder/stage.py, which brings shards, or parts of them, to this host, on threads (R23-R25)."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from memstore.core.holder import stage as procedure
from memstore.errors import DigestMismatch
from memstore.shell.holder.context import HolderContext
from memstore.shell.holder.rank_connections import RankConnections
from memstore.shell.holder.runner import Runner

STAGE_THREADS = 8


class Stager:
    """Staging of one holder."""

    def __init__(self, context: HolderContext, connections: RankConnections, runner: Runner) -> None:
        self.context, self.replicas, self.connections, self.runner = context, context.replicas, connections, runner
        self.workers = ThreadPoolExecutor(STAGE_THREADS, thread_name_prefix="memstore-stage")

    def order(self, body: dict[str, Any]) -> None:
        """Stage in the background; the end is reported."""
        with self.runner.state():
            procedure.begin(self.context.state, body)
        self.workers.submit(self.runner.run, procedure.run(self.context.state, body))

    def close(self) -> None:
        """Stop taking work."""
        self.workers.shutdown(wait=False, cancel_futures=True)

    def check(self, body: dict[str, Any]) -> None:
        """Let the rank compare `into=` with its staged shard; answer an order that cannot be done (R26)."""
        found = self.replicas.index.staged.get((str(body["job"]), int(body["round"]), int(body["rank"])))
        why = f"what was staged for rank {body['rank']} on host {self.context.host_id} is gone: call get() again"
        try:
            if found is not None:
                self.connections.check(body, found[0])
                return
        except DigestMismatch as exc:
            why = str(exc)
        reply = {key: body[key] for key in ("job", "round", "rank")}
        self.context.report("checked", {**reply, "ok": False, "error": ["RecoveryError", why]})
