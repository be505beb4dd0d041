"""Turns a submission of a rank into a sealed shard, and a fence into an answer (R7, R12, R14, R21).

    submitted, stamped with the fence of that moment --the same shard is being sealed for an older link--> waits
       --its slots are its own, and this host sees in them what the rank saw--> digested, pushed meanwhile --> sealed
       '--refused, or it failed--> its slots are free, and the controller is asked to have all ranks skip the step

    fence: opened --older submissions are finished, or 5 s are over--> older processes notified --> answered

A submission that came before a fence is finished under it; one that comes later is refused.
"""

from __future__ import annotations

from collections.abc import Collection

from memstore.core.arena.replica_index import StoredReplica
from memstore.core.format.manifest import DIGEST_BYTES, chunk_sizes, split_digests
from memstore.core.holder import ranks
from memstore.core.holder.holder_io import HolderIo, Link
from memstore.core.holder.inventory import answer_fence, report_copy
from memstore.core.holder.puts import equal_ranks, push
from memstore.core.holder.reads.ready import end_older
from memstore.core.holder.state import HolderState, SubmittedPut
from memstore.core.wire.calls import SkipStep
from memstore.core.wire.orders import StepLevel
from memstore.core.wire.rank_messages import PutReady
from memstore.core.wire.reports import PutTimes
from memstore.errors import CapacityError, IntegrityError, MemstoreError
from recovery.inventory import ShardId

SEAL_S = 60.0  # longest wait for the same shard to be sealed on behalf of an older link
FENCE_DRAIN_S = 5.0


def add(state: HolderState, link: Link, ready: PutReady) -> SubmittedPut | None:
    """Count a submission that came completely, so that a fence waits for it (R21); None if its link is retired."""
    if link.is_retired:
        return None
    put = SubmittedPut(link, ready, state.fences.first(link.job))
    state.puts.pending[put.key] = state.puts.pending.get(put.key, 0) + 1
    return put


def done(state: HolderState, put: SubmittedPut) -> None:
    """Count a submission as finished: sealed, failed, or to be submitted again on another link."""
    left = state.puts.pending.pop(put.key, 0) - 1
    if left > 0:
        state.puts.pending[put.key] = left


async def run(io: HolderIo, state: HolderState, put: SubmittedPut) -> None:
    """Seal a submission; if that fails, have the step given up on all ranks alike (R12)."""
    shard, why, is_failed = put.shard, "", True
    try:
        try:
            why = await _seal(io, state, put, shard)
        except MemstoreError as exc:
            why, is_failed = f"{type(exc).__name__}: {exc}", not isinstance(exc, CapacityError)
            await io.warn(f"put of {shard} failed on host {state.host_id}: {why}")
        except Exception as exc:
            await io.unexpected(f"put of {shard} on host {state.host_id}", exc)
            why = f"{type(exc).__name__}: {exc}"
        if why:
            failed = StepLevel(job=shard.job, attempt=shard.attempt, step=shard.step, level="failed", reason=why)
            await ranks.send_level(io, state, put.link, failed)
            skip = SkipStep(
                job=shard.job, attempt=shard.attempt, rank=shard.rank, step=shard.step, why=why, is_failed=is_failed
            )
            state.ask(skip)
    finally:
        done(state, put)


async def _seal(io: HolderIo, state: HolderState, put: SubmittedPut, shard: ShardId) -> str:
    """Digest a submission, store, report and push it; return why that is impossible, or ""."""
    sealing, link = state.puts.sealing, put.link
    if not await io.wait_for(lambda: link.is_retired or shard not in sealing, SEAL_S):
        raise IntegrityError(f"an earlier link's submission of {shard} has not been sealed for {SEAL_S:g} s")
    if link.is_retired:
        return ""  # the new link brings it again
    sealing.add(shard)
    try:
        found = await _stored(io, state, put, shard)
    finally:
        sealing.discard(shard)
    if isinstance(found, str):
        return found
    (known, has_targets), ready = found, put.ready
    before = state.shared_shards.put_sealed(known, shared_count(ready))
    sealed = StepLevel(job=shard.job, attempt=shard.attempt, step=shard.step, level="sealed", digest=known.spec.digest)
    await ranks.send_level(io, state, put.link, sealed)
    now, began_s = state.now(), ready.terms.began_s  # monotonic: the rank's clock is this host's
    age_s = now - began_s if 0.0 < began_s <= now else ready.stall_s
    report_copy(state, known, PutTimes(stall_s=ready.stall_s, age_s=age_s, unchanged_since=before))
    await equal_ranks.compare(io, state, shard)
    if not has_targets:
        await ranks.send_replicated(io, state, shard)
    await io.grant(state.ranks.current(put.link))
    return ""


async def _stored(
    io: HolderIo, state: HolderState, put: SubmittedPut, shard: ShardId
) -> tuple[StoredReplica, bool] | str:
    """Return the stored replica and whether copies of it are to come; or the reason why there is none.

    It is pushed while it is digested: the first chunks are on the wire before the last are digested. The rank's own
    digests are not compared with the slots here: that would be the pass that they save. A target digests what it is
    sent, so a step whose slots are not what was copied gets no second copy.
    """
    ready, store, slots = put.ready, state.store, put.ready.slots
    # The whole message is checked before a slot changes its owner; list lengths are checked, not taken from the rank.
    shared_count(ready)
    given = given_digests(ready)
    if len(slots) != -(-ready.nbytes // store.chunk_bytes):
        raise IntegrityError(f"{shard} was submitted with {len(slots)} slots for {ready.nbytes} bytes")
    is_lost = ready.is_lost or ready.arena != store.arena_identity
    known, is_mine = store.take_over(shard, put.link.owner, None if is_lost else slots)
    is_old = shard.attempt < put.fence
    why = ""
    if known is None and is_old:
        why = f"attempt {put.fence} was opened"
    elif known is None and not is_mine:
        why = "the rank no longer had the lease of these slots (has this host's holder restarted?)"
    elif known is None:
        why = await _not_seen(io, state, shard, ready)
    if is_mine and (why or known is not None):
        store.give_back(slots)
    if why:
        return why
    if known is not None:
        return known, await push.replicate(io, state, shard, known.spec.digest)
    source = await io.open_fresh(shard, slots, chunk_sizes(ready.nbytes, store.chunk_bytes), given)
    try:
        has_targets = await push.replicate(io, state, shard, "", source)
    except BaseException as exc:
        source.fail(repr(exc))
        store.give_back(slots)
        raise
    try:
        return await io.digest_and_store(shard, ready, source), has_targets
    except BaseException as exc:
        source.fail(f"{type(exc).__name__}: {exc}")
        raise


async def _not_seen(io: HolderIo, state: HolderState, shard: ShardId, ready: PutReady) -> str:
    """Return why these slots do not hold what the rank filled in, as far as a sample of its bytes shows, or ""."""
    try:
        found = await io.compare_sample(ready.slots, ready.nbytes, ready.sample)
    except IntegrityError as exc:
        return f"{shard} was submitted, but {exc}"
    if not found:
        return ""
    why = (
        f"what rank {shard.rank} filled is not what its host sees: {len(found)} of {len(ready.slots)} chunks "
        f"differ, the first is chunk {found[0]} in slot {ready.slots[found[0]]}, so nothing of it is kept. Restart "
        "the rank: it has another file mapped than its holder, or writes on after its put"
    )
    await io.warn(f"host {state.host_id}, job {shard.job}: {why}")
    return why


def shared_count(ready: PutReady) -> int | None:
    """Return how many of a put's first chunks its rank shares; None if it names no shard. MemstoreError."""
    shared = ready.terms.shared_chunks
    if shared is not None and shared > len(ready.slots):
        raise MemstoreError(f"a put of {len(ready.slots)} chunks shares {shared} of them")
    return shared


def given_digests(ready: PutReady) -> list[bytes] | None:
    """Return the digests that a put came with, one for each chunk; None if it has none. MemstoreError."""
    if ready.digests is None:
        return None
    if len(ready.digests) != len(ready.slots) * DIGEST_BYTES:
        raise MemstoreError(
            f"a put of {len(ready.slots)} chunks came with {len(ready.digests)} bytes of digests, not {DIGEST_BYTES} "
            "for each: its process and its host's holder have different memstores; restart the rank"
        )
    return split_digests(ready.digests)


# -- fences -------------------------------------------------------------------------------------------


async def fence(io: HolderIo, state: HolderState, job: str, attempt: int, members: Collection[str]) -> None:
    """Notify older processes that they are refused, finish their submissions, and answer with the inventory (R21).

    What was brought for their gets is let go of: the next attempt's puts may need its slots.
    """
    state.store.abort_older(job, attempt)
    pending = state.puts.pending
    if not await io.wait_for(lambda: not any(j == job and a < attempt for j, a, _ in pending), FENCE_DRAIN_S):
        await io.warn(f"job {job}: puts of older attempts are still digested {FENCE_DRAIN_S:g} s after a fence")
    await ranks.send_fenced(io, state, job, attempt, members)
    end_older(state, job, attempt)
    answer_fence(state, job, attempt)
