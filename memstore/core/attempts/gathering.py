"""The joins of one launch, until all of its ranks are there. Plain data; read `join.py` next."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from memstore.core.cluster.job import Call
from memstore.core.cluster.rank_calls import RankCalls
from recovery.inventory import StepId


@dataclass(slots=True)
class Gathering:
    """Joins of one launch that wait for the rest of their ranks."""

    key: str | None
    world_size: int
    joins: RankCalls = field(default_factory=RankCalls)
    rewind: tuple[int, int | None] | None = None  # the ranks of an open attempt go back to (step, of which attempt)
    rewind_to: StepId | None = None  # that step, once it is found
    order: tuple[int, ...] = ()  # a rewind keeps the ranks as they are (R27)
    markers_call: int = 0  # all ranks have come; the markers in durable storage are listed first (R31)
    listing_since_s: float = 0.0
    on_listed: Callable[[str], None] | None = None  # goes on, with why storage could not be read


def limit_s(call: Call) -> float:
    """Return how long a rank waits from its call on: the rest of its connect(), or of its attempt's."""
    return float(call.body.get("limit_s", call.body["config"]["connect_timeout_s"]))
