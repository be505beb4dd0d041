"""The link of a rank's process, or of a tool, as the holder's procedures use it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from memstore.core.arena.slot_table import Owner


class Link(Protocol):
    """One connection to the host's holder."""

    nonce: str
    owner: Owner
    job: str  # "": a tool's
    rank: int
    attempt: int
    pins: dict[int, Callable[[], None]]  # what this reader holds -> how to let go of it
    is_retired: bool  # the same process came back on another link and sends unsealed puts again

    @property
    def order(self) -> int:
        """Return a number that grows with each connection that this host accepts."""

    @property
    def is_open(self) -> bool:
        """Say whether it can be sent anything."""
