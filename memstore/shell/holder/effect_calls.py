"""Carries out the effects that procedures of core/holder ask for, each by a call that blocks its thread."""

from __future__ import annotations

import contextlib
import functools
import logging
from typing import Any, cast

from memstore.core.holder import effects
from memstore.core.holder.effects import Effect
from memstore.shell.holder.context import HolderContext
from memstore.shell.holder.rank_connections import RankConnections
from memstore.shell.holder.send_gate import Traffic
from memstore.shell.peer.client import RateLimit
from memstore.shell.peer.outgoing_shard import Fresh, Shipment

log = logging.getLogger("memstore")


class EffectCalls:
    """The calls of one holder."""

    def __init__(self, context: HolderContext, connections: RankConnections, traffic: Traffic) -> None:
        self.context, self.connections, self.traffic = context, connections, traffic
        self.repair_limit = RateLimit(context.config.repair_bytes_per_s, context.stopping)

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
    def _(self, effect: effects.Ask) -> Any:
        return effect.peer.call(effect.body, timeout_s=effect.limit_s)

    @_call.register
    def _(self, effect: effects.SendChunks) -> None:
        shipment = cast(Shipment, effect.source)
        held = contextlib.nullcontext() if effect.is_repair else self.traffic.sending(shipment)
        throttle = self.repair_limit if effect.is_repair else _unthrottled
        with held as gate:
            effect.peer.send_chunks(shipment, effect.chunks, sender=self.context.host_id, throttle=throttle, gate=gate)

    @_call.register
    def _(self, effect: effects.ReadManifest) -> bytes:
        return cast(Shipment, effect.source).manifest()

    @_call.register
    def _(self, effect: effects.AwaitDigest) -> str:
        return cast(Fresh, effect.source).sealed().spec.digest

    @_call.register
    def _(self, effect: effects.TellReplicated) -> None:
        self.connections.replicated(effect.shard)

    @_call.register
    def _(self, effect: effects.Unexpected) -> None:
        log.error("%s", effect.what, exc_info=effect.error)


def _unthrottled(nbytes: int) -> None:
    """A put goes at wire speed."""
