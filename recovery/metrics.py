"""What did a run lose? RPO, RTO by phase, stall and ETTR from an event timeline.

Pure, imports nothing of ours; timestamps come in as seconds on one clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

# In the order in which a recovery passes them; a phase is named by the event that ends it.
PHASES = ("detected", "relaunched", "planned", "transferred", "loaded")
FAILED, STEP, PUT = "failed", "step", "put"


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened at `at_s`.

    "step": a training step ended; `seconds` is its compute time. "put": `seconds` is the stall. "failed": training
    stopped. One of PHASES: that part of a recovery ended; "loaded" carries the step restored.
    """

    at_s: float
    kind: str
    step: int | None = None
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Recovery:
    """One failure and the way back. `rpo_steps` and `rto_s` are None while training has not resumed."""

    failed_at_s: float
    rpo_steps: int | None  # steps done before the failure that have to be done again
    rto_s: float | None  # failure to training resumed ("loaded")
    phases_s: dict[str, float]  # phase -> seconds since the phase before it


def recoveries(events: Iterable[Event]) -> tuple[Recovery, ...]:
    """Return every failure in the timeline with its RPO and RTO, in order.

    A second failure before "loaded" belongs to the same recovery: nothing had resumed. RPO counts from the last step
    done: RPO = last step done - step restored; a job that restored nothing restarts at 0 and lost last + 1 steps.
    Source: RPO and RTO as in section 2 of the design; the phase split is ours.
    """
    found: list[Recovery] = []
    last_step = -1
    marks: list[Event] = []
    for event in _in_order(events):
        if marks:
            if event.kind in PHASES:
                marks.append(event)
            if event.kind == PHASES[-1]:
                restored = -1 if event.step is None else event.step
                found.append(_recovery(marks, max(0, last_step - restored), event.at_s - marks[0].at_s))
                marks, last_step = [], restored
        elif event.kind == FAILED:
            marks = [event]
        elif event.kind == STEP and event.step is not None:
            last_step = event.step
    if marks:
        found.append(_recovery(marks, None, None))
    return tuple(found)


def _recovery(marks: Sequence[Event], rpo_steps: int | None, rto_s: float | None) -> Recovery:
    phases_s: dict[str, float] = {}
    for before, after in pairwise(marks):
        phases_s[after.kind] = phases_s.get(after.kind, 0.0) + after.at_s - before.at_s
    return Recovery(marks[0].at_s, rpo_steps, rto_s, phases_s)


def _in_order(events: Iterable[Event]) -> list[Event]:
    return sorted(events, key=lambda event: event.at_s)


def stalls_s(events: Iterable[Event]) -> tuple[float, float]:
    """Return (total, longest) seconds for which puts blocked training."""
    stalls = [event.seconds for event in events if event.kind == PUT]
    return sum(stalls), max(stalls, default=0.0)


def ettr(events: Iterable[Event], *, wall_s: float) -> float:
    """Return productive time over wall time: each step's compute counted once, for its last run.

    Raises:
        ValueError: `wall_s` is not above zero.

    Source: effective training time ratio, Kokolis et al., "Revisiting Reliability in Large-Scale Machine Learning
        Research Clusters" (HPCA 2025, arXiv 2410.21680): productive runtime / wall-clock of the run.
    """
    if not wall_s > 0:
        raise ValueError(f"wall_s is {wall_s}; it must be above zero")
    productive = {event.step: event.seconds for event in _in_order(events) if event.kind == STEP}
    return sum(productive.values()) / wall_s


def expected_ettr(
    *, hosts_count: int, failures_per_host_s: float, restart_s: float, interval_s: float, blocking_s: float
) -> float:
    """Return the first-order expectation of ETTR: (1 - N r (u + D/2)) / (1 + w/D).

    N hosts that each fail at rate r per second, u seconds of restart, D between checkpoints, w of blocking per
    checkpoint.

    Raises:
        ValueError: `interval_s` is not above zero, or N r (u + D/2) reaches 1, where the first order says nothing.

    Source: Kokolis et al., HPCA 2025 (arXiv 2410.21680), expected ETTR.
    """
    if not interval_s > 0:
        raise ValueError(f"interval_s is {interval_s}; it must be above zero")
    lost = hosts_count * failures_per_host_s * (restart_s + interval_s / 2)
    if lost >= 1:
        raise ValueError(f"failures cost {lost:.2f} of the wall time, the formula holds well below 1; simulate instead")
    return (1 - lost) / (1 + blocking_s / interval_s)
