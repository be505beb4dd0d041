"""Pushes what a put has copied so far while its rank still copies the rest (R11, R13).

first part --this host has targets--> pushed --the put is submitted--> part of the submission (`seal.py`)
   '--no targets, or fenced--> ignored  '--given up, another put begins, the process is gone, a fence--> its pushes end

The slots stay the rank's, and nothing is stored here or there before the put is submitted: a target seals a copy only
with the manifest. A rank has one such put at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from memstore.core.arena.slot_table import Owner
from memstore.core.format.manifest import DIGEST_BYTES, chunk_sizes, split_digests
from memstore.core.holder.effects import OpenFresh, Procedure, Replicate, StreamingSource
from memstore.core.holder.link import Link
from memstore.core.holder.state import HolderState, PutParts, SubmittedPut
from memstore.core.wire.rank_messages import PutPart, PutReady
from recovery.inventory import ShardId


@dataclass(frozen=True)
class Fresh:
    """The source of a put's pushes, and whether there are any."""

    source: StreamingSource
    has_targets: bool


def take(state: HolderState, link: Link, part: PutPart) -> Procedure[None]:
    """Let targets have the next chunks of a put; one that does not fit what came before is left out."""
    owner, shard = link.owner, ShardId(link.job, part.attempt, part.step, link.rank)
    known = state.puts.parts.get(owner)
    if known is not None and (known.shard != shard or part.first == 0):  # perhaps the same step, once more
        end(state, lambda one, _: one == owner, "the rank began another put")
        known = None
    if link.is_retired or not _is_sound(state, link, part):
        return
    if known is None and part.first == 0:
        sizes = chunk_sizes(part.nbytes, state.store.chunk_bytes)
        known = state.puts.parts[owner] = PutParts(shard, (yield OpenFresh(shard, (), sizes)))
        if not (yield Replicate(shard, "", known.fresh)):
            end(state, lambda one, _: one == owner, "this host has no targets")
            return
    # It may have ended, or be submitted on another link, by now.
    if known is None or state.puts.parts.get(owner) is not known or part.first != len(known.slots):
        return
    known.slots += part.slots
    known.digests += part.digests
    known.fresh.extend(part.slots, split_digests(part.digests))


def _is_sound(state: HolderState, link: Link, part: PutPart) -> bool:
    """Say whether a part is of this arena, the rank has leased room for its whole put, and no fence refuses it."""
    store, count = state.store, len(part.slots)
    leased, chunks_count = store.index.table.leases.get(link.owner, set[int]()), -(-part.nbytes // store.chunk_bytes)
    return (
        part.arena == store.arena_identity
        and 0 < count <= chunks_count - part.first
        and chunks_count <= len(leased)
        and leased.issuperset(part.slots)
        and len(part.digests) == count * DIGEST_BYTES
        and not state.fences.is_fenced(link.job, part.attempt)
    )


def submitted(state: HolderState, link: Link, ready: PutReady) -> PutParts | None:
    """Return the parts of a put that is submitted now; those of another one, or an earlier try, are given up."""
    known = state.puts.parts.pop(link.owner, None)
    if known is None or (
        known.shard == ShardId(link.job, ready.attempt, ready.step, link.rank)
        and ready.slots[: len(known.slots)] == tuple(known.slots)
        and (ready.digests or b"").startswith(bytes(known.digests))
    ):
        return known
    known.fresh.fail("the rank submitted another put")
    return None


def join(parts: PutParts, ready: PutReady) -> Fresh:
    """Let the pushes of a put that is taken over have the rest of its chunks."""
    count, digests = len(parts.slots), ready.digests or b""
    parts.fresh.extend(ready.slots[count:], split_digests(digests[len(parts.digests) :]))
    return Fresh(parts.fresh, has_targets=True)


def keep(state: HolderState, put: SubmittedPut) -> None:
    """Keep the parts of a put that its process submits again on another link."""
    if put.parts is not None:
        state.puts.parts.setdefault(put.link.owner, put.parts)


def done(state: HolderState, put: SubmittedPut, why: str) -> None:
    """End the pushes that began before a put was submitted, if it is not stored and not submitted again."""
    parts = put.parts
    if parts is not None and not parts.fresh.is_settled() and state.puts.parts.get(put.link.owner) is not parts:
        parts.fresh.fail(why or "its put was not stored")


def give_up(state: HolderState, link: Link, attempt: int, step: int) -> None:
    """End the pushes of a put that will not be submitted."""
    shard = ShardId(link.job, attempt, step, link.rank)
    end(state, lambda owner, one: (owner, one) == (link.owner, shard), "the rank gave its put up")


def end(state: HolderState, is_over: Callable[[Owner, ShardId], bool], why: str) -> None:
    """End the pushes of puts that are not submitted."""
    for owner, parts in list(state.puts.parts.items()):
        if is_over(owner, parts.shard):
            del state.puts.parts[owner]
            parts.fresh.fail(why)
