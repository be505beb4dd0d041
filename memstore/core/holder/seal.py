"""Turns a hand-over of a rank into a sealed shard, and a fence into an answer (R7, R12, R14, R21).

    handed over, stamped with the fence of that moment --the same shard is being sealed for an older link--> waits
       --its slots are its own, and this host sees in them what the rank saw--> digested, pushed meanwhile --> sealed
       '--refused, or it failed--> its slots are free, and the controller is asked to have all ranks skip the step

    fence: opened --older hand-overs are finished, or 5 s are over--> older processes notified --> answered

A hand-over that came before a fence is finished under it; one that comes later is refused.
"""

from __future__ import annotations

from collections.abc import Collection

from memstore.core.arena.replica_index import StoredReplica
from memstore.core.format.manifest import chunk_sizes
from memstore.core.holder import ranks
from memstore.core.holder.effects import (
    AnswerFence,
    CompareSample,
    CompareShared,
    DigestAndStore,
    GiveUpPut,
    Grant,
    NotePut,
    OpenFresh,
    Replicate,
    Steps,
    Unexpected,
    WaitFor,
    Warn,
)
from memstore.core.holder.link import Link
from memstore.core.holder.state import HandOver, HolderState
from memstore.core.wire.rank_messages import PutReady, StepLevel
from memstore.core.wire.reports import PutTimes
from memstore.errors import CapacityError, IntegrityError, MemstoreError
from recovery.inventory import ShardId

SEAL_S = 60.0  # longest wait for the same shard to be sealed on behalf of an older link
FENCE_DRAIN_S = 5.0


def add(state: HolderState, link: Link, ready: PutReady) -> HandOver | None:
    """Count a hand-over that came completely, so that a fence waits for it (R21); None if its link is retired."""
    if link.is_retired:
        return None
    put = HandOver(link, ready, state.fences.first(link.job))
    state.puts.pending[put.key] = state.puts.pending.get(put.key, 0) + 1
    return put


def done(state: HolderState, put: HandOver) -> None:
    """Count a hand-over as finished: sealed, failed, or to be handed over again on another link."""
    left = state.puts.pending.pop(put.key, 0) - 1
    if left > 0:
        state.puts.pending[put.key] = left


def run(state: HolderState, put: HandOver) -> Steps[None]:
    """Seal a hand-over; if that fails, have the step given up on all ranks alike (R12)."""
    shard, why, is_failed = put.shard, "", True
    try:
        try:
            why = yield from _seal(state, put, shard)
        except MemstoreError as exc:
            why, is_failed = f"{type(exc).__name__}: {exc}", not isinstance(exc, CapacityError)
            yield Warn(f"put of {shard} failed on host {state.host_id}: {why}")
        except Exception as exc:
            yield Unexpected(f"put of {shard} on host {state.host_id}", exc)
            why = f"{type(exc).__name__}: {exc}"
        if why:
            failed = StepLevel(attempt=shard.attempt, step=shard.step, level="failed", reason=why)
            yield from ranks.tell_level(state, put.link, failed)
            yield GiveUpPut(put.link, shard, why, is_failed)
    finally:
        done(state, put)


def _seal(state: HolderState, put: HandOver, shard: ShardId) -> Steps[str]:
    """Digest a hand-over, store, report and push it; return why that is impossible, or ""."""
    sealing = state.puts.sealing
    link = put.link
    is_free = yield WaitFor(lambda: link.is_retired or shard not in sealing, SEAL_S)
    if link.is_retired:
        return ""  # the new link brings it again
    if not is_free:
        raise IntegrityError(f"an earlier link's hand-over of {shard} has not been sealed for {SEAL_S:g} s")
    sealing.add(shard)
    try:
        known, has_targets, why = yield from _stored(state, put, shard)
    finally:
        sealing.discard(shard)
    if known is None:
        return why
    before = yield NotePut(known, shared_count(put.ready))
    sealed = StepLevel(attempt=shard.attempt, step=shard.step, level="sealed")
    yield from ranks.tell_level(state, put.link, sealed)
    state.sealed(known, _measured(put.ready, state.now(), before))
    yield CompareShared(shard)
    if not has_targets:
        yield from ranks.tell_replicated(state, shard)
    yield Grant(state.ranks.current(put.link))
    return ""


def _stored(state: HolderState, put: HandOver, shard: ShardId) -> Steps[tuple[StoredReplica | None, bool, str]]:
    """Return the stored replica and whether copies of it are to come; or None and the reason."""
    ready, store = put.ready, state.store
    # The whole message is checked before a slot changes its owner; list lengths are checked, not taken from the rank.
    slots = ready.slots
    shared_count(ready)
    if len(slots) != -(-ready.nbytes // store.chunk_bytes):
        raise IntegrityError(f"{shard} was handed over with {len(slots)} slots for {ready.nbytes} bytes")
    is_lost = ready.is_lost or ready.arena != store.arena_identity
    known, is_mine = store.take_over(shard, put.link.owner, None if is_lost else slots)
    is_old = shard.attempt < put.fence
    is_refused = known is None and (is_old or not is_mine)
    if is_mine and (known is not None or is_refused):
        store.give_back(slots)
    if is_refused:
        return None, False, (
            f"attempt {put.fence} was opened" if is_old
            else "the rank no longer had the lease of these slots (has this host's holder restarted?)"
        )  # fmt: skip
    if known is not None:
        return known, (yield Replicate(shard, known.spec.digest)), ""
    why = yield from _not_seen(state, shard, ready)
    if why:
        store.give_back(slots)
        return None, False, why
    return *(yield from _fresh(state, shard, ready)), ""


def _not_seen(state: HolderState, shard: ShardId, ready: PutReady) -> Steps[str]:
    """Return why these slots do not hold what the rank filled in, as far as a sample of its bytes shows, or "".

    The slots were taken over before, so they are this put's alone: no end of a lease frees them while it looks.
    """
    try:
        found = yield CompareSample(ready.slots, ready.nbytes, ready.sample)
    except IntegrityError as exc:
        return f"{shard} was handed over, but {exc}"
    if not found:
        return ""
    why = (
        f"what rank {shard.rank} filled is not what its host sees: {len(found)} of {len(ready.slots)} chunks "
        f"differ, the first is chunk {found[0]} in slot {ready.slots[found[0]]}, so nothing of it is kept. Restart "
        "the rank: it has another file mapped than its holder, or writes on after its put"
    )
    yield Warn(f"host {state.host_id}, job {shard.job}: {why}")
    return why


def _fresh(state: HolderState, shard: ShardId, ready: PutReady) -> Steps[tuple[StoredReplica, bool]]:
    """Digest, store, and push meanwhile: the first chunks are on the wire before the last are digested."""
    fresh = yield OpenFresh(shard, ready.slots, chunk_sizes(ready.nbytes, state.store.chunk_bytes))
    try:
        has_targets = yield Replicate(shard, "", fresh)
    except BaseException as exc:
        fresh.fail(repr(exc))
        state.store.give_back(ready.slots)
        raise
    try:
        shelved = yield DigestAndStore(shard, ready, fresh)
    except BaseException as exc:
        fresh.fail(f"{type(exc).__name__}: {exc}")
        raise
    return shelved, has_targets


def shared_count(ready: PutReady) -> int | None:
    """Return how many of a put's first chunks its rank shares; None if it names no shard. MemstoreError."""
    if ready.shared_chunks is not None and ready.shared_chunks > len(ready.slots):
        raise MemstoreError(f"a put of {len(ready.slots)} chunks shares {ready.shared_chunks} of them")
    return ready.shared_chunks


def _measured(ready: PutReady, now: float, before: int | None) -> PutTimes:
    """Return the times of a put for the report of its seal: the seconds for which it blocked, and since it began.

    The rank's monotonic clock is this host's, so its age needs no agreement between machines.
    """
    is_known = 0.0 < ready.began_s <= now
    age_s = now - ready.began_s if is_known else ready.stall_s
    return PutTimes(stall_s=ready.stall_s, age_s=age_s, unchanged_since=before)


# -- fences -------------------------------------------------------------------------------------------


def open_fence(state: HolderState, job: str, attempt: int) -> None:
    """Refuse from now on what older attempts hand over and what peers offer of them."""
    state.fences.open(job, attempt)


def fence(state: HolderState, job: str, attempt: int, members: Collection[str]) -> Steps[None]:
    """Notify older processes that they are refused, finish their hand-overs, and answer with the inventory (R21)."""
    state.store.abort_older(job, attempt)
    pending = state.puts.pending
    if not (yield WaitFor(lambda: not any(j == job and a < attempt for j, a, _ in pending), FENCE_DRAIN_S)):
        yield Warn(f"job {job}: puts of older attempts are still digested {FENCE_DRAIN_S:g} s after a fence")
    yield from ranks.tell_fenced(state, job, attempt, members)
    yield AnswerFence(job, attempt)
