"""Begins the pushes of one simulated holder; what a push does is in core/holder/puts/push.py."""

from __future__ import annotations

from memstore.core.holder.puts import push as procedure
from memstore.core.holder.puts.push import Push
from memstore.core.holder.state import HolderState
from memstore.shell.peer.outgoing_shard import StreamingReplica
from memstore.testing.simulator.host.context import HostContext
from memstore.testing.simulator.host.driver import Driver
from recovery.inventory import ShardId


class Pusher:
    """Outgoing copies of one holder."""

    def __init__(self, holder: HostContext, state: HolderState, driver: Driver) -> None:
        self.holder, self.state, self.driver = holder, state, driver

    def replicate(self, shard: ShardId, digest: str, fresh: StreamingReplica | None = None) -> bool:
        """Push to every target; False if there are none."""
        targets = self.holder.shared_shards.targets(shard)
        for push in procedure.replicate(self.state, shard, digest, targets, fresh):
            self.driver.start(procedure.run(self.state, push))
        return bool(targets)

    def submit(self, push: Push) -> None:
        """Begin one push, unless the same one is under way."""
        if procedure.begin(self.state, push):
            self.driver.start(procedure.run(self.state, push))
