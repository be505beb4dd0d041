"""What the system lets this process do."""

from __future__ import annotations

from pathlib import Path

CAP_SYS_NICE = 23


def may_lower_nice() -> bool:
    """Return whether this process may lower nice values: many containers forbid it to root as well."""
    [line] = [each for each in Path("/proc/self/status").read_text().splitlines() if each.startswith("CapEff:")]
    return bool(int(line.split()[1], 16) >> CAP_SYS_NICE & 1)
