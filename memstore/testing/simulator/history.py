"""Pins and forks in the simulator: what people ask for in the middle of a run, and a holder's part in it (R19, R32)."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from memstore.errors import CapacityError
from memstore.shell.forker import forked_body, look, make

if TYPE_CHECKING:
    from memstore.testing.simulator.holder import SimHolder
    from memstore.testing.simulator.world import Wait

Body = dict[str, Any]
LOOK_S = 0.004


def fork(holder: SimHolder, body: Body) -> Generator[Wait, None, None]:
    """Carry out an order to look or to make, as shell/holder.py does."""
    yield LOOK_S
    if body["what"] == "look":
        holder.report("forked", forked_body(body, look(holder.vault, body["shards"])))
        return
    with contextlib.suppress(CapacityError):  # ordered again
        for shelved in make(holder.vault, body["shards"]):
            holder.sealed(shelved)
            yield LOOK_S
