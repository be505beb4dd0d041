"""Says for how long no holder has run on an arena, by a clock that only counts up: that shows an orphan (R5).

The record names a moment of one boot. Nothing that is done to the wall clock makes an arena old; time before this
boot, and time in which the machine slept, does not count.
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
