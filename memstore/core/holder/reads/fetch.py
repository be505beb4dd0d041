"""Brings chunks of a shard, and its manifest, to this host from peers and from durable storage (R23, R25).

    chunk: asked of its planned source, three times --> then of the shard's other holders in turn --> here
             |--the source is silent--> asked of the others before it is asked again
             '--the source says that it lacks it--> lost: evidence for the next plan

All sources are asked at once. A broken connection or a deadline is no evidence about the bytes: another try follows,
until the deadline is over, the holder stops, or the same rank's restore has gone on to a newer round.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Coroutine, Iterable
from functools import partial
from typing import Any, TypeVar

from memstore.core.arena.replica_index import IncomingReplica
from memstore.core.format.manifest import shard_digest
from memstore.core.holder.holder_io import HolderIo
from memstore.core.holder.inventory import report_copy
from memstore.core.holder.state import HolderState
from memstore.core.wire.ids import WireShard
from memstore.core.wire.orders import OWN_PARITY, Bring, DurablePlace
from memstore.core.wire.peer_messages import FetchManifest, Verify
from memstore.errors import DigestMismatch, FencedError, IntegrityError, PeerTimeout, PeerUnreachable, TransportError

RETRY_S = 0.2
RETRY_LIMIT_S = 10.0  # and at least twice dead_after_s: a dead source is known dead before its fetch fails a get
SOURCE_TRIES = 3  # before the other holders of the shard are asked as well
SILENT_S = 300.0  # after a question that it left unanswered, other copies are asked before a source: each costs 30 s
DURABLE = "durable"  # names durable storage among sources, in reports
Chunks = dict[str, list[int]]  # source -> chunks
Ask = Callable[[str, list[int]], Coroutine[Any, Any, list[int]]]
T = TypeVar("T")


def deadline_s(state: HolderState) -> float:
    """Return when a fetch that begins now fails."""
    return state.now() + max(RETRY_LIMIT_S, 2 * state.limits.dead_after_s)


def is_newest(state: HolderState, order: Bring) -> bool:
    """Say whether nothing later was ordered for a get of the same rank."""
    return order.use != "get" or state.reads.newest.get((order.job, order.shard.rank)) is order


async def may_wait(io: HolderIo, state: HolderState, order: Bring, until_s: float) -> bool:
    """Wait before another try; False if there is to be none: too late, stopping, or a newer round is under way."""
    if not is_newest(state, order) or state.now() >= until_s or state.is_stopping():
        return False
    await io.sleep(RETRY_S)
    return not state.is_stopping()


async def manifest(io: HolderIo, state: HolderState, order: Bring, until_s: float) -> tuple[bytes | None, set[str]]:
    """Get the manifest from any holder, else from durable storage; or None and the sources that say they lack it.

    A damaged one here is written again from another copy's; if there is none, the copy here counts no more.

    Raises:
        TransportError: some source cannot be reached, and none of the others has it.
    """
    store = state.store
    pinned = store.pin(order.shard.id, order.spec.digest)
    if pinned is None:
        return await brought_manifest(io, state, order, until_s)
    try:
        return await io.on_store(partial(store.manifest, pinned[0])), set()
    except DigestMismatch as exc:
        await io.warn(f"host {state.host_id}: {exc}")
        data, lacking = await brought_manifest(io, state, order, until_s)
        if data is None:
            store.lose_manifest(pinned[0])
            report_copy(state, pinned[0])
        else:
            store.repair_manifest(pinned[0], data)
        return data, lacking
    finally:
        store.unpin(*pinned)


async def brought_manifest(
    io: HolderIo, state: HolderState, order: Bring, until_s: float
) -> tuple[bytes | None, set[str]]:
    """Get the manifest as `manifest` does, but from another host or durable storage."""
    sources = list(dict.fromkeys(run.source for run in order.runs if run.tier == "parity" and run.source))
    sources = [*(host for host in order.holders if host not in (state.host_id, *sources)), *sources]
    sources += [DURABLE] if order.durable is not None else []
    lacking: set[str] = set()
    while True:
        problems = []
        for source in _silent_last(state, sources):
            try:
                return (await _answered(io, state, source, _manifest_of(io, state, order, source))), lacking
            except IntegrityError:
                lacking.add(source)
            except TransportError as exc:
                problems.append(f"{source}: {exc}")
        if not problems:
            return None, lacking
        sources = [s for s in sources if s not in lacking]
        if not await may_wait(io, state, order, until_s):
            raise PeerUnreachable(f"no source gave the manifest of {order.shard.id}: {'; '.join(problems)}")


async def _manifest_of(io: HolderIo, state: HolderState, order: Bring, source: str) -> bytes:
    """Return the manifest that a source has, checked against the shard's digest (R14)."""
    shard, digest = order.shard.id, order.spec.digest
    if source == DURABLE:
        return await io.read_durable_manifest(_storage(order), shard, order.spec.spec)
    if source == state.host_id:
        return await io.on_store(partial(state.store.manifest_in_parity, shard, digest))
    peer = await io.reach(source)
    found = await io.call_peer(peer, FetchManifest(shard=order.shard, digest=digest))
    data = found.manifest
    if shard_digest(data) != digest:
        raise DigestMismatch(
            f"the manifest of {shard} from host {source} has digest {shard_digest(data)}, expected {digest}",
            shard=str(shard),
            holder=source,
        )
    return data


def _silent_last(state: HolderState, sources: Iterable[str]) -> list[str]:
    """Return sources in their order, but those that were silent just now behind the others."""
    asked_s = state.reads.unanswered_s
    return sorted(sources, key=lambda source: state.now() - asked_s.get(source, -math.inf) < SILENT_S)


async def _answered(io: HolderIo, state: HolderState, source: str, question: Coroutine[Any, Any, T]) -> T:
    """Ask a source, and note whether it answers."""
    try:
        answer = await question
    except PeerTimeout:
        state.reads.unanswered_s[source] = state.now()
        raise
    state.reads.unanswered_s.pop(source, None)
    return answer


def by_source(state: HolderState, order: Bring, indices: Iterable[int]) -> tuple[Chunks, Chunks]:
    """Return source -> those of the chunks that it is asked for; and what only this host was to have.

    What was planned from here and is bad, or gone, is asked of another holder; for a get of all ranks the controller
    plans again, so that the get says how many bytes came from where.
    """
    planned: dict[int, str] = {}
    for run in order.runs:
        source = state.host_id if run.tier == "local" else run.source or DURABLE
        is_own_parity = run.tier == "parity" and source == state.host_id
        planned.update(dict.fromkeys(run.chunks, OWN_PARITY if is_own_parity else source))
    others = [host for host in order.holders if host != state.host_id] if order.use != "get" else []
    asked: Chunks = {}
    for index in indices:
        source = planned.get(index, state.host_id)
        asked.setdefault(others[0] if source == state.host_id and others else source, []).append(index)
    return asked, {state.host_id: asked.pop(state.host_id)} if state.host_id in asked else {}


async def chunks(io: HolderIo, state: HolderState, order: Bring, replica: IncomingReplica, until_s: float) -> Chunks:
    """Fetch all that is missing into slots; return {}, or what sources say they lack. CapacityError, TransportError."""
    await io.on_store(partial(state.store.ensure_free, len(replica.missing)))
    is_here = lambda index: replica.slots[index] is not None  # noqa: E731
    ask = partial(_from, io, state, order, replica)
    lost = await from_all(io, state, order, replica.missing, is_here, ask, until_s)
    return lost or ({state.host_id: replica.missing} if replica.missing else {})


async def from_all(
    io: HolderIo,
    state: HolderState,
    order: Bring,
    indices: Iterable[int],
    is_done: Callable[[int], bool],
    ask: Ask,
    until_s: float,
) -> Chunks:
    """Ask all sources of chunks at once, as `from_planned` does; return what they say they lack.

    Raises:
        PeerUnreachable: Some could not be had, and no source says that it lacks any.
    """
    asked, lost = by_source(state, order, indices)
    work = [from_planned(io, state, order, source, asked[source], is_done, ask, until_s) for source in asked]
    ends = await io.together(work)
    lost |= {source: lacking for source, (lacking, _) in zip(asked, ends, strict=True) if lacking}
    problems = [problem for _, problem in ends if problem]
    if problems and not lost:
        raise PeerUnreachable("; ".join(problems))
    return lost


async def from_planned(
    io: HolderIo,
    state: HolderState,
    order: Bring,
    source: str,
    indices: list[int],
    is_done: Callable[[int], bool],
    ask: Ask,
    until_s: float,
) -> tuple[list[int], str]:
    """Ask for chunks at their planned source, then at the other holders of the shard as well (R25).

    Args:
        state: The holder's.
        order: Names the other holders.
        source: The planned one.
        indices: The chunks.
        is_done: Says whether a chunk needs no further question.
        ask: Asks one host about chunks; returns those that it says it lacks.
        until_s: When no further try begins.

    Returns:
        The chunks that the source says it lacks, and why others could not be had, or "".
    """
    others = [host for host in order.holders if host not in (source, state.host_id)]
    turns: list[str] = []
    lost: set[int] = set()
    problem = ""
    while True:
        turns = turns or [source] * SOURCE_TRIES + (others if source not in (DURABLE, OWN_PARITY) else [])
        host, *turns = _silent_last(state, turns)
        todo = [i for i in indices if not is_done(i) and i not in lost]
        try:
            lacking = await _answered(io, state, host, ask(host, todo))
            problem = problem or f"{host}: chunks it holds undamaged arrived damaged"
        except IntegrityError:
            lacking = todo
        except TransportError as exc:
            lacking, problem = [], f"{host}: {exc}"
            await io.warn(f"staging from {host}: {exc}")
        if host == source:  # another holder may have it or not: missing chunks there are no evidence
            lost.update(lacking)
        if all(is_done(i) or i in lost for i in indices):
            return sorted(lost), ""
        if not await may_wait(io, state, order, float("inf") if turns else until_s):
            break
    return sorted(lost), problem


async def _from(
    io: HolderIo, state: HolderState, order: Bring, replica: IncomingReplica, host: str, indices: list[int]
) -> list[int]:
    """Pull chunks into the incoming replica; return those that the source itself says it lacks.

    A chunk that arrives damaged makes the peer digest its own bytes again and report them: it counts as bad only on
    the peer's word (R25). What the peer holds undamaged stays open in the incoming replica, to be asked for again.
    """
    spec = order.spec.spec
    with state.store.lock:
        is_open = any(replica is known for known in state.store.index.incoming.values())
    if not is_open:  # each chunk that came would be dropped, and asked for again until the deadline
        raise FencedError(f"{order.shard.id}: what came of it was given up, as its attempt or its step was over")
    if host == DURABLE:
        return await io.receive_durable(_storage(order), replica, spec, indices)
    if host == OWN_PARITY:
        return await io.decode_chunks(replica, spec.digest, indices, order.others)
    peer = await io.reach(host)
    bad = await io.receive_chunks(peer, replica, spec.digest, indices, order.others)
    if not bad:
        return []
    answer = await io.call_peer(peer, Verify(shard=WireShard.of(replica.shard), digest=spec.digest, chunks=None))
    return sorted(set(answer.chunks).intersection(bad))


def _storage(order: Bring) -> DurablePlace:
    if order.durable is None:
        raise IntegrityError(f"{order.shard.id} is planned from durable storage, and its job has none")
    return order.durable
