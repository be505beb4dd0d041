"""Names of scratch stores, which tell the process that made them."""

from __future__ import annotations

import os
import re
import secrets

_MAKER = re.compile(r"-p([1-9][0-9]*)(?![0-9A-Za-z])")


def scratch_store_name(prefix: str = "t") -> str:
    """Return a store name that no other has: the prefix, this process's id, a random token."""
    return f"{prefix}-p{os.getpid()}-{secrets.token_hex(4)}"


def racks(hosts_count: int) -> dict[str, dict[str, str]]:
    """Return the labels of hosts h1, h2, ... by turns in two racks."""
    return {f"h{i + 1}": {"rack": f"r{i % 2 + 1}"} for i in range(hosts_count)}


def maker_pid(name: str) -> int | None:
    """Return the id of the process that made a name, also of a path that contains one; None if the name tells none."""
    found = _MAKER.search(name)
    return int(found.group(1)) if found else None
