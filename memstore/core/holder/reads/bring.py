"""Brings a shard, or some of its chunks, into a reader's reach, and verifies it as the order says (R23, R25, R27).

ordered --manifest here--> chunks here --digested, but for a read of one rank--> ready (`ready.py`) --> reported
   |                       chunks elsewhere --for a get of all ranks: digested there--'   '--its rank compares into=
   |--a source says that it lacks chunks--> reported as evidence: the controller plans again
   '--out of reach, no room, too late--> reported as no evidence: it fails the get, never the step (R25)

Most readers fetch what is not here themselves: it takes no slot, and each chunk goes straight into their memory.
Brought to slots here are chunks of durable storage, chunks that are decoded, what a reader found damaged or could not
fetch, and a shard that several ranks of this host may read. Of several reads that bring one shard, one fetches and the
others wait; one that brings nothing for 10 s is overtaken.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable
from functools import partial

from memstore.core.arena.replica_index import IncomingReplica
from memstore.core.format.manifest import decode_manifest
from memstore.core.holder.holder_io import HolderIo, Link
from memstore.core.holder.inventory import report_copy
from memstore.core.holder.reads import fetch, ready
from memstore.core.holder.state import Fetching, HolderState, Ready
from memstore.core.wire.ids import WireShard
from memstore.core.wire.orders import Bring
from memstore.core.wire.peer_messages import Verify
from memstore.core.wire.rank_messages import IntoChecked
from memstore.core.wire.reports import Brought
from memstore.errors import CapacityError, IntegrityError, MemstoreError

BESIDE_S = 10.0  # without a chunk, until a read that waits for another one of the same shard takes its place
LOOK_S = 0.5  # between two looks at how far that one has come
VERIFIED_TOGETHER = 256  # chunks that a source is asked to digest in one call: 1 GiB is far within its limit


def begin(state: HolderState, order: Bring) -> None:
    """Note an order for a get of all ranks: only for the newest one of a rank is anything tried again, or kept."""
    if order.use == "get":
        rank = order.job, order.shard.rank
        older = state.reads.newest.get(rank)
        state.reads.newest[rank] = order
        if older is not None:
            ready.release(state, older.read)


async def run(io: HolderIo, state: HolderState, order: Bring) -> None:
    """Bring what is ordered, have its rank compare `into=` with it, and report the end."""
    problem: str | None = None
    bad: fetch.Chunks = {}
    try:
        bad = await _bring(io, state, order)
        if bad:
            parts = "; ".join(f"{source}: {len(chunks)} chunks" for source, chunks in bad.items())
            problem = f"chunks damaged or missing at {parts}"
    except MemstoreError as exc:
        problem = f"{type(exc).__name__}: {exc}"
    except Exception as exc:
        await io.unexpected(f"bringing {order.shard.id}", exc)
        problem = repr(exc)
    if problem is not None or order.use != "get" or not order.reader:
        lacking = {source: tuple(chunks) for source, chunks in bad.items()}
        state.report(Brought(read=order.read, problem=problem, bad=lacking))
        return
    link = state.ranks.links.get(order.reader)  # None: it is asked when it comes back
    if link is not None and (check := state.reads.check_of(link)) is not None:
        await io.send_to_rank(link, check)


def checked(state: HolderState, link: Link, answer: IntoChecked) -> None:
    """Report what was brought for a rank, which has compared it with `into=` (R26)."""
    check = state.reads.check_of(link)
    if check is not None and check.read == answer.read:
        state.reads.ready[check.read].is_checked = True
        state.report(Brought(read=answer.read, problem=None, bad={}, refusal=answer.refusal))


def comes_here(state: HolderState, order: Bring) -> bool:
    """Say whether chunks that are not here are brought to slots here, not left to the reader."""
    if order.use in ("repair", "store") or any(run.tier in ("durable", "parity") for run in order.runs):
        return True
    reader = state.ranks.links.get(order.reader)
    if order.use == "get" or order.chunks is not None or reader is None or reader.job != order.job:
        return False
    return reader.rank != order.shard.rank and {link.rank for link in state.ranks.of_job(order.job)} != {reader.rank}


async def _bring(io: HolderIo, state: HolderState, order: Bring) -> fetch.Chunks:
    """Return {}, or source -> chunks that it says it lacks."""
    if not comes_here(state, order):
        return await _make_ready(io, state, order)
    if order.use == "store":
        return await _once(io, state, order, _store)
    with contextlib.suppress(CapacityError):
        return await _bring_here(io, state, order)
    # Others have the room, or it is being freed: this read has given its chunks back, and waits; only one at a time.
    reads = state.reads
    await io.wait_for(lambda: not reads.is_tight)
    reads.is_tight = True
    try:
        until_s = fetch.deadline_s(state)
        while True:
            try:
                return await _bring_here(io, state, order)
            except CapacityError:
                if not await fetch.may_wait(io, state, order, until_s):
                    raise
    finally:
        reads.is_tight = False


async def _bring_here(io: HolderIo, state: HolderState, order: Bring) -> fetch.Chunks:
    """Bring what is read to slots here, and keep it for its reader; a whole shard once for several. CapacityError.

    A shard of a get, or that a reader found damaged, is stored as a copy. What one rank reads of others is none: it
    would take the room that the next step's copies and parity are to have.
    """
    if order.chunks is not None:
        return await _make_ready(io, state, order, Fetching())
    if order.use == "read":
        return await _once(io, state, order, _make_ready)
    return await _once(io, state, order, _store) or await _make_ready(io, state, order, Fetching())


async def _make_ready(io: HolderIo, state: HolderState, order: Bring, fetching: Fetching | None = None) -> fetch.Chunks:
    """Keep the chunks for their reader: where each is here, or who has it; fetch what is elsewhere if `fetching`.

    What is kept is an incoming replica that is never finished: it counts as no copy of the shard. Content that this
    host holds anyway, of any shard, is referenced (R13).

    Raises:
        TransportError, CapacityError: No evidence about the bytes (R25).
        IntegrityError: The shard has no such chunks, or it was dropped.
    """
    wanted, until_s, shard = _wanted(order), fetch.deadline_s(state), order.shard.id
    data, lack_all = await fetch.manifest(io, state, order, until_s)
    if data is None:
        return {source: list(wanted) for source in lack_all or {state.host_id}}
    replica = await _open(io, order, ready.name_of(order.read), data, wanted)
    is_kept = False
    try:
        if order.use != "read":  # the reader of one shard digests what it copies, and has bad chunks brought again
            await _digest_here(io, replica)
        sources: fetch.Chunks = {}
        if fetching is not None:
            fetching.replica = replica
            lost = await fetch.chunks(io, state, order, replica, until_s)
        else:
            missing = replica.missing
            with state.store.lock:  # nothing more is to come: it claims no room for that
                replica.part = tuple(index for index in wanted if replica.slots[index] is not None)
            sources, lost = await _sources(io, state, order, missing, until_s)
        if lost:
            return lost
        found = Ready(order, replica, data, sources)
        if not ready.is_held(state, found) or not fetch.is_newest(state, order):
            raise IntegrityError(f"{shard} was dropped, or its rank began another get(), while it was brought")
        ready.keep(state, found)
        is_kept = True
        return {}
    finally:
        if not is_kept:
            state.store.abort_incoming(ready.name_of(order.read), shard, only=replica)


def _wanted(order: Bring) -> tuple[int, ...]:
    """Return the chunks that are to be read; IntegrityError if the shard has no such chunk."""
    count = order.spec.spec.chunks_count
    if order.chunks is None:
        return tuple(range(count))
    for first, asked in ((run.first, run.count) for run in order.chunks):
        if first + asked > count:
            raise IntegrityError(
                f"{order.shard.id} has {count} chunks, the reader asks for {asked} from chunk {first}: the metadata "
                "that names them is not of this shard"
            )
    return tuple(sorted({i for run in order.chunks for i in range(run.first, run.first + run.count)}))


async def _open(
    io: HolderIo, order: Bring, name: str, manifest: bytes, wanted: tuple[int, ...] | None = None
) -> IncomingReplica:
    chunks = decode_manifest(manifest).chunks
    digests, sizes = [c.digest for c in chunks], [c.nbytes for c in chunks]
    return await io.open_incoming(name, order.shard.id, digests, sizes, order.attempt, wanted)


async def _digest_here(io: HolderIo, replica: IncomingReplica) -> None:
    """Digest again what is here; what is bad is missing then, and reported of the copies that it was of."""
    await io.verify_slots(sorted({slot for slot in replica.slots if slot is not None}))


async def _sources(
    io: HolderIo, state: HolderState, order: Bring, missing: list[int], until_s: float
) -> tuple[fetch.Chunks, fetch.Chunks]:
    """Return source -> its chunks, and source -> chunks that it says it lacks.

    For a get of all ranks every source has digested its chunks by then.
    """
    if order.use != "get":
        return fetch.by_source(state, order, missing)
    found: dict[int, str] = {}
    ask = partial(_verified, io, order, found)
    lost = await fetch.from_all(io, state, order, missing, found.__contains__, ask, until_s)
    verified: fetch.Chunks = {}
    for index in sorted(found):
        verified.setdefault(found[index], []).append(index)
    return verified, lost


async def _verified(io: HolderIo, order: Bring, found: dict[int, str], host: str, wanted: list[int]) -> list[int]:
    """Have a holder digest chunks again; note which are good there, and return those that it lacks."""
    peer, lacking = (await io.reach(host)), []
    for first in range(0, len(wanted), VERIFIED_TOGETHER):
        part = tuple(wanted[first : first + VERIFIED_TOGETHER])
        request = Verify(shard=WireShard.of(order.shard.id), digest=order.spec.digest, chunks=part)
        answer = await io.call_peer(peer, request)
        missing = set(answer.chunks).intersection(part)
        found.update((index, host) for index in part if index not in missing)
        lacking += sorted(missing)
    return lacking


# -- whole shards that come here ----------------------------------------------------------------------


BringWhole = Callable[[HolderIo, HolderState, Bring, Fetching], Awaitable[fetch.Chunks]]


async def _once(io: HolderIo, state: HolderState, order: Bring, bring: BringWhole) -> fetch.Chunks:
    """Bring the shard here; of several reads of it, as by ranks that share its state, one fetches."""
    fetching, key, mine = state.reads.fetching, (order.shard.id, order.spec.digest), Fetching()
    while (first := fetching.setdefault(key, mine)) is not mine:
        if await _await_other(io, first):
            fetching.setdefault(key, mine)  # it fetches if the other could not, and reads that come now wait for it
            break
        if fetching.get(key) is first:  # the reads that waited beside this one wait for it now
            del fetching[key]
    try:
        return await bring(io, state, order, mine)
    finally:
        if fetching.get(key) is mine:
            del fetching[key]
        mine.is_over = True


async def _await_other(io: HolderIo, other: Fetching) -> bool:
    """Wait until another read has ended; return False if no chunk came for it within `BESIDE_S`."""
    waited_s, left = 0.0, other.left()
    while not await io.wait_for(lambda: other.is_over, LOOK_S):
        waited_s = waited_s + LOOK_S if other.left() == left else 0.0
        left = other.left()
        if waited_s > BESIDE_S:
            return False
    return True


async def _store(io: HolderIo, state: HolderState, order: Bring, mine: Fetching) -> fetch.Chunks:
    """Fetch what is not here of a shard, and store it as a copy; return {}, or what sources say they lack."""
    shard, store, name = order.shard.id, state.store, f"stage-{order.read}"
    with store.lock:
        stored = store.index.find(shard, order.spec.digest)
        if stored is not None and not stored.is_doomed and not stored.missing:
            return {}
    until_s = fetch.deadline_s(state)
    data, lack_all = await fetch.manifest(io, state, order, until_s)
    if data is None:
        return {source: list(_wanted(order)) for source in lack_all or {state.host_id}}
    mine.replica = replica = await _open(io, order, name, data)
    try:
        await _digest_here(io, replica)
        if lost := await fetch.chunks(io, state, order, replica, until_s):
            return lost
        stored = store.finish(name, data)
    finally:
        store.abort_incoming(name, shard)
    report_copy(state, stored)
    return {}
