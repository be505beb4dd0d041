"""I1, I2, I3, R23 and R27: a get returns the bytes that were put, of one step, and of no older one than due."""

from __future__ import annotations

from memstore.core.format.manifest import decode_manifest
from memstore.core.wire.replies import NothingStored, ShardPlaced, StepAgreed
from memstore.testing.simulator.checks.generations import Generations
from memstore.testing.simulator.checks.observed import Observed
from memstore.testing.simulator.world.world import AnyRank, CopiedRead, Violation, World
from recovery.inventory import ShardId, StepId


class Restores:
    """The answers that ranks are given when they join and restore."""

    def __init__(self, world: World, observed: Observed, generations: Generations) -> None:
        self.world, self.observed, self.generations = world, observed, generations
        self._failed: set[tuple[str, int]] = set()  # (key, round) of gets in which some rank could not load
        self._returned: set[tuple[str, int]] = set()  # of gets that returned on some rank
        self._last_failed: dict[str, bool] = {}  # key -> whether the last get that brought bytes failed

    def read_damaged(self, rank: AnyRank, slots: list[int], staged_s: float, host_id: str | None = None) -> None:
        """Look at staged slots that a rank found damaged: that must have happened after they were staged (R23).

        Args:
            host_id: Where the slots are; None: on the rank's host.
        """
        spoilt = self.world.memories[host_id or rank.host_id].spoilt
        early = [n for n in slots if spoilt.get(n, staged_s) < staged_s]
        if early:
            raise Violation("R23", f"rank {rank.rank} was handed slots {early}, bad before they were staged")

    def read_whole(self, rank: AnyRank, *, is_pinned: bool) -> None:
        """Look at a read whose link is still the one on which it was answered: its pin was kept until now (R7)."""
        if not is_pinned:
            raise Violation("R7", f"rank {rank.rank} has just read slots that were pinned for it, and are so no more")

    def read_ranges(self, rank: AnyRank, answer: CopiedRead) -> None:
        """Look at the chunks that a reader of ranges was given: they are those of a shard that was put (I3)."""
        shard = decode_manifest(answer.placed.manifest).shard
        puts = self.observed.contents.get(shard, [])
        if not any(all(put[index] == data for index, data in answer.chunks.items()) for put in puts):
            raise Violation("I3", f"rank {rank.rank} was given chunks of {shard} that no rank put")

    def restored(self, rank: AnyRank, answer: NothingStored | CopiedRead) -> int:
        """Look at the answer to a get; return the step to go on after, 0 for a start from nothing (I3)."""
        got = self.chosen(rank, answer.placed if isinstance(answer, CopiedRead) else answer)
        if got is None or not isinstance(answer, CopiedRead):
            return 0
        shard = ShardId(rank.job, got.attempt, got.step, rank.rank)
        if answer.whole not in self.observed.contents.get(shard, []):
            raise Violation("I3", f"rank {rank.rank} was given bytes for {got} that no rank put")
        return got.step

    def loaded(self, rank: AnyRank, number: int, *, is_failed: bool) -> None:
        """Look at a rank that has loaded what its get brought, or could not."""
        if is_failed:
            self._failed.add((rank.key, number))
            self._last_failed[rank.key] = True
            self._compare(rank, number)

    def returned(self, rank: AnyRank, number: int) -> None:
        """Look at a rank whose get returns: every rank has loaded what that get brought (R23)."""
        self._returned.add((rank.key, number))
        self._last_failed[rank.key] = False
        self._compare(rank, number)

    def _compare(self, rank: AnyRank, number: int) -> None:
        if (rank.key, number) in self._failed & self._returned:
            raise Violation("R23", f"rank {rank.rank}: a rank goes on from round {number}, and one could not load it")

    def may_put(self, rank: AnyRank) -> None:
        """Look at a rank that was given room: what it puts takes the place of the step that its get adopted (R23)."""
        if self._last_failed.get(rank.key):
            raise Violation("R23", f"rank {rank.rank} may put over a step that a rank of its launch could not load")

    def chosen(self, rank: AnyRank, answer: NothingStored | ShardPlaced | StepAgreed) -> StepId | None:
        """Look at the step that a get or an agreement chose (I1, I2).

        It is the same for all ranks. Within the promise no acknowledged step is newer.
        """
        self.observed.restores += 1
        report = None if isinstance(answer, NothingStored) else answer.report
        got = None if isinstance(answer, NothingStored) else StepId(answer.attempt, answer.step)
        known = self.observed.decided.setdefault((rank.attempt, rank.key), got)
        if known != got:
            raise Violation("I2", f"attempt {rank.attempt}: rank {rank.rank} got {got}, another rank {known}")
        newest = max(self.observed.acked, default=None)
        is_owed = newest is not None and not (self.world.scenario.is_in_place and self.generations.is_spent(newest))
        if self.world.scenario.is_strict and is_owed and newest is not None and (got is None or got < newest):
            why = report.why if report is not None else ""
            raise Violation("I1", f"attempt {rank.attempt} restored {got}, {newest} had been acknowledged: {why}")
        return got

    def refused(self, rank: AnyRank, verb: str, error: str) -> None:
        """Look at a call that failed: within the promise no get fails for want of bytes (I1).

        Other errors are no loss: if a host died meanwhile, the launcher starts again. If durable storage could not be
        read, the store cannot know whether the step is lost (D136).
        """
        self.world.note(f"rank {rank.rank}: {verb} failed: {error[:160]}")
        is_loss = verb == "get" and "no whole step" in error and "could not be read" not in error
        self.observed.starts_over |= is_loss
        if is_loss and self.world.scenario.is_strict:
            raise Violation("I1", f"attempt {rank.attempt}: get() was refused within the promise: {error[:400]}")
