"""Room that one host reserves for one job. Pure (R10)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class PeerShare:
    """Room reserved for one job on this host, in slots (R10)."""

    attempt: int
    ranks: dict[int, int]  # local rank -> slots
    guest_slots: int
    world_size: int = 0  # shards of another world size count for no rank's part; 0: all count
    versions: int = 1  # how many versions the slots are for

    @property
    def total(self) -> int:
        """All slots the job may use here."""
        return sum(self.ranks.values()) + self.guest_slots


def share_from_wire(body: Mapping[str, Any]) -> PeerShare:
    """Decode the share that the controller orders to reserve."""
    return PeerShare(
        int(body["attempt"]), {int(r): int(n) for r, n in body["ranks"]}, int(body["guest_slots"]),
        int(body.get("world_size", 0)), int(body.get("versions", 1)),
    )  # fmt: skip
