"""Interleaved rounds, medians with their spread, ratios within a round, and the record of each benchmark.

Numbers of a shared machine drift by the minute, so contenders take turns inside every round and are
compared round by round: a ratio's median over rounds is steadier than the ratio of two medians.
What the records are written to and how they are read back: results.py. How they are shown: report.py.
"""

from __future__ import annotations

import math
import os
import platform
import statistics
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

from memstore.distribution import VERSION

GIB = 1 << 30
MIB = 1 << 20
AT_MOST, AT_LEAST = "at most", "at least"
SHARED_CORES, EMULATED_HOSTS = "shared cores", "emulated hosts"
ROUNDS_LEAST = 5  # of so many the lowest and the highest do not count as noise
ROUNDS_MANY = 20  # of so many the interval of their median counts, which more rounds make narrower
TAIL = 0.025  # how likely the median lies below that interval, and above it


@dataclass(frozen=True)
class Options:
    """What every benchmark gets: bytes of the state, timed rounds, rounds thrown away first.

    `hosts` says how the two hosts of a transfer stand on this machine: sharing its cores, or emulated with one each.
    """

    nbytes: int = GIB
    rounds: int = 5
    warmups: int = 2
    chunk_bytes: int = 4 * MIB
    with_ray: bool = True
    hosts: tuple[str, ...] = (SHARED_CORES, EMULATED_HOSTS)


class Took(NamedTuple):
    """What one round of a contender took: seconds, and processor seconds of its processes; None: they were not read."""

    wall_s: float
    cpu_s: float | None = None


class Rounds(NamedTuple):
    """What all timed rounds took, by contender: one value a round. Who did not read its processor seconds has none."""

    seconds: dict[str, list[float]]
    cpu_seconds: dict[str, list[float]]


class Target(NamedTuple):
    """What a figure is held against; `line` names the promise in targets.py that it answers, "" for none."""

    limit: float
    side: str
    line: str = ""


@dataclass
class Ratio:
    """A figure with one value a round: by default one contender over another, else in `unit`.

    Args:
        name: What it is, unique in its record.
        values: One a round.
        target: (limit, AT_MOST or AT_LEAST), or a `Target` of targets.py; None where nothing is promised.
        unit: "" for a ratio, "s", "bytes", "percent" or "count".
        judged_by: "median", or "highest" where no round may be worse than the target.
    """

    name: str
    values: list[float]
    target: tuple[float, str] | Target | None = None
    unit: str = ""
    judged_by: str = "median"

    @property
    def median(self) -> float:
        """Median over the rounds."""
        return statistics.median(self.values)

    @property
    def judged(self) -> float:
        """The value that the target is held against."""
        return max(self.values) if self.judged_by == "highest" else self.median

    @property
    def is_met(self) -> bool | None:
        """Whether the target is kept; None without one, or if the rounds differ too much to say."""
        if self.target is None or self.is_noisy:
            return None
        return self._keeps(self.judged)

    @property
    def is_noisy(self) -> bool:
        """Whether the rounds say nothing about the target: some keep it and some do not; or all do, but they lie
        further apart than it is from 0. Of few rounds all count but the lowest and the highest; of many those between
        which the median lies (`median_interval`)."""
        if self.target is None or self.judged_by != "median":
            return False
        rounds: Sequence[float] = sorted(self.values)
        if len(rounds) >= ROUNDS_MANY:
            rounds = median_interval(rounds)
        elif len(rounds) >= ROUNDS_LEAST:
            rounds = rounds[1:-1]
        kept = {self._keeps(value) for value in rounds}
        return len(kept) > 1 or (kept == {True} and max(rounds) - min(rounds) > abs(self.target[0]) > 0)

    def _keeps(self, value: float) -> bool:
        assert self.target is not None
        limit, side = self.target[:2]
        return value <= limit if side == AT_MOST else value >= limit


def median_interval(rounds: Sequence[float]) -> Sequence[float]:
    """Return those of sorted rounds between which the median of all rounds there could be lies with 95 %.

    Whatever the rounds' distribution, each is below its median as a coin falls: so the binomial says how many are.
    """
    share, below = 0.0, 0
    while share + (part := math.comb(len(rounds), below) / 2 ** len(rounds)) <= TAIL:
        share, below = share + part, below + 1
    return rounds[max(0, below - 1) : len(rounds) - max(0, below - 1)]


@dataclass
class Record:
    """What one benchmark measured.

    Args:
        name: Unique among the records of all benchmarks.
        nbytes: Bytes of the state; rates are given for it. 0 where a rate means nothing.
        seconds: Seconds by contender, one value a round.
        ratios: The ratios and other figures that matter.
        notes: Sentences that a reader of the numbers needs.
        absent: Why a contender did not run, by contender.
        cpu_seconds: Processor seconds of all its processes while its clock ran, by contender, one value a round.
        about: Machine, versions, commit, rounds: see `results.about`.
    """

    name: str
    nbytes: int
    seconds: dict[str, list[float]]
    ratios: list[Ratio] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    absent: dict[str, str] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)
    cpu_seconds: dict[str, list[float]] = field(default_factory=dict)

    def ratio(self, name: str, over: str, under: str, target: tuple[float, str] | Target | None = None) -> None:
        """Add seconds[over] / seconds[under] of every round."""
        pairs = zip(self.seconds[over], self.seconds[under], strict=True)
        self.ratios.append(Ratio(name, [a / b for a, b in pairs], target))

    def cpu_ratio(self, name: str, over: str, under: str, target: Target | None = None) -> None:
        """Add the processor seconds of `over` / those of `under` of every round."""
        pairs = zip(self.cpu_seconds[over], self.cpu_seconds[under], strict=True)
        self.ratios.append(Ratio(name, [a / b for a, b in pairs], target))

    def figure(
        self,
        name: str,
        values: list[float],
        unit: str,
        target: tuple[float, str] | Target | None = None,
        *,
        judged_by: str = "median",
    ) -> None:
        """Add a figure that is not a ratio: seconds that are no contender's, bytes, percent, a count."""
        self.ratios.append(Ratio(name, values, target, unit, judged_by))


def interleave(
    contenders: Mapping[str, Callable[[int], Took]], options: Options, before_round: Callable[[int], None]
) -> Rounds:
    """Run all contenders once a round and return what the timed rounds took.

    Every contender returns what it measured itself, after having compared the bytes it moved.
    The order turns by one each round, so that no contender always follows the same neighbour. Round numbers
    go on from the warm-up rounds, so that contents never repeat.
    """
    names = list(contenders)
    rounds = Rounds({name: [] for name in names}, {})
    for number in range(options.warmups + options.rounds):
        before_round(number)
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            took = contenders[name](number)
            if number >= options.warmups:
                rounds.seconds[name].append(took.wall_s)
                if took.cpu_s is not None:
                    rounds.cpu_seconds.setdefault(name, []).append(took.cpu_s)
    return rounds


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
        "versions": {"memstore": VERSION, **{name: _version(name) for name in ("torch", "ray", "numpy", "xxhash")}},
        "commit": _commit(),
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
    root = Path(__file__).resolve().parents[2]
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
