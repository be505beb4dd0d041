"""The report of a drill: a timeline while it runs, a verdict as text at the end, one JSON object for machines."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

PASS, BROKEN, ERROR = "PASS", "FAIL", "ERROR"
EXIT_CODES = {PASS: 0, ERROR: 1, BROKEN: 3}
# The phases of a drill, in order. The report has the seconds of each.
SETUP, INJECT, WAIT_FOR_EFFECT, RECOVER, WAIT_FOR_RECOVERY, CHECK, CLEANUP = PHASES = (
    "setup",
    "inject",
    "wait-for-effect",
    "recover",
    "wait-for-recovery",
    "check",
    "cleanup",
)
LABEL_WIDTH = 12
TEXT_WIDTH = 76


@dataclass
class Phase:
    """One phase of a drill, in seconds since the first line of the timeline; so setup begins below zero."""

    name: str
    start_s: float
    end_s: float


@dataclass
class Line:
    """One line of the timeline."""

    at_s: float
    label: str
    text: str
    note: str = ""


@dataclass
class Report:
    """The findings of a drill. `bytes_by_tier` and `seconds` belong to the restore."""

    drill: str
    seed: int
    promised: str
    is_beyond: bool = False
    victims: list[str] = field(default_factory=list)
    outcome: str = ERROR
    words: str = "the drill did not run"
    verdict: str | None = None
    step_before: int | None = None
    step_restored: int | None = None
    seconds: dict[str, float | None] = field(
        default_factory=lambda: dict.fromkeys(("detect", "plan", "transfer", "load", "resume", "redundant"))
    )
    bytes_by_tier: dict[str, int] = field(default_factory=lambda: {"local": 0, "peer": 0, "durable": 0})
    bytes_compared: int = 0
    is_verified: bool = False
    stall_s: float | None = None  # the longest put during the fault; None if the ranks did not put during it
    error: str | None = None
    message: str | None = None
    replay: str = ""
    timeline: list[Line] = field(default_factory=list)
    phases: list[Phase] = field(default_factory=list)

    @property
    def rto_s(self) -> float | None:
        """Return for how many seconds the store held training up; None if that is not known.

        After a restart: detect, plan, transfer and load, without the launcher's own time. If the ranks went on
        training: from the end of the fault to the next commit. In place: from the fault to the first step after it.
        """
        if self.seconds["resume"] is not None:
            return self.seconds["resume"]
        known = [s for name in ("detect", "plan", "transfer", "load") if (s := self.seconds[name]) is not None]
        return round(sum(known), 3) if self.seconds["load"] is not None else None

    @property
    def rpo_steps(self) -> int | None:
        """Return how many committed steps were lost; None if nothing was restored."""
        if self.step_before is None or self.step_restored is None:
            return None
        return max(0, self.step_before - self.step_restored)

    @property
    def exit_code(self) -> int:
        """Return 0 for the promised outcome, 1 if the drill did not work, 3 for a broken promise."""
        return EXIT_CODES[self.outcome]

    def to_dict(self) -> dict[str, Any]:
        """Return the plain values that `drill --json` prints."""
        names = {"is_beyond": "beyond", "bytes_by_tier": "bytes", "is_verified": "verified", "stall_s": "stall_max_s"}
        plain = {names.get(key, key): value for key, value in vars(self).items()}
        return {
            **plain,
            "rpo_steps": self.rpo_steps,
            "rto_s": self.rto_s,
            "timeline": [[round(line.at_s, 3), line.label, line.text] for line in self.timeline],
            "phases": [
                {"phase": p.name, "start_s": round(p.start_s, 3), "end_s": round(p.end_s, 3)} for p in self.phases
            ],
        }


class Timeline:
    """The lines and phases of a drill, in seconds since its first line. Each line is printed as it happens.

    `tell` gets each line, and the begin of each phase, as a label and a text.
    """

    def __init__(self, report: Report, print_line: Callable[[str], None]) -> None:
        self._report, self._print_line = report, print_line
        self.tell: Callable[[str, str], None] = lambda label, text: None
        self._zero_s: float | None = None

    def now(self) -> float:
        """Return the seconds since the first call of this method."""
        if self._zero_s is None:
            self._zero_s = time.monotonic()
        return time.monotonic() - self._zero_s

    def line(self, label: str, text: str, note: str = "") -> None:
        """Record and print what just happened; `note` is printed at the right."""
        line = Line(self.now(), label, text, note)
        self._report.timeline.append(line)
        self.tell(label, text)
        self._print_line(f"  {line.at_s:06.3f}  {label:<{LABEL_WIDTH}}{text:<{TEXT_WIDTH}} {note}".rstrip())

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Record the begin and end of a phase, also if an exception ends it."""
        started_s = time.monotonic()
        self.tell(name, "begins")
        try:
            yield
        finally:
            end_s = self.now()
            self._report.phases.append(Phase(name, end_s - (time.monotonic() - started_s), end_s))


def verdict_line(report: Report) -> str:
    """Return the last line: the outcome as text, and the command that plays the drill again."""
    return f"{report.outcome}  {report.words} · replay: {report.replay}"
