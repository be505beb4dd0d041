"""What a replica store is given: its clocks, and a follower of what it seals."""

from __future__ import annotations

from typing import Protocol

from memstore.core.arena.replica_index import StoredReplica


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
