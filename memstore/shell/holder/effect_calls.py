"""Carries out the effects that procedures of core/holder ask for, each by a call that blocks its thread."""

from __future__ import annotations

import functools
import logging
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

from memstore.core.arena.replica_index import IncomingReplica
from memstore.core.durable.storage_ports import DurableTier
from memstore.core.format.manifest import chunk_digest
from memstore.core.holder import effects
from memstore.core.holder.effects import Effect
from memstore.errors import IntegrityError
from memstore.shell.arena.slot_sample import differing
from memstore.shell.durable.tier import open_tier
from memstore.shell.holder.context import HolderContext
from memstore.shell.holder.rank_connections import RankConnection, RankConnections
from memstore.shell.holder.send_gate import SendGate
from memstore.shell.peer.client import Peer, RateLimit
from memstore.shell.peer.outgoing_shard import OutgoingReplica, StreamingReplica
from memstore.shell.threads.pool_work import await_ended

log = logging.getLogger("memstore")
RANGE_THREADS = 16  # of durable storage, over all shards: an object store is fast only by many requests at once
DIGEST_THREADS = min(4, os.cpu_count() or 1)  # two fill a small machine's memory bus


class EffectCalls:
    """The calls that carry out the effects of one holder's procedures."""

    def __init__(self, context: HolderContext, connections: RankConnections, send_gate: SendGate) -> None:
        self.context, self.replicas, self.connections, self.send_gate = (
            context,
            context.replicas,
            connections,
            send_gate,
        )
        self.ranges = ThreadPoolExecutor(RANGE_THREADS, thread_name_prefix="memstore-range")
        self.digesters = ThreadPoolExecutor(DIGEST_THREADS, thread_name_prefix="memstore-digest")
        self.repair_limit = RateLimit(context.config.repair_bytes_per_s, context.stopping)

    def close(self) -> None:
        """Stop taking work."""
        for pool in (self.ranges, self.digesters):
            pool.shutdown(wait=False, cancel_futures=True)

    def __call__(self, effect: Effect) -> Any:
        """Carry one effect out and return its value."""
        return self._call(effect)

    @functools.singledispatchmethod
    def _call(self, effect: Effect) -> Any:
        raise TypeError(f"no call carries out {effect!r}")

    @_call.register
    def _(self, effect: effects.Sleep) -> None:
        self.context.stopping.wait(effect.seconds)

    @_call.register
    def _(self, effect: effects.Reach) -> Any:
        return self.context.peers.peer(effect.host)

    @_call.register
    def _(self, effect: effects.CallPeer) -> Any:
        return effect.peer.call(effect.request, timeout_s=effect.limit_s)

    @_call.register
    def _(self, effect: effects.SendChunks) -> None:
        shipment = cast(OutgoingReplica, effect.source)
        gate = None if effect.is_repair else self.send_gate.sending(shipment)
        throttle = self.repair_limit if effect.is_repair else None
        effect.peer.send_chunks(shipment, effect.chunks, sender=self.context.host_id, throttle=throttle, gate=gate)

    @_call.register
    def _(self, effect: effects.SendWhole) -> Any:
        shipment = cast(OutgoingReplica, effect.source)
        gate = None if effect.is_repair else self.send_gate.sending(shipment)
        throttle = self.repair_limit if effect.is_repair else None
        return effect.peer.send_whole(shipment, effect.request, throttle=throttle, gate=gate)

    @_call.register
    def _(self, effect: effects.ReceiveChunks) -> list[int]:
        return cast(Peer, effect.peer).fetch_into(self.replicas, effect.replica, effect.digest, effect.chunks)

    @_call.register
    def _(self, effect: effects.ReadDurableManifest) -> bytes:
        return open_tier(effect.place).read_manifest(effect.shard, effect.spec)

    @_call.register
    def _(self, effect: effects.ReceiveDurable) -> list[int]:
        read = functools.partial(self._read_durable, open_tier(effect.place), effect)
        futures = [self.ranges.submit(read, index) for index in effect.chunks]
        await_ended(futures)  # none may still write to the incoming replica when it is given up
        return [index for future in futures for index in future.result()]

    def _read_durable(self, tier: DurableTier, effect: effects.ReceiveDurable, index: int) -> list[int]:
        """Read one chunk; return [index] if it is not there as it was put, else []."""
        nbytes = effect.sizes[index]
        number = self.replicas.take_slots_growing(1)[0]
        view = self.replicas.arena.view(number, nbytes)
        try:
            tier.read_chunk_into(effect.replica.shard, effect.spec, index, view)
        except IntegrityError:
            self.replicas.give_back([number])
            return [index]
        except BaseException:
            self.replicas.give_back([number])
            raise
        return self.replicas.keep_chunks(effect.replica, [(index, number, nbytes, chunk_digest(view))])

    @_call.register
    def _(self, effect: effects.OnStore) -> Any:
        return effect.call()

    @_call.register
    def _(self, effect: effects.ClaimRoom) -> None:
        self.replicas.claim(effect.job, effect.share, functools.partial(self.connections.room, effect.job))

    @_call.register
    def _(self, effect: effects.Verify) -> list[int]:
        return self.replicas.verify(effect.stored, self.digesters.map, effect.chunks)

    @_call.register
    def _(self, effect: effects.OpenIncoming) -> IncomingReplica:
        return self.replicas.open_incoming(
            effect.name, effect.shard, effect.digests, effect.sizes, effect.attempt, effect.chunks
        )

    @_call.register
    def _(self, effect: effects.KeepStaged) -> None:
        self.replicas.keep_staged(effect.key, effect.stored, effect.pin)

    @_call.register
    def _(self, effect: effects.Warn) -> None:
        log.warning("%s", effect.text)

    @_call.register
    def _(self, effect: effects.ReadManifest) -> bytes:
        return cast(OutgoingReplica, effect.source).manifest()

    @_call.register
    def _(self, effect: effects.AwaitDigest) -> str:
        return cast(StreamingReplica, effect.source).sealed().spec.digest

    @_call.register
    def _(self, effect: effects.CompareSample) -> list[int]:
        return differing(self.replicas.arena.mapping, effect.slots, effect.nbytes, effect.seen)

    @_call.register
    def _(self, effect: effects.OpenFresh) -> StreamingReplica:
        return StreamingReplica(self.replicas, effect.shard, effect.slots, effect.sizes)

    @_call.register
    def _(self, effect: effects.SendToRank) -> None:
        cast(RankConnection, effect.link).send(effect.message)

    @_call.register
    def _(self, effect: effects.CloseLink) -> None:
        cast(RankConnection, effect.link).channel.abort()

    @_call.register
    def _(self, effect: effects.Grant) -> None:
        self.connections.grant(cast(RankConnection, effect.link))

    @_call.register
    def _(self, effect: effects.Unexpected) -> None:
        if isinstance(effect.error, OSError):  # the machine's, such as a full table of descriptors: no bug of ours
            log.error("%s: %s", effect.what, effect.error)
        else:
            log.error("%s", effect.what, exc_info=effect.error)
