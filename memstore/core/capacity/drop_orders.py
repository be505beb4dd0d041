"""Copies that hosts are ordered to free, and that do not count from then on. Pure (R7, R19).

counted --drop ordered--> ordered --the host reports it freed--> free; counted again if it is made again

A host's inventory or report that crosses the order on the way still names the copy, and must not have it counted. An
order may also outlive the session in which it was given: the host says then, too, that the copy is freed.
"""

from __future__ import annotations

from collections.abc import Sequence

from memstore.core.cluster.effects import Effects
from memstore.core.cluster.state import ClusterState
from memstore.core.wire.ids import WireShard
from memstore.core.wire.orders import FreeCopies, TermNumber
from memstore.core.wire.reports import Freed
from recovery.inventory import ShardId, StepId


class Drops:
    """Orders to free copies, until each is obeyed."""

    def __init__(self, state: ClusterState, out: Effects, term: int) -> None:
        self.state, self.out, self.term = state, out, term
        self._ordered: dict[str, dict[ShardId, set[int]]] = {}  # host -> copy -> numbers of the orders it has to obey
        self._given_count = 0

    def order(self, host: str, shards: Sequence[ShardId]) -> None:
        """Order a host to free copies; the caller takes them off the job."""
        self._given_count += 1
        ordered = self._ordered.setdefault(host, {})
        for shard in shards:
            ordered.setdefault(shard, set()).add(self._given_count)
        number = TermNumber(self.term, self._given_count)
        self.out.send(host, FreeCopies(shards=tuple(map(WireShard.of, shards)), number=number))

    def freed(self, host: str, report: Freed) -> None:
        """Note that a host has freed copies, perhaps for an earlier session or controller."""
        ordered = self._ordered.get(host, {})
        for shard in (row.id for row in report.shards):
            numbers = ordered.get(shard, set())
            if report.number is not None and report.number.term == self.term:
                numbers.discard(report.number.number)
            if not numbers:
                ordered.pop(shard, None)
            self._uncount(shard, host)

    def _uncount(self, shard: ShardId, host: str) -> None:
        """Take a copy off its job, if it was counted in an inventory while an older order was still to be obeyed."""
        job = self.state.jobs.get(shard.job)
        step = StepId(shard.attempt, shard.step)
        if job is not None and host in job.copies.get(step, {}).get(shard.rank, {}):
            job.drop_copy(shard, host)

    def is_ordered(self, host: str, shard: ShardId) -> bool:
        """Return whether a host has yet to free a copy, so that a report of it is outdated."""
        return shard in self._ordered.get(host, ())

    def forget_host(self, host: str) -> None:
        """Forget a host's orders: a new session begins with its inventory, and older orders may be lost."""
        self._ordered.pop(host, None)
