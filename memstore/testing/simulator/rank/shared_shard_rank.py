"""A rank that names its shard: a writer puts the shared part, and every rank gets it from a writer (R34).

It mirrors memstore/client/shared_shard.py. Its own part comes from its own shard, in the round. The shared part comes
from a writer's shard of the same step, without a barrier. With another world size all ranks agree on the step, and get
the shared part alone.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Generator, Sequence
from typing import Any

from memstore.core.format.manifest import Manifest, decode_manifest
from memstore.core.format.shared_layout import ShardPart, SharedShardLayout
from memstore.core.wire.replies import Joined, NothingStored
from memstore.testing.simulator.checks.checker import Checker
from memstore.testing.simulator.rank.rank import GET_S, SimRank, chunk_of
from memstore.testing.simulator.world.scenario import Scenario
from memstore.testing.simulator.world.virtual_time import Wait
from memstore.testing.simulator.world.world import Answer, CallFailed, CopiedRead, World
from recovery.inventory import StepId

# -- dealing ------------------------------------------------------------------------------------------
# How launches deal shards to ranks with equal state.


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


# -- shared shard rank --------------------------------------------------------------------------------


SHARED_CHUNKS, OWN_CHUNKS = 2, 1


class SharedShardRank(SimRank):
    """One process of a rank whose shard other ranks hold too."""

    def __init__(
        self, world: World, checker: Checker, dealer: Dealer, rank: int, host_id: str, key: str, shard_of: Sequence[int]
    ) -> None:
        super().__init__(world, checker, rank, host_id, key)
        self.dealer = dealer
        self.shard_of, self.world_size = tuple(shard_of), len(shard_of)  # by rank
        self.writers: tuple[int, ...] = ()
        self.writers_by_shard: tuple[tuple[int, ...], ...] = ()
        self.stuck_at = ""  # the question that it never asks

    @property
    def shard(self) -> int:
        """The shard that the rank's number holds."""
        return self.shard_of[self.rank]

    @property
    def is_writer(self) -> bool:
        """Return whether it copies what it shares."""
        return self.rank in self.writers

    def named(self) -> dict[str, Any]:
        """Return what it says of its shard when it joins."""
        return {"shard": self.shard, "shards": self.world.scenario.shards}

    def joined(self, answer: Joined) -> None:
        """Take its place, and learn which ranks copy."""
        super().joined(answer)
        place = answer.shared_shard
        if place is None:
            raise ValueError(f"rank {answer.rank} named a shard, and was sent no place in one")
        self.writers, self.writers_by_shard = place.writers, place.writers_by_shard
        self.chunks_count = OWN_CHUNKS + SHARED_CHUNKS * self.is_writer
        self.checker.shared_shards.joined(self, answer)
        size = self.world.memories[self.host_id].chunk_bytes
        first = SHARED_CHUNKS * self.is_writer
        shared = ShardPart(b"", 0, SHARED_CHUNKS * size) if self.is_writer else None
        layout = SharedShardLayout(
            place.shard,
            place.shards,
            self.writers,
            self.writers_by_shard,
            shared,
            ShardPart(b"", first, OWN_CHUNKS * size),
        )
        self.layout = layout.encode((first + OWN_CHUNKS) * size)

    def _answer(self, verb: str, limit_s: float, **body: Any) -> Generator[Wait, None, Answer]:
        if verb == self.stuck_at:
            yield lambda: False
        return (yield from super()._answer(verb, limit_s, **body))

    # -- putting --------------------------------------------------------------------------------

    def content(self, step: int) -> list[bytes]:
        """Return a writer's two shared chunks, of which one never changes, and one chunk of its own."""
        is_torn, self.differs = self.differs > 0, max(0, self.differs - 1)
        texts = (
            f"frozen layer of shard {self.shard}",
            f"shared {self.key} {self.shard} {step}{f' but for rank {self.rank}' if is_torn else ''}",
        )
        shared = [chunk_of(text) for text in texts] if self.is_writer else []
        self.checker.shared_shards.shared_put(self, step, shared)
        return [*shared, chunk_of(f"own {self.key} {self.rank} {step}")]

    def shared_chunks(self) -> int | None:
        """Return how many of its first chunks other ranks put as well."""
        return SHARED_CHUNKS * self.is_writer

    # -- getting --------------------------------------------------------------------------------

    def check(self, manifest: Manifest) -> str:
        """Say why it cannot take what was staged: its number must have held the same shard in that step."""
        layout = SharedShardLayout.decode(manifest)
        if layout is None or (layout.shard, layout.shards) != (self.shard, self.world.scenario.shards):
            return f"{manifest.shard} is not of shard {self.shard}"
        return ""

    def get(self) -> Generator[Wait, None, int | None]:
        """Restore both parts; with another world size the shared one alone."""
        while True:
            step = yield from self._get_once()
            if step is not None or self.why:
                return step

    def _get_once(self) -> Generator[Wait, None, int | None]:
        """Ask once; None if the get failed, or, without a reason, if every rank is to ask again."""
        answer = yield from self._answer("get", GET_S, step=None, timeout_s=GET_S)
        if isinstance(answer, CallFailed):
            if answer.error.startswith("WorldSizeError"):
                return (yield from self._get_resized())
            self.why = f"get: {answer.error or 'no answer in time'}"
            self.checker.restores.refused(self, "get", answer.error)
            if answer.error.startswith("ManifestMismatch"):
                self.dealer.refused(self.shard_of)
            return None
        if not isinstance(answer, CopiedRead):
            return self.checker.restores.restored(self, answer)
        mine, placed = self._layout_of(answer), answer.placed
        if mine.shared is not None:
            found: CopiedRead | None = answer
        else:
            found = yield from self._read(self._near(mine.writers), placed.step, placed.attempt)
        is_over = yield from self.all_loaded(answer, "the writer's shard did not come" if found is None else None)
        if found is None or not is_over:
            return None
        step = self.checker.restores.restored(self, answer)
        self._loaded(StepId(placed.attempt, step), found, answer.whole[mine.own.first_chunk :])
        return step

    def _get_resized(self) -> Generator[Wait, None, int | None]:
        opened = yield from self._read(0, None, None)
        if opened is None:
            return None
        answer = yield from self._call("get", GET_S, step=None, timeout_s=GET_S, is_agreement=True, then_loads=True)
        if answer is None:
            return None
        if isinstance(answer, NothingStored):
            return 0 if self.checker.restores.chosen(self, answer) is None else None
        step = StepId(answer.attempt, answer.step)
        found = yield from self._read_shared(opened, step)
        is_over = yield from self.all_loaded(answer, "the writer's shard did not come" if found is None else None)
        if found is None or not is_over:
            return None
        self.checker.restores.chosen(self, answer)
        self._loaded(step, found, None)
        return step.step

    def _read_shared(self, opened: CopiedRead, step: StepId) -> Generator[Wait, None, CopiedRead | None]:
        """Read what a writer of the step shares; `opened` may be of another step, which is no longer the newest."""
        if step != StepId(opened.placed.attempt, opened.placed.step):
            again = yield from self._read(0, step.step, step.attempt)
            if again is None:
                return None
            opened = again
        writer = self._near(self._layout_of(opened).writers_by_shard[self.shard])
        return (yield from self._read(writer, step.step, step.attempt))

    def _read(self, rank: int, step: int | None, attempt: int | None) -> Generator[Wait, None, CopiedRead | None]:
        found: CopiedRead | None = yield from self._call("read_step", GET_S, rank=rank, step=step, of_attempt=attempt)
        return found

    def _near(self, ranks: Sequence[int]) -> int:
        """Return the writer that all ranks of this host read from."""
        return ranks[zlib.crc32(self.host_id.encode()) % len(ranks)]

    def _layout_of(self, answer: CopiedRead) -> SharedShardLayout:
        layout = SharedShardLayout.decode(decode_manifest(answer.placed.manifest))
        if layout is None:
            raise ValueError(f"the shard that was put at step {answer.placed.step} has no layout of a shared shard")
        return layout

    def _loaded(self, step: StepId, shared: CopiedRead, own: list[bytes] | None) -> None:
        """Check both parts: the shared one must come from a shard whose layout says that it has it."""
        found, where = self._layout_of(shared), StepId(shared.placed.attempt, shared.placed.step)
        count = SHARED_CHUNKS if found.shared is not None else 0
        self.checker.shared_shards.loaded(self, step, where, found, shared.whole[:count], own)
