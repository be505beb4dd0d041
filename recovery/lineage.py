"""Which steps count as this run's past? Attempts and the part of each that its successor built on (R22).

Pure. Imports `inventory` only. Read `candidates.py` next.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from recovery.inventory import StepId


@dataclass(frozen=True, slots=True)
class AttemptFact:
    """One launch: its attempt number, the attempt and step it restored, and its world size (R16, R20)."""

    attempt: int
    parent: int | None  # None: started fresh, the lineage begins here
    parent_step: int | None  # newest step of the parent's lineage that was adopted; None: no bound
    world_size: int


@dataclass(frozen=True, slots=True)
class Span:
    """The steps of one attempt that belong to a lineage: all those <= `step_max`, or all."""

    attempt: int
    step_max: int | None


def lineage(attempts: Mapping[int, AttemptFact], newest: int) -> tuple[Span, ...]:
    """Return the spans of the lineage that ends in attempt `newest`, newest first (R22).

    The newest attempt contributes all its steps, each parent those its child went on from. Bounds accumulate: what a
    rewind hid stays hidden in every older attempt. A parent without a fact ends the chain, its own steps included.

    Raises:
        ValueError: `newest` has no fact, or a fact names a parent that is not older than itself.
    """
    if newest not in attempts:
        raise ValueError(f"attempt {newest} has no fact; attempts known: {sorted(attempts)}")
    spans = [Span(newest, None)]
    fact = attempts.get(newest)
    step_max: int | None = None
    while fact is not None and fact.parent is not None:
        if fact.parent >= fact.attempt:
            raise ValueError(f"attempt {fact.attempt} names parent {fact.parent}; a parent must be an older attempt")
        if fact.parent_step is not None:
            step_max = fact.parent_step if step_max is None else min(step_max, fact.parent_step)
        spans.append(Span(fact.parent, step_max))
        fact = attempts.get(fact.parent)
    return tuple(spans)


def in_lineage(spans: Iterable[Span], step_id: StepId) -> bool:
    """Return whether `step_id` belongs to the lineage that `spans` describe."""
    return any(
        span.attempt == step_id.attempt and (span.step_max is None or step_id.step <= span.step_max) for span in spans
    )
