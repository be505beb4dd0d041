"""Lets go of what the controller names: dropped shards, a removed job, a step that was abandoned (R7, R10, R12)."""

from __future__ import annotations

from functools import partial

from memstore.core.holder import ranks
from memstore.core.holder.holder_io import HolderIo
from memstore.core.holder.state import HolderState
from memstore.core.wire.ids import WireShard
from memstore.core.wire.orders import DropJob, FreeCopies, StepLevel, TermNumber
from memstore.core.wire.reports import Freed


async def free(io: HolderIo, state: HolderState, order: FreeCopies) -> None:
    """Drop shards, and report that they are dropped."""
    await _drop(io, state, order.shards, number=order.number)
    await _grant(io, state, order.shards)


async def drop_job(io: HolderIo, state: HolderState, order: DropJob) -> None:
    """Drop what is here of a removed job up to an attempt, and refuse its processes."""
    await _drop(io, state, order.shards, removed=(order.job, order.attempt))
    state.shared_shards.forget(order.job, order.attempt)
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
    """Forget a step that was not committed, and tell the ranks that put it."""
    await io.on_store(partial(state.store.drop_step, level.job, level.attempt, level.step))
    await ranks.send_to_attempt(io, state, level)
    await ranks.grant_job(io, state, level.job)
