"""What moves chunks between two arenas: the receiver reads them from the sender's memory (R6, R13, R14).

A read that was given up may still write to its places here. Only `has_ended` of what `read` returned says that it
cannot any more; until then those places are out of use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from memstore.errors import TransportError


class Piece(NamedTuple):
    """Bytes to be read, by their offsets in the two arenas."""

    their_offset: int
    my_offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class GivenUp:
    """A read that brought nothing."""

    error: TransportError
    has_ended: Callable[[], bool]


class Transport(Protocol):
    """Reads from other holders' arenas, and lets them read from this one's."""

    def metadata(self) -> bytes:
        """Return what another holder needs to read from this arena now."""

    def read(self, metadata: bytes, pieces: Sequence[Piece], *, host: str, deadline_s: float) -> GivenUp | None:
        """Read pieces of the arena that `metadata` is of; None once all have come. Waits at most `deadline_s`."""

    def close(self) -> None:
        """End what reads and what is read, and wait for their end; reads under way fail."""
