"""Runs the procedures of core/holder in virtual time: what the shell does by a call that blocks is a wait here.

A procedure is a thread of its holder: it ends with it, and anything may happen between two of its steps.
"""

from __future__ import annotations

import copy
import functools
import math
import random
from collections.abc import Callable, Generator, Mapping
from typing import Any, TypeVar, cast

from memstore.core.arena.replica_index import IncomingReplica, StagedKey
from memstore.core.format.manifest import chunk_digest, decode_manifest
from memstore.core.holder import effects, ranks
from memstore.core.holder.effects import Effect, Procedure
from memstore.core.wire.ids import WireShard
from memstore.core.wire.orders import DurablePlace
from memstore.core.wire.peer_messages import ChunkBatch, FetchChunks, NoIncoming, OfferedChunk
from memstore.core.wire.rank_messages import CheckInto, SlotsLeased, StepLevel
from memstore.core.wire.reports import IntoChecked, IntoError
from memstore.errors import IntegrityError, MemstoreError, PeerRefused, PeerUnreachable
from memstore.shell.peer.outgoing_shard import OutgoingReplica, StreamingReplica
from memstore.testing.simulator.host.context import HostContext
from memstore.testing.simulator.host.peer_requests import PeerLink, connect
from memstore.testing.simulator.host.rank_link import RankLink
from memstore.testing.simulator.world.processes import Rank
from memstore.testing.simulator.world.virtual_time import Wait
from recovery.inventory import ShardId, ShardSpec

T = TypeVar("T")
Waits = Generator[Wait, None, T]
BATCH_CHUNKS = 2
VERIFY_S = (0.005, 0.05)  # to digest a replica again
LATE_SHARE, LATE_MAX_S = 0.3, 1.0  # of welcomes: longer than a broken link takes to come back
FILE_S = 0.001  # to read a small file, or to look at a few slots


class Driver:
    """The procedures of one simulated holder."""

    def __init__(self, holder: HostContext) -> None:
        self.holder, self.replicas = holder, holder.replicas
        self.has_late_welcomes = any(fault.kind == "break-link" for fault in holder.world.scenario.faults)
        self.lateness = random.Random(f"welcomes {holder.world.scenario.seed} {holder.host_id}")
        self._calls: dict[type[Effect], Callable[[Any], Waits[Any]]] = {}
        self.verified_s: dict[StagedKey, float] = {}  # since when what was staged for a reader has been verified
        self._opened_s: dict[ShardId, float] = {}  # when the incoming replica of what is brought was opened
        self.opened_s: dict[tuple[str, ShardId], float] = {}  # the same by its name: what was spoilt before is found

    def extended(self, calls: Mapping[type[Effect], Callable[[Any], Waits[Any]]]) -> Driver:
        """Return a driver of the same holder that carries out more kinds of effects."""
        other = copy.copy(self)
        other._calls = {**self._calls, **calls}
        return other

    def start(self, steps: Procedure[Any]) -> None:
        """Run a procedure as a thread of the holder."""
        self.holder.spawn(self.run(steps))

    def run(self, steps: Procedure[T]) -> Waits[T]:
        """Run a procedure to its end and return its result."""
        value: Any = None
        error: MemstoreError | None = None
        try:
            while True:
                try:
                    effect = steps.send(value) if error is None else steps.throw(error)
                except StopIteration as end:
                    return cast(T, end.value)
                value, error = None, None
                try:
                    value = yield from self._calls.get(type(effect), self._perform)(effect)
                except MemstoreError as exc:  # any other error is a fault of the code, and ends the run
                    error = exc
        finally:
            steps.close()

    @functools.singledispatchmethod
    def _perform(self, effect: Effect) -> Waits[Any]:
        raise TypeError(f"the simulator does not carry out {effect!r}")

    @_perform.register
    def _(self, effect: effects.Sleep) -> Waits[None]:
        yield effect.seconds

    @_perform.register
    def _(self, effect: effects.WaitFor) -> Waits[bool]:
        until_s = math.inf if effect.limit_s is None else self.holder.world.now + effect.limit_s
        yield lambda: effect.is_there() or self.holder.world.now >= until_s
        return effect.is_there()

    @_perform.register
    def _(self, effect: effects.Together) -> Waits[list[Any]]:
        ends: dict[int, tuple[Any, MemstoreError | None]] = {}

        def child(number: int, steps: Procedure[Any]) -> Waits[None]:
            try:
                ends[number] = (yield from self.run(steps)), None
            except MemstoreError as exc:
                ends[number] = None, exc

        for number, steps in enumerate(effect.procedures):
            self.holder.spawn(child(number, steps))
        yield lambda: len(ends) == len(effect.procedures)
        for _, error in (ends[number] for number in sorted(ends)):
            if error is not None:
                raise error
        return [ends[number][0] for number in sorted(ends)]

    @_perform.register
    def _(self, effect: effects.Reach) -> Waits[PeerLink]:
        yield from ()
        return connect(self.holder, effect.host)

    @_perform.register
    def _(self, effect: effects.CallPeer) -> Waits[Any]:
        return (yield from effect.peer.ask(effect.request, limit_s=effect.limit_s))

    @_perform.register
    def _(self, effect: effects.SendChunks) -> Waits[None]:
        shipment, chunks = cast(OutgoingReplica, effect.source), list(effect.chunks)
        for batch in [chunks[i : i + BATCH_CHUNKS] for i in range(0, len(chunks), BATCH_CHUNKS)]:
            yield lambda: shipment.has_digests(batch)  # noqa: B023
            offered = zip(batch, shipment.digests(batch), (shipment.sizes[i] for i in batch), strict=True)
            request = ChunkBatch(
                shard=WireShard.of(shipment.shard), sender=self.holder.host_id,
                chunks=tuple(OfferedChunk(*chunk) for chunk in offered),
            )  # fmt: skip
            reply = yield from effect.peer.ask(request, shipment)
            if isinstance(reply, NoIncoming):
                raise PeerRefused("no such incoming replica", is_final=False)

    @_perform.register
    def _(self, effect: effects.SendWhole) -> Waits[Any]:
        return (yield from effect.peer.ask(effect.request, cast(OutgoingReplica, effect.source)))

    @_perform.register
    def _(self, effect: effects.ReceiveChunks) -> Waits[list[int]]:
        found = yield from effect.peer.fetch(
            FetchChunks(shard=WireShard.of(effect.replica.shard), digest=effect.digest, chunks=tuple(effect.chunks))
        )
        return [
            index for index, data in zip(effect.chunks, found, strict=True) if self._is_bad(effect.replica, index, data)
        ]

    @_perform.register
    def _(self, effect: effects.ReadDurableManifest) -> Waits[bytes]:
        return (yield from self._part(effect.place, effect.shard, effect.spec))[0]

    @_perform.register
    def _(self, effect: effects.ReceiveDurable) -> Waits[list[int]]:
        _, chunks = yield from self._part(effect.place, effect.replica.shard, effect.spec)
        found = {index: chunks[index] if index < len(chunks) else b"" for index in effect.chunks}
        sized = {index: data if len(data) == effect.sizes[index] else b"" for index, data in found.items()}
        return [index for index, data in sized.items() if self._is_bad(effect.replica, index, data)]

    def _part(self, place: DurablePlace, shard: ShardId, spec: ShardSpec) -> Waits[tuple[bytes, list[bytes]]]:
        """Read a shard from durable storage."""
        storage = self.holder.world.durable
        yield storage.delay_s
        if storage.problem:
            raise PeerUnreachable(storage.problem)
        own_key = storage.key_of(place, self.holder.host_id)  # unless the order names the step's
        part = storage.part(shard, spec.digest, place.key if place.key is not None else own_key)
        if part is None:
            raise IntegrityError(f"durable storage has not all slices of {shard}")
        return part

    def _is_bad(self, replica: IncomingReplica, index: int, data: bytes) -> bool:
        """Keep a chunk that came; True if it is not what the incoming replica expects, or nothing came."""
        if not data:
            return True
        number = self.replicas.take_slots_growing(1)[0]
        self.replicas.arena.view(number, len(data))[:] = data
        self.holder.memory.version += 1
        return bool(self.replicas.keep_chunks(replica, [(index, number, len(data), chunk_digest(data))]))

    @_perform.register
    def _(self, effect: effects.Verify) -> Waits[list[int]]:
        yield self.holder.world.network.rng.uniform(*VERIFY_S)
        self._opened_s.pop(effect.stored.shard, None)
        return self.replicas.verify(effect.stored, map, effect.chunks)

    @_perform.register
    def _(self, effect: effects.OpenIncoming) -> Waits[IncomingReplica]:
        yield FILE_S
        self._opened_s[effect.shard] = self.holder.world.now  # the first of its chunks is verified now
        self.opened_s[effect.name, effect.shard] = self.holder.world.now
        return self.replicas.open_incoming(
            effect.name, effect.shard, effect.digests, effect.sizes, effect.attempt, effect.chunks
        )

    @_perform.register
    def _(self, effect: effects.KeepStaged) -> Waits[None]:
        yield from ()
        self.replicas.keep_staged(effect.key, effect.stored, effect.pin)
        self.verified_s[effect.key] = self._opened_s.pop(effect.stored.shard, self.holder.world.now)

    @_perform.register
    def _(self, effect: effects.Warn) -> Waits[None]:
        yield from ()

    @_perform.register
    def _(self, effect: effects.ReadManifest) -> Waits[bytes]:
        shipment = cast(OutgoingReplica, effect.source)
        yield shipment.is_settled
        return shipment.manifest()

    @_perform.register
    def _(self, effect: effects.AwaitDigest) -> Waits[str]:
        fresh = cast(StreamingReplica, effect.source)
        yield fresh.is_settled
        return fresh.sealed().spec.digest

    @_perform.register
    def _(self, effect: effects.OnStore) -> Waits[Any]:
        yield FILE_S
        return effect.call()

    @_perform.register
    def _(self, effect: effects.ClaimRoom) -> Waits[None]:
        yield from ()
        self.replicas.claim(effect.job, effect.share)

    @_perform.register
    def _(self, effect: effects.BeginConnect) -> Waits[Callable[[], bool]]:
        yield from ()
        return lambda: True  # time is all that it saves

    @_perform.register
    def _(self, effect: effects.Grant) -> Waits[None]:
        yield from ()
        if slots := ranks.lease(self.holder.state, effect.link):
            cast(RankLink, effect.link).process.receive(SlotsLeased(slots=tuple(slots)))

    @_perform.register
    def _(self, effect: effects.SendWelcome) -> Waits[None]:
        if self.has_late_welcomes and self.lateness.random() < LATE_SHARE:
            yield self.lateness.uniform(0.0, LATE_MAX_S)
        link = cast(RankLink, effect.link)
        if link.is_open:
            link.process.welcomed(self.holder, effect.stale)

    @_perform.register
    def _(self, effect: effects.SendToRank) -> Waits[None]:
        yield from ()
        link, message = cast(RankLink, effect.link), effect.message
        if link.is_open and isinstance(message, StepLevel) and message.level in ("committed", "durable"):
            self.holder.checker.commits.commit_reported(link.process, message.step, is_degraded=message.degraded)
        if link.is_open and isinstance(message, CheckInto):
            self._check(link.process, message)
        elif link.is_open:
            link.process.receive(message)

    def _check(self, rank: Rank, message: CheckInto) -> None:
        if not rank.is_frozen:
            why = rank.check(decode_manifest(message.manifest))
            error = IntoError(error="ManifestMismatch", message=why) if why else None
            self.holder.report(IntoChecked(job=rank.job, round=message.round, rank=rank.rank, error=error))

    @_perform.register
    def _(self, effect: effects.CloseLink) -> Waits[None]:
        yield from ()  # its process gets nothing more on it: it has another one, or is dead

    @_perform.register
    def _(self, effect: effects.ForgetProcess) -> Waits[None]:
        yield from ()
        self.holder.calls.forget(effect.owner)

    @_perform.register
    def _(self, effect: effects.ForgetJob) -> Waits[None]:
        yield from ()  # nothing here keeps trained steps

    @_perform.register
    def _(self, effect: effects.Unexpected) -> Waits[None]:
        yield from ()
        raise effect.error
