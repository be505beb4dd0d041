"""A suite: several drills one after the other, on clusters that are reused.

A drill that fails does not stop the suite. If a drill did not work, its cluster is replaced. `suite.py` has the
record for machines, `page.py` the page for people.
"""

from __future__ import annotations

import contextlib
import os
import platform
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from memstore.distribution import DISTRIBUTION
from memstore.drills.model.catalogue import (
    APART,
    DRILLS,
    IN_PLACE,
    KEPT_HEAD,
    ON_RAY,
    PLACES,
    RAY_NAMESPACES,
    RUNNING,
    TIGHT,
    Drill,
    Options,
    find,
    replay,
    suites_of,
)
from memstore.drills.model.report import BROKEN, ERROR, PASS, Report, verdict_line
from memstore.drills.run.runner import run_drill
from memstore.drills.sites.site import Site
from memstore.errors import ConfigError
from memstore.testing.faults.processes import memory_available
from memstore.testing.part_records import source_commit

STANDARD, FULL = "standard", "full"
SUITES = (STANDARD, FULL, IN_PLACE)

Opener = Callable[[], AbstractContextManager[Site]]


@dataclass(frozen=True)
class Play:
    """One entry of a suite: a drill, or its play beyond the tolerance."""

    drill: Drill
    is_beyond: bool = False

    @property
    def places(self) -> tuple[str, ...]:
        """Return the places where it may be played."""
        return self.drill.beyond_runs_on if self.is_beyond else self.drill.runs_on

    @property
    def title(self) -> str:
        """Return its name as on the command line."""
        return f"{self.drill.name}{' --beyond' if self.is_beyond else ''}"


def plays_of(suite: str) -> list[Play]:
    """Return the plays of a suite: the standard drills; or every drill, or those in place, then the plays beyond.

    Of clusters on Ray one replaces another; so plays on a rare one come last, together.
    """
    if suite == STANDARD:
        return [Play(d) for d in DRILLS.values() if d.is_standard]
    if suite in SUITES:
        drills = [d for d in DRILLS.values() if suite in suites_of(d)]
        beyond = [Play(d, is_beyond=True) for d in drills if d.beyond is not None]
        return sorted([*map(Play, drills), *beyond], key=lambda play: _rarity(play.places))
    raise ConfigError(f"there is no suite {suite!r}: use one of {', '.join(SUITES)}", field="suite", value=suite)


def _rarity(places: Sequence[str]) -> int:
    rare = (APART, KEPT_HEAD, RAY_NAMESPACES, TIGHT)
    return max(rare.index(p) + 1 if p in rare else 0 for p in places)


@dataclass
class SuiteResult:
    """The plays of a suite with their reports, and the plays that were skipped."""

    drills: list[dict[str, Any]] = field(default_factory=list)  # Report.to_dict(), and where and how long it was played
    skipped: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0
    is_cut_short: bool = False  # by the deadline or by Ctrl-C; then the outcome is no PASS, because not all was played


class Suite:
    """A player with one cluster per place, which it opens when a drill needs it."""

    def __init__(
        self,
        openers: Mapping[str, Opener],
        options: Options,
        *,
        durable: str | None,
        timeout_s: float,
        print_line: Callable[[str], None],
        named_durable: str | None = None,
        problems: Mapping[str, str] | None = None,
    ) -> None:
        self.openers, self.options, self.durable, self.print_line = openers, options, durable, print_line
        self.problems = problems or {}  # by place: why its cluster cannot be started here
        self.named_durable = named_durable  # the directory that the person named; None if one was made for the suite
        self.deadline_s = time.monotonic() + timeout_s
        self.timeout_s = timeout_s
        self.result = SuiteResult()
        self._sites: dict[str, tuple[Site, contextlib.ExitStack]] = {}

    def run(self, plays: Sequence[Play]) -> SuiteResult:
        """Play all, until the deadline or Ctrl-C; a play that fails does not stop the others."""
        started_s = time.monotonic()
        try:
            for play in plays:
                why_not, place = self._place(play)
                if why_not:
                    self._skip(play, why_not)
                    continue
                try:
                    self._play(play, place)
                except KeyboardInterrupt:  # the drill has cleaned up; report the plays before it
                    self.deadline_s, self.result.is_cut_short = 0.0, True
                    self._skip(play, "interrupted")
        finally:
            self.result.seconds = time.monotonic() - started_s
            for place in list(self._sites):
                self._close(place)
        return self.result

    def _skip(self, play: Play, why: str) -> None:
        self.result.skipped.append({"drill": play.drill.name, "beyond": play.is_beyond, "why": why})
        self.print_line(f"not played: {play.title}: {why}")

    def _place(self, play: Play) -> tuple[str, str]:
        """Return why a play must be skipped, or "", and the place for it."""
        place = next((place for place in play.places if place in self.openers), "")
        if time.monotonic() > self.deadline_s:
            self.result.is_cut_short = True
            return f"the suite's deadline of {self.timeout_s:g} s has passed", place
        if not place:
            words = (PLACES[p] + (f" ({self.problems[p]})" if p in self.problems else "") for p in play.places)
            return f"it runs on {' or '.join(words)}", place
        if play.drill.needs_root and os.geteuid() != 0:
            return "it needs root", place
        if play.drill.needs_durable and self.durable is None:
            return "it needs a directory that every host reaches: --durable", place
        if play.drill.needs_victim and place == RUNNING and self.options.victim is None:
            return "it hits what is not its own: name a host with --victim", place
        return "", place

    def _play(self, play: Play, place: str) -> None:
        started_s = time.monotonic()
        name, config = play.drill.name, self.options.config
        if play.drill.needs_durable:
            config = config.with_fields({"durable": self.durable})
        try:
            site = self._site(place)
            config = site.config.with_fields(config.job_fields())
            report = run_drill(
                name, site, replace(self.options, is_beyond=play.is_beyond, config=config), self.print_line
            )
        except Exception as exc:
            # No error of one drill may stop the others; its report names the error, and the suite does not pass.
            report = Report(name, self.options.seed, find(name).promise.words, play.is_beyond)
            report.error, report.message = type(exc).__name__, str(exc)
            report.words = f"{type(exc).__name__}: {exc}"
        report.replay = replay(
            name,
            replace(self.options, is_beyond=play.is_beyond),
            store=config.store if place == RUNNING else None,
            durable=self.named_durable if config.durable is not None else None,
        )
        self.print_line(verdict_line(report))
        if report.outcome == ERROR or place == TIGHT:
            # The drill may have left something broken; and a tight cluster's limits fit the memory in use at its start.
            self._close(place)
        row = report.to_dict()
        row.update(
            family=play.drill.family,
            breaks=play.drill.breaks,
            flow=play.drill.flow,
            place=place,
            seconds_played=round(time.monotonic() - started_s, 3),
        )
        self.result.drills.append(row)

    def _site(self, place: str) -> Site:
        if place not in self._sites:
            for other in ON_RAY.intersection(self._sites) if place in ON_RAY else ():
                self._close(other)
            stack = contextlib.ExitStack()
            self._sites[place] = (stack.enter_context(self.openers[place]()), stack)
        return self._sites[place][0]

    def _close(self, place: str) -> None:
        found = self._sites.pop(place, None)
        if found is not None:
            try:
                found[1].close()
            except Exception as exc:
                self.print_line(f"closing the cluster: {type(exc).__name__}: {exc}")


# -- suite record -------------------------------------------------------------------------------------
# The record of a suite for machines: environment, versions, and the report of every drill.


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
