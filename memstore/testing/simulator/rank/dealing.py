"""How launches deal shards to ranks with equal state."""

from __future__ import annotations

import random
from collections.abc import Sequence

from memstore.testing.simulator.world.scenario import Scenario

MISTAKES_SHARE = 0.08


class Dealer:
    """The launcher's choice of shards, in blocks or in turn, launch after launch."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.rng = random.Random(f"natural {scenario.seed}")
        self.is_blocked = scenario.is_blocked  # how the next launch deals

    def deal(self, *, may_mistake: bool) -> list[int]:
        """Return, by rank, the shard that the next launch's ranks name.

        Now and then a launch deals otherwise by mistake. It is refused if the ranks of the step to restore held other
        shards.
        """
        size = self.rng.choice(self.scenario.sizes) if self.scenario.sizes else self.scenario.world_size
        if self.rng.random() < MISTAKES_SHARE and may_mistake:
            self.is_blocked = not self.is_blocked
        return _dealt(size, self.scenario.shards, is_blocked=self.is_blocked)

    def refused(self, shard_of: Sequence[int]) -> None:
        """Deal otherwise from now on, because a launch that dealt like this was refused."""
        is_blocked = list(shard_of) == _dealt(len(shard_of), self.scenario.shards, is_blocked=True)
        self.is_blocked = not is_blocked


def _dealt(size: int, shards: int, *, is_blocked: bool) -> list[int]:
    return [rank * shards // size if is_blocked else rank % shards for rank in range(size)]
