"""Forks of the simulation: an order to look or to make, carried out as shell/holder/orders.py does."""

from __future__ import annotations

import contextlib
from typing import Any

from memstore.errors import CapacityError, DigestMismatch
from memstore.shell.holder.fork import forked_body, look, make
from memstore.testing.simulator.host.context import HostContext
from memstore.testing.simulator.world.virtual_time import Thread

Body = dict[str, Any]
LOOK_S = 0.004


def fork(holder: HostContext, body: Body) -> Thread:
    """Look at the shards of a fork and report, or make them."""
    yield LOOK_S
    if body["what"] == "look":
        holder.report("forked", forked_body(body, look(holder.replicas, body["shards"])))
        return
    with contextlib.suppress(CapacityError, DigestMismatch):  # the controller orders it again
        for shelved in make(holder.replicas, body["shards"]):
            holder.sealed(shelved)
            yield LOOK_S
