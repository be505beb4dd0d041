"""Which share of a run's time was productive? ETTR, from an event timeline and as expected.

Pure, imports nothing of ours; timestamps come in as seconds on one clock.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

STEP = "step"


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened at `at_s`; "step": a training step ended, and `seconds` is its compute time."""

    at_s: float
    kind: str
    step: int | None = None
    seconds: float = 0.0


def ettr(events: Iterable[Event], *, wall_s: float) -> float:
    """Return productive time over wall time: each step's compute counted once, for its last run.

    Raises:
        ValueError: `wall_s` is not above zero.

    Source: effective training time ratio, Kokolis et al., "Revisiting Reliability in Large-Scale Machine Learning
        Research Clusters" (HPCA 2025, arXiv 2410.21680): productive runtime / wall-clock of the run.
    """
    if not wall_s > 0:
        raise ValueError(f"wall_s is {wall_s}; it must be above zero")
    productive = {
        event.step: event.seconds for event in sorted(events, key=lambda event: event.at_s) if event.kind == STEP
    }
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
