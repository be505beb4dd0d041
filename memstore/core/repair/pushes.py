"""Copies that repair has under way, and those that it leaves alone for a moment. Plain data (R29)."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from recovery.inventory import ShardId

PUSHES_PER_SOURCE_MAX = 2


@dataclass(slots=True)
class RepairPushes:
    """The pushes that repair has ordered, and the refusals, for all jobs."""

    #: (shard, target) -> (source, deadline)
    under_way: dict[tuple[ShardId, str], tuple[str, float]] = field(default_factory=dict)
    refused_s: dict[tuple[ShardId, str], float] = field(default_factory=dict)  # (shard, target) -> when
    vain_s: dict[ShardId, float] = field(default_factory=dict)  # copies for which no substitute was found, and when
    load: Counter[str] = field(default_factory=Counter)  # pushes by source, in one look at a job

    def count_load(self) -> None:
        """Recount the pushes of each source."""
        self.load = Counter(source for source, _ in self.under_way.values())

    def is_free(self, source: str) -> bool:
        """Return whether a host may send one copy more."""
        return self.load[source] < PUSHES_PER_SOURCE_MAX
