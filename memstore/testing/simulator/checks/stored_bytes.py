"""R6, R7, R8 and R21: bytes in every memory are what headers and manifests say, and written by who may write them."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from memstore.core.arena.replica_index import StoredReplica
from memstore.core.arena.slot_table import SlotState
from memstore.core.format.manifest import Manifest, chunk_digest, decode_manifest, shard_digest
from memstore.testing.simulator.checks.copies import DropCheck
from memstore.testing.simulator.checks.observed import Observed, Replica
from memstore.testing.simulator.checks.parity import LossCheck
from memstore.testing.simulator.world.memory import Memory
from memstore.testing.simulator.world.world import AnyHolder, Violation, World
from recovery.inventory import ShardId

# -- fences -------------------------------------------------------------------------------------------
# R21: a holder that has answered a fence takes nothing of an older attempt.


class Fences:
    """The fences that the holders of one simulation have answered."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._answered: dict[tuple[AnyHolder, str], int] = {}  # (holder, job) -> newest attempt

    def answered(self, holder: AnyHolder, job: str, attempt: int) -> None:
        """Record that a holder has promised to refuse older attempts."""
        self._answered[holder, job] = max(attempt, self._answered.get((holder, job), 0))

    def is_fenced(self, holder: AnyHolder, job: str, attempt: int) -> bool:
        """Say whether a holder has promised to refuse an attempt."""
        return attempt < self._answered.get((holder, job), 0)

    def look_at_incoming(self, holder: AnyHolder) -> None:
        """Raise Violation if a holder still receives a shard in an attempt that it has fenced."""
        for (shard, sender, *_), replica in holder.replicas.index.incoming.items():
            if sender in self.world.holders and self.is_fenced(holder, shard.job, replica.attempt):
                raise Violation("R21", f"{holder.host_id} receives {shard} of {sender} in a fenced attempt")
        for shard, parity in holder.replicas.index.parity.items():
            if self.is_fenced(holder, shard.job, parity.attempt):
                raise Violation("R21", f"{holder.host_id} adds up {shard} in a fenced attempt")

    def sealed_here(self, holder: AnyHolder, shard: ShardId) -> None:
        """Raise Violation if a holder has sealed a local rank's shard of an attempt that it has fenced."""
        if self.is_fenced(holder, shard.job, shard.attempt):
            raise Violation("R21", f"{holder.host_id} sealed {shard} although it had answered a newer fence")


# -- leases -------------------------------------------------------------------------------------------
# R8: a rank writes only into slots that are leased to it.


def look_at_leases(world: World, holder: AnyHolder) -> None:
    """Raise Violation if a living rank may write into a slot that its holder leases to another process."""
    for rank in (*world.ranks, *world.former):
        if rank.holder is holder and not rank.is_dead:
            for number in (*rank.pool, *rank.in_copy):
                slot = holder.replicas.table.slots[number]
                if slot.state is not SlotState.LEASED or slot.owner != rank.owner:
                    raise Violation(
                        "R8",
                        f"rank {rank.rank} may write slot {number} of {holder.host_id}, "
                        f"which is {slot.state.name} of {slot.owner}",
                    )


# -- stored bytes -------------------------------------------------------------------------------------
# R6 and R7: the bytes in every memory are what slot headers and manifests say, and stay while they are read.
#
# A memory is looked at after each event that changed it. The same look finds replicas that have gone (R19), slots in
# wrong hands (R8) and incoming replicas of fenced attempts (R21).


SEALED = 3


class StoredBytes:
    """The memories of one simulation, each as it was when it was looked at last."""

    def __init__(self, world: World, observed: Observed, drops: DropCheck, fences: Fences, losses: LossCheck) -> None:
        self.world, self.observed = world, observed
        self.drops, self.fences, self.losses = drops, fences, losses
        self._seen: dict[str, int] = {}  # host -> version of its memory

    def look(self) -> None:
        """Look at every memory that has changed."""
        for name, memory in self.world.memories.items():
            if self._seen.get(name) != memory.version:
                self._seen[name] = memory.version
                self._look_at(name, memory)

    def _look_at(self, name: str, memory: Memory) -> None:
        holder = self.world.holders.get(name)
        if holder is not None and holder.is_up and not memory.is_cut:
            self._look_at_table(holder)
            self.fences.look_at_incoming(holder)
            look_at_leases(self.world, holder)
        sealed, good = _sealed_digests(name, memory)
        whole: set[Replica] = set()
        believed = self.observed.believed[name] = set()
        for file_name, data in memory.manifests.items():
            manifest, digest, wanted = _decoded(data)
            if not wanted <= sealed | memory.damaged:
                raise Violation("R7", f"a manifest of {manifest.shard} on {name} names chunks that no slot holds")
            replica = (manifest.shard, digest)
            if name not in self.observed.ever.setdefault(replica, set()) and wanted <= sealed:
                self.observed.ever[replica].add(name)
                self.losses.stored(name, manifest, digest)
                if not wanted <= good:  # it shares a chunk that a fault had spoilt before, and nobody has found yet
                    self.losses.taken_by_fault(manifest.shard)
            believed.add(replica)
            if wanted <= good and file_name not in memory.rotten:
                whole.add(replica)
        before, self.observed.whole[name] = self.observed.whole.get(name, set()), whole
        for shard, digest in before - whole:
            if self.observed.cause:
                self.losses.taken_by_fault(shard)
            if not self.world.scenario.is_strict:
                continue
            if self.observed.cause:
                self.drops.taken_by_fault(name, shard)
            else:
                self.drops.dropped(name, shard, digest)

    def _look_at_table(self, holder: AnyHolder) -> None:
        try:
            holder.replicas.table.validate()
        except AssertionError as exc:
            raise Violation("R6", f"slot table of {holder.host_id}: {exc}") from exc

    def adopted(self, holder: AnyHolder) -> None:
        """Look at a memory that a holder has taken over: slots that a fault had spoilt must not be served (R6)."""
        for number in sorted(holder.memory.spoilt):
            if int(holder.memory.headers[number].state) == SEALED:
                raise Violation("R6", f"{holder.host_id} adopted slot {number}, whose bytes are not its digest's")

    def read(self, holder: AnyHolder, stored: StoredReplica, index: int) -> None:
        """Look at a chunk of a pinned replica that is read: its slot must not have been used again (R7)."""
        number = stored.slots[index]
        if number is not None and bytes(holder.memory.headers[number].digest) != stored.digests[index]:
            raise Violation("R7", f"slot {number} of {holder.host_id} was reused while {stored.shard} was read")


def _sealed_digests(name: str, memory: Memory) -> tuple[set[bytes], set[bytes]]:
    """Return the digests of all sealed slots, and of those whose bytes no fault has changed."""
    sealed: set[bytes] = set()
    good: set[bytes] = set()
    for number, header in enumerate(memory.headers):
        if int(header.state) != SEALED:
            continue
        sealed.add(digest := bytes(header.digest))
        if number in memory.spoilt:
            continue
        if chunk_digest(memoryview(memory.slots[number])[: header.nbytes]) != digest:
            raise Violation("R6", f"sealed slot {number} of {name} holds other bytes than its digest says")
        good.add(digest)
    return sealed, good


@functools.lru_cache(1 << 14)
def _decoded(data: bytes) -> tuple[Manifest, str, frozenset[bytes]]:
    """Return a manifest, the digest of its shard, and the digests of its chunks."""
    manifest = decode_manifest(data)
    return manifest, shard_digest(data), frozenset(chunk.digest for chunk in manifest.chunks)


# -- puts ---------------------------------------------------------------------------------------------
# R8: a holder seals the bytes that its rank has put, and no others.


class PutCheck:
    """What ranks submit, and what their holders make of it."""

    def __init__(self, observed: Observed, fences: Fences) -> None:
        self.observed, self.fences = observed, fences

    def submitted(self, shard: ShardId, content: list[bytes]) -> None:
        """Record the bytes that a rank has put."""
        self.observed.contents.setdefault(shard, []).append(content)
        self.observed.steps_put += 1

    def sealed_here(self, holder: AnyHolder, shard: ShardId, digests: Sequence[bytes]) -> None:
        """Look at a shard that a holder has sealed for a local rank."""
        puts = [[chunk_digest(data) for data in put] for put in self.observed.contents[shard]]
        if list(digests) not in puts:
            raise Violation("R8", f"{holder.host_id} sealed other bytes of {shard} than its rank put")
        self.fences.sealed_here(holder, shard)
