"""Planted bugs of parity: rows, who is awaited, what is stored, adopted and decoded (R37)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from memstore.core.arena.parity_rows import IncomingParity
from memstore.core.arena.replica_index import ReplicaIndex
from memstore.core.arena.replica_store import ReplicaStore, Store
from memstore.core.cluster.job import Held, Job
from memstore.core.commits import CommitRule
from memstore.core.format.manifest import chunk_digest
from memstore.core.targets.targets import ClusterView
from memstore.core.wire.peer_messages import ChunksLacking
from memstore.shell.peer import parity
from memstore.shell.peer.parity import ParityServer
from memstore.testing.faults.catalogue import Fault
from memstore.testing.simulator.planted.bug import planted, row
from memstore.testing.simulator.world.scenario import UNEVEN_CHUNKS
from recovery.inventory import ShardId
from recovery.parity import ParitySet

SET: dict[str, Any] = {"hosts": 4, "world_size": 4, "parity": 3}
TWO: dict[str, Any] = {"hosts": 5, "world_size": 5, "parity": 3, "replicas": 3}
RESETS = tuple(Fault(2.0 + n, "reset-in-transit", count=2) for n in range(6))
FLIPS = tuple(Fault(2.0 + n, "flip-in-transit", count=2) for n in range(6))
LAUNCHES = tuple(Fault(2.5 + 1.7 * n, "kill-rank", rank=n) for n in range(5))
CRASHES = tuple(Fault(2.0 + 1.3 * n, "crash-holder-at", (n % 4,), count=2 * n + 3) for n in range(7))


@planted("chunk-added-twice", "R37", "I27", *RESETS, at=(ParityServer, "chunks"), parity=2, chunks=UNEVEN_CHUNKS)
def chunk_added_twice(real: Any, self: ParityServer, *request: Any) -> Any:
    """A chunk that is sent again after a broken connection is added again."""
    with patch.object(IncomingParity, "is_added", lambda self, rank, chunk, digest: False):
        return real(self, *request)


@planted("torn-chunk-stays", "R37", "I27", *FLIPS, at=(ParityServer, "chunks"), **SET)
def torn_chunk_stays(real: Any, self: ParityServer, *request: Any) -> Any:
    """A chunk is added before it is digested, and what arrived damaged stays in its row."""
    batch = request[2]
    digest_of = {chunk.index: chunk.digest for chunk in batch.chunks}
    wanted: list[bytes] = []

    def all_right(channel: Any, views: Any, digests: list[bytes], **limits: Any) -> None:
        receive(channel, views, digests, **limits)
        digests[:] = [wanted.pop(0)]

    def lacking(**fields: Any) -> Any:
        wanted.extend(digest_of[index] for index in fields["chunks"])
        return lack(**fields)

    receive, lack = type(request[0]).recv_bulk_digests, ChunksLacking
    with patch.object(type(request[0]), "recv_bulk_digests", all_right), patch.object(parity, "ChunksLacking", lacking):
        return real(self, *request)


@planted("parity-freed-at-put", "R37", "I27 I1", at=(ParityServer, "offer"), **SET)
def parity_freed_at_put(real: Any, self: ParityServer, offer: Any, of: Any) -> Any:
    """An older step's rows are freed when the next step is offered, before that is committed."""
    shard = offer.shard
    for stored in list(self.replicas.index.shards.values()):
        old = stored.shard
        if old.is_parity and old.job == shard.job and (old.attempt, old.step) < (shard.attempt, shard.step):
            self.replicas.drop(old)
    return real(self, offer, of)


@planted("member-not-awaited", "R37", "I27", **SET)
def member_not_awaited() -> Any:
    """Parity counts as complete before every other rank has named its shard, if only nothing."""
    return patch.object(IncomingParity, "is_named", property(lambda self: len(self.named) >= len(self.ranks.ranks) - 2))


@planted("one-parity-host-enough", "R37", "I27", at=(CommitRule, "_held_with_parity"), **SET)
def one_parity_host_enough(real: Any, self: CommitRule, rank: int, digest: str, hosts: list[str]) -> Held | None:
    """A step is committed when one other host has its rows."""
    kept = [
        host
        for other in self.parity.values()
        for host, copy in other.items()
        if self._keeps(host, copy, rank, digest) and host not in hosts
    ]
    return Held(digest, tuple(sorted({*hosts, *kept})), ()) if kept else None


@planted("second-rows-are-plain", "R37", "I27", at=(ParitySet, "factor"), **TWO)
def second_rows_are_plain(real: Any, self: ParitySet, row: int, rank: int) -> int:
    """The second row of some chunks is their plain sum once more."""
    return 1


@planted("one-row-host-lacks", "R37", "I27", *RESETS, at=(CommitRule, "_held_with_parity"), step_s=0.1, **TWO)
def one_row_host_lacks(real: Any, self: CommitRule, rank: int, digest: str, hosts: list[str]) -> Held | None:
    """A step is committed although one host of a set that survives two losses lacks its parity."""
    ranks = self.parity_sets[rank]
    kept = [host for other in ranks.others(rank) for host in self.parity.get(other, {})]
    return Held(digest, tuple(sorted({*hosts, *kept})), ()) if len(kept) >= len(ranks.ranks) - 2 else None


@planted(
    "parity-on-own-host", "R37", "R29 I27 I16", at=(ClusterView, "parity_sets"), **{**SET, "world_size": 8}, step_s=0.2
)
def parity_on_own_host(real: Any, self: ClusterView, job: Job, attempt: Any, needs: Any) -> Any:
    """The parity of a shard is placed on its own host: a set has two ranks of it."""
    sets = map(ParitySet, ((0, 1, 4, 5), (2, 3, 6, 7)) if real(self, job, attempt, needs) else ())
    return {rank: ranks for ranks in sets for rank in ranks.ranks}


@planted("fence-keeps-rows", "R21", "R21", *LAUNCHES, at=(ReplicaIndex, "abort_parity"), step_s=0.1, **SET)
def fence_keeps_rows(real: Any, self: ReplicaIndex, begun: IncomingParity) -> None:
    """A fence leaves unfinished rows of older attempts, and their senders add to them."""
    if begun.is_named or begun.shard not in self.parity:
        real(self, begun)


@planted("unfinished-rows-adopted", "R37", "I27", *CRASHES, step_s=0.15, **SET)
@contextmanager
def unfinished_rows_adopted() -> Iterator[None]:
    """A holder that begins again takes the rows that its predecessor had begun for whole ones."""
    left: dict[tuple[str, ShardId], IncomingParity] = {}
    taken: list[IncomingParity] = []
    offer, finish, owed = ParityServer.offer, ReplicaStore.finish_parity, IncomingParity.owed

    def adopted(self: ParityServer, request: Any, of: Any) -> Any:
        answer = offer(self, request, of)
        begun = self.replicas.index.parity.get(request.shard.id._replace(rank=of.rank, is_parity=True))
        if begun is not None:
            before = left.get((self.host_id, begun.shard))
            if before is not None and before is not begun and not begun.named:
                begun.named.update({rank: named for rank, named in before.named.items() if rank != request.shard.rank})
                begun.senders.update(before.senders)
                taken.append(begun)
            left[self.host_id, begun.shard] = begun
        return answer

    def finished(self: Store, begun: IncomingParity) -> Any:
        rows = max(begun.ranks.rows_count(len(m.chunks)) for m, _ in begun.named.values())
        return finish(self, begun) if len(begun.rows) >= rows else None

    def lacking(self: IncomingParity) -> dict[int, list[int]]:
        return {} if any(self is each for each in taken) else owed(self)

    patches = (
        (ParityServer, "offer", adopted),
        (ReplicaStore, "finish_parity", finished),
        (IncomingParity, "owed", lacking),
    )
    with ExitStack() as stack:
        for of, name, instead in patches:
            stack.enter_context(patch.object(of, name, instead))
        yield


class _Any(bytes):
    """A digest that equals every other one."""

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = bytes.__hash__


ROWS = (
    row(
        "decoded-bytes-not-digested",
        "R37",
        "R7",
        (parity, "chunk_digest"),
        lambda data: _Any(chunk_digest(data)),
        "Decoded bytes are kept without being compared with the lost shard's digests.",
        Fault(5.0, "kill-host", (1,), for_s=4.0),
        Fault(5.2, "flip-at-rest", (2,), rank=5),
        parity=2,
        chunks=UNEVEN_CHUNKS,
        step_s=0.8,
        is_strict=False,
    ),
)
