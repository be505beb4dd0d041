"""Reads what was brought to a simulated holder for its ranks: copies it out, and digests it again (R23, R25)."""

from __future__ import annotations

import random
from collections.abc import Generator
from contextlib import suppress

from memstore.core.format.manifest import Manifest, chunk_digest, decode_manifest, shard_digest
from memstore.core.holder.reads import ready
from memstore.core.wire.calls import RankCall, ReadStep
from memstore.core.wire.codec import reply_decoder
from memstore.core.wire.ids import WireShard
from memstore.core.wire.orders import CallAnswered
from memstore.core.wire.peer_messages import FetchChunks
from memstore.core.wire.replies import ShardPlaced, decode_pinned
from memstore.errors import MemstoreError, ProtocolError
from memstore.testing.simulator.host.context import HostContext
from memstore.testing.simulator.host.peer_requests import connect
from memstore.testing.simulator.host.rank_link import RankLink
from memstore.testing.simulator.world.processes import AnyRank, CallFailed, CopiedRead
from memstore.testing.simulator.world.virtual_time import Thread, Wait

READ_S = (0.0, 0.05)  # until a reader has copied what was staged for it
SLOW_SHARE, SLOW_S = 0.2, 2.0  # of readers that take longer than a broken link takes to come back


class Readers:
    """The ranks of one holder, as far as they read."""

    def __init__(self, holder: HostContext) -> None:
        self.holder = holder
        self.slowness = random.Random(f"readers {holder.world.scenario.seed} {holder.host_id}")
        self.opened_s: dict[str, float] = {}  # when an incoming replica was opened, by its name: it is verified since

    def answer(self, link: RankLink, answer: CallAnswered) -> None:
        """Let a rank take an answer; if it is a read, on a thread of its own."""
        request = link.process.calls.get(answer.id)
        if answer.error is not None:
            link.process.answered(answer.id, CallFailed(": ".join(answer.error)))
        elif request is None:
            with suppress(ProtocolError):  # the answer to another call
                ready.give_back(link, decode_pinned(answer.reply).pin)  # its reader has given up
        else:
            reply = reply_decoder(type(request))(answer.reply)
            if isinstance(reply, ShardPlaced):
                self.holder.world.spawn(self._read(link, answer.id, request, reply), link.process)
            else:
                link.process.answered(answer.id, reply)

    def _read(self, link: RankLink, call_id: int, request: RankCall, placed: ShardPlaced) -> Thread:
        """Copy out what an answer names and digest it again, as a reader does; then let go of it (R7)."""
        holder, rank = self.holder, link.process
        is_whole = not isinstance(request, ReadStep) or request.chunks is None
        slow_s = self.slowness.uniform(0.0, SLOW_S) if self.slowness.random() < SLOW_SHARE else 0.0
        yield holder.world.network.rng.uniform(*READ_S) + slow_s
        wanted = [index for index, slot in enumerate(placed.slots) if slot is not None]
        read = dict(zip(wanted, rank.read([placed.slots[index] for index in wanted]), strict=True))
        if rank.link is link and holder.is_up:
            holder.checker.restores.read_whole(rank, is_pinned=placed.pin in link.pins)
        fetched = yield from self._fetch(rank, placed)
        if isinstance(rank.link, RankLink) and rank.holder is not None and rank.holder.is_up:
            ready.give_back(rank.link, placed.pin)  # as a rank does, on the link that it has now
        manifest = decode_manifest(placed.manifest)
        good = {i: data for i, data in {**read, **fetched}.items() if chunk_digest(data) == manifest.chunks[i].digest}
        bad = [i for i in read if i not in good]
        if placed.report is not None and (bad or (is_whole and not placed.elsewhere and None in placed.slots)):
            slots = [n for n in placed.slots if n is not None]
            holder.checker.restores.read_damaged(rank, slots, self._staged_s(rank))  # a barrier said: good (R27)
        asked = set(range(len(placed.slots))) if is_whole else {*read, *_elsewhere(placed)}
        missing = sorted(asked - good.keys())
        if missing and not (isinstance(request, ReadStep) and request.is_repair):
            good.update((yield from rank.repair(manifest, missing)))
        if asked - good.keys():
            rank.answered(call_id, CallFailed("DigestMismatch: a chunk was damaged before it was read"))
            return
        rank.answered(call_id, CopiedRead(placed, dict(sorted(good.items()))))

    def _fetch(self, rank: AnyRank, placed: ShardPlaced) -> Generator[Wait, None, dict[int, bytes]]:
        """Fetch chunks from other holders as a rank does; those that do not come are left out."""
        found: dict[int, bytes] = {}
        manifest = decode_manifest(placed.manifest)
        digest = shard_digest(placed.manifest)
        for row in placed.elsewhere:
            indices = tuple(i for part in row.chunks for i in range(part.first, part.first + part.count))
            request = FetchChunks(shard=WireShard.of(manifest.shard), digest=digest, chunks=indices)
            with suppress(MemstoreError):
                chunks = yield from connect(self.holder, row.host).fetch(request, is_reader=True)
                found.update(zip(indices, chunks, strict=True))
                if placed.report is not None:
                    self._check_source(rank, manifest, digest, row.host, dict(zip(indices, chunks, strict=True)))
        return found

    def _check_source(
        self, rank: AnyRank, manifest: Manifest, digest: str, host: str, chunks: dict[int, bytes]
    ) -> None:
        """Look at what a source sent a rank of a round: what was bad there before it was staged was found (R23)."""
        stored = self.holder.world.holders[host].replicas.index.find(manifest.shard, digest)
        wrong = [i for i, data in chunks.items() if data and chunk_digest(data) != manifest.chunks[i].digest]
        slots = [stored.slots[i] for i in wrong] if stored is not None else []
        found = [n for n in slots if n is not None]
        self.holder.checker.restores.read_damaged(rank, found, self._staged_s(rank), host)

    def _staged_s(self, rank: AnyRank) -> float:
        """Return since when what was brought for a rank's get has been verified."""
        order = self.holder.state.reads.newest.get((rank.job, rank.rank))
        name = ready.name_of(order.read) if order is not None else ""
        return self.opened_s.get(name, self.holder.world.now)


def _elsewhere(placed: ShardPlaced) -> set[int]:
    parts = (part for row in placed.elsewhere for part in row.chunks)
    return {i for part in parts for i in range(part.first, part.first + part.count)}
