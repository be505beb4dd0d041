"""Pins staged slots for a reader of this host, until it releases them or its link ends (R7)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from memstore.core.holder import partial_read
from memstore.core.holder.effects import OnStore, Procedure
from memstore.core.holder.link import Link
from memstore.core.holder.state import HolderState
from memstore.core.wire.replies import ChunksStaged, ShardStaged
from memstore.errors import IntegrityError


class PinnedBytes(NamedTuple):
    """The place of the bytes: slots by chunk, None for a chunk that was not asked for; `pin` ends the loan."""

    manifest: bytes
    slots: Sequence[int | None]
    pin: int


def pin_staged(state: HolderState, link: Link, staged: ShardStaged | ChunksStaged) -> Procedure[PinnedBytes]:
    """Pin what the controller's answer to a read names. IntegrityError if it is gone, or its manifest damaged."""
    if isinstance(staged, ChunksStaged):
        ready = partial_read.take(state, staged.read)
        release = partial(partial_read.release, state, staged.read)
        return PinnedBytes(ready.manifest, ready.replica.slots, _hold(state, link, release))
    pinned = state.store.pin(staged.shard.id, staged.digest, is_reader=True)
    if pinned is None:
        raise IntegrityError("the staged shard was dropped before it could be read: call get() again")
    release = partial(state.store.unpin, *pinned)
    try:
        manifest = yield OnStore(partial(state.store.manifest, pinned[0]))
    except BaseException:
        release()
        raise
    return PinnedBytes(manifest, pinned[0].slots, _hold(state, link, release))


def _hold(state: HolderState, link: Link, release: Callable[[], None]) -> int:
    """Keep a pin for its reader; not one of a link that has just ended."""
    pin = next(state.pin_numbers)
    if state.ranks.is_current(link):
        link.pins[pin] = release
    else:
        release()
    return pin


def expire(state: HolderState) -> Procedure[None]:
    """Let go of what readers kept past their deadline, or did not take."""
    yield OnStore(state.store.expire_pins)
    partial_read.expire(state)


def give_back(link: Link, pin: int) -> None:
    """End a loan; nothing if it is over, such as one of an older link, whose number no other loan has."""
    link.pins.pop(pin, lambda: None)()
