"""What a drill tells: a timeline while it runs, a verdict in words at the end, one JSON object for machines."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

PASS, BROKEN, ERROR = "PASS", "FAIL", "ERROR"
EXIT_CODES = {PASS: 0, ERROR: 1, BROKEN: 3}
# The life of a drill, in order. Each is told with its seconds in the report.
SETUP, INJECT, WAIT_FOR_EFFECT, RECOVER, WAIT_FOR_RECOVERY, CHECK, CLEANUP = PHASES = (
    "setup", "inject", "wait-for-effect", "recover", "wait-for-recovery", "check", "cleanup",
)  # fmt: skip
LABEL_WIDTH = 12
TEXT_WIDTH = 76


@dataclass
class Phase:
    """One phase of a drill's life: seconds since its first line, so that setup begins below zero."""

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
    """Everything a drill found out. `bytes_by_tier` and `seconds` are of the restore."""

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
    stall_s: float | None = None  # the longest put during the fault, where ranks put during it
    error: str | None = None
    message: str | None = None
    replay: str = ""
    timeline: list[Line] = field(default_factory=list)
    phases: list[Phase] = field(default_factory=list)

    @property
    def rto_s(self) -> float | None:
        """Seconds the store was in the way of training: detect, plan, transfer and load, without the launcher's
        restart; where ranks went on, from the end of the fault to the next commit. None if it is not known."""
        if self.seconds["resume"] is not None:
            return self.seconds["resume"]
        known = [s for name in ("detect", "plan", "transfer", "load") if (s := self.seconds[name]) is not None]
        return round(sum(known), 3) if self.seconds["load"] is not None else None

    @property
    def rpo_steps(self) -> int | None:
        """Committed steps that were lost; None if nothing was restored."""
        if self.step_before is None or self.step_restored is None:
            return None
        return max(0, self.step_before - self.step_restored)

    @property
    def exit_code(self) -> int:
        """0 the promised outcome, 1 the drill did not work, 3 the promise is broken."""
        return EXIT_CODES[self.outcome]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, JSON-able: what `drill --json` prints."""
        return {
            "drill": self.drill, "seed": self.seed, "beyond": self.is_beyond, "victims": self.victims,
            "promised": self.promised, "outcome": self.outcome, "words": self.words, "verdict": self.verdict,
            "step_before": self.step_before, "step_restored": self.step_restored, "rpo_steps": self.rpo_steps,
            "seconds": self.seconds, "bytes": self.bytes_by_tier, "verified": self.is_verified,
            "bytes_compared": self.bytes_compared, "stall_max_s": self.stall_s, "error": self.error,
            "message": self.message, "replay": self.replay,
            "rto_s": self.rto_s,
            "timeline": [[round(line.at_s, 3), line.label, line.text] for line in self.timeline],
            "phases": [
                {"phase": p.name, "start_s": round(p.start_s, 3), "end_s": round(p.end_s, 3)} for p in self.phases
            ],
        }  # fmt: skip


class Timeline:
    """Seconds since the drill's first look at a healthy cluster, told line by line; and its phases."""

    def __init__(self, report: Report, tell: Callable[[str], None]) -> None:
        self._report, self._tell = report, tell
        self._zero_s: float | None = None

    def now(self) -> float:
        """Seconds since the first line."""
        if self._zero_s is None:
            self._zero_s = time.monotonic()
        return time.monotonic() - self._zero_s

    def line(self, label: str, text: str, note: str = "") -> None:
        """Tell what just happened; `note` stands at the right."""
        line = Line(self.now(), label, text, note)
        self._report.timeline.append(line)
        self._tell(f"  {line.at_s:06.3f}  {label:<{LABEL_WIDTH}}{text:<{TEXT_WIDTH}} {note}".rstrip())

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Note when a phase begins and ends, however it ends."""
        started_s = time.monotonic()
        try:
            yield
        finally:
            end_s = self.now()
            self._report.phases.append(Phase(name, end_s - (time.monotonic() - started_s), end_s))


def verdict_line(report: Report) -> str:
    """The last line: the outcome in words and how to run it again."""
    return f"{report.outcome}  {report.words} · replay: {report.replay}"


def gib(nbytes: float) -> str:
    """Return bytes in the unit a person would choose."""
    for unit in ("B", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} GiB"
