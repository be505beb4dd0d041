"""Room that one host reserves for one job. Pure (R10)."""

from __future__ import annotations

from dataclasses import dataclass

from memstore.core.wire.orders import Reserve


@dataclass(slots=True)
class PeerShare:
    """Room reserved for one job on this host, in slots (R10)."""

    attempt: int
    ranks: dict[int, int]  # local rank -> slots
    peer_slots: int
    world_size: int = 0  # shards of another world size count for no rank's part; 0: all count
    versions: int = 1  # how many versions the slots are for

    @property
    def total(self) -> int:
        """All slots the job may use here."""
        return sum(self.ranks.values()) + self.peer_slots


def share_of(order: Reserve) -> PeerShare:
    """Return the room that an order names."""
    return PeerShare(order.attempt, dict(order.ranks), order.peer_slots, order.world_size, order.versions)
