"""Where holders announce themselves and controllers claim their term (R3, R17).

`RayMembership` (on_ray/membership.py) keeps these records in Ray's GCS key-value store.
"""

from __future__ import annotations

from typing import Any, Protocol


class ClusterMembership(Protocol):
    """Small records that outlive any one process. Calls may block and may raise TransportError."""

    def announce(self, host_id: str, record: dict[str, Any]) -> None:
        """Register a holder: address, port, incarnation."""

    def hosts(self) -> dict[str, dict[str, Any]]:
        """Return every announced holder by host id."""

    def withdraw(self, host_id: str) -> None:
        """Remove a host that left for good."""

    def claim_term(self, above: int) -> int:
        """Take a term above every one claimed so far and above `above`."""

    def newest_term(self) -> int:
        """Return the highest term claimed so far."""
