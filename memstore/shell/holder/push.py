"""Runs the pushes of one holder on threads: after puts, and when the controller orders a repair (R13, R29).

The procedure of a push is in core/holder/puts/push.py.
"""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor

from memstore.core.holder.puts import push as procedure
from memstore.core.holder.puts.push import Push
from memstore.core.wire.orders import PushCopy
from memstore.errors import TransportError
from memstore.shell.holder.context import HolderContext
from memstore.shell.holder.runner import Runner
from memstore.shell.holder.send_gate import SendGate
from memstore.shell.peer.outgoing_shard import StreamingReplica
from memstore.shell.threads.priority import lower_thread_priority
from recovery.inventory import ShardId

log = logging.getLogger("memstore")
PUSH_THREADS = 8


class Pusher:
    """Outgoing copies of one holder."""

    def __init__(self, context: HolderContext, runner: Runner, send_gate: SendGate) -> None:
        self.context, self.runner, self.send_gate = context, runner, send_gate
        self.workers = ThreadPoolExecutor(PUSH_THREADS, "memstore-push", lower_thread_priority)
        self.repairs = ThreadPoolExecutor(
            PUSH_THREADS, "memstore-repair", lower_thread_priority
        )  # never behind what marks hold

    def replicate(self, shard: ShardId, digest: str, fresh: StreamingReplica | None = None) -> bool:
        """Push a shard that is stored, or being sealed, to this host's targets; then its ticket is replicated (R15).

        False if there are no targets, so that nothing is to be waited for.
        """
        self.send_gate.release(shard.job, shard.rank, (shard.attempt, shard.step))
        with self.runner.state():
            targets = self.context.state.shared_shards.targets(shard)
            pushes = procedure.replicate(self.context.state, shard, digest, targets, fresh)
        for push in pushes:
            self._start(push)
        return bool(targets)

    def connect(self, job: str) -> None:
        """Open the streams to a job's targets before the first push needs them."""
        for target in self.context.state.shared_shards.all_targets(job):
            try:
                self.context.peers.peer(target).connect()
            except TransportError as exc:
                log.info("job %s: host %s cannot be reached yet: %s", job, target, exc)

    def order(self, order: PushCopy) -> None:
        """Make a copy that the controller ordered."""
        self.submit(Push(order.shard.id, order.digest, order.target, is_repair=True))

    def submit(self, push: Push) -> None:
        """Begin one push, unless the same one is under way."""
        with self.runner.state():
            is_new = procedure.begin(self.context.state, push)
        if is_new:
            self._start(push)

    def _start(self, push: Push) -> None:
        workers = self.repairs if push.is_repair else self.workers
        workers.submit(self.runner.run, procedure.run(self.context.state, push))

    def close(self) -> None:
        """Stop taking work."""
        for workers in (self.workers, self.repairs):
            workers.shutdown(wait=False, cancel_futures=True)
