"""What jobs, pins, stores and hosts may be called, one rule each, checked wherever a name enters; lists of ranks.

Pure. Names become folder names and parts of messages, so they are plain ASCII, start with a
letter or digit and never hold a slash.
"""

from __future__ import annotations

import re

from memstore.errors import ConfigError

NAME_CHARS_MAX = 64
HOST_CHARS_MAX = 128  # a host id may be a host name and a boot id together (R1)

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def check_job_name(name: object) -> None:
    """Raise ConfigError unless `name` may name a job."""
    _check("job", name, _NAME, NAME_CHARS_MAX)


def check_pin_name(name: object) -> str:
    """Return `name` if it may name a pin; ConfigError otherwise (R19)."""
    _check("pin", name, _NAME, NAME_CHARS_MAX)
    return str(name)


def check_store_name(name: str) -> None:
    """Raise ConfigError unless `name` may name a store (R5)."""
    _check("store", name, _NAME, NAME_CHARS_MAX)


def check_host_name(name: str) -> None:
    """Raise ConfigError unless `name` may be a host id (R1)."""
    _check("host", name, _HOST, HOST_CHARS_MAX)


def _check(what: str, name: object, rule: re.Pattern[str], chars_max: int) -> None:
    if not isinstance(name, str) or rule.fullmatch(name) is None:
        shown = repr(name)[:160]
        raise ConfigError(
            f"{what} name {shown} is not allowed: use 1 to {chars_max} of A-Z a-z 0-9 . _ - "
            "and start with a letter or digit",
            field=what,
            value=shown,
        )


def listed(values: list[int], limit: int = 10) -> str:
    """Return at most `limit` values as text, with the count of the rest."""
    head = ", ".join(str(v) for v in values[:limit])
    return head if len(values) <= limit else f"{head} and {len(values) - limit} more"
