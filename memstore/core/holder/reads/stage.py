"""Brings a shard to this host and verifies every byte of it, as the controller's plan says (R23, R24).

ordered --it is here and whole--> kept for its reader, pinned --> reported
   '--fetched (fetch.py): every chunk came--> stored --> kept for its reader
         '--a source lacks chunks--> reported as evidence: the controller plans again
         '--out of reach, no room, too late--> reported as no evidence: it fails the get, never the step (R25)

Most reads bring no bytes here: their readers fetch what is not here themselves (`direct_read.py`). Of several reads of
one shard that do, one fetches and the others wait; one that brings nothing for 10 s is overtaken.
"""

from __future__ import annotations

from functools import partial

from memstore.core.arena.replica_index import StagedKey, StoredReplica
from memstore.core.format.manifest import decode_manifest
from memstore.core.holder.holder_io import HolderIo
from memstore.core.holder.inventory import report_copy
from memstore.core.holder.reads import direct_read, fetch, partial_read
from memstore.core.holder.state import HolderState, Reading
from memstore.core.wire.orders import Bring, OrderCheck, ReadChunks, ReadShard, StageShard
from memstore.core.wire.rank_messages import CheckInto
from memstore.core.wire.reports import IntoChecked, IntoError, ReadEnded, StageEnded
from memstore.errors import DigestMismatch, IntegrityError, MemstoreError, PeerUnreachable
from recovery.inventory import ShardId, ShardSpec

BringOrder = StageShard | ReadShard | ReadChunks
BESIDE_S = 10.0  # without a chunk, until a read that waits for another one of the same shard takes its place
LOOK_S = 0.5  # between two looks at how far that one has come


def staged_key(order: StageShard | ReadShard) -> StagedKey:
    """Return under which key what an order brings is kept for its reader."""
    if isinstance(order, StageShard):
        return StagedKey(order.job, order.rank, "round", order.round)
    return StagedKey(order.job, order.rank, "read", order.read)


def begin(state: HolderState, order: BringOrder) -> None:
    """Note an order of a round: only for the newest one of a rank are fetches tried again, and is a read kept."""
    if isinstance(order, StageShard):
        state.stages.newest[order.job, order.rank] = order


async def run(io: HolderIo, state: HolderState, order: BringOrder) -> None:
    """Stage a shard, or some chunks of it, and report the end."""
    problem: str | None = None
    bad: dict[str, list[int]] = {}
    try:
        bad = await _bring(io, state, order)
        if bad:
            parts = "; ".join(f"{source}: {len(chunks)} chunks" for source, chunks in bad.items())
            problem = f"chunks damaged or missing at {parts}"
    except MemstoreError as exc:
        problem = f"{type(exc).__name__}: {exc}"
    except Exception as exc:
        await io.unexpected(f"staging {order.shard.id}", exc)
        problem = repr(exc)
    lacking = {source: tuple(chunks) for source, chunks in bad.items()}
    shard, digest = order.shard, order.spec.digest
    if isinstance(order, StageShard):
        report: StageEnded | ReadEnded = StageEnded(
            job=order.job, round=order.round, rank=order.rank, shard=shard, digest=digest, problem=problem, bad=lacking
        )
    else:
        is_partial = order.read in state.partial_reads.known
        report = ReadEnded(
            read=order.read, shard=shard, digest=digest, problem=problem, bad=lacking, is_partial=is_partial
        )
    state.report(report)


async def check(io: HolderIo, state: HolderState, order: OrderCheck) -> None:
    """Let a rank compare `into=` with what was staged for it; an order that cannot be done is answered (R26)."""
    why = f"what was staged for rank {order.rank} on host {state.host_id} is gone: call get() again"
    stored = state.store.staged(StagedKey(order.job, order.rank, "round", order.round))
    direct = state.partial_reads.known.get((order.job, order.rank))
    try:
        manifest = direct.manifest if direct is not None else None
        if stored is not None:
            manifest = await io.on_store(partial(state.store.manifest, stored))
        if manifest is not None:
            for link in state.ranks.of_job(order.job):
                if link.rank == order.rank:
                    await io.send_to_rank(link, CheckInto(round=order.round, manifest=manifest))
            return
    except DigestMismatch as exc:
        why = str(exc)
    error = IntoError(error="RecoveryError", message=why)
    state.report(IntoChecked(job=order.job, round=order.round, rank=order.rank, error=error))


async def _bring(io: HolderIo, state: HolderState, order: BringOrder) -> dict[str, list[int]]:
    """Bring what is ordered, or find its sources; return {}, or source -> chunks that it says it lacks."""
    if not isinstance(order, ReadChunks):
        if isinstance(order, StageShard):
            partial_read.release(state, direct_read.read_key(order))  # of an older round
        return await _once(io, state, order)
    if direct_read.is_direct(state, order):
        return await direct_read.stage(io, state, order, {}, partial_read.TAKE_S)
    return await partial_read.stage(io, state, order)


async def _once(io: HolderIo, state: HolderState, order: StageShard | ReadShard) -> dict[str, list[int]]:
    """Stage a shard; of several reads of it, as by ranks that share its state, one fetches and the others wait."""
    shard = order.shard.id
    if isinstance(order, StageShard) or direct_read.is_direct(state, order):
        return await stage(io, state, order, shard)
    reading = state.stages.reading
    key, mine = (shard, order.spec.digest), Reading()
    while (first := reading.setdefault(key, mine)) is not mine:
        if await _await_other(io, state, first):
            return await stage(io, state, order, shard)  # which fetches, if the other could not
        if reading.get(key) is first:  # the reads that waited beside this one wait for it now
            del reading[key]
    try:
        return await stage(io, state, order, shard, mine)
    finally:
        if reading.get(key) is mine:
            del reading[key]
        mine.is_over = True


async def _await_other(io: HolderIo, state: HolderState, other: Reading) -> bool:
    """Wait until another read has ended; return False if no chunk came for it within `BESIDE_S`."""
    left, since_s = other.left(), state.now()
    while not await io.wait_for(lambda: other.is_over, LOOK_S):
        if other.left() != left:
            left, since_s = other.left(), state.now()
        elif state.now() - since_s > BESIDE_S:
            return False
    return True


async def stage(
    io: HolderIo, state: HolderState, order: StageShard | ReadShard, shard: ShardId, reading: Reading | None = None
) -> dict[str, list[int]]:
    """Return {} when the whole shard is here and verified, else source -> chunks that it says it lacks."""
    spec, me, store = order.spec.spec, state.host_id, state.store
    key = staged_key(order)
    bad = await _staged_here(io, state, order, key, shard, spec)
    if bad is None:
        return {}
    if direct_read.is_direct(state, order):
        pin_s = partial_read.PIN_S if isinstance(order, StageShard) else partial_read.TAKE_S
        return await direct_read.stage(io, state, order, bad, pin_s)
    until_s = fetch.deadline_s(state)
    data, lack_all = await fetch.manifest(io, state, order, shard, spec.digest, until_s)
    if data is None:
        return {**bad, **{source: list(range(spec.chunks_count)) for source in lack_all or {me}}}
    sizes = [c.nbytes for c in decode_manifest(data).chunks]
    digests = [c.digest for c in decode_manifest(data).chunks]
    number = f"{order.attempt}-{order.round}" if isinstance(order, StageShard) else f"read-{order.read}"
    name = f"stage-{number}"
    replica = await io.open_incoming(name, shard, digests, sizes, order.attempt)
    if reading is not None:
        reading.replica = replica
    try:
        await io.on_store(partial(store.ensure_free, len(replica.missing)))
        lost, problems = await fetch.chunks(io, state, order, replica, sizes, until_s)
        for source, chunks in lost.items():
            bad.setdefault(source, []).extend(chunks)
        if replica.missing and problems and not bad:
            raise PeerUnreachable("; ".join(problems))
        if replica.missing:
            return bad or {me: replica.missing}
        stored = store.finish(name, data)
    finally:
        store.abort_incoming(name, shard)
    report_copy(state, stored)
    pinned = store.pin(shard, spec.digest)
    if pinned is None:
        raise IntegrityError(f"{shard} was dropped while it was staged")
    await io.keep_staged(key, *pinned)
    return {}


async def _staged_here(
    io: HolderIo, state: HolderState, order: StageShard | ReadShard, key: StagedKey, shard: ShardId, spec: ShardSpec
) -> dict[str, list[int]] | None:
    """Keep the copy that is here and return None, if it is whole; else return the planned chunks that it lacks."""
    pinned = state.store.pin(shard, spec.digest)
    if pinned is None:
        return {}
    stored, pin = pinned
    is_kept = False
    try:
        # A reader digests what it copies and fetches bad chunks again, so it is not digested here first (R27).
        is_read = isinstance(order, ReadShard)
        lacking = sorted(stored.missing) if is_read else (await io.verify(stored))
        if not lacking and (await _has_manifest(io, state, order, stored)):
            is_kept = True
            await io.keep_staged(key, stored, pin)
            return None
        report_copy(state, stored)
    finally:
        if not is_kept:
            state.store.unpin(stored, pin)
    local = (run for run in order.runs if run.tier == "local")
    planned = {i for run in local for i in range(run.first, run.first + run.count)}
    lost = sorted(planned & set(lacking))
    return {state.host_id: lost} if lost else {}  # evidence for the next plan


async def _has_manifest(io: HolderIo, state: HolderState, order: Bring, stored: StoredReplica) -> bool:
    """Return whether a copy's manifest is what was stored; a damaged one is brought from another copy first."""
    try:
        await io.on_store(partial(state.store.manifest, stored))
    except DigestMismatch as exc:
        await io.warn(f"host {state.host_id}: {exc}")
        until_s = fetch.deadline_s(state)
        data, _ = await fetch.brought_manifest(io, state, order, stored.shard, stored.spec.digest, until_s)
        if data is None:
            state.store.lose_manifest(stored)  # the caller reports the copy as it is now
            return False
        state.store.repair_manifest(stored, data)
    return True
