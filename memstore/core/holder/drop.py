"""Lets go of what the controller names: dropped shards, a removed job, a step that was abandoned (R7, R10, R12)."""

from __future__ import annotations

from functools import partial

from memstore.core.holder import ranks
from memstore.core.holder.effects import ForgetJob, OnStore, Procedure
from memstore.core.holder.state import HolderState
from memstore.core.wire.ids import WireShard
from memstore.core.wire.orders import AbandonStep, DropJob, DropNumber, FreeCopies
from memstore.core.wire.reports import Freed


def free(state: HolderState, order: FreeCopies) -> Procedure[None]:
    """Drop shards, and report that they are dropped."""
    yield from _drop(state, order.shards, number=order.number)
    yield from _grant(state, order.shards)


def drop_job(state: HolderState, order: DropJob) -> Procedure[None]:
    """Drop what is here of a removed job up to an attempt, and refuse its processes."""
    yield from _drop(state, order.shards, removed=(order.job, order.attempt))
    state.shared_shards.forget(order.job, order.attempt)
    yield ForgetJob(order.job)
    state.fences.remove(order.job, order.attempt)
    yield from ranks.send_fenced(state, order.job, order.attempt + 1)  # so that none waits for room
    yield from _grant(state, order.shards)


def _drop(
    state: HolderState, rows: tuple[WireShard, ...], *, number: DropNumber | None = None,
    removed: tuple[str, int] | None = None,
) -> Procedure[None]:  # fmt: skip
    """Drop shards and the room of a removed job, and report it, also if that failed."""
    try:
        yield OnStore(partial(state.store.drop_all, [row.id for row in rows], removed))
    finally:
        state.report(Freed(shards=rows, number=number))


def _grant(state: HolderState, rows: tuple[WireShard, ...]) -> Procedure[None]:
    for job in sorted({row.job for row in rows}):
        yield from ranks.grant_job(state, job)


def abandon(state: HolderState, order: AbandonStep) -> Procedure[None]:
    """Forget a step that was not committed, and tell the ranks that put it."""
    yield OnStore(partial(state.store.drop_step, order.job, order.attempt, order.step))
    yield from ranks.send_to_attempt(state, order.job, ranks.abandoned(order))
    yield from ranks.grant_job(state, order.job)
