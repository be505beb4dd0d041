"""How many bytes go into what is left of an idle span? Pure.

Source: Gemini (SOSP 2023), section 5, Algorithm 2: fill the spans in order with pieces that cost
f(s) = startup + s / rate, at most a safe share of each span; what does not fit goes after the last one. It is run as
the spans come (`send_gate.py`), not ahead of them. Two gaps of the published form are closed: a span without room
for a piece is passed over, and no piece is smaller than it is worth.
"""

from __future__ import annotations

from typing import NamedTuple

SAFE_SHARE = 0.85  # of a span's room; spans vary by a tenth (Gemini), and the profile is a low quantile already
PIECE_MIN_BYTES = 64 << 10  # below, system calls and wake-ups cost more than they move


class LinkSpeed(NamedTuple):
    """What sending costs: seconds before the first byte, then bytes per second; pieces are of `piece_bytes`."""

    rate: float
    startup_s: float
    piece_bytes: int

    def cost_s(self, nbytes: int) -> float:
        """Seconds that a piece holds the link."""
        return self.startup_s + nbytes / self.rate


def piece_bytes(room_s: float, left_bytes: int, link: LinkSpeed) -> int:
    """Return the size of the next piece for so much room; 0 if none is worth it."""
    largest = min(left_bytes, link.piece_bytes)
    if room_s >= link.cost_s(largest):
        return largest
    fitting = int((room_s - link.startup_s) * link.rate)
    return fitting if fitting >= PIECE_MIN_BYTES else 0
