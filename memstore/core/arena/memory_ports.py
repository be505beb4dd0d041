"""What a replica store is given: memory for slots, files for manifests, clocks, a follower of what it seals."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple, Protocol

from memstore.core.arena.replica_index import StoredReplica
from memstore.core.arena.slot_table import SlotState


class SlotHeader(NamedTuple):
    """One slot's record, after the state in the order of the file."""

    state: SlotState = SlotState.FREE
    nbytes: int = 0
    digest: bytes = bytes(16)  # xxh3-128 of the slot's bytes (R14)
    owner_pid: int = 0
    attempt: int = 0
    owner_start: int = 0  # field 22 of /proc/<pid>/stat
    generation: int = 0  # of the lease (R8)
    last_verified: float = 0.0  # wall seconds, as given by the caller


class SlotHeaderTable(Protocol):
    """The records of all slots, which outlive the holder."""

    def read(self, slot: int) -> SlotHeader:
        """Return a slot's record; a damaged one is that of a free slot."""

    def write(self, slot: int, header: SlotHeader) -> None:
        """Write a slot's record."""


class SlotMemory(Protocol):
    """The memory of all slots, which outlives the holder."""

    @property
    def headers(self) -> SlotHeaderTable:
        """Return the records of its slots."""

    @property
    def identity(self) -> str:
        """Return what tells it from another one in its place."""

    @property
    def chunk_bytes(self) -> int:
        """Return the size of a slot."""

    @property
    def slots_count(self) -> int:
        """Return how many slots there are."""

    @property
    def unbacked(self) -> Collection[int]:
        """Return the slots that had no memory behind them when it was opened."""

    def view(self, slot: int, nbytes: int | None = None) -> memoryview:
        """Return the bytes of a slot, or its first ones."""

    def grow(self, slots_count: int) -> int:
        """Claim memory until there are so many slots; CapacityError if the machine has none."""

    def fill(self, slots: Sequence[int]) -> None:
        """Claim memory for slots that gave theirs back; CapacityError if the machine has none."""

    def give_back(self, slots: Sequence[int]) -> list[int]:
        """Give the memory of slots back; return those that still have it."""

    def close(self) -> None:
        """Unmap; what is stored stays."""


class ManifestFiles(Protocol):
    """The manifests of stored shards by name, which outlive the holder."""

    def save(self, name: str, data: bytes) -> None:
        """Write a manifest whole, or not at all."""

    def load(self, name: str) -> bytes:
        """Return a manifest's bytes, as they are now."""

    def load_all(self) -> Iterable[tuple[str, bytes]]:
        """Return all names with their bytes."""

    def remove(self, name: str) -> None:
        """Remove a manifest, if it is there."""

    def close(self) -> None:
        """Write nothing more."""


class Clock(Protocol):
    """Wall clock and monotonic clock, in seconds. The `time` module is one."""

    def time(self) -> float:
        """Return the time of day."""

    def monotonic(self) -> float:
        """Return a time that never goes back."""


class SealFollower(Protocol):
    """Follows a shard while it is digested and stored, to send its chunks meanwhile."""

    def add(self, digest: bytes) -> None:
        """Take the digest of the next chunk."""

    def seal(self, stored: StoredReplica) -> None:
        """Take the stored replica; the caller holds the store's lock."""
