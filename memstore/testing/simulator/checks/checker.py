"""All checks of one simulation.

They know the truth: which bytes were put, what lies in which memory, which fault did what. They never ask the
controller whether it is right. They read what it claims in order to hold it to that.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from memstore.testing.simulator.checks.commits import Commits
from memstore.testing.simulator.checks.copies import DropCheck, Promises, Redundancy, look_at_the_end
from memstore.testing.simulator.checks.generations import Generations
from memstore.testing.simulator.checks.observed import Observed
from memstore.testing.simulator.checks.parity import LossCheck
from memstore.testing.simulator.checks.restores import Restores
from memstore.testing.simulator.checks.shared_shards import SharedShardCheck
from memstore.testing.simulator.checks.stored_bytes import Fences, PutCheck, StoredBytes
from memstore.testing.simulator.world.world import World


class Checker:
    """The checks by property; each raises Violation."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.observed = Observed()
        self.losses = LossCheck(world, self.observed)
        self.promises = Promises(world, self.observed, self.losses)
        self.drops = DropCheck(world, self.observed, self.promises, self.losses)
        self.fences = Fences(world)
        self.puts = PutCheck(self.observed, self.fences)
        self.stored_bytes = StoredBytes(world, self.observed, self.drops, self.fences, self.losses)
        self.shared_shards = SharedShardCheck(world, self.observed)
        self.commits = Commits(world, self.observed, self.shared_shards, self.losses)
        self.generations = Generations(world, self.observed)
        self.restores = Restores(world, self.observed, self.generations)
        self.redundancy = Redundancy(world, self.observed, self.promises, self.losses)

    def after_event(self) -> None:
        """Look at every memory that the event has changed."""
        self.stored_bytes.look()
        self.losses.look(self.promises.steps())

    @contextmanager
    def blaming(self, kind: str) -> Iterator[None]:
        """Count what is lost meanwhile as the doing of a kind of fault, not of the store."""
        before, self.observed.cause = self.observed.cause, kind
        try:
            yield
        finally:  # another holder may have died at a write of this
            self.after_event()
            self.observed.cause = before

    def at_the_end(self) -> None:
        """Look at the store once nothing happens any more."""
        look_at_the_end(self.world, self.redundancy)
