"""Numbers the lives of a host's holder, so that a later life has a higher number; no clock has a part in it (R3)."""

from __future__ import annotations


def following(last: int, above: int) -> int:
    """Return the number of the next life; `above`: the highest that the controller names, 0 if it named none."""
    return max(last, above) + 1
