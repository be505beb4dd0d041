"""Some chunks of a shard, brought to this host for one reader that asked for ranges of it (R7, R27).

    ordered --every chunk here and digested--> ready --its reader took it--> used --unpinned, or its link ended--> gone
      '--a source failed--> gone                 '--not taken in time, or kept too long--> gone

A partial read is an incoming replica that is never finished: it counts as no copy of the shard. Content that this host
holds anyway, of any shard, is referenced, not fetched (R13). The reader digests again what it has copied.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from msgspec import structs

from memstore.core.arena.replica_index import IncomingReplica
from memstore.core.format.manifest import decode_manifest
from memstore.core.holder.holder_io import HolderIo
from memstore.core.holder.reads import fetch
from memstore.core.holder.state import HolderState, PartialRead, ReadKey
from memstore.core.wire.orders import ChunkRange, ReadChunks, Run
from memstore.errors import CapacityError, IntegrityError, PeerUnreachable
from recovery.inventory import ShardId

PIN_S = 600.0  # longest a reader may keep a partial read (R7)
TAKE_S = 30.0  # longest it waits for its reader, who may be gone or have asked another controller: puts lack its slots


async def stage(io: HolderIo, state: HolderState, order: ReadChunks) -> dict[str, list[int]]:
    """Bring the chunks here; return {} or, per source, those that it says it lacks.

    If other readers have the room, the read gives its chunks back and waits; only one read waits at a time.

    Raises:
        TransportError, CapacityError: No evidence about the bytes (R25).
        IntegrityError: the shard has no such chunks.
    """
    with contextlib.suppress(CapacityError):
        return await _stage(io, state, order)
    partial_reads = state.partial_reads
    await io.wait_for(lambda: not partial_reads.is_tight)
    partial_reads.is_tight = True
    try:
        until_s = fetch.deadline_s(state)
        while True:
            try:
                return await _stage(io, state, order)
            except CapacityError:
                if not await fetch.may_wait(io, state, order, until_s):
                    raise
    finally:
        partial_reads.is_tight = False


async def _stage(io: HolderIo, state: HolderState, order: ReadChunks) -> dict[str, list[int]]:
    shard, spec = order.shard.id, order.spec.spec
    chunks_wanted = wanted(shard, order.chunks, spec.chunks_count)
    until_s = fetch.deadline_s(state)
    data, lack_all = await fetch.manifest(io, state, order, shard, spec.digest, until_s)
    if data is None:
        return {source: list(chunks_wanted) for source in lack_all or {state.host_id}}
    chunks = decode_manifest(data).chunks
    name = f"read-{order.read}"
    digests, sizes = [c.digest for c in chunks], [c.nbytes for c in chunks]
    replica = await io.open_incoming(name, shard, digests, sizes, order.attempt, chunks_wanted)
    is_kept = False
    try:
        # What this host holds already is good, or it is fetched like the rest.
        await io.on_store(partial(state.store.verify_slots, _held(replica)))
        await io.on_store(partial(state.store.ensure_free, len(replica.missing)))
        bad, problems = await fetch.chunks(io, state, _elsewhere(state, order), replica, sizes, until_s)
        if replica.missing and problems and not bad:
            raise PeerUnreachable("; ".join(problems))
        if replica.missing:
            return bad or {state.host_id: replica.missing}
        keep(state, order.read, PartialRead(name, replica, data, state.now() + TAKE_S))
        is_kept = True
        return {}
    finally:
        if not is_kept:
            state.store.abort_incoming(name, shard, only=replica)


def _held(replica: IncomingReplica) -> list[int]:
    """Return the slots whose content this host held before."""
    return sorted({slot for slot in (replica.slots[i] for i in replica.wanted) if slot is not None})


def _elsewhere(state: HolderState, order: ReadChunks) -> ReadChunks:
    """Return the order with another holder, if there is one, as the source of chunks that were planned from here."""
    others = [host for host in order.holders if host != state.host_id]
    if not others:
        return order
    runs = (Run("peer", others[0], run.first, run.count) if run.tier == "local" else run for run in order.runs)
    return structs.replace(order, runs=tuple(runs))


def keep(state: HolderState, key: ReadKey, read: PartialRead) -> None:
    """Keep a read for its reader, in place of an older one of that key."""
    release(state, key)
    state.partial_reads.known[key] = read


def take(state: HolderState, key: ReadKey) -> PartialRead:
    """Pin a read's staged chunks for its reader. IntegrityError if they are gone."""
    ready = state.partial_reads.known.get(key)
    if ready is None:
        raise IntegrityError("the chunks that were staged for this read are gone: read again")
    taken = state.partial_reads.known[key] = replace(ready, deadline_s=state.now() + PIN_S)
    return taken


def release(state: HolderState, key: ReadKey, only: PartialRead | None = None) -> None:
    """Release a partial read, if it is still that one: its reader has copied it, or is gone."""
    ready = state.partial_reads.known.get(key)
    if ready is not None and (only is None or ready.replica is only.replica):
        del state.partial_reads.known[key]
        state.store.abort_incoming(ready.name, ready.replica.shard, only=ready.replica)


def expire(state: HolderState) -> None:
    """Release reads that no reader took, that are past their deadline, or that are of a dropped step (R7)."""
    now = state.now()
    for key, ready in list(state.partial_reads.known.items()):
        if min(ready.deadline_s, ready.replica.deadline_s) < now:
            release(state, key)


def wanted(shard: ShardId, runs: Sequence[ChunkRange], chunks_count: int) -> tuple[int, ...]:
    """Return the chunks of runs; IntegrityError if the shard has no such chunk."""
    for first, count in ((run.first, run.count) for run in runs):
        if first + count > chunks_count:
            raise IntegrityError(
                f"{shard} has {chunks_count} chunks, the reader asks for {count} from chunk {first}: the metadata that "
                "names them is not of this shard"
            )
    return tuple(sorted({i for run in runs for i in range(run.first, run.first + run.count)}))
