"""Carries out durable orders: slices of shards, markers, removals, lists; never on a path that a put waits for (R31).

    slice: ordered --> its chunks copied, each digested --its turn under the job's cap--> written --> reported
              '--the step is to be written no more--> nothing is said      '--a chunk went bad--> reported as failed

The chunks of a slice are copied first: a pin that is held while storage hangs would keep slots that puts need. Then
those of the order's base are looked at: what is equal there is not written again. If it is gone all chunks are. Of
chunks that changed only the blocks that did are written, where this holder wrote the base and remembers its blocks.
"""

from __future__ import annotations

from collections.abc import Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from msgspec import structs

from memstore.core.arena.replica_index import StoredReplica
from memstore.core.durable.increments import Base, Origins, block_digests, make_patch, plan_origins
from memstore.core.durable.markers import slice_uses
from memstore.core.durable.paths import other_key
from memstore.core.durable.slice_format import slice_range, slice_tag
from memstore.core.format.manifest import decode_manifest
from memstore.core.holder.holder_io import HolderIo, Lane, Stop, Storage
from memstore.core.holder.inventory import report_copy
from memstore.core.holder.state import HolderState
from memstore.core.wire.ids import WireUse
from memstore.core.wire.orders import DurableOrder, ListMarkers, RemoveStep, SlicesOfShard, WriteMarker, WriteSlices
from memstore.core.wire.reports import MarkersListed, MarkerWritten, SliceWritten, StepRemoved
from memstore.errors import IntegrityError, MemstoreError
from recovery.inventory import DurableMarker, ShardId, SliceRef, SliceUse

T = TypeVar("T")


def obey(io: HolderIo, state: HolderState, order: DurableOrder) -> None:
    """Begin what an order asks for: each storage has threads of its own, and so has a job with a cap."""
    storage = (order.durable.url,)
    match order:
        case WriteSlices():
            paced = (*storage, order.job) if order.durable.bytes_per_s else storage
            for piece in slices(state, order):
                io.start(Lane("write", paced), write, state, piece)
        case WriteMarker():
            io.start(Lane("write", storage), marker, state, order)
        case RemoveStep():
            io.start(Lane("write", storage), remove, state, order)
        case ListMarkers():
            io.start(Lane("list", storage), markers, state, order)


@dataclass(frozen=True)
class Slice:
    """One slice of a shard that is to be written."""

    order: WriteSlices
    part: SlicesOfShard
    number: int
    stop: Stop
    base_digests: list[bytes]  # of the base's chunks, shared by the shard's slices; empty until one has read them


def slices(state: HolderState, order: WriteSlices) -> list[Slice]:
    """Return the slices of an order, each to be written; those of steps stop that it does not name.

    An order without slices stops its own step's.
    """
    job, step = key = order.job, order.step.id
    if not order.parts:
        state.stops.setdefault(key, Stop()).is_set = True
        return []
    live = {step, *(row.id for row in order.beside)}
    for old in [k for k in state.stops if k[0] == job and k[1] not in live]:
        state.stops.pop(old).is_set = True
    if key not in state.stops or state.stops[key].is_set:  # more slices may be ordered, and a step may be begun again
        state.stops[key] = Stop()
    state.keep_blocks(job, live | {part.base.step.id for part in order.parts if part.base is not None})
    flag = state.stops[key]
    known: list[list[bytes]] = [[] for _ in order.parts]
    parts = zip(order.parts, known, strict=True)
    return [Slice(order, part, number, flag, digests) for part, digests in parts for number in part.numbers]


async def write(io: HolderIo, state: HolderState, piece: Slice) -> None:
    """Write one slice and report it; report nothing if it is not wanted any more."""
    order, shard, number = piece.order, piece.part.shard.id, piece.number
    report = SliceWritten(job=order.job, step=order.step, rank=shard.rank, number=number, key=None, problem=None)
    try:
        if piece.stop.is_set:
            return
        storage = await io.open_durable(order.durable)
        report = structs.replace(report, key=storage.key)
        if order.key is not None and order.key != storage.key:
            report = structs.replace(report, problem=other_key(order.key, storage.key))
        else:
            stored, manifest, chunks = await _copied(io, state, shard, piece.part.digest, number)
            origins: Origins = ()
            bases: tuple[SliceRef, ...] = ()
            if piece.part.bases_max:
                base = await _base(io, storage, piece, stored)
                compared = partial(_planned, state, piece, stored, chunks, base)
                origins, bases, chunks, state.blocks[shard, piece.part.digest, number] = await io.on_store(compared)
            if not await _is_wanted(io, state, piece, sum(map(len, chunks))):
                return
            if not await io.write_slice(storage, shard, stored.spec, number, manifest, chunks, piece.stop, origins):
                return
            report = structs.replace(report, use=WireUse.of([SliceUse(slice_tag(origins), bases)]))
    except MemstoreError as exc:
        report = structs.replace(report, problem=str(exc))
    except Exception as exc:
        await io.unexpected("durable write", exc)
        report = structs.replace(report, problem=repr(exc))
    state.report(report)


async def _base(io: HolderIo, storage: Storage, piece: Slice, stored: StoredReplica) -> Base | None:
    """Return the slice of the order's base; None if there is none, or it is not there."""
    base, shard, spec, number = piece.part.base, piece.part.shard.id, stored.spec, piece.number
    if base is None:
        return None
    ref = SliceRef(base.step.id, base.digest, base.tags[number] if base.tags else "")
    try:
        if not piece.base_digests:
            place = structs.replace(piece.order.durable, key=storage.key, tags=base.tags)
            manifest = await io.read_durable_manifest(place, _shard_of(shard, ref), spec._replace(digest=ref.digest))
            piece.base_digests[:] = [chunk.digest for chunk in decode_manifest(manifest).chunks]
        return Base(ref, piece.base_digests, await io.read_slice_headers(storage, shard, spec, number, ref))
    except IntegrityError as exc:
        await io.warn(f"durable write: slice {number} of {shard} is written whole: {exc}")
        return None


def _planned(
    state: HolderState, piece: Slice, stored: StoredReplica, chunks: list[bytes], base: Base | None
) -> tuple[Origins, tuple[SliceRef, ...], list[bytes], list[bytes]]:
    """Return which older slice has each chunk, all that a reader opens, what is written, and the blocks' digests."""
    spec, number, shard, here = stored.spec, piece.number, piece.part.shard.id, slice_range(stored.spec, piece.number)
    if base is None:
        return (), (), chunks, [block_digests(chunk) for chunk in chunks]
    same = [stored.digests[index] == base.digests[index] for index in here]
    known = state.blocks.get((_shard_of(shard, base.ref), base.ref.digest, number), [b""] * len(here))
    rows = list(zip(chunks, same, known, strict=True))
    blocks = [was if is_same and was else block_digests(chunk) for chunk, is_same, was in rows]
    patches = {
        index: make_patch(chunk, now, was)
        for index, now, (chunk, is_same, was) in zip(here, blocks, rows, strict=True)
        if was and not is_same
    }
    origins, bases = plan_origins(spec, number, stored.digests, base, piece.part.bases_max, patches)
    written = [
        chunk if ref is None else patches.get(index, b"")
        for index, chunk, ref in zip(here, chunks, origins, strict=True)
    ]
    return origins, bases, written, blocks


def _shard_of(shard: ShardId, ref: SliceRef) -> ShardId:
    """Return the same rank's shard of an older step."""
    return shard._replace(attempt=ref.step.attempt, step=ref.step.step)


async def _is_wanted(io: HolderIo, state: HolderState, piece: Slice, nbytes: int) -> bool:
    """Wait for a slice's turn; return False if it is not wanted any more."""
    wait_s = await io.slice_turn(piece.order.job, nbytes, piece.order.durable.bytes_per_s)
    return not (await io.wait_for(lambda: piece.stop.is_set or state.is_stopping(), wait_s))


async def _copied(
    io: HolderIo, state: HolderState, shard: ShardId, digest: str, number: int
) -> tuple[StoredReplica, bytes, list[bytes]]:
    """Copy the chunks of a slice; one that went bad meanwhile is quarantined, so that repair replaces it."""
    pinned = state.store.pin(shard, digest)
    if pinned is None:
        raise IntegrityError(f"{shard} is not here any more")
    stored, pin = pinned
    try:
        manifest = await io.on_store(partial(state.store.manifest, stored))
        chunks, bad = await io.copy_slice(stored, number)
        if bad is not None:
            await io.verify(stored)
            report_copy(state, stored)
            raise IntegrityError(f"chunk {bad} of {shard} went bad before it was written")
        return stored, manifest, chunks
    finally:
        state.store.unpin(stored, pin)


async def marker(io: HolderIo, state: HolderState, order: WriteMarker) -> None:
    """Write the marker of a step whose parts are all there, report it, then remove what abandoned writes left."""
    step, place, specs = order.step.id, order.durable, {rank: spec.spec for rank, spec in order.specs.items()}
    record = DurableMarker(step, len(specs), specs, order.key, slice_uses(order.uses), order.is_trusted)
    _, problem = await outcome(io, "durable write", io.store_marker(place, order.job, record, order.lineage))
    done = MarkerWritten(job=order.job, step=order.step, key=order.key, problem=None, is_trusted=order.is_trusted)
    state.report(structs.replace(done, problem=problem or None))
    if problem:
        return
    keep = {step, *(row.id for row in order.beside)}
    _, problem = await outcome(io, "durable write", io.sweep_durable(place, order.job, keep))
    if problem:
        await io.warn(f"durable clean-up: {problem}")


async def remove(io: HolderIo, state: HolderState, order: RemoveStep) -> None:
    """Remove a step from durable storage and report it."""
    unmarked = order.only_unmarked
    work = io.remove_durable(order.durable, order.job, order.step.id, only_unmarked=unmarked)
    _, problem = await outcome(io, "durable write", work)
    state.report(StepRemoved(job=order.job, step=order.step, only_unmarked=unmarked, problem=problem or None))


async def markers(io: HolderIo, state: HolderState, order: ListMarkers) -> None:
    """List the durable markers of a job, and report them with the faults of the others."""
    step = order.check.id if order.check is not None else None
    found, problem = await outcome(io, "durable markers", io.read_markers(order.durable, order.job, step))
    state.report(MarkersListed(job=order.job, call=order.call, found=found, problem=problem))


async def outcome(io: HolderIo, what: str, work: Coroutine[Any, Any, T]) -> tuple[T | None, str]:
    """Do some work; return what it gave, or why it could not be done."""
    try:
        return await work, ""
    except MemstoreError as exc:
        return None, str(exc)
    except Exception as exc:
        await io.unexpected(what, exc)
        return None, repr(exc)
