"""Several drills one after the other, on clusters that are reused, with one report for machines and one for people.

A drill that fails does not stop the suite; a cluster on which one did not work is replaced. Read `suite_record.py`
for what is written, `page.py` for how it looks.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

from memstore.drills.model.catalogue import DRILLS, find
from memstore.drills.model.options import Options, replay
from memstore.drills.model.promises import ON_RAY, PLACES, RUNNING, TIGHT, Drill
from memstore.drills.model.report import ERROR, Report, verdict_line
from memstore.drills.run.runner import run_drill
from memstore.drills.sites.site import Site
from memstore.errors import ConfigError

STANDARD, FULL = "standard", "full"
SUITES = (STANDARD, FULL)

Opener = Callable[[], AbstractContextManager[Site]]


@dataclass(frozen=True)
class Play:
    """One entry of a suite."""

    drill: Drill
    is_beyond: bool = False

    @property
    def places(self) -> tuple[str, ...]:
        """Where it may be played."""
        return self.drill.beyond_runs_on if self.is_beyond else self.drill.runs_on

    @property
    def title(self) -> str:
        """As it is called on the command line."""
        return f"{self.drill.name}{' --beyond' if self.is_beyond else ''}"


def plays_of(suite: str) -> list[Play]:
    """Return what a suite plays: the standard drills, or every drill and then every must-fail twin.

    Those that want a cluster with little memory come last, for the other one ends when that is started.
    """
    if suite == STANDARD:
        return [Play(d) for d in DRILLS.values() if d.is_standard]
    if suite == FULL:
        twins = [Play(d, is_beyond=True) for d in DRILLS.values() if d.beyond is not None]
        plays = [*(Play(d) for d in DRILLS.values()), *twins]
        return sorted(plays, key=lambda play: TIGHT in play.places)
    raise ConfigError(f"there is no suite {suite!r}: use one of {', '.join(SUITES)}", field="suite", value=suite)


@dataclass
class SuiteResult:
    """What was played and what was not."""

    drills: list[dict[str, Any]] = field(default_factory=list)  # Report.to_dict() and where and how long
    skipped: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0
    is_cut_short: bool = False  # by the deadline or by a person: then it proves less than it says, and is no pass


class Suite:
    """Plays on one cluster per place, opened when it is first needed."""

    def __init__(
        self, openers: Mapping[str, Opener], options: Options, *, durable: str | None, timeout_s: float,
        tell: Callable[[str], None], named_durable: str | None = None, problems: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        self.openers, self.options, self.durable, self.tell = openers, options, durable, tell
        self.problems = problems or {}  # why a cluster of this kind cannot be made here, by place
        self.named_durable = named_durable  # as a person gave it; None where the directory was made for the suite
        self.deadline_s = time.monotonic() + timeout_s
        self.timeout_s = timeout_s
        self.result = SuiteResult()
        self._sites: dict[str, tuple[Site, contextlib.ExitStack]] = {}

    def run(self, plays: Sequence[Play]) -> SuiteResult:
        """Play them all; whatever one of them does, the next is played, until the deadline or Ctrl-C."""
        started_s = time.monotonic()
        try:
            for play in plays:
                why_not, place = self._place(play)
                if why_not:
                    self._skip(play, why_not)
                    continue
                try:
                    self._play(play, place)
                except KeyboardInterrupt:  # the drill has cleaned up; what was found so far is still reported
                    self.deadline_s, self.result.is_cut_short = 0.0, True
                    self._skip(play, "interrupted")
        finally:
            self.result.seconds = time.monotonic() - started_s
            for place in list(self._sites):
                self._close(place)
        return self.result

    def _skip(self, play: Play, why: str) -> None:
        self.result.skipped.append({"drill": play.drill.name, "beyond": play.is_beyond, "why": why})
        self.tell(f"not played: {play.title}: {why}")

    def _place(self, play: Play) -> tuple[str, str]:
        """Why a drill cannot be played (or "") and where it can be."""
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
            options = replace(
                self.options, is_beyond=play.is_beyond, config=site.config.with_fields(config.job_fields())
            )
            report = run_drill(name, site, options, self.tell)
        except Exception as exc:
            # Whatever it is, it must not cost the other drills; the report names it and the suite fails by it.
            report = Report(name, self.options.seed, find(name).promise.words, play.is_beyond)
            report.error, report.message = type(exc).__name__, str(exc)
            report.words = f"{type(exc).__name__}: {exc}"
        options = replace(self.options, is_beyond=play.is_beyond)
        report.replay = replay(
            name,
            options,
            store=config.store if place == RUNNING else None,
            durable=self.named_durable if play.drill.needs_durable else None,
        )
        self.tell(verdict_line(report))
        if report.outcome == ERROR or place == TIGHT:
            # Nobody knows what it left broken; or its limits were right for the memory in use when it was opened.
            self._close(place)
        row = report.to_dict()
        row.update(
            family=play.drill.family, breaks=play.drill.breaks, flow=play.drill.flow, place=place,
            seconds_played=round(time.monotonic() - started_s, 3),
        )  # fmt: skip
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
                self.tell(f"closing the cluster: {type(exc).__name__}: {exc}")
