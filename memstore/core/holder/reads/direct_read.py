"""Stages a read of which this host keeps only what it holds anyway: the reader fetches the rest from other holders.

    ordered --manifest brought, chunks here held--> sources named --they digested them, if all ranks read--> ready
      '--a source lacks chunks--> reported as evidence: the controller plans again       (then as a partial read)
      '--no source answers--> reported as no evidence (R25)

No slot is taken and no chunk travels here. The reader receives each chunk straight into its memory and digests it as
it comes; what does not come, or comes damaged, it has its holder bring (`partial_read.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial

from memstore.core.format.manifest import decode_manifest
from memstore.core.holder.holder_io import HolderIo
from memstore.core.holder.reads import fetch, partial_read
from memstore.core.holder.state import HolderState, PartialRead, ReadKey
from memstore.core.wire.ids import WireShard
from memstore.core.wire.orders import ChunkRange, ReadChunks, ReadShard, StageShard
from memstore.core.wire.peer_messages import Verify
from memstore.core.wire.replies import ChunksElsewhere
from memstore.errors import IntegrityError, PeerUnreachable

BringOrder = StageShard | ReadShard | ReadChunks
VERIFIED_TOGETHER = 256  # chunks that a source is asked to digest in one call: 1 GiB is far within its limit


def is_direct(state: HolderState, order: BringOrder) -> bool:
    """Say whether the reader fetches what is not here.

    Chunks of durable storage come through slots, as does what a reader found damaged, and a shard that several ranks
    of this host may read: it comes here once.
    """
    if any(run.tier == "durable" for run in order.runs):
        return False
    if isinstance(order, ReadChunks):
        return not order.is_repair
    if isinstance(order, StageShard):
        return True
    reader = state.ranks.links.get(order.reader)
    if reader is None or reader.job != order.job or reader.rank == order.rank:
        return True
    return {link.rank for link in state.ranks.of_job(order.job)} == {reader.rank}


def read_key(order: BringOrder) -> ReadKey:
    """Return under which key a read is kept for its reader; a rank's newest round takes the place of an older one."""
    return (order.job, order.rank) if isinstance(order, StageShard) else order.read


async def stage(
    io: HolderIo, state: HolderState, order: BringOrder, bad: dict[str, list[int]], pin_s: float
) -> dict[str, list[int]]:
    """Find a source for every chunk that is not here; return {} or, per source, the chunks that it says it lacks.

    Args:
        state: The holder's.
        order: What is to be read.
        bad: Planned chunks that this host was found to lack.
        pin_s: How long the chunks here are kept for a reader that does not come.

    Raises:
        TransportError: No source of some chunk answers; no evidence about the bytes.
        IntegrityError: The shard has no such chunks.
    """
    shard, spec = order.shard.id, order.spec.spec
    until_s = fetch.deadline_s(state)
    data, lack_all = await fetch.manifest(io, state, order, shard, spec.digest, until_s)
    if data is None:
        return {**bad, **{source: list(range(spec.chunks_count)) for source in lack_all or {state.host_id}}}
    chunks = decode_manifest(data).chunks
    wanted = tuple(range(len(chunks)))
    if isinstance(order, ReadChunks):
        wanted = partial_read.wanted(shard, order.chunks, spec.chunks_count)
    key = read_key(order)
    name = f"direct-{order.read}" if not isinstance(order, StageShard) else f"direct-{order.attempt}-{order.round}"
    replica = await io.open_incoming(
        name, shard, [c.digest for c in chunks], [c.nbytes for c in chunks], order.attempt, wanted
    )
    is_kept = False
    try:
        missing = replica.missing
        with state.store.lock:  # nothing more is to come: it claims no room for that
            replica.part = tuple(index for index in wanted if replica.slots[index] is not None)
        sources, lost, problems = await _sources(io, state, order, missing, until_s)
        for source, indices in lost.items():
            bad.setdefault(source, []).extend(indices)
        if bad:
            return bad
        if problems:
            raise PeerUnreachable("; ".join(problems))
        with state.store.lock:
            is_open = state.store.index.find_incoming(name, shard) is replica  # else its slots may be another step's
        if not is_open or not fetch.is_newest(state, order):
            raise IntegrityError(f"{shard} was dropped, or its rank began another get(), while it was staged")
        partial_read.keep(state, key, PartialRead(name, replica, data, state.now() + pin_s, sources))
        is_kept = True
        return {}
    finally:
        if not is_kept:
            state.store.abort_incoming(name, shard, only=replica)


async def _sources(
    io: HolderIo, state: HolderState, order: BringOrder, missing: list[int], until_s: float
) -> tuple[dict[str, list[int]], dict[str, list[int]], list[str]]:
    """Return source -> its chunks, source -> chunks that it lacks, and problems.

    For a get of all ranks every source has digested its chunks by then.
    """
    planned = {i: run.source or state.host_id for run in order.runs for i in range(run.first, run.first + run.count)}
    others = [host for host in order.holders if host != state.host_id]
    asked: dict[str, list[int]] = {}
    for index in missing:
        source = planned.get(index, state.host_id)
        if source == state.host_id and others:  # what was planned from here is lost
            source = others[0]
        asked.setdefault(source, []).append(index)
    lost = {state.host_id: asked.pop(state.host_id)} if state.host_id in asked else {}
    if not isinstance(order, StageShard):
        return asked, lost, []
    found: dict[int, str] = {}
    ask = partial(_verified, io, order, found)
    ends = await io.together(
        [fetch.from_planned(io, state, order, source, wanted, found.__contains__, ask, until_s)
         for source, wanted in asked.items()]
    )  # fmt: skip
    lost.update({source: lacking for source, (lacking, _) in zip(asked, ends, strict=True) if lacking})
    verified: dict[str, list[int]] = {}
    for index in sorted(found):
        verified.setdefault(found[index], []).append(index)
    return verified, lost, [problem for _, problem in ends if problem]


async def _verified(io: HolderIo, order: BringOrder, found: dict[int, str], host: str, wanted: list[int]) -> list[int]:
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


async def elsewhere(io: HolderIo, read: PartialRead) -> tuple[ChunksElsewhere, ...]:
    """Return where a reader fetches the chunks that are not here; none of a host that is gone by now."""
    rows = []
    for host, indices in sorted(read.sources.items()):
        try:
            peer = await io.reach(host)
        except PeerUnreachable:
            continue  # its reader has these brought from another copy
        rows.append(ChunksElsewhere(host, peer.endpoints, tuple(ranges(indices))))
    return tuple(rows)


def ranges(indices: Iterable[int]) -> Iterator[ChunkRange]:
    """Yield chunks as ranges of neighbours.

    >>> [(r.first, r.count) for r in ranges([1, 2, 3, 7])]
    [(1, 3), (7, 1)]
    """
    first = count = 0
    for index in sorted(indices):
        if count and index != first + count:
            yield ChunkRange(first, count)
            count = 0
        first, count = (first, count + 1) if count else (index, 1)
    if count:
        yield ChunkRange(first, count)
