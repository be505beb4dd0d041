"""Begins the seals and fences of one simulated holder (core/holder/seal.py), and carries out their effects."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Protocol, cast

from memstore.core.arena.replica_index import StoredReplica
from memstore.core.arena.slot_table import Owner
from memstore.core.format.manifest import chunk_digest
from memstore.core.holder import effects
from memstore.core.holder import seal as procedure
from memstore.core.holder.state import HolderState
from memstore.core.wire.messages import copy_to_wire
from memstore.shell.peer.outgoing_shard import StreamingReplica
from memstore.testing.simulator.host import mapped_arena
from memstore.testing.simulator.host.context import HostContext
from memstore.testing.simulator.host.driver import Driver, Waits
from memstore.testing.simulator.host.push import Pusher
from memstore.testing.simulator.world.processes import Rank
from recovery.inventory import ShardId

Body = dict[str, Any]
DIGEST_S = 0.004  # a chunk


@dataclass(eq=False)
class RankConnection:
    """The link of a simulated rank: a rank that comes back on another one is the same process."""

    process: Rank
    owner: Owner
    job: str
    rank: int
    is_retired: bool = False


class Digested:
    """A fresh shard whose digests are known: the replica store digests it once more when it stores it."""

    def __init__(self, fresh: StreamingReplica) -> None:
        self.seal = fresh.seal

    def add(self, digest: bytes) -> None:
        """Pass over what is known."""


class SealingHolder(HostContext, Protocol):
    """A holder, as its sealer sees it."""

    def put_failed(self, shard: ShardId, body: Body) -> None:
        """Ask the controller to have the step given up on all ranks alike."""

    def grant(self, rank: Rank) -> None:
        """Lease the rank what its share allows."""


class Sealer:
    """The hand-overs and fences of one holder."""

    def __init__(self, holder: SealingHolder, state: HolderState, driver: Driver, pusher: Pusher) -> None:
        self.holder, self.state, self.pusher = holder, state, pusher
        self.driver = driver.extended(
            {
                effects.CompareSample: self._compare_sample,
                effects.OpenFresh: self._open_fresh,
                effects.Replicate: self._replicate,
                effects.DigestAndStore: self._digest_and_store,
                effects.NotePut: self._note_put,
                effects.CompareShared: self._compare_shared,
                effects.GiveUpPut: self._give_up,
                effects.TellLevel: self._tell_level,
                effects.Grant: self._grant,
                effects.TellFenced: self._tell_fenced,
                effects.AnswerFence: self._answer_fence,
            }
        )

    def take_over(self, rank: Rank, step: int, slots: list[int], body: Body) -> None:
        """Seal a hand-over that came completely."""
        replicas = self.holder.replicas
        whole = {
            **body, "step": step, "slots": slots, "nbytes": len(slots) * replicas.chunk_bytes,
            "arena": replicas.arena_identity, "sample": {"chunks": body["seen"]},
        }  # fmt: skip
        put = procedure.add(self.state, RankConnection(rank, rank.owner, rank.job, rank.rank), whole)
        if put is not None:
            self.holder.twins.began(put.shard)
            self.driver.start(procedure.run(self.state, put))

    def fence(self, job: str, attempt: int, members: Collection[str]) -> None:
        """Refuse older attempts, and answer once nothing of theirs is unfinished."""
        procedure.open_fence(self.state, job, attempt)
        self.driver.start(procedure.fence(self.state, job, attempt, members))

    # -- effects ------------------------------------------------------------------------------

    def _compare_sample(self, effect: effects.CompareSample) -> Waits[list[int]]:
        yield from ()
        is_seen = mapped_arena.are_seen(self.holder, list(effect.slots), {"seen": effect.seen["chunks"]})
        return [] if is_seen else [0]

    def _open_fresh(self, effect: effects.OpenFresh) -> Waits[StreamingReplica]:
        yield from ()
        return StreamingReplica(self.holder.replicas, effect.shard, effect.slots, effect.sizes)

    def _replicate(self, effect: effects.Replicate) -> Waits[bool]:
        yield from ()
        return self.pusher.replicate(effect.shard, effect.digest, cast("StreamingReplica | None", effect.fresh))

    def _digest_and_store(self, effect: effects.DigestAndStore) -> Waits[StoredReplica]:
        holder, fresh, body = self.holder, cast(StreamingReplica, effect.fresh), effect.body
        for slot, nbytes in zip(effect.slots, fresh.sizes, strict=True):
            yield DIGEST_S
            fresh.add(chunk_digest(holder.replicas.arena.view(slot, nbytes)))
        shelved = holder.replicas.seal_local(
            effect.shard, world_size=int(body["world_size"]), layout=body["layout"], nbytes=int(body["nbytes"]),
            slots=effect.slots, attempt=effect.shard.attempt, follower=Digested(fresh),
        )  # fmt: skip
        holder.checker.puts.sealed_here(holder, effect.shard, shelved.digests)
        return shelved

    def _note_put(self, effect: effects.NotePut) -> Waits[int | None]:
        yield from ()
        self.holder.twins.ended(effect.shelved.shard)
        return self.holder.twins.put(effect.shelved, effect.shared_count)

    def _compare_shared(self, effect: effects.CompareShared) -> Waits[None]:
        yield from ()
        self.holder.twins.sealed(effect.shard)

    def _give_up(self, effect: effects.GiveUpPut) -> Waits[None]:
        yield from ()
        shard = effect.shard
        self.holder.twins.ended(shard)
        body = {"job": shard.job, "attempt": shard.attempt, "rank": shard.rank, "step": shard.step, "why": effect.why}
        self.holder.put_failed(shard, {**body, "is_failed": effect.is_failed})

    def _tell_level(self, effect: effects.TellLevel) -> Waits[None]:
        yield from ()
        rank = cast(RankConnection, effect.link).process
        if rank.attempt == effect.attempt:
            rank.rise(effect.step, effect.level)

    def _grant(self, effect: effects.Grant) -> Waits[None]:
        yield from ()
        self.holder.grant(cast(RankConnection, effect.link).process)

    def _tell_fenced(self, effect: effects.TellFenced) -> Waits[None]:
        yield from ()
        for rank in self.holder.ranks.values():
            if rank.job == effect.job and 0 < rank.attempt < effect.attempt and rank.nonce not in effect.members:
                rank.is_fenced = True

    def _answer_fence(self, effect: effects.AnswerFence) -> Waits[None]:
        yield from ()
        copies = [copy_to_wire(c) for c in self.holder.replicas.index.copies(self.holder.host_id, effect.job)]
        self.holder.checker.fences.answered(self.holder, effect.job, effect.attempt)
        self.holder.report("fenced", {"job": effect.job, "attempt": effect.attempt, "copies": copies})
