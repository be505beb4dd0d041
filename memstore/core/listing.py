"""Lists of ranks and steps in messages: a few of them, and how many more there are. Pure."""

from __future__ import annotations


def listed(values: list[int], limit: int = 10) -> str:
    """Return at most `limit` values as text, with the count of the rest."""
    head = ", ".join(str(v) for v in values[:limit])
    return head if len(values) <= limit else f"{head} and {len(values) - limit} more"


def plural(count: int, noun: str) -> str:
    """Return "1 step", "2 steps", "2 copies"."""
    if count == 1:
        return f"1 {noun}"
    return f"{count:,} {noun[:-1]}ies" if noun.endswith("y") else f"{count:,} {noun}s"
