"""What a holder finds of the one before it: how long ago that ran, and the number of its life (R3, R5).

How long no holder ran on an arena shows an orphan, by a clock that only counts up. The record names a moment of one
boot. Nothing that is done to the wall clock makes an arena old; time before this boot, and time in which the machine
slept, does not count.
"""

from __future__ import annotations

EVERY_S = 10.0


def record_of(boot: str, now_s: float) -> str:
    """Return what is written while a holder runs: that it was there at `now_s` of this boot."""
    return f"{boot} {now_s:.1f}"


def is_due(written_s: float, now_s: float) -> bool:
    """Return whether a holder that runs is to write its record again."""
    return now_s - written_s >= EVERY_S


def idle_s(record: str, boot: str, now_s: float) -> float:
    """Return the time since a holder was there; the time since the boot if it was before that, 0 if unknown."""
    words = record.split()
    if len(words) != 2:
        return 0.0
    try:
        seen_s = float(words[1]) if words[0] == boot else 0.0
    except ValueError:
        return 0.0
    return max(0.0, now_s - seen_s)


def following(last: int, above: int) -> int:
    """Return the number of the next life; `above`: the highest that the controller names, 0 if it named none."""
    return max(last, above) + 1
