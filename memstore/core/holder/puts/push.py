"""Copies a shard to one other host: after a put, while it is still digested, or when a repair is ordered (R13, R29).

begun --> offered --> sent --> sealed at the target      (a small shard: all three in one request)
            ^  '--refused, not for good, or broken off: wait, and try again with what is stored here--.
            '-----------------------------------------------------------------------------------------'
given up, and reported: refused for good, for 10 s without room, or out of reach for `dead_after_s`
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

from memstore.core.holder import ranks
from memstore.core.holder.holder_io import HolderIo, Lane, Peer, PushSource, StreamingSource
from memstore.core.holder.inventory import report_copy
from memstore.core.holder.state import HolderState, Replication
from memstore.core.wire.ids import WireShard
from memstore.core.wire.peer_messages import (
    Abort,
    ChunksLacking,
    Done,
    HasCopy,
    Offer,
    ParityOf,
    Ping,
    Refused,
    Seal,
    WholeShard,
)
from memstore.core.wire.reports import PushFailed
from memstore.errors import DigestMismatch, MemstoreError, PeerRefused, ProtocolError, TransportError
from recovery.inventory import ShardId

WHOLE_BYTES = 1 << 20  # below it round trips cost more than bytes that the target may have already
RETRY_S = 0.05
ROOM_WAIT_S = 10.0  # a target frees room when it learns of the last commit; longer means it is really full
SEAL_ROUNDS_MAX = 3  # a chunk that arrives damaged is sent again this often
PUSH = Lane("push")


@dataclass(frozen=True)
class Push:
    """One copy to make. `fresh` is the shard while it is digested here; then its digest is not known yet."""

    shard: ShardId
    digest: str
    target: str
    is_repair: bool = False
    parity: ParityOf | None = None  # the shard is added into parity there; None: a copy of it is made
    fresh: StreamingSource | None = None

    @property
    def key(self) -> tuple[ShardId, str, bool]:
        """Return what tells pushes apart."""
        return self.shard, self.target, self.parity is not None

    def chunks(self, count: int) -> Sequence[int]:
        """Return the chunks to send of a shard with so many, in their order."""
        if self.parity is None:
            return range(count)
        return [*self.parity.set.rows_at(self.parity.rank, self.shard.rank, count)]


async def replicate(
    io: HolderIo, state: HolderState, shard: ShardId, digest: str, fresh: StreamingSource | None = None
) -> bool:
    """Begin the pushes of a put to this host's targets; return False if there are none.

    The digest is "" while the shard is being digested. A push that is under way already counts for this put too (R15).
    """
    await io.release_sends(shard)
    targets, parity = state.shared_shards.targets(shard), state.shared_shards.parity_targets(shard)
    replication = Replication(shard, {*targets, *parity})  # into parity no put is replicated before it is committed
    pushes = [Push(shard, digest, target, fresh=fresh) for target in targets]
    pushes += [Push(shard, digest, target, parity=of, fresh=fresh) for target, of in parity.items()]
    for push in pushes:
        if begin(state, push, replication if push.parity is None else None):
            io.start(PUSH, run, state, push)
    return bool(pushes)


def begin(state: HolderState, push: Push, replication: Replication | None = None) -> bool:
    """Note that a push begins; False if the same one is under way: a put then waits for that push instead."""
    is_new = push.key not in state.pushes.under_way
    waiting = state.pushes.under_way.setdefault(push.key, [])
    waiting += [replication] if replication is not None else []
    if is_new and push.fresh is not None:
        push.fresh.begin()
    return is_new


async def run(io: HolderIo, state: HolderState, push: Push) -> None:
    """Make the copy. Report a failure; notify the rank if this was the last copy of its put."""
    why, is_final = "", True
    try:
        why, is_final = await _copied(io, state, push)
    except MemstoreError as exc:
        why = str(exc)
    except Exception as exc:
        await io.unexpected(f"push of {push.shard} to {push.target}", exc)
        why = repr(exc)
    finally:
        waiting = state.pushes.under_way.pop(push.key, [])
    if why:
        missing = push.shard if push.parity is None else push.shard._replace(rank=push.parity.rank, is_parity=True)
        state.report(PushFailed(shard=WireShard.of(missing), target=push.target, why=why, is_final=is_final))
        return
    for replication in waiting:
        replication.left.discard(push.target)
        if not replication.left:
            await ranks.send_replicated(io, state, replication.shard)


async def _copied(io: HolderIo, state: HolderState, push: Push) -> tuple[str, bool]:
    """Return ("", ...) when the target has sealed the shard, else why not and whether that is final."""
    digest = push.digest
    if push.fresh is not None:
        try:
            await send(io, state, push, push.fresh, push.shard.attempt)
            return "", True
        except (PeerRefused, TransportError):  # what goes wrong meanwhile is tried again once it is sealed
            digest = await io.await_digest(push.fresh)
        finally:
            push.fresh.release()
    deadline_s = state.now() + ROOM_WAIT_S
    while not state.is_stopping():
        source = state.outgoing(push.shard, digest)
        if source is None:
            return "", True  # dropped here meanwhile: nothing is missing
        try:
            fence = state.fences.first(push.shard.job) if push.is_repair else 0
            await send(io, state, push, source, max(push.shard.attempt, fence))
            return "", True
        except PeerRefused as exc:
            why, is_final = str(exc), bool(getattr(exc, "is_final", False))
        except TransportError as exc:
            why, since_s = f"cannot reach {push.target}: {exc}", state.pushes.silent_since_s.get(push.target)
            # Given up once it has been out of our reach for as long as a silent host takes to be dead (R28).
            is_final = since_s is not None and state.now() - since_s > state.limits.dead_after_s
        finally:
            source.release()
        if is_final or state.now() > deadline_s:
            return why, True
        await io.sleep(RETRY_S)
    return "the holder is stopping", False


async def send(io: HolderIo, state: HolderState, push: Push, source: PushSource, attempt: int) -> None:
    """Try once and note whether the target answers; if it did not answer last time, ping it first (R18).

    The controller may still reach a host that this one cannot: a short ping fails before a put waits long.
    """
    silent_since_s = state.pushes.silent_since_s
    try:
        peer = await io.reach(push.target)
    except TransportError:
        silent_since_s.pop(push.target, None)  # dead: the controller knows it, and orders repairs
        raise
    try:
        if push.target in silent_since_s:
            await io.call_peer(peer, Ping(), limit_s=state.limits.suspect_after_s)
        reply = await _offer(io, state, push, peer, source, attempt)
        await _send_and_seal(io, state, push, peer, source, reply)
    except PeerRefused:
        silent_since_s.pop(push.target, None)
        raise
    except TransportError:
        silent_since_s.setdefault(push.target, state.now())
        raise
    silent_since_s.pop(push.target, None)


async def _offer(
    io: HolderIo, state: HolderState, push: Push, peer: Peer, source: PushSource, attempt: int
) -> Done | HasCopy | ChunksLacking:
    """Offer the shard to a peer, a small one with all of its chunks; return what the peer has of it. PeerRefused."""
    shard, sender, count = WireShard.of(push.shard), state.host_id, len(source.sizes)
    reply: Done | HasCopy | ChunksLacking | Refused
    if push.parity is not None or sum(source.sizes) > state.limits.whole_bytes:
        digest = source.digest or None
        offer = Offer(
            shard=shard, digest=digest, attempt=attempt, sender=sender, chunks_count=count, parity=push.parity
        )
        reply = await io.call_peer(peer, offer)
    else:
        manifest = await _manifest(io, state, source)
        whole = WholeShard(shard=shard, sender=sender, attempt=attempt, manifest=manifest)
        try:
            reply = await io.send_whole(peer, source, whole, is_repair=push.is_repair)
        except MemstoreError:
            await _abort(io, state, push, peer)
            raise
    if isinstance(reply, Refused):
        raise PeerRefused(reply.why, is_final=reply.is_final)
    return reply


async def _abort(io: HolderIo, state: HolderState, push: Push, peer: Peer) -> None:
    """Have a peer free what it has of the shard; if that does not reach it, it gives the copy up itself, later."""
    with contextlib.suppress(TransportError):
        await io.call_peer(peer, Abort(shard=WireShard.of(push.shard), sender=state.host_id, parity=push.parity))


async def _send_and_seal(
    io: HolderIo,
    state: HolderState,
    push: Push,
    peer: Peer,
    source: PushSource,
    reply: Done | HasCopy | ChunksLacking | Refused,
) -> None:
    """Send every chunk that the peer lacks, then the manifest; send again what arrived damaged and is good here.

    What was begun at the peer is aborted if that fails.
    """
    every, rounds = push.chunks(len(source.sizes)), 0
    try:
        while not isinstance(reply, HasCopy) and not (rounds and isinstance(reply, Done)):
            if isinstance(reply, Refused):
                raise PeerRefused(reply.why, is_final=reply.is_final)
            wanted: Sequence[int] = every
            if isinstance(reply, ChunksLacking):  # although they were sent
                wanted = reply.chunks
                if not set(wanted).issubset(every):
                    why = f"host {push.target} lacks chunks {wanted[:64]}, which the shard does not have"
                    raise ProtocolError(why)
                await _verify(io, state, source, wanted)
            if rounds == SEAL_ROUNDS_MAX:
                why = f"{len(wanted)} chunks arrived damaged or found no room {SEAL_ROUNDS_MAX} times"
                raise PeerRefused(why, is_final=True)
            is_whole = rounds or push.is_repair or push.parity is not None  # what was refused as a patch comes whole
            base = () if is_whole else base_of(state, push)
            rounds += 1
            await io.send_chunks(peer, source, wanted, base=base, is_repair=push.is_repair, parity=push.parity)
            manifest = await _manifest(io, state, source)
            seal = Seal(shard=WireShard.of(push.shard), sender=state.host_id, manifest=manifest, parity=push.parity)
            reply = await io.call_peer(peer, seal)
    except MemstoreError:
        await _abort(io, state, push, peer)
        raise


def base_of(state: HolderState, push: Push) -> Sequence[bytes]:
    """Return the chunks' digests of the newest older step of the rank here that is not on its way to the target.

    The target has most likely a copy of it, and says for each chunk that it lacks whether it has the one in its place.
    """
    shard, under_way = push.shard, state.pushes.under_way
    with state.store.lock:
        here = [each for each in state.store.index.shards.values() if (each.shard, push.target, False) not in under_way]
    own = [each for each in here if (each.shard.job, each.shard.rank) == (shard.job, shard.rank)]
    older = [each for each in own if each.shard < shard]
    return max(older, key=lambda each: each.shard).digests if older else ()


async def _verify(io: HolderIo, state: HolderState, source: PushSource, wanted: Sequence[int]) -> None:
    """Digest chunks here that a peer lacks after they were sent; DigestMismatch if this host's own copy is bad.

    That is reported first: the refused copy must not make a step count as one that has this copy.
    """
    stored = source.stored
    if stored is not None and (await io.verify(stored, frozenset(wanted))):
        report_copy(state, stored)
        raise DigestMismatch(
            f"{len(stored.missing)} chunks of {source.shard} on {state.host_id} are not what their digests say: they "
            "changed after they were copied, or were digested wrongly",
            shard=str(source.shard),
        )


async def _manifest(io: HolderIo, state: HolderState, source: PushSource) -> bytes:
    """Return the manifest of the source. If it is damaged, this host has no copy: a step must not commit with it."""
    try:
        return await io.read_manifest(source)
    except DigestMismatch:
        if source.stored is not None and state.store.lose_manifest(source.stored):
            report_copy(state, source.stored)
        raise
