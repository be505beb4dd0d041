"""Carries out the controller's orders, each once, in the order in which they came (R12, R21, R23).

What a session is about (facts for the journal, the clock, answers to calls, the incarnation) is its holder's.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Collection, Coroutine
from functools import partial
from typing import Any

from memstore.core.arena.slot_table import share_of
from memstore.core.holder import persist, ranks
from memstore.core.holder.holder_io import HolderIo, Lane
from memstore.core.holder.puts import push, seal
from memstore.core.holder.reads import bring
from memstore.core.holder.state import HolderState
from memstore.core.wire.ids import WireShard
from memstore.core.wire.orders import (
    Bring,
    DropJob,
    DurableOrder,
    Fence,
    FreeCopies,
    FreeStep,
    HostNews,
    Order,
    PushCopy,
    PushTargets,
    PutEarly,
    Reserve,
    StepLevel,
    TermNumber,
    VerifyCopies,
)
from memstore.core.wire.reports import CopiesVerified, Freed, Reserved, StepFreed
from memstore.errors import CapacityError, InternalError

# -- room ---------------------------------------------------------------------------------------------
# Claims room for jobs as the controller orders (R9, R10).


DESCRIPTORS_S, RETRY_S = 10.0, 0.25  # for file descriptors to become free: a first put may wait that long
TOO_MANY_FILES = (errno.EMFILE, errno.ENFILE)
CONNECT_S = 1.0  # room is not withheld for longer because a target does not answer


async def reserve(io: HolderIo, state: HolderState, order: Reserve) -> None:
    """Claim a share and report it, or report why not, with numbers: all ranks wait for the report."""
    job, problem = order.job, None
    is_connected = await io.begin_connect(job)  # meanwhile: a first put that has to connect finds nothing warm
    is_fault, deadline_s = False, state.now() + DESCRIPTORS_S
    while True:
        try:
            await io.claim_room(job, share_of(order))
        except CapacityError as exc:
            problem = str(exc)
        except Exception as exc:
            is_short = any(getattr(each, "errno", None) in TOO_MANY_FILES for each in (exc, exc.__cause__))
            if is_short and state.now() < deadline_s:
                await io.sleep(RETRY_S)
                continue
            await io.unexpected(f"room for job {job}", exc)
            is_fault, problem = True, f"its holder failed to claim room ({exc!r}): its log says where; put again then"
            if is_short:
                problem = (
                    f"its holder had no file descriptor left for {DESCRIPTORS_S:g} s ({exc}): raise its limit, "
                    "`memstore status` shows how, and put again"
                )
        break
    await io.wait_for(is_connected, CONNECT_S)
    state.report(Reserved(job=job, attempt=order.attempt, number=order.number, problem=problem, is_fault=is_fault))
    await ranks.grant_job(io, state, job)


async def grow(io: HolderIo, state: HolderState, order: Reserve) -> None:
    """Have memory and streams for the puts that may follow a restore; this claims nothing."""
    await io.begin_connect(order.job)
    with contextlib.suppress(CapacityError):
        await io.on_store(partial(state.store.room.prepare, order.job, share_of(order)))
    await ranks.grant_job(io, state, order.job)


async def keep_shares(io: HolderIo, state: HolderState, jobs: Collection[str]) -> None:
    """Give back the shares of jobs that the controller does not know and that have nothing here."""
    await io.on_store(partial(state.store.room.keep_shares, jobs))


async def release(io: HolderIo, state: HolderState) -> None:
    """Give back what no job has reserved."""
    await io.on_store(state.store.room.release)


# -- drop ---------------------------------------------------------------------------------------------
# Lets go of what the controller names: dropped shards, a removed job, a step that was abandoned (R7, R10, R12).


async def free(io: HolderIo, state: HolderState, order: FreeCopies) -> None:
    """Drop shards, and report that they are dropped."""
    await _drop(io, state, order.shards, number=order.number)
    await _grant(io, state, order.shards)


async def free_step(io: HolderIo, state: HolderState, order: FreeStep) -> None:
    """Drop all of a step, and report that it is dropped, also if that failed."""
    try:
        await io.on_store(partial(state.store.drop_step, order.job, order.step.attempt, order.step.step))
    finally:
        state.report(StepFreed(job=order.job, step=order.step, number=order.number))
    await ranks.grant_job(io, state, order.job)


async def drop_job(io: HolderIo, state: HolderState, order: DropJob) -> None:
    """Drop what is here of a removed job up to an attempt, and refuse its processes."""
    await _drop(io, state, order.shards, removed=(order.job, order.attempt))
    state.shared_shards.forget(order.job, order.attempt)
    state.keep_blocks(order.job, ())
    await io.forget_job(order.job)
    state.fences.remove(order.job, order.attempt)
    await ranks.send_fenced(io, state, order.job, order.attempt + 1)  # so that none waits for room
    await _grant(io, state, order.shards)


async def _drop(
    io: HolderIo,
    state: HolderState,
    rows: tuple[WireShard, ...],
    *,
    number: TermNumber | None = None,
    removed: tuple[str, int] | None = None,
) -> None:
    """Drop shards and the room of a removed job, and report it, also if that failed."""
    try:
        await io.on_store(partial(state.store.drop_all, [row.id for row in rows], removed))
    finally:
        state.report(Freed(shards=rows, number=number))


async def _grant(io: HolderIo, state: HolderState, rows: tuple[WireShard, ...]) -> None:
    for job in sorted({row.job for row in rows}):
        await ranks.grant_job(io, state, job)


async def abandon(io: HolderIo, state: HolderState, level: StepLevel) -> None:
    """Forget a step that was not committed, and send word to the ranks that put it."""
    await io.on_store(partial(state.store.drop_step, level.job, level.attempt, level.step))
    await ranks.send_to_attempt(io, state, level)
    await ranks.grant_job(io, state, level.job)


# -- orders -------------------------------------------------------------------------------------------


DROP, READ, REPAIR, ROOM = Lane("drop"), Lane("read"), Lane("repair"), Lane("room")


def obey(io: HolderIo, state: HolderState, order: Order) -> Coroutine[Any, Any, None] | None:
    """Begin what an order asks for; return what is to be run at once, before the next order is obeyed."""
    match order:
        case HostNews():
            io.start(ROOM, keep_shares, state, order.jobs)
        case Fence():
            state.fences.open(order.job, order.attempt)
            io.start(Lane("fence"), seal.fence, state, order.job, order.attempt, order.members)
        case PushTargets():
            state.shared_shards.declare(order)
        case Reserve():
            io.start(ROOM, reserve if order.is_claim else grow, state, order)
        case PushCopy():
            copy = push.Push(order.shard.id, order.digest, order.target, is_repair=True, parity=order.parity)
            if push.begin(state, copy):
                io.start(REPAIR, push.run, state, copy)
        case Bring():
            bring.begin(state, order)
            io.start(READ, bring.run, state, order)
        case StepLevel(level="skipped" | "superseded"):
            io.start(DROP, abandon, state, order)
        case StepLevel() | PutEarly():
            return ranks.send_to_attempt(io, state, order)
        case FreeCopies():
            io.start(DROP, free, state, order)
        case FreeStep():
            io.start(DROP, free_step, state, order)
        case DropJob():
            io.start(DROP, drop_job, state, order)
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
