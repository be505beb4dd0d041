"""Lets go of what the controller names: dropped shards, a removed job, a step that was abandoned (R7, R10, R12)."""

from __future__ import annotations

from functools import partial

from memstore.core.holder import ranks
from memstore.core.holder.effects import ForgetJob, OnStore, Steps
from memstore.core.holder.state import HolderState
from memstore.core.wire.messages import Body, shard_from_wire


def drop(state: HolderState, body: Body) -> Steps[None]:
    """Drop shards, and with them a job that was removed; report that they are dropped, also if that failed."""
    shards = [shard_from_wire(item) for item in body["shards"]]
    removed = (str(body["removed"][0]), int(body["removed"][1])) if body.get("removed") else None
    try:
        yield OnStore(partial(state.store.drop_all, shards, removed))
    finally:
        state.report("freed", {"shards": body["shards"], "number": body.get("number")})
    if removed is not None:
        is_refused_fork = bool(body.get("is_refused_fork"))
        yield ForgetJob(*removed, is_refused_fork)
        if not is_refused_fork:
            state.fences.remove(*removed)
            yield from ranks.tell_fenced(state, removed[0], removed[1] + 1)  # so that none waits for room
    for job in sorted({shard.job for shard in shards}):
        yield from ranks.grant_job(state, job)


def abandon(state: HolderState, body: Body) -> Steps[None]:
    """Forget a step that was not committed, and tell the ranks that put it."""
    job = str(body["job"])
    yield OnStore(partial(state.store.drop_step, job, int(body["attempt"]), int(body["step"])))
    yield from ranks.tell_attempt(state, job, ranks.level_of(body))
    yield from ranks.grant_job(state, job)
