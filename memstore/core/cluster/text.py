"""Pieces of text in messages: lists of ranks, steps and pins, counts, and why a step was dropped. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from memstore.core.cluster.job import Job
from memstore.core.wire.status_rows import Cause, ReplacedRow

HOSTS_MAX = 5  # hosts that a message names
NAMED_MAX = 32  # hosts, or ranks, that an event names
RANKS_MAX = 5  # replaced ranks that a message names
_AGES = ((86_400, "d"), (3_600, "h"), (60, "min"))
_SIZES = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))
CAUSES: Mapping[Cause, str] = {
    "ended": "its process ended",
    "frozen": "its process was frozen",
    "silent": "its host did not answer",
    "unwatched": "it lost its watchdog, and no other one came: its process ended, too",
    "absent": "it did not come to a collective, for which the others waited until that timed out",
    "ray": "Ray says that its process ended",
}


WHY_DROPPED = "no holder of its hosts had run for its job_ttl_s, and nobody had asked for it then"
"""Why a forgotten job is gone (R5)."""


def listed(values: list[int], limit: int = 10) -> str:
    """Return at most `limit` values as text, with the count of the rest."""
    head = ", ".join(str(v) for v in values[:limit])
    return head if len(values) <= limit else f"{head} and {len(values) - limit} more"


def listed_names(names: Collection[str], limit: int = 10) -> str:
    """Return at most `limit` names as text, with the count of the rest.

    >>> listed_names({"b", "a", "c"}, limit=2)
    'a, b and 1 more'
    """
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return f"{', '.join(sorted(names)[:limit])}{more}"


def named_hosts(hosts: Collection[str]) -> str:
    """Return "host h1", or "hosts h1, h2 and 3 more"."""
    names = sorted(hosts)
    more = f" and {len(names) - HOSTS_MAX} more" if len(names) > HOSTS_MAX else ""
    return f"{'host' if len(names) == 1 else 'hosts'} {', '.join(names[:HOSTS_MAX])}{more}"


def listed_pins(job: Job) -> str:
    """Return "best (step 4), last (step 9)", or "" without pins."""
    return ", ".join(f"{name} (step {pin.step})" for name, pin in sorted(job.pins.items())[:10])


def plural(count: int, noun: str) -> str:
    """Return "1 step", "2 steps", "2 copies"."""
    if count == 1:
        return f"1 {noun}"
    return f"{count:,} {noun[:-1]}ies" if noun.endswith("y") else f"{count:,} {noun}s"


def age_text(seconds: float | None) -> str:
    """Return a duration with one unit: "2.1 s", "41 s", "11 min", "3 h", "3 d"."""
    if seconds is None:
        return "-"
    for size, unit in _AGES:
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"


def size_text(nbytes: int | float | None) -> str:
    """Return a size in binary units: "112 GiB", "9.6 MiB", "512 B"."""
    if nbytes is None:
        return "-"
    for size, unit in _SIZES:
        if nbytes >= size:
            value = nbytes / size
            return f"{value:.1f} {unit}" if value < 100 else f"{value:.0f} {unit}"
    return f"{nbytes:.0f} B"


def fine_text(value_s: float) -> str:
    """Return seconds as a person compares them: "0.0123 s", "0.21 s", "12 s", "3 min"."""
    return f"{value_s:.4f} s" if value_s < 0.1 else f"{value_s:.2f} s" if value_s < 10 else age_text(value_s)


def lost_text(count: int) -> str:
    """Return how many steps are to be trained again, as far as ranks reported them.

    >>> lost_text(9), lost_text(0)
    ('at least 9 steps lost', 'no step known to be lost')
    """
    return f"at least {plural(count, 'step')} lost" if count else "no step known to be lost"


def dropped_text(job: str, step: int) -> str:
    """Return the error for a reader whose step was dropped for a newer one before all of it was copied."""
    return (
        f"step {step} of job {job!r} was dropped while it was read: newer ones are committed, and puts wait for no "
        f"reader. Read the newest, or pin one and read that: `memstore pin {job} latest NAME`"
    )


def who_is_missing(missing: list[int], world_size: int, done: str) -> str:
    """Return "2 of 3 ranks have connected, missing: rank 1", for `done`="connected"."""
    return f"{world_size - len(missing)} of {world_size} ranks have {done}, missing: {ranks_text(missing)}"


def ranks_text(ranks: list[int]) -> str:
    """Return "rank 1", or "ranks 0, 2"."""
    return f"rank{'s' if len(ranks) != 1 else ''} {listed(ranks)}"


def replaced_text(rows: Sequence[ReplacedRow]) -> str:
    """Return "rank 3 of h2 was replaced on h5 by a spare (its process ended)", for RANKS_MAX ranks at most."""
    texts = [
        f"rank {row.rank}{f' of {row.host}' if row.host else ''} was replaced on {row.to_host} by "
        f"{'a spare' if row.is_spare else 'a new worker'} ({CAUSES[row.cause]})"
        for row in rows[:RANKS_MAX]
    ]
    more = [f"{plural(len(rows) - RANKS_MAX, 'more rank')}"] if len(rows) > RANKS_MAX else []
    return ", ".join([*texts, *more]) or "which ranks were replaced is not known"


def phases_text(seconds: Mapping[str, float]) -> str:
    """Return the seconds of phases as text.

    >>> phases_text({"meet": 0.25, "first_step": 1.0})
    'meet 0.25 s, first step 1.00 s'
    """
    return ", ".join(f"{phase.replace('_', ' ')} {took_s:.2f} s" for phase, took_s in seconds.items())


def error_text(error: BaseException, limit: int) -> str:
    """Return an exception as one line of at most `limit` characters that a message can hold, whatever its text has.

    >>> error_text(OSError("no file 'a\\udc80'"), 300)
    "OSError: no file 'a\\\\udc80'"
    """
    said = " ".join(str(error).split()).encode("utf-8", "backslashreplace").decode()
    return f"{type(error).__name__}: {said}"[:limit] if said else type(error).__name__
