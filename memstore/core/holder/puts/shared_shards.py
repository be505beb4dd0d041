"""Keeps what a holder knows of ranks with equal state: targets of copies, newest puts, late ranks (R13, R34)."""

from __future__ import annotations

from dataclasses import dataclass

from memstore.core.arena.replica_index import StoredReplica
from memstore.core.wire.orders import PushTargets, RankTargets
from memstore.core.wire.peer_messages import ParityOf
from memstore.core.wire.rank_messages import ShardDiffers
from recovery.inventory import ShardId

NAMED_CHUNKS_MAX = 64


@dataclass(slots=True)
class Newest:
    """The newest put that was sealed here of one rank."""

    shard: ShardId
    digests: tuple[bytes, ...]
    shared_count: int | None  # leading chunks that other writers have too; None: the rank names no shard
    is_flagged: bool = False  # its chunks are those of the put before, and that was said


class HolderSharedShards:
    """The ranks with equal state, as one holder knows them."""

    def __init__(self) -> None:
        self.ordinary: dict[str, list[str]] = {}  # job -> hosts of the copies of the ranks that have no own targets
        self.declared: dict[str, tuple[int, dict[int, RankTargets]]] = {}  # job -> attempt, local ranks that have
        self.newest: dict[tuple[str, int], Newest] = {}  # (job, local rank)
        self.late: dict[tuple[str, int], int] = {}  # those awaited in vain in this attempt, without a seal since
        self.differing: set[tuple[str, int, int, int]] = set()  # job, attempt, two ranks: reported and not equal since

    def declare(self, order: PushTargets) -> None:
        """Take from the controller where the copies of the ranks here go, and which ranks write for others."""
        job, attempt = order.job, order.attempt
        self.ordinary[job] = list(order.targets)
        self.declared[job] = (attempt, {row.rank: row for row in order.ranks})
        self.differing = {key for key in self.differing if key[0] != job or key[1] == attempt}

    def targets(self, shard: ShardId) -> list[str]:
        """Return the hosts that take copies of a local rank's shard."""
        row = self._row(shard)
        return list(row.targets if row is not None else self.ordinary.get(shard.job, ()))

    def parity_targets(self, shard: ShardId) -> dict[str, ParityOf]:
        """Return the hosts that add a local rank's shard into their parity."""
        row = self._row(shard)
        members = row.parity_set if row is not None else ()
        ranks, spare = tuple(member.rank for member in members), row.spare if row is not None else 0
        return {member.host: ParityOf(member.rank, ranks, spare) for member in members if member.rank != shard.rank}

    def all_targets(self, job: str) -> list[str]:
        """Return the hosts that are sent anything of a job's ranks here."""
        _, table = self.declared.get(job, (0, {}))
        own = [host for row in table.values() for host in (*row.targets, *(each.host for each in row.parity_set))]
        return list(dict.fromkeys([*self.ordinary.get(job, ()), *own]))

    def _row(self, shard: ShardId) -> RankTargets | None:
        attempt, table = self.declared.get(shard.job, (0, {}))
        return table.get(shard.rank) if attempt == shard.attempt else None

    def own_of(self, shard: ShardId) -> int | None:
        """Return the local rank whose shard is equal to one from elsewhere; None if there is none."""
        attempt, table = self.declared.get(shard.job, (0, {}))
        if attempt == shard.attempt:
            for rank, row in table.items():
                if shard.rank in row.other_writers:
                    return rank
        return None

    def is_over(self, shard: ShardId, own: int) -> bool:
        """Say whether an offered shard has nothing to wait for in a local rank's put, or its attempt is over."""
        if self.own_of(shard) != own or self.late.get((shard.job, own)) == shard.attempt:
            return True
        known = self.newest.get((shard.job, own))
        return known is not None and (known.shard.attempt, known.shard.step) >= (shard.attempt, shard.step)

    def gave_up(self, shard: ShardId, own: int) -> None:
        """Note that an offer waited for a local rank in vain: none waits for it until it has sealed again (D104).

        It may have sealed since the wait ended, or its attempt may be over: then it is not late.
        """
        if not self.is_over(shard, own):
            self.late[shard.job, own] = shard.attempt

    def forget(self, job: str, attempt: int) -> None:
        """Forget a job that was removed after this attempt."""
        if self.declared.get(job, (0, {}))[0] <= attempt:
            self.declared.pop(job, None)
        self.differing = {key for key in self.differing if key[0] != job or key[1] > attempt}
        self.late = {key: at for key, at in self.late.items() if key[0] != job or at > attempt}
        self.newest = {key: n for key, n in self.newest.items() if key[0] != job or n.shard.attempt > attempt}

    def put_sealed(self, stored: StoredReplica, shared_count: int | None) -> int | None:
        """Note a local rank's sealed put; return the step before if this put is the first to repeat its chunks."""
        shard = stored.shard
        now = Newest(shard, stored.digests, shared_count)
        before = self.newest.get((shard.job, shard.rank))
        if before is not None and before.shard == shard:
            return None  # submitted again by a link that came back
        is_same = before is not None and before.shard.attempt == shard.attempt and _repeats(before, now)
        now.is_flagged = is_same
        self.newest[shard.job, shard.rank] = now
        self.late.pop((shard.job, shard.rank), None)
        return before.shard.step if before is not None and is_same and not before.is_flagged else None

    def compare(self, own: Newest, other: StoredReplica) -> ShardDiffers | None:
        """Return the notice to a rank if its shared chunks and those of another writer differ, or are equal again.

        None if that is no news. The rank finds the tensors in the chunks that are named.
        """
        shard, other_rank = own.shard, other.shard.rank
        row, count = self._row(shard), own.shared_count
        if row is None or count is None or other_rank not in row.other_writers or shard.rank > other_rank:
            return None  # the host of the higher rank compares the same two
        theirs = (*other.digests[:count], *[b""] * (count - len(other.digests)))
        unequal = [i for i, (a, b) in enumerate(zip(own.digests[:count], theirs, strict=True)) if a != b]
        key = (shard.job, shard.attempt, shard.rank, other_rank)
        if bool(unequal) == (key in self.differing):
            return None
        self.differing.add(key) if unequal else self.differing.discard(key)
        named = tuple(unequal[:NAMED_CHUNKS_MAX])
        return ShardDiffers(
            attempt=shard.attempt, step=shard.step, other_rank=other_rank, count=len(unequal), chunks=named
        )


def _repeats(before: Newest, now: Newest) -> bool:
    """Return whether two puts have the same chunks; of a rank that names a shard, only shared chunks are compared."""
    if before.shared_count != now.shared_count or now.shared_count == 0 or not now.digests:
        return False
    end = now.shared_count
    return before.digests[:end] == now.digests[:end]
