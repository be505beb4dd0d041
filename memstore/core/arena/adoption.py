"""What an earlier holder left in an arena: every sealed slot is digested again before it may serve (R6)."""

from __future__ import annotations

from collections.abc import Callable

from memstore.core.arena.memory_ports import ManifestFiles, SlotMemory
from memstore.core.arena.replica_index import ReplicaIndex
from memstore.core.arena.slot_table import Owner, Slot, SlotState
from memstore.core.format.manifest import chunk_digest, decode_manifest, manifest_name, shard_digest, spec_of
from memstore.errors import DigestMismatch, MemstoreError


def adopt(
    arena: SlotMemory,
    manifests: ManifestFiles,
    replica_index: ReplicaIndex,
    now: float,
    is_alive: Callable[[int, int], bool],
) -> list[str]:
    """Fill an empty index from an arena; slots whose header must be rewritten are left dirty. Return the dropped ones.

    Args:
        now: Time of day, seconds: the slots are verified now.
        is_alive: Says of (pid, start time) whether that process lives: its leases outlive the holder (R8).
    """
    table, notes, bad = replica_index.table, [], 0
    for number in range(arena.slots_count):
        header = arena.headers.read(number)
        slot = Slot(
            header.state,
            header.nbytes,
            bytes(header.digest),
            Owner(header.owner_pid, header.owner_start, header.generation) if header.owner_pid else None,
            header.attempt,
            now,
        )
        is_owned = slot.owner is not None and is_alive(slot.owner.pid, slot.owner.start)
        if is_owned and slot.state in (SlotState.LEASED, SlotState.RECEIVING):
            # Submitted but not sealed: the rank still has the put and will send it again (R8).
            slot.state = SlotState.LEASED
            table.restore(number, slot)
        elif slot.state is SlotState.SEALED and slot.nbytes <= arena.chunk_bytes:
            if chunk_digest(arena.view(number, slot.nbytes)) == slot.digest:
                slot.owner = None
                table.restore(number, slot)
            else:
                bad += 1
                table.dirty.add(number)
        elif slot.state is not SlotState.FREE:
            table.dirty.add(number)
    table.rebuild_free(arena.unbacked)
    for name, data in manifests.load_all():
        why = _adopt_manifest(replica_index, name, data)
        if why:
            notes.append(f"dropped {name}: {why}")
            manifests.remove(name)
    table.sweep_unreferenced()
    return [*notes, f"{bad} slots failed their digest on adoption and were dropped"] if bad else notes


def _adopt_manifest(replica_index: ReplicaIndex, name: str, data: bytes) -> str:
    """Add a manifest's shard to the index; return why it cannot be, or ""."""
    try:
        manifest, digest = decode_manifest(data), shard_digest(data)
        if name != manifest_name(manifest.shard, digest):
            raise DigestMismatch(f"manifest file {name} does not hold what its name says")
        replica_index.adopt(
            manifest.shard,
            spec_of(manifest, digest),
            [c.digest for c in manifest.chunks],
            [c.nbytes for c in manifest.chunks],
        )
    except MemstoreError as exc:
        return str(exc)
    return ""
