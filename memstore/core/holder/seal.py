"""Turns a hand-over of a rank into a sealed shard, and a fence into an answer (R7, R12, R14, R21).

    handed over, stamped with the fence of that moment --another one of the same shard is being sealed--> waits
       --its slots are its own, and this host sees in them what the rank saw--> digested, pushed meanwhile --> sealed
       '--refused, or it failed--> its slots are free, and the controller is asked to have all ranks skip the step

    fence: opened --older hand-overs are finished, or 5 s are over--> older processes notified --> answered

A hand-over that came before a fence is finished under it; one that comes later is refused.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from memstore.core.arena.replica_index import StoredReplica
from memstore.core.arena.slot_table import Owner
from memstore.core.format.manifest import chunk_sizes
from memstore.core.holder.effects import (
    AnswerFence,
    CompareSample,
    CompareShared,
    DigestAndStore,
    GiveUpPut,
    Grant,
    Link,
    NotePut,
    OpenFresh,
    Replicate,
    Steps,
    TellFenced,
    TellLevel,
    TellReplicated,
    Unexpected,
    WaitFor,
    Warn,
)
from memstore.core.holder.state import HandOver, HolderState
from memstore.core.wire.measured import seconds
from memstore.core.wire.messages import Body
from memstore.errors import CapacityError, IntegrityError, MemstoreError
from recovery.inventory import ShardId

SEAL_S = 60.0  # longest wait for the same shard to be sealed on behalf of an older link
FENCE_DRAIN_S = 5.0


def add(state: HolderState, link: Link, body: Body) -> HandOver | None:
    """Count a hand-over that came completely, so that a fence waits for it (R21); None if its link is retired."""
    if link.is_retired:
        return None
    put = HandOver(link, body, state.fences.first(link.job))
    key, _ = put.key, put.shard  # a message that names no step is refused before it counts
    state.puts.pending[key] = state.puts.pending.get(key, 0) + 1
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
            yield TellLevel(put.link, shard.attempt, shard.step, "failed", why)
            yield GiveUpPut(put.link, shard, why, is_failed)
    finally:
        done(state, put)


def _seal(state: HolderState, put: HandOver, shard: ShardId) -> Steps[str]:
    """Digest a hand-over, store, report and push it; return why that is impossible, or ""."""
    sealing = state.puts.sealing
    if not (yield WaitFor(lambda: shard not in sealing, SEAL_S)):
        raise IntegrityError(f"{shard} was not sealed within {SEAL_S:g} s on behalf of a link that ended")
    sealing.add(shard)
    try:
        known, has_targets, why = yield from _stored(state, put, shard)
    finally:
        sealing.discard(shard)
    if known is None:
        return why
    before = yield NotePut(known, _shared(put))
    yield TellLevel(put.link, shard.attempt, shard.step, "sealed", "")
    measured = _measured(put.body, state.now()) | ({} if before is None else {"unchanged_since": before})
    state.sealed(known, measured)
    yield CompareShared(shard)
    if not has_targets:
        yield TellReplicated(shard)
    yield Grant(put.link)
    return ""


def _stored(state: HolderState, put: HandOver, shard: ShardId) -> Steps[tuple[StoredReplica | None, bool, str]]:
    """Return the stored replica and whether copies of it are to come; or None and why not ("": it comes again)."""
    body, store, link = put.body, state.store, put.link
    # The whole message is checked before a slot changes its owner, and no list is as long as a rank says.
    slots, nbytes, world_size = [int(n) for n in body["slots"]], int(body["nbytes"]), int(body["world_size"])
    _shared(put)
    if len(slots) != -(-nbytes // store.chunk_bytes) or world_size < 1:
        raise IntegrityError(
            f"{shard} was handed over with {len(slots)} slots for {nbytes} bytes, world size {world_size}"
        )
    sizes = chunk_sizes(nbytes, store.chunk_bytes)
    if type(body["layout"]) is not bytes:  # of a number, bytes() would make that many
        raise IntegrityError(f"{shard} was handed over without a layout")
    seen = dict(body.get("sample") or {})
    if link.is_retired:
        return None, False, ""  # the new link brings it again
    is_lost = bool(body.get("lost")) or str(body["arena"]) != store.arena_identity
    known, is_mine = store.take_over(shard, link.owner, None if is_lost else slots)
    is_old = shard.attempt < put.fence
    is_refused = known is None and (is_old or not is_mine)
    if is_mine and (known is not None or is_refused):
        store.give_back(slots)
    if is_refused:
        return None, False, f"attempt {put.fence} was opened" if is_old else "its slots were no longer leased to it"
    if known is not None:
        return known, (yield Replicate(shard, known.spec.digest)), ""
    why = yield from _not_seen(state, shard, slots, nbytes, seen)
    if why:
        store.give_back(slots)
        return None, False, why
    return *(yield from _fresh(state, shard, body, slots, sizes)), ""


def _not_seen(state: HolderState, shard: ShardId, slots: list[int], nbytes: int, seen: Body) -> Steps[str]:
    """Return why these slots do not hold what the rank filled in, as far as a sample of its bytes shows, or ""."""
    try:
        found = yield CompareSample(slots, nbytes, seen)
    except IntegrityError as exc:
        return f"{shard} was handed over, but {exc}"
    if not found:
        return ""
    why = (
        f"what rank {shard.rank} filled is not what its host sees: {len(found)} of {len(slots)} chunks differ, the "
        f"first is chunk {found[0]} in slot {slots[found[0]]}, so nothing of it is kept. Restart "
        "the rank: it has another file mapped than its holder, or writes on after its put"
    )
    yield Warn(f"host {state.host_id}, job {shard.job}: {why}")
    return why


def _fresh(
    state: HolderState, shard: ShardId, body: Body, slots: list[int], sizes: list[int]
) -> Steps[tuple[StoredReplica, bool]]:
    """Digest, store, and push meanwhile: the first chunks are on the wire before the last are digested."""
    fresh = yield OpenFresh(shard, slots, sizes)
    try:
        has_targets = yield Replicate(shard, "", fresh)
    except BaseException as exc:
        fresh.fail(repr(exc))
        state.store.give_back(slots)
        raise
    try:
        shelved = yield DigestAndStore(shard, body, slots, fresh)
    except BaseException as exc:
        fresh.fail(f"{type(exc).__name__}: {exc}")
        raise
    return shelved, has_targets


def _shared(put: HandOver) -> int | None:
    return shared_count(put.body, len(put.body["slots"]))


def shared_count(body: Body, chunks_count: int) -> int | None:
    """Return how many of a hand-over's first chunks its rank shares; None if it names no shard. MemstoreError."""
    value = body.get("shared_chunks")
    if value is None:
        return None
    if type(value) is not int or not 0 <= value <= chunks_count:
        raise MemstoreError(f"a put of {chunks_count} chunks shares {str(value)[:40]} of them")
    return value


def _measured(body: Body, now: float) -> dict[str, Any]:
    """Return the times of a put for the report of its seal: the seconds for which it blocked, and since it began.

    The rank's monotonic clock is this host's, so its age needs no agreement between machines.
    """
    stall_s, began_s = seconds(body.get("stall_s")), seconds(body.get("began_s"))
    return {"stall_s": stall_s, "age_s": now - began_s if 0.0 < began_s <= now else stall_s}


# -- fences -------------------------------------------------------------------------------------------


def open_fence(state: HolderState, job: str, attempt: int) -> None:
    """Refuse from now on what older attempts hand over and what peers offer of them."""
    state.fences.open(job, attempt)


def fence(state: HolderState, job: str, attempt: int, members: Collection[str]) -> Steps[None]:
    """Notify older processes that they are refused, finish what they handed over, and answer with what is here (R21).

    A process of `members` goes on in the new attempt: it asked for it by a rewind (R22).
    """
    state.store.abort_older(job, attempt)
    pending = state.puts.pending
    if not (yield WaitFor(lambda: not any(j == job and a < attempt for j, a, _ in pending), FENCE_DRAIN_S)):
        yield Warn(f"job {job}: puts of older attempts are still digested {FENCE_DRAIN_S:g} s after a fence")
    yield TellFenced(job, attempt, tuple(members))
    yield AnswerFence(job, attempt)


def await_owner(state: HolderState, owner: Owner, limit_s: float) -> Steps[bool]:
    """Wait until nothing that one process handed over is unfinished; False if it took too long."""
    pending = state.puts.pending
    return (yield WaitFor(lambda: not any(process == owner for _, _, process in pending), limit_s))  # type: ignore[no-any-return]
