"""Passes the controller's answer to a rank's call on, with the place of the bytes if it is a read (R4, R7).

answered --the process that asked is connected here--> passed on, as it is, or with the slots that are pinned for it
   '--it is gone, or comes back: it asks again--> dropped
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from msgspec.structs import replace

from memstore.core.arena.slot_table import Owner
from memstore.core.holder.holder_io import HolderIo
from memstore.core.holder.link import Link
from memstore.core.holder.reads import ready
from memstore.core.holder.state import HolderState
from memstore.core.wire.calls import EndLease, LeaseStep, RankCall
from memstore.core.wire.codec import encode
from memstore.core.wire.orders import CallAnswered
from memstore.core.wire.replies import Joined, ShardReady, StepLeased, decode_passed
from memstore.errors import IntegrityError


@dataclass(frozen=True)
class ForwardedCall:
    """A call; `owner` is None for the holder's own."""

    owner: Owner | None
    nonce: str
    rank_id: int  # the rank's own number of it
    request: RankCall


async def pass_on(
    io: HolderIo, state: HolderState, call: ForwardedCall, data: bytes, error: tuple[str, str] | None
) -> None:
    """Send the process that asked what the controller answered: a reply, or the name and the text of an error."""
    link = state.ranks.links.get(call.nonce)
    if link is None or link.owner != call.owner:
        _end_lease(state, call)
        return
    try:
        answer = await _answer(io, state, link, call, data, error)
    except IntegrityError as exc:
        answer = CallAnswered(id=call.rank_id, reply=b"", error=("RecoveryError", str(exc)))
    except Exception as exc:  # the call is taken out: without an answer its rank would wait for its whole limit
        await io.unexpected(f"host {state.host_id}: an answer of the controller cannot be passed on", exc)
        answer = CallAnswered(id=call.rank_id, reply=b"", error=("InternalError", f"{type(exc).__name__}: {exc}"))
    await io.send_to_rank(link, answer)


def _end_lease(state: HolderState, call: ForwardedCall) -> None:
    """End the lease that a call asked for, if it did (R36)."""
    if isinstance(call.request, LeaseStep):
        state.ask(EndLease(job=call.request.job, lease=call.request.lease))


async def _answer(
    io: HolderIo, state: HolderState, link: Link, call: ForwardedCall, data: bytes, error: tuple[str, str] | None
) -> CallAnswered:
    if error is not None:
        return CallAnswered(id=call.rank_id, reply=b"", error=error)
    reply = decode_passed(call.request, data)
    if isinstance(reply, Joined):
        link.attempt, link.rank = reply.attempt, reply.rank
    if isinstance(reply, ShardReady):
        reply = await ready.place(io, state, link, reply)
    elif isinstance(reply, StepLeased):
        reply = replace(reply, pin=ready.hold(state, link, partial(_end_lease, state, call)))
    return CallAnswered(id=call.rank_id, reply=encode(reply))
