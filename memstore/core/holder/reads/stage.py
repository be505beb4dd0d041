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
from memstore.core.holder.effects import (
    KeepStaged,
    OnStore,
    OpenIncoming,
    Procedure,
    SendToRank,
    Unexpected,
    Verify,
    WaitFor,
    Warn,
)
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


def run(state: HolderState, order: BringOrder) -> Procedure[None]:
    """Stage a shard, or some chunks of it, and report the end."""
    problem: str | None = None
    bad: dict[str, list[int]] = {}
    try:
        bad = yield from _bring(state, order)
        if bad:
            parts = "; ".join(f"{source}: {len(chunks)} chunks" for source, chunks in bad.items())
            problem = f"chunks damaged or missing at {parts}"
    except MemstoreError as exc:
        problem = f"{type(exc).__name__}: {exc}"
    except Exception as exc:
        yield Unexpected(f"staging {order.shard.id}", exc)
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


def check(state: HolderState, order: OrderCheck) -> Procedure[None]:
    """Let a rank compare `into=` with what was staged for it; an order that cannot be done is answered (R26)."""
    why = f"what was staged for rank {order.rank} on host {state.host_id} is gone: call get() again"
    stored = state.store.staged(StagedKey(order.job, order.rank, "round", order.round))
    direct = state.partial_reads.known.get((order.job, order.rank))
    try:
        manifest = direct.manifest if direct is not None else None
        if stored is not None:
            manifest = yield OnStore(partial(state.store.manifest, stored))
        if manifest is not None:
            for link in state.ranks.of_job(order.job):
                if link.rank == order.rank:
                    yield SendToRank(link, CheckInto(round=order.round, manifest=manifest))
            return
    except DigestMismatch as exc:
        why = str(exc)
    error = IntoError(error="RecoveryError", message=why)
    state.report(IntoChecked(job=order.job, round=order.round, rank=order.rank, error=error))


def _bring(state: HolderState, order: BringOrder) -> Procedure[dict[str, list[int]]]:
    """Bring what is ordered, or find its sources; return {}, or source -> chunks that it says it lacks."""
    if not isinstance(order, ReadChunks):
        if isinstance(order, StageShard):
            partial_read.release(state, direct_read.read_key(order))  # of an older round
        return (yield from _once(state, order))
    if direct_read.is_direct(state, order):
        return (yield from direct_read.stage(state, order, {}, partial_read.TAKE_S))
    return (yield from partial_read.stage(state, order))


def _once(state: HolderState, order: StageShard | ReadShard) -> Procedure[dict[str, list[int]]]:
    """Stage a shard; of several reads of it, as by ranks that share its state, one fetches and the others wait."""
    shard = order.shard.id
    if isinstance(order, StageShard) or direct_read.is_direct(state, order):
        return (yield from stage(state, order, shard))
    reading = state.stages.reading
    key, mine = (shard, order.spec.digest), Reading()
    while (first := reading.setdefault(key, mine)) is not mine:
        if (yield from _await_other(state, first)):
            return (yield from stage(state, order, shard))  # which fetches, if the other could not
        if reading.get(key) is first:  # the reads that waited beside this one wait for it now
            del reading[key]
    try:
        return (yield from stage(state, order, shard, mine))
    finally:
        if reading.get(key) is mine:
            del reading[key]
        mine.is_over = True


def _await_other(state: HolderState, other: Reading) -> Procedure[bool]:
    """Wait until another read has ended; return False if no chunk came for it within `BESIDE_S`."""
    left, since_s = other.left(), state.now()
    while not (yield WaitFor(lambda: other.is_over, LOOK_S)):
        if other.left() != left:
            left, since_s = other.left(), state.now()
        elif state.now() - since_s > BESIDE_S:
            return False
    return True


def stage(
    state: HolderState, order: StageShard | ReadShard, shard: ShardId, reading: Reading | None = None
) -> Procedure[dict[str, list[int]]]:
    """Return {} when the whole shard is here and verified, else source -> chunks that it says it lacks."""
    spec, me, store = order.spec.spec, state.host_id, state.store
    key = staged_key(order)
    bad = yield from _staged_here(state, order, key, shard, spec)
    if bad is None:
        return {}
    if direct_read.is_direct(state, order):
        pin_s = partial_read.PIN_S if isinstance(order, StageShard) else partial_read.TAKE_S
        return (yield from direct_read.stage(state, order, bad, pin_s))
    until_s = fetch.deadline_s(state)
    data, lack_all = yield from fetch.manifest(state, order, shard, spec.digest, until_s)
    if data is None:
        return {**bad, **{source: list(range(spec.chunks_count)) for source in lack_all or {me}}}
    sizes = [c.nbytes for c in decode_manifest(data).chunks]
    digests = [c.digest for c in decode_manifest(data).chunks]
    number = f"{order.attempt}-{order.round}" if isinstance(order, StageShard) else f"read-{order.read}"
    name = f"stage-{number}"
    replica = yield OpenIncoming(name, shard, digests, sizes, order.attempt)
    if reading is not None:
        reading.replica = replica
    try:
        yield OnStore(partial(store.ensure_free, len(replica.missing)))
        lost, problems = yield from fetch.chunks(state, order, replica, sizes, until_s)
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
    yield KeepStaged(key, *pinned)
    return {}


def _staged_here(
    state: HolderState, order: StageShard | ReadShard, key: StagedKey, shard: ShardId, spec: ShardSpec
) -> Procedure[dict[str, list[int]] | None]:
    """Keep the copy that is here and return None, if it is whole; else return the planned chunks that it lacks."""
    pinned = state.store.pin(shard, spec.digest)
    if pinned is None:
        return {}
    stored, pin = pinned
    is_kept = False
    try:
        # A reader digests what it copies and fetches bad chunks again, so it is not digested here first (R27).
        is_read = isinstance(order, ReadShard)
        lacking = sorted(stored.missing) if is_read else (yield Verify(stored))
        if not lacking and (yield from _has_manifest(state, order, stored)):
            is_kept = True
            yield KeepStaged(key, stored, pin)
            return None
        report_copy(state, stored)
    finally:
        if not is_kept:
            state.store.unpin(stored, pin)
    local = (run for run in order.runs if run.tier == "local")
    planned = {i for run in local for i in range(run.first, run.first + run.count)}
    lost = sorted(planned & set(lacking))
    return {state.host_id: lost} if lost else {}  # evidence for the next plan


def _has_manifest(state: HolderState, order: Bring, stored: StoredReplica) -> Procedure[bool]:
    """Return whether a copy's manifest is what was stored; a damaged one is brought from another copy first."""
    try:
        yield OnStore(partial(state.store.manifest, stored))
    except DigestMismatch as exc:
        yield Warn(f"host {state.host_id}: {exc}")
        until_s = fetch.deadline_s(state)
        data, _ = yield from fetch.brought_manifest(state, order, stored.shard, stored.spec.digest, until_s)
        if data is None:
            state.store.lose_manifest(stored)  # the caller reports the copy as it is now
            return False
        state.store.repair_manifest(stored, data)
    return True
