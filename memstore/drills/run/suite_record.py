"""The machine-readable record of a suite: where it ran, with what, and what every drill found."""

from __future__ import annotations

import os
import platform
import subprocess
from collections import Counter
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from memstore.distribution import DISTRIBUTION
from memstore.drills.breaking.faults import memory_available
from memstore.drills.model.report import BROKEN, ERROR, PASS
from memstore.drills.run.suite import SuiteResult

FORMAT = 1
SOURCE_ROOT = Path(__file__).resolve().parents[3]  # the repository, unless this runs from a wheel
GIT_S = 10.0
PACKAGES = (DISTRIBUTION, "ray", "torch", "numpy", "msgpack", "xxhash")


def record(suite: str, seed: int, result: SuiteResult, *, nbytes: int) -> dict[str, Any]:
    """Return the whole report as plain values; `drills` holds what `drill --json` prints for each, and more."""
    counts = Counter(row["outcome"] for row in result.drills)
    return {
        "format": FORMAT, "suite": suite, "seed": seed, "nbytes_per_rank": nbytes,
        "ended": datetime.now(timezone.utc).isoformat(timespec="seconds"), "seconds": round(result.seconds, 1),
        "outcome": outcome_of(result), "counts": {name: counts[name] for name in (PASS, BROKEN, ERROR)},
        "environment": environment(), "versions": {name: _version(name) for name in PACKAGES}, "commit": commit(),
        "drills": result.drills, "skipped": result.skipped,
    }  # fmt: skip


def outcome_of(result: SuiteResult) -> str:
    """Return the worst outcome; ERROR if nothing was played or not all that could be, since that proves less."""
    found = {row["outcome"] for row in result.drills}
    if BROKEN in found:
        return BROKEN
    return ERROR if ERROR in found or not found or result.is_cut_short else PASS


def environment() -> dict[str, Any]:
    """Return what a reader must know to judge the seconds."""
    return {
        "python": platform.python_version(), "system": platform.system(), "kernel": platform.release(),
        "machine": platform.machine(), "cpus": os.cpu_count(), "memory_available_bytes": memory_available(),
    }  # fmt: skip


def commit() -> str | None:
    """Return the commit of the source tree this runs from, with "-dirty" if it was changed; None in a wheel."""
    if not (SOURCE_ROOT / ".git").exists():
        return None
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            cwd=SOURCE_ROOT, capture_output=True, text=True, timeout=GIT_S, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
