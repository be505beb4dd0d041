"""The record of a suite for machines: environment, versions, and the report of every drill."""

from __future__ import annotations

import os
import platform
from collections import Counter
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from memstore.distribution import DISTRIBUTION
from memstore.drills.model.report import BROKEN, ERROR, PASS
from memstore.drills.run.suite import SuiteResult
from memstore.testing.faults.processes import memory_available
from memstore.testing.part_records import source_commit

FORMAT = 1
PACKAGES = (DISTRIBUTION, "ray", "torch", "numpy", "msgpack", "xxhash")


def record(suite: str, seed: int, result: SuiteResult, *, nbytes: int) -> dict[str, Any]:
    """Return the record as plain values; each row of `drills` has the fields of `drill --json`, and more."""
    counts = Counter(row["outcome"] for row in result.drills)
    return {
        "format": FORMAT,
        "suite": suite,
        "seed": seed,
        "nbytes_per_rank": nbytes,
        "ended": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "seconds": round(result.seconds, 1),
        "outcome": outcome_of(result),
        "counts": {name: counts[name] for name in (PASS, BROKEN, ERROR)},
        "environment": environment(),
        "versions": {name: _version(name) for name in PACKAGES},
        "commit": source_commit(digits=40),
        "drills": result.drills,
        "skipped": result.skipped,
    }


def outcome_of(result: SuiteResult) -> str:
    """Return the worst outcome; ERROR also if no drill was played, or if the suite was cut short."""
    found = {row["outcome"] for row in result.drills}
    if BROKEN in found:
        return BROKEN
    return ERROR if ERROR in found or not found or result.is_cut_short else PASS


def environment() -> dict[str, Any]:
    """Return the facts about the machine that a reader needs to judge the seconds."""
    return {
        "python": platform.python_version(),
        "system": platform.system(),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "memory_available_bytes": memory_available(),
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
