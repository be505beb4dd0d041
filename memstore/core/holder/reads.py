"""Passes the controller's answers on to ranks of this host; pins what was staged for a reader (R7).

staged --pinned--> placed --its reader releases it, its link ends, or its deadline passes--> free
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from memstore.core.holder import partial_read
from memstore.core.holder.effects import OnStore, Procedure
from memstore.core.holder.link import Link
from memstore.core.holder.state import HolderState
from memstore.core.wire.calls import RankCall
from memstore.core.wire.codec import encode
from memstore.core.wire.rank_messages import AskAnswered, AskRefused
from memstore.core.wire.replies import ChunksStaged, Joined, ShardPlaced, ShardStaged, decode_passed
from memstore.errors import IntegrityError


def answer(
    state: HolderState, link: Link, rank_id: int, request: RankCall, data: bytes | None, error: Sequence[str] | None
) -> Procedure[AskAnswered | AskRefused]:
    """Return what a rank is sent of the controller's answer to its call; with the place of the bytes if it is a read.

    Args:
        rank_id: The rank's number of its call.
        data: The answer.
        error: Or why there is none: the name of an error, and its text.
    """
    reply = decode_passed(request, data) if data is not None else None
    if isinstance(reply, Joined):
        link.attempt, link.rank = reply.attempt, reply.rank
    if error is not None or reply is None:
        name, message = error or ("InternalError", "the controller answered nothing")
        return AskRefused(id=rank_id, error=name, message=message)
    if isinstance(reply, ShardStaged | ChunksStaged):
        try:
            reply = yield from _place(state, link, reply)
        except IntegrityError as exc:
            return AskRefused(id=rank_id, error="RecoveryError", message=str(exc))
    return AskAnswered(id=rank_id, reply=encode(reply))


def _place(state: HolderState, link: Link, staged: ShardStaged | ChunksStaged) -> Procedure[ShardPlaced]:
    """Pin what was brought here for a rank, and say where it lies: slots by chunk, None for one that was not asked for.

    IntegrityError if it is gone, or its manifest damaged.
    """
    manifest, slots, pin = yield from _pin(state, link, staged)
    return ShardPlaced(
        step=staged.step, attempt=staged.attempt, verdict=staged.verdict, why=staged.why,
        report=staged.report if isinstance(staged, ShardStaged) else None, manifest=manifest, slots=tuple(slots),
        pin=pin,
    )  # fmt: skip


def _pin(
    state: HolderState, link: Link, staged: ShardStaged | ChunksStaged
) -> Procedure[tuple[bytes, Sequence[int | None], int]]:
    if isinstance(staged, ChunksStaged):
        ready = partial_read.take(state, staged.read)
        release = partial(partial_read.release, state, staged.read)
        return ready.manifest, ready.replica.slots, _hold(state, link, release)
    pinned = state.store.pin(staged.shard.id, staged.digest, is_reader=True)
    if pinned is None:
        raise IntegrityError("the staged shard was dropped before it could be read: call get() again")
    release = partial(state.store.unpin, *pinned)
    try:
        manifest = yield OnStore(partial(state.store.manifest, pinned[0]))
    except BaseException:
        release()
        raise
    return manifest, pinned[0].slots, _hold(state, link, release)


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
