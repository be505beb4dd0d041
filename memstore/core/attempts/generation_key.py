"""The launch key of a generation of recovery in place: its run and its number. Pure (R20)."""

from __future__ import annotations

_PREFIX = "in-place:"


def generation_key(run: str, number: int) -> str:
    """Return the launch key of a generation; `run` names the start of the whole worker group."""
    return f"{_PREFIX}{run}:{number}"


def run_of(key: str | None) -> str | None:
    """Return the run that a launch key names; None if it is of no generation of recovery in place."""
    parsed = _parsed(key)
    return parsed and parsed[0]


def newer_number(key: str | None, other: str | None) -> int | None:
    """Return the number of the generation that `other` names if it is a newer one of the same run than `key`'s."""
    mine, theirs = _parsed(key), _parsed(other)
    if mine is None or theirs is None or mine[0] != theirs[0] or mine[1] >= theirs[1]:
        return None
    return theirs[1]


def _parsed(key: str | None) -> tuple[str, int] | None:
    run, _, number = (key or "").removeprefix(_PREFIX).rpartition(":")
    is_one = key is not None and key.startswith(_PREFIX) and number.isascii() and number.isdigit()
    return (run, int(number)) if is_one else None
