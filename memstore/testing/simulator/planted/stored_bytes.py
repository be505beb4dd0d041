"""Planted bugs in the replica store: index, slot table, adoption, peer server."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

from memstore.core.arena.replica_index import LOCAL_SENDER, IncomingReplica, ReplicaIndex, StoredReplica
from memstore.core.arena.slot_table import SlotState, SlotTable
from memstore.shell.arena import adoption
from memstore.shell.arena.manifests import ManifestFolder
from memstore.shell.arena.replica_store import ReplicaStore
from memstore.shell.holder.scrub import Scrubber
from memstore.shell.peer.server import PeerServer
from memstore.testing.simulator.planted.bug import BETWEEN_STEPS, planted
from memstore.testing.simulator.world.scenario import Fault

CRASHES = tuple(Fault(2.0 + 1.7 * n, "crash-holder-at", (n % 3,), count=2 * n + 1) for n in range(6))

FROZEN_SENDER = (Fault(5.0, "freeze-holder", (0,), for_s=3.9), Fault(5.2, "kill-rank", rank=1))


class _Equal:
    """A digest that equals every other one."""

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = object.__hash__


@planted("digest-skipped-on-arrival", "R14", "R6", Fault(3.0, "flip-in-transit", count=4))
def digest_skipped_on_arrival() -> Any:
    """A chunk from a peer is kept without comparing its digest."""

    def keep(self: ReplicaStore, replica: IncomingReplica, arrived: Any) -> list[int]:
        for index, number, nbytes, _ in arrived:
            self.index.fill(replica, index, number, replica.digests[index], nbytes, self.clock.time())
        self.flush()
        return []

    return patch.object(ReplicaStore, "keep_chunks", keep)


@planted("adoption-trusts-headers", "R6", "R6", Fault(5.0, "flip-at-rest", (0,), count=16),
         Fault(5.1, "kill-holder", (0,)))  # fmt: skip
def adoption_trusts_headers() -> Any:
    """A new holder believes every slot header without digesting the slot."""
    return patch.object(adoption, "chunk_digest", lambda view: _Equal())


@planted("digest-skipped-on-staging", "R23", "R23", Fault(4.5, "kill-rank"),
         Fault(4.6, "flip-at-rest", (0,), count=16), tries=4)  # fmt: skip
def digest_skipped_on_staging() -> Any:
    """A restore hands local bytes to the rank without digesting them again."""
    return patch.object(ReplicaStore, "verify", lambda self, stored: sorted(stored.missing))


@planted("bad-slot-not-condemned", "R30", "R23 R6 R29", Fault(4.5, "kill-rank"),
         Fault(4.6, "flip-at-rest", (0,), count=16), tries=4)  # fmt: skip
def bad_slot_not_quarantined() -> Any:
    """A slot with bad bytes stays in its replicas and is served."""
    return patch.object(ReplicaIndex, "quarantine", lambda self, number: [])


@planted("scrub-finds-nothing", "R30", "R29", Fault(8.0, "flip-at-rest", (0,), count=16), **BETWEEN_STEPS)
def scrub_finds_nothing() -> Any:
    """The scrub skips slots."""
    return patch.object(ReplicaStore, "verify_slot", lambda self, number: [])


@planted("scrub-passes-manifests", "R30", "R29", Fault(8.0, "rot-manifest", (0,), count=16), **BETWEEN_STEPS)
def scrub_passes_manifests() -> Any:
    """The scrub skips manifests."""
    return patch.object(Scrubber, "_check_manifest", lambda self, stored: False)


@planted("have-without-a-reference", "R13", "R6 R7")
def have_without_a_reference() -> Any:
    """An offered chunk that is here already is counted without a reference of its own."""

    def hold(self: ReplicaIndex, replica: IncomingReplica, index: int, nbytes: int) -> int | None:
        number = self.table.lookup(replica.digests[index], nbytes)
        if number is not None and replica.slots[index] is None:
            replica.slots[index] = number
        return number

    return patch.object(ReplicaIndex, "hold_known", hold)


@planted("index-keeps-freed-slots", "R6", "R6")
def index_keeps_freed_slots() -> Any:
    """The content index goes on naming a slot that was freed."""
    return patch.object(SlotTable, "quarantine", lambda self, number: None)


@planted("free-before-unlink", "R7", "R7", *CRASHES, step_s=0.15, tries=3)
def free_before_unlink() -> Any:
    """A dropped replica's slots are freed before its manifest is unlinked."""

    def discard(self: ReplicaStore, gone: list[StoredReplica]) -> None:
        for stored in gone:
            self.index.free(stored)
            self.flush()
            self.manifests.remove(ManifestFolder.name_of(stored.shard, stored.spec.digest))

    return patch.object(ReplicaStore, "_discard", discard)


@planted("ack-before-the-manifest", "R7", "I4")
def ack_before_the_manifest() -> Any:
    """A replica is acknowledged although its manifest was never stored."""
    finish = ReplicaStore.finish

    def unsaved(self: ReplicaStore, name: str, data: bytes) -> StoredReplica:
        if name == LOCAL_SENDER:
            return finish(self, name, data)
        with patch.object(self.manifests, "save", lambda name, data: None):
            return finish(self, name, data)

    return patch.object(ReplicaStore, "finish", unsaved)


@planted("manifest-before-the-chunks", "R7", "R7", *CRASHES, step_s=0.15, tries=3)
def manifest_before_the_chunks() -> Any:
    """The manifest is stored before the headers of its slots say sealed."""
    finish, flush = ReplicaStore.finish, ReplicaStore.flush
    finishing: list[ReplicaStore] = []

    def late(self: ReplicaStore) -> None:
        kept = {n for n in self.table.dirty if self.table.slots[n].state is SlotState.SEALED and self not in finishing}
        self.table.dirty -= kept
        flush(self)
        self.table.dirty |= kept

    def early(self: ReplicaStore, name: str, data: bytes) -> StoredReplica:
        finishing.append(self)
        try:
            return finish(self, name, data)
        finally:
            finishing.clear()

    return patch.multiple(ReplicaStore, finish=early, flush=late)


@planted("stale-submission", "R8", "R6 R7 R8", *CRASHES, step_s=0.15, tries=3)
def stale_submission() -> Any:
    """After a broken link a rank submits slots that are not leased to it any more, and the holder takes them."""

    def take(self: SlotTable, owner: Any, numbers: Any) -> bool:
        for number in numbers:
            self.leases.get(owner, set()).discard(number)
            self._enter(number, SlotState.RECEIVING)
        return True

    return patch.multiple(SlotTable, submit=take, confirm=lambda self, owner, held: (list(held), []))


@planted(
    "incoming-replicas-kept", "R13", "I13 I16", Fault(4.0, "memory-full", (2,), for_s=3.0), replicas=3, world_size=2
)
def incoming_kept() -> Any:
    """A push that was given up leaves its incoming replica at the peer for ever."""
    abort = PeerServer._abort

    def forget(self: PeerServer, request: Any) -> Any:
        with patch.object(self.replicas, "abort_incoming", lambda name, shard: None):
            return abort(self, request)

    return patch.object(PeerServer, "_abort", forget)


@planted(
    "fence-keeps-incoming-replicas", "R21", "R21", Fault(4.0, "slow-link", (0,), for_s=4.0, count=2), *FROZEN_SENDER,
         step_s=0.15, tries=5)  # fmt: skip
def fence_keeps_incoming() -> Any:
    """A fence leaves half-received shards of older attempts alone."""
    return patch.object(ReplicaIndex, "abort_older", lambda self, job, attempt: [])


@planted("offer-ignores-fence", "R21", "R21", Fault(4.0, "slow-link", (0,), for_s=4.0, count=2), *FROZEN_SENDER,
         step_s=0.15, tries=5)  # fmt: skip
def offer_ignores_fence() -> Any:
    """A peer takes a shard of an attempt that it has fenced."""
    offer = PeerServer._offer

    def unfenced(self: PeerServer, channel: Any, request: Any) -> Any:
        with patch.object(self, "is_fenced", lambda job, attempt: False):
            return offer(self, channel, request)

    return patch.object(PeerServer, "_offer", unfenced)


@planted("pin-ignored", "R7", "R7", Fault(3.0, "slow-link", (0,), for_s=8.0, count=8), step_s=0.15, tries=3)
def pin_ignored() -> Any:
    """A replica is freed although a reader has pinned it."""

    def drop(self: ReplicaIndex, shard: Any, *how: Any) -> list[StoredReplica]:
        return [self.shards.pop(key) for key in [k for k in self.shards if k[0] == shard]]

    return patch.object(ReplicaIndex, "drop", drop)


@planted("drop-leaves-staged", "R12", "I16", Fault(4.0, "kill-rank"))
def drop_leaves_staged() -> Any:
    """A drop leaves the pin of a staged replica, so its slots stay in use until the pin's deadline."""
    drop = ReplicaIndex.drop

    def forgetful(self: ReplicaIndex, shard: Any, *how: Any) -> list[StoredReplica]:
        staged, self.staged = self.staged, {}
        gone = drop(self, shard, *how)
        self.staged = staged
        return gone

    return patch.object(ReplicaIndex, "drop", forgetful)


@planted("peer-copies-refused", "R10", "I16")
def peer_copies_refused() -> Any:
    """A host refuses every copy of a peer for want of room."""
    return patch.object(ReplicaIndex, "peer_refusal", lambda self, shard, count: "peer share full")
