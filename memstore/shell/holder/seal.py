"""Runs core/holder/puts/seal.py, which turns submissions into sealed shards, on one thread for each link."""

from __future__ import annotations

import threading

from memstore.core.arena.replica_index import StoredReplica
from memstore.core.holder import effects
from memstore.core.holder.puts import seal as procedure
from memstore.core.wire.rank_messages import PutReady
from memstore.shell.holder.context import HolderContext
from memstore.shell.holder.push import Pusher
from memstore.shell.holder.put_timings import PutMeter
from memstore.shell.holder.rank_connections import RankConnection
from memstore.shell.holder.runner import Runner
from memstore.shell.peer.outgoing_shard import StreamingReplica
from memstore.shell.threads.priority import lower_thread_priority


class Sealer:
    """The submissions of all links of one holder, and its fences."""

    def __init__(self, context: HolderContext, runner: Runner, pusher: Pusher) -> None:
        self.context, self.replicas, self.pusher = context, context.replicas, pusher
        self.meter = PutMeter()
        self.runner = runner.extended(
            {
                effects.Replicate: self._replicate,
                effects.DigestAndStore: self._digest_and_store,
            }
        )

    def start(self, link: RankConnection) -> None:
        """Serve a link until None is queued."""
        threading.Thread(target=self._run, args=(link,), name=f"memstore-seal-{link.nonce}", daemon=True).start()

    def add(self, link: RankConnection, ready: PutReady) -> None:
        """Queue a submission that came completely; a fence that comes now waits for it (R21)."""
        with self.runner.state():
            put = procedure.add(self.context.state, link, ready)
            if put is not None:
                link.submitted_puts.put(put)

    def open_fence(self, job: str, attempt: int) -> None:
        """Refuse older attempts from now on."""
        with self.runner.state():
            procedure.open_fence(self.context.state, job, attempt)

    def fence(self, job: str, attempt: int, members: list[str]) -> None:
        """Finish what older attempts submitted, and answer the controller's fence (R21)."""
        self.runner.run(procedure.fence(self.context.state, job, attempt, members))

    def _run(self, link: RankConnection) -> None:
        lower_thread_priority()
        while (put := link.submitted_puts.get()) is not None:
            self.runner.run(procedure.run(self.context.state, put))

    # -- effects ------------------------------------------------------------------------------

    def _replicate(self, effect: effects.Replicate) -> bool:
        fresh = effect.fresh
        return self.pusher.replicate(
            effect.shard, effect.digest, fresh if isinstance(fresh, StreamingReplica) else None
        )

    def _digest_and_store(self, effect: effects.DigestAndStore) -> StoredReplica:
        ready, shard = effect.ready, effect.shard
        stored = self.replicas.seal_local(
            shard, world_size=ready.world_size, layout=ready.layout, nbytes=ready.nbytes, slots=ready.slots,
            attempt=shard.attempt, given=procedure.given_digests(ready),
            follower=effect.fresh if isinstance(effect.fresh, StreamingReplica) else None,
        )  # fmt: skip
        self.meter.count(shard.job, ready.stall_s, ready.nbytes)
        return stored
