"""Begins the seals and fences of one simulated holder (core/holder/puts/seal.py), and carries out their effects."""

from __future__ import annotations

from collections.abc import Collection
from typing import cast

import msgspec

from memstore.core.arena.replica_index import StoredReplica
from memstore.core.format.manifest import chunk_digest
from memstore.core.holder import effects
from memstore.core.holder.puts import seal as procedure
from memstore.core.holder.state import HolderState, SubmittedPut
from memstore.core.wire.rank_messages import PutReady
from memstore.shell.peer.outgoing_shard import StreamingReplica
from memstore.testing.simulator.host.context import HostContext
from memstore.testing.simulator.host.driver import Driver, Waits
from memstore.testing.simulator.host.push import Pusher
from memstore.testing.simulator.host.rank_link import RankLink

DIGEST_S = 0.004  # a chunk


class Digested:
    """A fresh shard whose digests are known: the replica store digests it once more when it stores it."""

    def __init__(self, fresh: StreamingReplica) -> None:
        self.seal = fresh.seal

    def add(self, digest: bytes) -> None:
        """Pass over what is known."""


class Sealer:
    """The submissions and fences of one holder."""

    def __init__(self, holder: HostContext, state: HolderState, driver: Driver, pusher: Pusher) -> None:
        self.holder, self.state, self.pusher = holder, state, pusher
        self.driver = driver.extended(
            {
                effects.CompareSample: self._compare_sample,
                effects.OpenFresh: self._open_fresh,
                effects.Replicate: self._replicate,
                effects.DigestAndStore: self._digest_and_store,
            }
        )

    def take_over(self, link: RankLink, ready: PutReady) -> None:
        """Seal a submission that came completely."""
        ready = msgspec.structs.replace(
            ready, arena=self.holder.replicas.arena_identity
        )  # its sample tells another one
        put = procedure.add(self.state, link, ready)
        if put is not None:
            self.holder.shared_shards.began(put.shard)
            self.holder.spawn(self._seal(put))

    def _seal(self, put: SubmittedPut) -> Waits[None]:
        yield from self.driver.run(procedure.run(self.state, put))
        self.holder.shared_shards.ended(put.shard)

    def fence(self, job: str, attempt: int, members: Collection[str]) -> None:
        """Refuse older attempts, and answer once nothing of theirs is unfinished."""
        procedure.open_fence(self.state, job, attempt)
        self.driver.start(procedure.fence(self.state, job, attempt, members))

    # -- effects ------------------------------------------------------------------------------

    def _compare_sample(self, effect: effects.CompareSample) -> Waits[list[int]]:
        yield from ()
        seen = b"".join(bytes(self.holder.replicas.arena.view(number)) for number in effect.slots)
        return [] if seen == effect.seen.digests else [0]

    def _open_fresh(self, effect: effects.OpenFresh) -> Waits[StreamingReplica]:
        yield from ()
        return StreamingReplica(self.holder.replicas, effect.shard, effect.slots, effect.sizes)

    def _replicate(self, effect: effects.Replicate) -> Waits[bool]:
        yield from ()
        return self.pusher.replicate(effect.shard, effect.digest, cast("StreamingReplica | None", effect.fresh))

    def _digest_and_store(self, effect: effects.DigestAndStore) -> Waits[StoredReplica]:
        holder, fresh, ready = self.holder, cast(StreamingReplica, effect.fresh), effect.ready
        given = procedure.given_digests(ready)
        for slot, nbytes in zip(ready.slots, fresh.sizes, strict=True) if given is None else ():
            yield DIGEST_S
            fresh.add(chunk_digest(holder.replicas.arena.view(slot, nbytes)))
        if given is not None:
            yield DIGEST_S
        stored = holder.replicas.seal_local(
            effect.shard, world_size=ready.world_size, layout=ready.layout, nbytes=ready.nbytes,
            slots=ready.slots, attempt=effect.shard.attempt, given=given, follower=Digested(fresh),
        )  # fmt: skip
        holder.checker.puts.sealed_here(holder, effect.shard, stored.digests)
        return stored
