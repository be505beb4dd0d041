"""Runs the procedures of core/holder in virtual time: what the shell does by a call that blocks is a wait here.

A procedure is a thread of its holder: it ends with it, and anything may happen between two of its steps.
"""

from __future__ import annotations

import functools
from collections.abc import Generator
from typing import Any, TypeVar, cast

from memstore.core.holder import effects
from memstore.core.holder.effects import Effect, Steps
from memstore.core.wire.messages import shard_to_wire
from memstore.errors import MemstoreError, PeerRefused
from memstore.shell.peer.outgoing_shard import Fresh, Shipment
from memstore.testing.simulator.host.context import HostContext
from memstore.testing.simulator.host.peer_requests import PeerLink, connect
from memstore.testing.simulator.world.virtual_time import Wait

T = TypeVar("T")
Waits = Generator[Wait, None, T]
BATCH_CHUNKS = 2


class Driver:
    """The procedures of one simulated holder."""

    def __init__(self, holder: HostContext) -> None:
        self.holder = holder

    def start(self, steps: Steps[Any]) -> None:
        """Run a procedure as a thread of the holder."""
        self.holder.spawn(self.run(steps))

    def run(self, steps: Steps[T]) -> Waits[T]:
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
                    value = yield from self._perform(effect)
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
        until_s = self.holder.world.now + effect.limit_s
        yield lambda: effect.is_there() or self.holder.world.now >= until_s
        return effect.is_there()

    @_perform.register
    def _(self, effect: effects.Reach) -> Waits[PeerLink]:
        yield from ()
        return connect(self.holder, effect.host)

    @_perform.register
    def _(self, effect: effects.Ask) -> Waits[Any]:
        return (yield from effect.peer.ask(effect.body))

    @_perform.register
    def _(self, effect: effects.SendChunks) -> Waits[None]:
        shipment, chunks = cast(Shipment, effect.source), list(effect.chunks)
        for batch in [chunks[i : i + BATCH_CHUNKS] for i in range(0, len(chunks), BATCH_CHUNKS)]:
            yield lambda: shipment.has_digests(batch)  # noqa: B023
            body = {
                "do": "chunks", "shard": shard_to_wire(shipment.shard), "sender": self.holder.host_id, "want": batch,
                "digests": shipment.digests(batch), "sizes": [shipment.sizes[i] for i in batch],
            }  # fmt: skip
            reply = yield from effect.peer.ask(body, shipment)
            if not reply["ok"]:
                raise PeerRefused(str(reply["why"]), is_final=False)

    @_perform.register
    def _(self, effect: effects.ReadManifest) -> Waits[bytes]:
        shipment = cast(Shipment, effect.source)
        yield shipment.is_settled
        return shipment.manifest()

    @_perform.register
    def _(self, effect: effects.AwaitDigest) -> Waits[str]:
        fresh = cast(Fresh, effect.source)
        yield fresh.is_settled
        return fresh.sealed().spec.digest

    @_perform.register
    def _(self, effect: effects.TellReplicated) -> Waits[None]:
        yield from ()
        shard = effect.shard
        for rank in self.holder.ranks.values():
            if (rank.job, rank.rank, rank.attempt) == (shard.job, shard.rank, shard.attempt):
                rank.rise(shard.step, "replicated")

    @_perform.register
    def _(self, effect: effects.Unexpected) -> Waits[None]:
        yield from ()
        raise effect.error
