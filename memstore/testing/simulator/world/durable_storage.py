"""Durable storage that all simulated hosts see."""

from __future__ import annotations

from dataclasses import dataclass, field

from memstore.core.wire.orders import DurablePlace, Lineage
from recovery.inventory import ShardId, ShardSpec


@dataclass
class DurableStorage:
    """Slices of shards with their bytes, the markers of whole steps, and the keys in the hosts' key files."""

    # (shard, digest, key's name, slice) -> number of slices, manifest, chunks
    slices: dict[tuple[ShardId, str, str, int], tuple[int, bytes, list[bytes]]] = field(default_factory=dict)
    markers: dict[tuple[str, int, int], tuple[dict[int, ShardSpec], str, Lineage]] = field(default_factory=dict)
    removed: set[tuple[str, int, int]] = field(default_factory=set)  # steps that an order removed
    keys: dict[str, str] = field(default_factory=dict)  # host -> name of the key in its file
    problem: str = ""  # every operation fails with it
    delay_s: float = 0.05
    tears: int = 0  # so many of the next slices are cut short, silently

    def remove_step(self, job: str, attempt: int, step: int) -> None:
        """Remove a step's marker, then its slices."""
        self.removed.add((job, attempt, step))
        self.markers.pop((job, attempt, step), None)
        for key in [k for k in self.slices if (k[0].job, k[0].attempt, k[0].step) == (job, attempt, step)]:
            del self.slices[key]

    def part(self, shard: ShardId, digest: str, key: str) -> tuple[bytes, list[bytes]] | None:
        """Return a shard's manifest and chunks under a key, None if a slice is missing."""
        count, manifest, _ = self.slices.get((shard, digest, key, 0), (1, b"", []))
        found = [self.slices.get((shard, digest, key, number)) for number in range(count)]
        chunks = [chunk for each in found if each is not None for chunk in each[2]]
        return (manifest, chunks) if None not in found else None

    def key_of(self, place: DurablePlace, host: str) -> str:
        """Return the name of the key that a host has for a job's storage."""
        return self.keys.get(host, "0" * 16) if place.key_file else ""
