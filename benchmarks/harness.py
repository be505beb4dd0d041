"""Interleaved rounds, medians with their spread, ratios within a round, and one JSON record a run.

Numbers of a shared machine drift by the minute, so contenders take turns inside every round and are
compared round by round: a ratio's median over rounds is steadier than the ratio of two medians.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

GIB = 1 << 30
MIB = 1 << 20


@dataclass(frozen=True)
class Options:
    """What every benchmark is told: bytes of the state, timed rounds, rounds thrown away first."""

    nbytes: int = GIB
    rounds: int = 5
    warmups: int = 2
    chunk_bytes: int = 4 * MIB
    with_ray: bool = True


@dataclass
class Ratio:
    """One contender against another, round by round; `target` is (limit, "at most" | "at least") or None."""

    name: str
    values: list[float]
    target: tuple[float, str] | None = None

    @property
    def median(self) -> float:
        """Median over the rounds."""
        return statistics.median(self.values)

    @property
    def is_met(self) -> bool | None:
        """Whether the median keeps the target; None without one."""
        if self.target is None:
            return None
        limit, side = self.target
        return self.median <= limit if side == "at most" else self.median >= limit


@dataclass
class Record:
    """What one benchmark measured: seconds by contender, one value a round, and the ratios that matter."""

    name: str
    nbytes: int
    seconds: dict[str, list[float]]
    ratios: list[Ratio] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def ratio(self, name: str, over: str, under: str, target: tuple[float, str] | None = None) -> None:
        """Add seconds[over] / seconds[under] of every round."""
        pairs = zip(self.seconds[over], self.seconds[under], strict=True)
        self.ratios.append(Ratio(name, [a / b for a, b in pairs], target))

    def to_dict(self) -> dict[str, Any]:
        """Return the record as plain values."""
        return {
            "name": self.name,
            "nbytes": self.nbytes,
            "seconds": self.seconds,
            "gb_per_s_median": {k: self.nbytes / statistics.median(v) / 1e9 for k, v in self.seconds.items()},
            "ratios": [
                {"name": r.name, "median": r.median, "values": r.values, "target": r.target, "is_met": r.is_met}
                for r in self.ratios
            ],
            "notes": self.notes,
        }


def interleave(
    contenders: Mapping[str, Callable[[int], float]], options: Options, before_round: Callable[[int], None]
) -> dict[str, list[float]]:
    """Run all contenders once a round and return their seconds, one value a timed round.

    Every contender returns the seconds it measured itself, after having compared the bytes it moved.
    The order turns by one each round, so that nobody always follows the same neighbour. Round numbers
    go on from the warm-up rounds, so that contents never repeat.
    """
    names = list(contenders)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(options.warmups + options.rounds):
        before_round(number)
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            took_s = contenders[name](number)
            if number >= options.warmups:
                seconds[name].append(took_s)
    return seconds


def require(is_equal: bool, what: str) -> None:
    """Stop the benchmark if bytes that were moved differ: a speed without the bytes is no result."""
    if not is_equal:
        raise RuntimeError(f"{what}: the bytes that arrived differ from those that were sent; no number is reported")


def machine() -> dict[str, Any]:
    """Describe where and with what the numbers were taken; no host name, no path."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory_bytes / GIB, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in ("memstore", "torch", "ray", "numpy", "xxhash")},
        "commit": _commit(),
        "glibc_tunables": os.environ.get("GLIBC_TUNABLES", ""),
        "load_before": round(os.getloadavg()[0], 2),
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "absent"


def _commit() -> str:
    """Return the commit, with a + if tracked files of the product or the benchmarks differ from it."""
    root = Path(__file__).resolve().parent.parent
    try:
        head = _git(root, "rev-parse", "--short", "HEAD")
        changed = _git(
            root, "status", "--porcelain", "-uno", "--", "memstore", "placement", "recovery", "benchmarks/*.py"
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return head + ("+" if changed else "")


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, timeout=10, check=True)
    return done.stdout.strip()


HEAD = "| benchmark | what | median | lowest to highest | target |\n|---|---|---:|---:|---|"


def rows(record: Record) -> str:
    """Return Markdown table rows: one for every contender, then one for every ratio."""
    lines = []
    for name, values in record.seconds.items():
        middle = statistics.median(values)
        rate = f"{middle * 1e3:.0f} ms, {record.nbytes / middle / 1e9:.2f} GB/s"
        lines.append(f"| {record.name} | {name} | {rate} | {min(values) * 1e3:.0f} to {max(values) * 1e3:.0f} ms | |")
    for ratio in record.ratios:
        target = ""
        if ratio.target is not None:
            target = f"{ratio.target[1]} {ratio.target[0]:g}: {'met' if ratio.is_met else 'MISSED'}"
        spread = f"{min(ratio.values):.2f} to {max(ratio.values):.2f}"
        lines.append(f"| {record.name} | **{ratio.name}** | **{ratio.median:.2f}** | {spread} | {target} |")
    return "\n".join(lines)


def write(records: list[Record], about: dict[str, Any], out: Path) -> Path:
    """Write one JSON file for the run and return its path."""
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{about['size']}.json"
    body = {**about, "records": [record.to_dict() for record in records]}
    path.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
    return path
