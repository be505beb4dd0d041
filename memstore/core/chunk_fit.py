"""Which bytes go into which idle span, and what spills over? Pure.

Source: Gemini (SOSP 2023), section 5, Algorithm 2: fill the spans in order with pieces that cost
f(s) = startup + s / rate, at most a safe share of each span; what does not fit goes after the last one. Three gaps of
the published form are mended: it ends when a span has no room for a piece, it makes one remote copy less than there are
copies in all, and no piece is smaller than it is worth.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

SAFE_SHARE = 0.85  # of a span's room; spans vary by a tenth (Gemini), and the profile is a low quantile already
PIECE_MIN_BYTES = 64 << 10  # below, system calls and wake-ups cost more than they move


class Link(NamedTuple):
    """What sending costs: seconds before the first byte, then bytes per second; pieces are of `piece_bytes`."""

    rate: float
    startup_s: float
    piece_bytes: int

    def cost_s(self, nbytes: int) -> float:
        """Seconds that a piece holds the link."""
        return self.startup_s + nbytes / self.rate


class Piece(NamedTuple):
    """Bytes of one copy for one span."""

    span: int
    copy: int
    nbytes: int


class Fit(NamedTuple):
    """Where everything goes; `spilled_bytes` found no idle time."""

    pieces: list[Piece]
    spilled_bytes: int
    needs_s: float
    has_s: float

    @property
    def why(self) -> str:
        """Why something spills; "" if nothing does."""
        if not self.spilled_bytes:
            return ""
        return f"needs {self.needs_s * 1e3:.0f} ms of the link, has {self.has_s * 1e3:.0f} ms between collectives"


def piece_bytes(room_s: float, left_bytes: int, link: Link) -> int:
    """Return the size of the next piece for so much room; 0 if none is worth it."""
    largest = min(left_bytes, link.piece_bytes)
    if room_s >= link.cost_s(largest):
        return largest
    fitting = int((room_s - link.startup_s) * link.rate)
    return fitting if fitting >= PIECE_MIN_BYTES else 0


def fit(spans_s: Sequence[float], nbytes: int, link: Link, *, copies: int = 1, share: float = SAFE_SHARE) -> Fit:
    """Fill idle spans in order with `copies` times `nbytes`.

    Args:
        spans_s: Lengths of the idle spans of one iteration, in order.
        nbytes: Bytes of one copy.
        copies: Copies that travel: replicas - 1.
        share: Safe share of a span, in (0, 1].

    Complexity: O(spans + pieces).
    """
    pieces: list[Piece] = []
    copy, left = 0, nbytes if copies > 0 else 0
    for span, length_s in enumerate(spans_s):
        room_s = share * length_s
        while left and (size := piece_bytes(room_s, left, link)):
            pieces.append(Piece(span, copy, size))
            room_s -= link.cost_s(size)
            left -= size
            if not left and copy < copies - 1:
                copy, left = copy + 1, nbytes
    spilled = left + max(0, copies - 1 - copy) * nbytes
    count = -(-nbytes // link.piece_bytes) * copies
    return Fit(pieces, spilled, count * link.startup_s + copies * nbytes / link.rate, share * sum(spans_s))
