"""R6 and R7: the bytes in every memory are what slot headers and manifests say, and stay while they are read.

A memory is looked at after each event that changed it. The same look finds replicas that have gone (R19), slots in
wrong hands (R8) and incoming replicas of fenced attempts (R21).
"""

from __future__ import annotations

import functools

from memstore.core.arena.replica_index import StoredReplica
from memstore.core.format.manifest import Manifest, chunk_digest, decode_manifest, shard_digest
from memstore.testing.simulator.checks.drops import DropCheck
from memstore.testing.simulator.checks.fences import Fences
from memstore.testing.simulator.checks.leases import look_at_leases
from memstore.testing.simulator.checks.observed import Observed, Replica
from memstore.testing.simulator.world.memory import Memory
from memstore.testing.simulator.world.processes import AnyHolder
from memstore.testing.simulator.world.violation import Violation
from memstore.testing.simulator.world.world import World

SEALED = 3


class StoredBytes:
    """The memories of one simulation, each as it was when it was looked at last."""

    def __init__(self, world: World, observed: Observed, drops: DropCheck, fences: Fences) -> None:
        self.world, self.observed = world, observed
        self.drops, self.fences = drops, fences
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
            believed.add(replica)
            if wanted <= good and file_name not in memory.rotten:
                whole.add(replica)
        before, self.observed.whole[name] = self.observed.whole.get(name, set()), whole
        for shard, digest in before - whole if self.world.scenario.is_strict else ():
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
