"""The file descriptors of this process: how many it has open, and how many it may (RLIMIT_NOFILE)."""

from __future__ import annotations

import os
import resource


def descriptor_stats() -> dict[str, int]:
    """Return the counts and the process id; if no descriptor is left to count with, report all in use."""
    limit, hard = resource.getrlimit(resource.RLIMIT_NOFILE)  # Linux knows no infinite one
    try:
        used = len(os.listdir("/proc/self/fd")) - 1  # its own
    except OSError:
        used = limit
    return {"descriptors": used, "descriptors_limit": limit, "descriptors_hard": hard, "pid": os.getpid()}
