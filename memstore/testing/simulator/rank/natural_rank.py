"""A rank that names its shard: puts what it shares if it is a copier, and gets that from a copier (R34).

It mirrors memstore/client/shared_shard.py: its own part from its own shard, in the round; the shared part from a
copier's shard of the same step, without a barrier; with another world size the step that all agree on, and the shared
part alone.
"""

from __future__ import annotations

import zlib
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any

from memstore.core.format.manifest import decode_manifest
from memstore.core.format.shared_layout import NaturalLayout, Part
from memstore.errors import DigestMismatch
from memstore.testing.simulator.rank.rank import GET_S, SimRank, chunk_of
from recovery.inventory import StepId

if TYPE_CHECKING:
    from memstore.testing.simulator.host.staging import Stager
    from memstore.testing.simulator.world.world import Simulation, Wait

Body = dict[str, Any]
SHARED_CHUNKS, OWN_CHUNKS = 2, 1


class NaturalRank(SimRank):
    """One process of a rank that holds what others hold too."""

    def __init__(self, world: Simulation, rank: int, host_id: str, key: str, shard_of: Sequence[int]) -> None:
        super().__init__(world, rank, host_id, key)
        self.shard_of, self.world_size = tuple(shard_of), len(shard_of)  # by rank
        self.copiers: tuple[int, ...] = ()
        self.roster: tuple[tuple[int, ...], ...] = ()
        self.stuck_at = ""  # it never asks this

    @property
    def shard(self) -> int:
        """The shard that the rank's number holds."""
        return self.shard_of[self.rank]

    @property
    def is_copier(self) -> bool:
        """Whether it copies what it shares."""
        return self.rank in self.copiers

    def named(self) -> Body:
        """What it says of its shard when it joins."""
        return {"shard": self.shard, "shards": self.world.scenario.shards}

    def joined(self, answer: Body) -> None:
        """It has its place, and knows who copies."""
        super().joined(answer)
        shard, shards, copiers, roster = answer["natural"]
        self.copiers, self.roster = tuple(copiers), tuple(tuple(ranks) for ranks in roster)
        self.chunks_count = OWN_CHUNKS + SHARED_CHUNKS * self.is_copier
        self.world.natural.told(self, answer)
        size = self.world.memories[self.host_id].chunk_bytes
        first = SHARED_CHUNKS * self.is_copier
        shared = Part(b"", 0, SHARED_CHUNKS * size) if self.is_copier else None
        layout = NaturalLayout(
            int(shard), int(shards), self.copiers, self.roster, shared, Part(b"", first, OWN_CHUNKS * size)
        )
        self.layout = layout.encode((first + OWN_CHUNKS) * size)

    def _answer(self, verb: str, limit_s: float, **body: Any) -> Generator[Wait, None, Body]:
        if verb == self.stuck_at:
            yield lambda: False
        return (yield from super()._answer(verb, limit_s, **body))

    # -- putting --------------------------------------------------------------------------------

    def content(self, step: int) -> list[bytes]:
        """A copier's chunks: two that its shard shares, of which one never changes, and one of its own."""
        torn, self.differs = self.differs > 0, max(0, self.differs - 1)
        texts = (
            f"frozen layer of shard {self.shard}",
            f"shared {self.key} {self.shard} {step}{f' but for rank {self.rank}' if torn else ''}",
        )
        shared = [chunk_of(text) for text in texts] if self.is_copier else []
        self.world.natural.shared_put(self, step, shared)
        return [*shared, chunk_of(f"own {self.key} {self.rank} {step}")]

    def shares(self) -> Body:
        """How many of its first chunks its twins have too."""
        return {"shared_chunks": SHARED_CHUNKS * self.is_copier}

    # -- getting --------------------------------------------------------------------------------

    def check(self, stager: Stager, order: Body) -> str:
        """As check_shard: its number must have held the same shard in that step."""
        try:
            manifest = stager.manifest_of(order)
        except DigestMismatch as exc:
            return str(exc)
        natural = NaturalLayout.decode(manifest)
        if natural is None or (natural.shard, natural.shards) != (self.shard, self.world.scenario.shards):
            return f"{manifest.shard} is not of shard {self.shard}"
        return ""

    def get(self) -> Generator[Wait, None, int | None]:
        """Both parts; with another world size the shared one."""
        answer = yield from self._answer("get", GET_S, step=None, timeout_s=GET_S)
        if str(answer.get("error", "")).startswith("WorldSizeError"):
            return (yield from self._get_resized())
        if "error" in answer:
            self.why = f"get: {answer['error'] or 'no answer in time'}"
            self.world.checker.refused(self, "get", answer["error"])
            if answer["error"].startswith("ManifestMismatch"):  # whoever started it corrects that
                self.world.natural.deal_otherwise(self.shard_of)
            return None
        step = self.world.checker.restored(self, answer)
        if answer["step"] is None:
            return step
        mine = self._layout_of(answer)
        home = answer
        if mine.shared is None:
            found = yield from self._read(self._near(mine.copiers), int(answer["step"]), int(answer["attempt"]))
            if found is None:
                return None
            home = found
        self._loaded(StepId(int(answer["attempt"]), step), home, answer["read"][mine.own.first_chunk :])
        return step

    def _get_resized(self) -> Generator[Wait, None, int | None]:
        opened = yield from self._read(0, None, None)
        if opened is None:
            return None
        answer = yield from self._call("get", GET_S, step=None, timeout_s=GET_S, is_agreement=True)
        if answer is None:
            return None
        step = self.world.checker.chosen(self, answer)
        if step is None:
            return 0
        if step != StepId(int(opened["attempt"]), int(opened["step"])):
            opened = yield from self._read(0, step.step, step.attempt)
            if opened is None:
                return None
        copier = self._near(self._layout_of(opened).roster[self.shard])
        found = yield from self._read(copier, step.step, step.attempt)
        if found is None:
            return None
        self._loaded(step, found, None)
        return step.step

    def _read(self, rank: int, step: int | None, attempt: int | None) -> Generator[Wait, None, Body | None]:
        return (yield from self._call("read", GET_S, rank=rank, step=step, of_attempt=attempt))

    def _near(self, ranks: Sequence[int]) -> int:
        """The rank whose shard all of this host's ranks read."""
        return ranks[zlib.crc32(self.host_id.encode()) % len(ranks)]

    def _layout_of(self, answer: Body) -> NaturalLayout:
        natural = NaturalLayout.decode(decode_manifest(answer["manifest"]))
        if natural is None:
            raise ValueError(f"what was put at step {answer['step']} is no natural replica's")
        return natural

    def _loaded(self, step: StepId, home: Body, own: list[bytes] | None) -> None:
        """The parts are here: the shared one from a shard that says it has it."""
        found, where = self._layout_of(home), StepId(int(home["attempt"]), int(home["step"]))
        count = SHARED_CHUNKS if found.shared is not None else 0
        self.world.natural.loaded(self, step, where, found, home["read"][:count], own)
