"""Carries out the controller's orders, each once, in the order in which they came (R12, R21, R23).

What a session is about (facts for the journal, the clock, answers to calls, the incarnation) is its holder's.
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

from memstore.core.holder import drop, persist, ranks, room
from memstore.core.holder.holder_io import HolderIo, Lane
from memstore.core.holder.puts import push, seal
from memstore.core.holder.reads import bring
from memstore.core.holder.state import HolderState
from memstore.core.wire.orders import (
    Bring,
    DropJob,
    DurableOrder,
    Fence,
    FreeCopies,
    HostNews,
    Order,
    PushCopy,
    PushTargets,
    Reserve,
    StepLevel,
    VerifyCopies,
)
from memstore.core.wire.reports import CopiesVerified
from memstore.errors import InternalError

DROP, READ, REPAIR, ROOM = Lane("drop"), Lane("read"), Lane("repair"), Lane("room")


def obey(io: HolderIo, state: HolderState, order: Order) -> Coroutine[Any, Any, None] | None:
    """Begin what an order asks for; return what is to be run at once, before the next order is obeyed."""
    match order:
        case HostNews():
            io.start(ROOM, room.keep_shares, state, order.jobs)
        case Fence():
            seal.open_fence(state, order.job, order.attempt)
            io.start(Lane("fence"), seal.fence, state, order.job, order.attempt, order.members)
        case PushTargets():
            state.shared_shards.declare(order)
        case Reserve():
            io.start(ROOM, room.reserve if order.is_claim else room.grow, state, order)
        case PushCopy():
            copy = push.Push(order.shard.id, order.digest, order.target, is_repair=True)
            if push.begin(state, copy):
                io.start(REPAIR, push.run, state, copy)
        case Bring():
            bring.begin(state, order)
            io.start(READ, bring.run, state, order)
        case StepLevel(level="skipped" | "superseded"):
            io.start(DROP, drop.abandon, state, order)
        case StepLevel():
            return ranks.send_to_attempt(io, state, order)
        case FreeCopies():
            io.start(DROP, drop.free, state, order)
        case DropJob():
            io.start(DROP, drop.drop_job, state, order)
        case VerifyCopies():
            io.start(Lane("verify"), _verify, state, order)
        case _ if isinstance(order, DurableOrder):
            persist.obey(io, state, order)
        case _:
            raise InternalError(f"{type(order).__name__} is the session's")
    return None


async def _verify(io: HolderIo, state: HolderState, order: VerifyCopies) -> None:
    """Digest what is here again, and report what was found (R30)."""
    found, problem = await persist.outcome(io, "verify", io.verify_copies(order.job))
    state.report(CopiesVerified(call=order.call, found=found, problem=problem))
