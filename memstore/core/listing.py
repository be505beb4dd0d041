"""Lists of ranks and steps in messages: a few of them, and how many more there are. Pure."""

from __future__ import annotations


def listed(values: list[int], limit: int = 10) -> str:
    """Return at most `limit` values as text, with the count of the rest."""
    head = ", ".join(str(v) for v in values[:limit])
    return head if len(values) <= limit else f"{head} and {len(values) - limit} more"
