"""Forks of the simulation: an order to look or to make, carried out as shell/holder/orders.py does."""

from __future__ import annotations

import contextlib

from memstore.core.wire.orders import LookAtCopies, MakeFork
from memstore.core.wire.reports import CopiesLookedAt
from memstore.errors import CapacityError, DigestMismatch
from memstore.shell.holder.fork import look, make
from memstore.testing.simulator.host.context import HostContext
from memstore.testing.simulator.world.virtual_time import Thread

LOOK_S = 0.004


def fork(holder: HostContext, order: LookAtCopies | MakeFork) -> Thread:
    """Look at the shards of a fork and report, or make them."""
    yield LOOK_S
    if isinstance(order, LookAtCopies):
        shards = tuple(look(holder.vault, order.shards))
        holder.report(CopiesLookedAt(job=order.job, call=order.call, shards=shards))
        return
    with contextlib.suppress(CapacityError, DigestMismatch):  # the controller orders it again
        for shelved in make(holder.vault, order.shards):
            holder.sealed(shelved)
            yield LOOK_S
