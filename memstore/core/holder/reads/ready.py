"""Keeps what was brought for a reader of this host, pins it once the reader takes it, and lets it go (R7).

    ready --its reader took it--> pinned --released, or its link ended--> gone
      |--not taken in time, or a newer get of its rank--> gone    '--kept too long, or its step dropped--> gone
      '--the attempt of its get is fenced--> gone

The reader digests again what it has copied, or what it fetches from another host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial

from memstore.core.holder.holder_io import HolderIo, Link
from memstore.core.holder.state import HolderState, Ready
from memstore.core.wire.orders import ChunkRange
from memstore.core.wire.replies import ChunksElsewhere, ShardPlaced, ShardReady
from memstore.errors import IntegrityError, PeerUnreachable

PIN_S = 600.0  # longest a reader may keep what it has taken, and longest a get waits for all of its ranks (R7)
TAKE_S = (
    30.0  # longest a read waits for its reader, who may be gone or have asked another controller: puts lack its slots
)


def name_of(read: int) -> str:
    """Return the name of the incoming replica that a read keeps."""
    return f"read-{read}"


def keep(state: HolderState, ready: Ready) -> None:
    """Keep what was brought until its reader takes it."""
    ready.deadline_s = state.now() + (PIN_S if ready.order.use == "get" else TAKE_S)
    state.reads.ready[ready.order.read] = ready


def take(state: HolderState, read: int) -> Ready:
    """Pin what was brought for a reader. IntegrityError if it is gone."""
    ready = state.reads.ready.get(read)
    if ready is None or not is_held(state, ready):
        raise IntegrityError("what was brought for this read is gone, as with its step: call get() again")
    ready.deadline_s = state.now() + PIN_S
    return ready


def is_held(state: HolderState, ready: Ready) -> bool:
    """Say whether its chunks here are held still; an order to abandon its step gives them back at once (R12)."""
    replica = ready.replica
    with state.store.lock:
        return state.store.index.find_incoming(name_of(ready.order.read), replica.shard) is replica


def release(state: HolderState, read: int) -> None:
    """Let go of what was brought; nothing if it is gone."""
    ready = state.reads.ready.pop(read, None)
    if ready is not None:
        state.store.abort_incoming(name_of(read), ready.replica.shard, only=ready.replica)


def end_older(state: HolderState, job: str, attempt: int) -> None:
    """Let go of what was brought for gets of attempts before this one: their processes are refused (R21)."""
    for read, ready in list(state.reads.ready.items()):
        order = ready.order
        if order.use == "get" and order.job == job and order.attempt < attempt:
            release(state, read)


async def place(io: HolderIo, state: HolderState, link: Link, reply: ShardReady) -> ShardPlaced:
    """Pin what was brought here for a reader, and return its place. IntegrityError if it is gone."""
    ready = take(state, reply.read)
    elsewhere = await sources_of(io, ready)
    pin = hold(state, link, partial(release, state, reply.read))
    return ShardPlaced(
        step=reply.step,
        attempt=reply.attempt,
        verdict=reply.verdict,
        why=reply.why,
        report=reply.report,
        manifest=ready.manifest,
        slots=tuple(ready.replica.slots),
        elsewhere=elsewhere,
        pin=pin,
    )


async def sources_of(io: HolderIo, ready: Ready) -> tuple[ChunksElsewhere, ...]:
    """Return where a reader fetches the chunks that are not here; none of a host that is gone by now."""
    rows = []
    for host, indices in sorted(ready.sources.items()):
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


def hold(state: HolderState, link: Link, release: Callable[[], None]) -> int:
    """Keep a pin for its reader; not one of a link that has just ended."""
    pin = next(state.pin_numbers)
    if state.ranks.is_current(link):
        link.pins[pin] = release
    else:
        release()
    return pin


def give_back(link: Link, pin: int) -> None:
    """End a loan; nothing if it is over, such as one of an older link, whose number no other loan has."""
    link.pins.pop(pin, lambda: None)()


async def expire(io: HolderIo, state: HolderState) -> None:
    """Let go of what readers kept past their deadline, or did not take, and of what is of a dropped step."""
    await io.on_store(state.store.expire_pins)
    now = state.now()
    for read, ready in list(state.reads.ready.items()):
        if min(ready.deadline_s, ready.replica.deadline_s) < now or not is_held(state, ready):
            release(state, read)
