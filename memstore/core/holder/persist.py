"""Carries out durable orders: slices of shards, markers, removals, lists; never on a path that a put waits for (R31).

    slice: ordered --its turn under the job's cap--> its chunks copied, each digested --> written --> reported
              '--the step is to be written no more--> nothing is said      '--a chunk went bad--> reported as failed

The chunks of a slice are copied first: a pin that is held while storage hangs would keep slots that puts need.
"""

from __future__ import annotations

from functools import partial

import msgspec

from memstore.core.arena.replica_index import StoredReplica
from memstore.core.holder.effects import (
    CopySlice,
    Effect,
    MarkersFound,
    OnStore,
    OpenDurable,
    Procedure,
    ReadMarkers,
    RemoveDurable,
    SliceTurn,
    Stop,
    StoreMarker,
    SweepDurable,
    Unexpected,
    Verify,
    WaitFor,
    Warn,
    WriteSlice,
)
from memstore.core.holder.inventory import report_copy
from memstore.core.holder.state import HolderState
from memstore.core.wire.orders import (
    ListMarkers,
    NameKey,
    RemoveStep,
    RemoveTornStep,
    StopWriting,
    WriteMarker,
    WriteSlices,
)
from memstore.core.wire.reports import (
    KeyNamed,
    MarkersListed,
    MarkersUnread,
    MarkerWritten,
    SliceWritten,
    TornStepRemoved,
)
from memstore.errors import IntegrityError, MemstoreError
from recovery.inventory import DurableMarker, ShardId


def stop(state: HolderState, order: StopWriting) -> None:
    """Write nothing more of a step."""
    state.stops.setdefault((order.job, order.step.id), Stop()).is_set = True


def slices(state: HolderState, order: WriteSlices) -> list[Procedure[None]]:
    """Return the procedures that write the pieces of an order; those of another step of the job stop."""
    job, step = key = order.job, order.step.id
    for old in [k for k in state.stops if k[0] == job and k[1] != step]:
        state.stops.pop(old).is_set = True
    if key not in state.stops or state.stops[key].is_set:  # more slices may be ordered, and a step may be begun again
        state.stops[key] = Stop()
    mark = state.stops[key]
    return [
        _slice(state, order, part.shard.id, part.digest, number, mark)
        for part in order.parts
        for number in part.numbers
    ]


def _slice(
    state: HolderState, order: WriteSlices, shard: ShardId, digest: str, number: int, mark: Stop
) -> Procedure[None]:
    """Write one slice and report it; report nothing if it is not wanted any more."""
    report = SliceWritten(job=order.job, step=order.step, rank=shard.rank, number=number, key=order.key, problem=None)
    try:
        if not (yield from _is_wanted(state, order, shard, digest, number, mark)):
            return
        storage = yield OpenDurable(order.durable)
        if storage.key != order.key:
            key, asked = storage.key, order.key
            why = f"durable_key_file has key {key} here, ordered was {asked}: put the same file on all hosts"
            report = msgspec.structs.replace(report, key=key, problem=why)
        else:
            stored, manifest, chunks = yield from _copied(state, shard, digest, number)
            if not (yield WriteSlice(storage, shard, stored.spec, number, manifest, chunks, mark)):
                return
    except MemstoreError as exc:
        report = msgspec.structs.replace(report, problem=str(exc))
    except Exception as exc:
        yield Unexpected("durable write", exc)
        report = msgspec.structs.replace(report, problem=repr(exc))
    state.report(report)


def _is_wanted(
    state: HolderState, order: WriteSlices, shard: ShardId, digest: str, number: int, mark: Stop
) -> Procedure[bool]:
    """Wait for a slice's turn; return False if it is not wanted any more."""
    if mark.is_set:
        return False
    pinned = state.store.pin(shard, digest)
    if pinned is None:
        return True
    state.store.unpin(*pinned)  # its turn may be far off
    wait_s = yield SliceTurn(order.job, pinned[0], number, order.durable.bytes_per_s)
    return not (yield WaitFor(lambda: mark.is_set or state.is_stopping(), wait_s))


def _copied(
    state: HolderState, shard: ShardId, digest: str, number: int
) -> Procedure[tuple[StoredReplica, bytes, list[bytes]]]:
    """Copy the chunks of a slice; one that went bad meanwhile is quarantined, so that repair replaces it."""
    pinned = state.store.pin(shard, digest)
    if pinned is None:
        raise IntegrityError(f"{shard} is not here any more")
    stored, pin = pinned
    try:
        manifest = yield OnStore(partial(state.store.manifest, stored))
        chunks, bad = yield CopySlice(stored, number)
        if bad is not None:
            yield Verify(stored)
            report_copy(state, stored)
            raise IntegrityError(f"chunk {bad} of {shard} went bad before it was written")
        return stored, manifest, chunks
    finally:
        state.store.unpin(stored, pin)


def marker(state: HolderState, order: WriteMarker) -> Procedure[None]:
    """Write the marker of a step whose parts are all there, report it, then remove what abandoned writes left."""
    step, place, specs = order.step.id, order.durable, {row.rank: row.spec.spec for row in order.specs}
    record = DurableMarker(step, len(specs), specs, order.key)
    problem = yield from _problem_of(StoreMarker(place, order.job, record, order.lineage))
    state.report(MarkerWritten(job=order.job, step=order.step, key=order.key, problem=problem))
    if problem is None:
        yield from _quietly(SweepDurable(place, order.job, step))


def remove(order: RemoveStep) -> Procedure[None]:
    """Remove a step from durable storage."""
    yield from _quietly(RemoveDurable(order.durable, order.job, order.step.id, order.only_unmarked))


def remove_torn(state: HolderState, order: RemoveTornStep) -> Procedure[None]:
    """Remove a torn step from durable storage and report it: the controller waits for that."""
    problem = yield from _problem_of(RemoveDurable(order.durable, order.job, order.step.id, only_unmarked=False))
    state.report(TornStepRemoved(job=order.job, step=order.step, problem=problem))


def say_key(state: HolderState, order: NameKey) -> Procedure[None]:
    """Report the name of the key that is in this host's key file now."""
    key, problem = "", None
    try:
        key = (yield OpenDurable(order.durable)).key
    except MemstoreError as exc:
        problem = str(exc)
    except Exception as exc:
        yield Unexpected("durable key", exc)
        problem = repr(exc)
    state.report(KeyNamed(job=order.job, key=key, problem=problem))


def markers(state: HolderState, order: ListMarkers) -> Procedure[None]:
    """List the durable markers of a job, and report them with the faults of the others."""
    step = order.check.id if order.check is not None else None
    try:
        found: MarkersFound = yield ReadMarkers(order.durable, order.job, step)
    except MemstoreError as exc:
        why = str(exc)
    except Exception as exc:
        yield Unexpected("durable markers", exc)
        why = repr(exc)
    else:
        state.report(
            MarkersListed(
                job=order.job, call=order.call, markers=found.markers, key=found.key, damaged=found.damaged,
                lacks=found.lacks,
            )
        )  # fmt: skip
        return
    state.report(MarkersUnread(job=order.job, call=order.call, why=why))


def _problem_of(effect: Effect) -> Procedure[str | None]:
    """Have an effect carried out; return why it could not be, or None."""
    try:
        yield effect
    except MemstoreError as exc:
        return str(exc)
    except Exception as exc:
        yield Unexpected("durable write", exc)
        return repr(exc)
    return None


def _quietly(effect: Effect) -> Procedure[None]:
    try:
        yield effect
    except MemstoreError as exc:
        yield Warn(f"durable clean-up: {exc}")
