"""Pins staged slots for a reader of this host (R7).

staged --pinned--> placed --its reader releases it, its link ends, or its deadline passes--> free
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from memstore.core.format.manifest import shard_digest
from memstore.core.holder.holder_io import HolderIo
from memstore.core.holder.link import Link
from memstore.core.holder.reads import direct_read, partial_read
from memstore.core.holder.state import HolderState, ReadKey
from memstore.core.wire.replies import ChunksElsewhere, ChunksStaged, ShardPlaced, ShardStaged
from memstore.errors import IntegrityError


async def place(io: HolderIo, state: HolderState, link: Link, staged: ShardStaged | ChunksStaged) -> ShardPlaced:
    """Pin what was brought here for a reader, and return its place. IntegrityError if it is gone or damaged."""
    key: ReadKey = staged.read if isinstance(staged, ChunksStaged) else (link.job, staged.shard.rank)
    if isinstance(staged, ChunksStaged) or _is_direct(state, key, staged):
        ready = partial_read.take(state, key)
        elsewhere = await direct_read.elsewhere(io, ready)
        pin = hold(state, link, partial(partial_read.release, state, key, ready))
        return _placed(staged, ready.manifest, ready.replica.slots, pin, elsewhere)
    pinned = state.store.pin(staged.shard.id, staged.digest, is_reader=True)
    if pinned is None:
        raise IntegrityError("the staged shard was dropped before it could be read: call get() again")
    release = partial(state.store.unpin, *pinned)
    try:
        manifest = await io.on_store(partial(state.store.manifest, pinned[0]))
    except BaseException:
        release()
        raise
    return _placed(staged, manifest, pinned[0].slots, hold(state, link, release))


def _is_direct(state: HolderState, key: ReadKey, staged: ShardStaged) -> bool:
    """Say whether a round was staged here as a read whose reader fetches what is not here."""
    ready = state.partial_reads.known.get(key)
    if staged.report is None or ready is None:
        return False
    return (ready.replica.shard, shard_digest(ready.manifest)) == (staged.shard.id, staged.digest)


def _placed(
    staged: ShardStaged | ChunksStaged, manifest: bytes, slots: Iterable[int | None], pin: int,
    elsewhere: tuple[ChunksElsewhere, ...] = (),
) -> ShardPlaced:  # fmt: skip
    return ShardPlaced(
        step=staged.step, attempt=staged.attempt, verdict=staged.verdict, why=staged.why,
        report=staged.report if isinstance(staged, ShardStaged) else None,
        manifest=manifest, slots=tuple(slots), elsewhere=elsewhere, pin=pin,
    )  # fmt: skip


def hold(state: HolderState, link: Link, release: Callable[[], None]) -> int:
    """Keep a pin for its reader; not one of a link that has just ended."""
    pin = next(state.pin_numbers)
    if state.ranks.is_current(link):
        link.pins[pin] = release
    else:
        release()
    return pin


async def expire(io: HolderIo, state: HolderState) -> None:
    """Let go of what readers kept past their deadline, or did not take."""
    await io.on_store(state.store.expire_pins)
    partial_read.expire(state)


def give_back(link: Link, pin: int) -> None:
    """End a loan; nothing if it is over, such as one of an older link, whose number no other loan has."""
    link.pins.pop(pin, lambda: None)()
