"""Planted bugs in the replica store: index, slot table, adoption, peer server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from memstore.core.arena import adoption
from memstore.core.arena.replica_index import LOCAL_SENDER, IncomingReplica, ReplicaIndex, StoredReplica
from memstore.core.arena.replica_store import ReplicaStore, Store
from memstore.core.arena.slot_table import SlotState, SlotTable
from memstore.core.format.manifest import manifest_name
from memstore.core.holder import lost_files
from memstore.core.holder.puts import seal
from memstore.core.wire.peer_messages import ChunksLacking, OfferedChunk
from memstore.core.wire.rank_messages import PutReady
from memstore.shell.holder.scrub import Scrubber
from memstore.shell.peer import patches
from memstore.shell.peer.server import PeerServer
from memstore.testing.faults.catalogue import Fault
from memstore.testing.simulator.planted.bug import BETWEEN_STEPS, planted, row
from memstore.testing.simulator.rank.rank import SimRank
from memstore.testing.simulator.world.memory import Memory

CRASHES = tuple(Fault(2.0 + 1.7 * n, "crash-holder-at", (n % 3,), count=2 * n + 1) for n in range(6))

FROZEN_SENDER = (Fault(5.0, "freeze-holder", (0,), for_s=3.9), Fault(5.2, "kill-rank", rank=1))


class _Equal:
    """A digest that equals every other one."""

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = object.__hash__


@planted(
    "digest-skipped-on-arrival", "R14", "R6", Fault(3.0, "flip-in-transit", count=4), at=(ReplicaStore, "keep_chunks")
)
def digest_skipped_on_arrival(real: Any, self: Store, replica: IncomingReplica, arrived: Any) -> Any:
    """A chunk from a peer is kept without comparing its digest."""
    for index, number, nbytes, _ in arrived:
        self.index.fill(replica, index, number, replica.digests[index], nbytes, self.clock.time())
    self.flush()
    return []


@planted("patch-not-digested", "R13", "R6", Fault(3.0, "flip-in-transit", count=4), at=(patches, "_built"))
def patch_not_digested(real: Any, replicas: Store, chunk: OfferedChunk, *how: Any) -> bytes:
    """A chunk that was built of a patch is taken for the one that was offered, whatever it is."""
    return chunk.digest if real(replicas, chunk, *how) else b""


@planted("digests-of-the-put-before", "R14", "R8")
@contextmanager
def digests_of_the_put_before() -> Iterator[None]:
    """A holder keeps the digests that came with a put, and takes them for the next bytes in the same slots."""
    given, kept = seal.given_digests, dict[int, bytes]()

    def first(ready: PutReady) -> list[bytes] | None:
        digests = given(ready)
        return digests and [kept.setdefault(slot, one) for slot, one in zip(ready.slots, digests, strict=True)]

    with patch.object(seal, "given_digests", first):
        yield


@planted("have-without-a-reference", "R13", "R6 R7", at=(ReplicaIndex, "hold_known"))
def have_without_a_reference(real: Any, self: Any, replica: IncomingReplica, index: int, nbytes: int) -> Any:
    """An offered chunk that is here already is counted without a reference of its own."""
    number = self.table.lookup(replica.digests[index], nbytes)
    if number is not None and replica.slots[index] is None:
        replica.slots[index] = number
    return number


@planted("free-before-unlink", "R7", "R7", *CRASHES, step_s=0.15, at=(ReplicaStore, "_discard"))
def free_before_unlink(real: Any, self: Store, gone: list[StoredReplica]) -> None:
    """A dropped replica's slots are freed before its manifest is unlinked."""
    for stored in gone:
        self.index.free(stored)
        self.flush()
        self.manifests.remove(manifest_name(stored.shard, stored.spec.digest))


@planted("ack-before-the-manifest", "R7", "I4", at=(ReplicaStore, "finish"))
def ack_before_the_manifest(real: Any, self: Store, name: str, *manifest: Any) -> Any:
    """A replica is acknowledged although its manifest was never stored."""
    if name == LOCAL_SENDER:
        return real(self, name, *manifest)
    with patch.object(self.manifests, "save", lambda name, data: None):
        return real(self, name, *manifest)


@planted("manifest-before-the-chunks", "R7", "R7", *CRASHES, step_s=0.15)
def manifest_before_the_chunks() -> Any:
    """The manifest is stored before the headers of its slots say sealed."""
    finish, flush = ReplicaStore.finish, ReplicaStore.flush
    finishing: list[Store] = []

    def late(self: Store) -> None:
        kept = {n for n in self.table.dirty if self.table.slots[n].state is SlotState.SEALED and self not in finishing}
        self.table.dirty -= kept
        flush(self)
        self.table.dirty |= kept

    def early(self: Store, name: str, *manifest: Any) -> StoredReplica:
        finishing.append(self)
        try:
            return finish(self, name, *manifest)
        finally:
            finishing.clear()

    return patch.multiple(ReplicaStore, finish=early, flush=late)


@planted("stale-submission", "R8", "R6 R7 R8", *CRASHES, step_s=0.15)
def stale_submission() -> Any:
    """After a broken link a rank submits slots that are not leased to it any more, and the holder takes them."""

    def take(self: SlotTable, owner: Any, numbers: Any) -> bool:
        for number in numbers:
            self.leases.get(owner, set()).discard(number)
            self._enter(number, SlotState.RECEIVING)
        return True

    return patch.multiple(SlotTable, submit=take, confirm=lambda self, owner, held: (list(held), []))


@planted(
    "incoming-replicas-kept",
    "R13",
    "I13 I16",
    Fault(4.0, "memory-full", (2,), for_s=3.0),
    replicas=3,
    world_size=2,
    at=(PeerServer, "_abort"),
)
def incoming_kept(real: Any, self: PeerServer, request: Any) -> Any:
    """A push that was given up leaves its incoming replica at the peer for ever."""
    with patch.object(self.replicas, "abort_incoming", lambda name, shard: None):
        return real(self, request)


@planted(
    "offer-ignores-fence",
    "R21",
    "R21",
    Fault(4.0, "slow-link", (0,), for_s=4.0, count=2),
    *FROZEN_SENDER,
    step_s=0.15,
    at=(PeerServer, "_offer"),
)
def offer_ignores_fence(real: Any, self: PeerServer, channel: Any, request: Any) -> Any:
    """A peer takes a shard of an attempt that it has fenced."""
    with patch.object(self, "is_fenced", lambda job, attempt: False):
        return real(self, channel, request)


@planted(
    "pin-ignored", "R7", "R7", Fault(3.0, "slow-link", (0,), for_s=8.0, count=8), step_s=0.15, at=(ReplicaIndex, "drop")
)
def pin_ignored(real: Any, self: ReplicaIndex, shard: Any, *how: Any) -> Any:
    """A replica is freed although a reader has pinned it."""
    return [self.shards.pop(key) for key in [k for k in self.shards if k[0] == shard]]


ROWS = (
    row("adoption-trusts-headers", "R6", "R6", (adoption, "chunk_digest"), lambda view: _Equal(),
        "A new holder believes every slot header without digesting the slot.",
        Fault(5.0, "flip-at-rest", (0,), count=16), Fault(5.1, "kill-holder", (0,))),
    row("digest-skipped-on-staging", "R23", "R23", (ReplicaStore, "verify_slots"), lambda self, slots, *how: None,
        "A restore hands local bytes to the rank without digesting them again.",
        Fault(4.5, "kill-rank"), Fault(4.6, "flip-at-rest", (0,), count=16)),
    row("source-not-digested", "R23", "R23", (PeerServer, "_verify"), lambda self, request: ChunksLacking(chunks=()),
        "Ranks are released to fetch bytes that their source has not digested again.",
        Fault(4.5, "kill-host", (1,), for_s=2.0), Fault(5.2, "flip-at-rest", (3,), count=30), hosts=4, world_size=4,
        is_strict=False),
    row("bad-slot-not-condemned", "R30", "R23 R6 R29", (ReplicaIndex, "quarantine"), lambda self, number: [],
        "A slot with bad bytes stays in its replicas and is served.",
        Fault(4.5, "kill-rank"), Fault(4.6, "flip-at-rest", (0,), count=16)),
    row("scrub-finds-nothing", "R30", "R29", (ReplicaStore, "verify_slot"), lambda self, number: [],
        "The scrub skips slots.", Fault(8.0, "flip-at-rest", (0,), count=16), **BETWEEN_STEPS),
    row("scrub-passes-manifests", "R30", "R29", (Scrubber, "_check_manifest"), lambda self, stored: False,
        "The scrub skips manifests.", Fault(8.0, "rot-manifest", (0,), count=16), **BETWEEN_STEPS),
    row("index-keeps-freed-slots", "R6", "R6", (SlotTable, "quarantine"), lambda self, number: None,
        "The content index goes on naming a slot that was freed."),
    row("fence-keeps-incoming-replicas", "R21", "R21", (ReplicaIndex, "abort_older"), lambda self, job, attempt: [],
        "A fence leaves half-received shards of older attempts alone.",
        Fault(4.0, "slow-link", (0,), for_s=4.0, count=2), *FROZEN_SENDER, step_s=0.15),
    row("peer-copies-refused", "R10", "I16", (ReplicaIndex, "peer_refusal"), lambda *_: "peer share full",
        "A host refuses every copy of a peer for want of room."),
)  # fmt: skip


# -- taken files --------------------------------------------------------------------------------------
# Planted bugs around files that go while processes live: replaced arenas, removed names.


REPLACED, REMOVED = Fault(4.0, "replace-arena", (1,)), Fault(4.0, "remove-files", (1,))


def _first_only(self: SimRank, memory: Memory) -> None:
    self.mapping = self.mapping or memory.slots


@planted("old-arena-written", "R8", "R8", REPLACED)
@contextmanager
def old_arena_written() -> Iterator[None]:
    """A rank goes on writing into the arena that it mapped first, and its holder seals the zeros of the new one."""
    with patch.object(SimRank, "map_arena", _first_only), patch.object(seal, "_not_seen", _seen):
        yield


async def _seen(*_: Any) -> str:
    return ""


FILE_ROWS = (
    row("old-arena-kept", "R8", "I16", (SimRank, "map_arena"), _first_only,
        "A rank keeps its mapping of an arena that was replaced, so every put of it fails.", REPLACED),
    row("removed-files-unseen", "R35", "I16", (lost_files, "look"), lambda files, loss: None,
        "A holder does not notice that its files were removed; it stays, and can store nothing.", REMOVED),
    row("removed-files-not-written", "R35", "R19 I1", (lost_files, "_written_again"), lambda files: "",
        "A holder whose files were removed ends without writing them again.", REMOVED),
)  # fmt: skip
