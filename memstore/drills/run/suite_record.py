"""The record of a suite for machines: environment, versions, and the report of every drill."""

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
SOURCE_ROOT = Path(__file__).resolve().parents[3]  # the repository, unless the package was installed from a wheel
GIT_S = 10.0
PACKAGES = (DISTRIBUTION, "ray", "torch", "numpy", "msgpack", "xxhash")


def record(suite: str, seed: int, result: SuiteResult, *, nbytes: int) -> dict[str, Any]:
    """Return the record as plain values; each row of `drills` has the fields of `drill --json`, and more."""
    counts = Counter(row["outcome"] for row in result.drills)
    return {
        "format": FORMAT, "suite": suite, "seed": seed, "nbytes_per_rank": nbytes,
        "ended": datetime.now(timezone.utc).isoformat(timespec="seconds"), "seconds": round(result.seconds, 1),
        "outcome": outcome_of(result), "counts": {name: counts[name] for name in (PASS, BROKEN, ERROR)},
        "environment": environment(), "versions": {name: _version(name) for name in PACKAGES}, "commit": commit(),
        "drills": result.drills, "skipped": result.skipped,
    }  # fmt: skip


def outcome_of(result: SuiteResult) -> str:
    """Return the worst outcome; ERROR also if no drill was played, or if the suite was cut short."""
    found = {row["outcome"] for row in result.drills}
    if BROKEN in found:
        return BROKEN
    return ERROR if ERROR in found or not found or result.is_cut_short else PASS


def environment() -> dict[str, Any]:
    """Return the facts about the machine that a reader needs to judge the seconds."""
    return {
        "python": platform.python_version(), "system": platform.system(), "kernel": platform.release(),
        "machine": platform.machine(), "cpus": os.cpu_count(), "memory_available_bytes": memory_available(),
    }  # fmt: skip


def commit() -> str | None:
    """Return the commit of the source tree, with "-dirty" if files were changed; None if there is no repository."""
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
