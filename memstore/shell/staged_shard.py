"""A shard that was staged on this host, seen from the process that reads it (R7, R26)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from memstore.core.manifest import Manifest
from memstore.errors import IntegrityError
from memstore.shell.checked_stream import Views
from memstore.shell.rank_link import RankLink
from memstore.shell.shard_ranges import ShardRanges

MEND_TIMEOUT_S = 120.0  # for chunks to come from another copy; a holder that cannot reach one says so far earlier


class StagedShard:
    """The slots that an answer to a get names; pinned until `close`."""

    def __init__(self, link: RankLink, manifest: Manifest, answer: dict[str, Any]) -> None:
        self.link, self.manifest = link, manifest
        self._slots: list[int | None] = list(answer["slots"])
        self._pin = answer["pin"]
        if len(self._slots) != len(manifest.chunks):
            raise IntegrityError(
                f"{manifest.shard} has {len(manifest.chunks)} chunks, its holder named {len(self._slots)} slots: "
                "call get() again"
            )

    def take(self, wanted: Sequence[int]) -> Views:
        """Return all of them; one that was lost after staging as an empty view, which is no chunk's."""
        return [(index, self._view(index)) for index in wanted]

    def _view(self, index: int) -> memoryview:
        slot = self._slots[index]
        return memoryview(b"") if slot is None else self.link.view(slot, self.manifest.chunks[index].nbytes)

    def mend(self, wanted: Sequence[int], use: Callable[[Mapping[int, memoryview]], None]) -> None:
        """Have the holder digest its copies of these chunks again, and bring from elsewhere what is bad (R27)."""
        shard, chunk_bytes = self.manifest.shard, self.manifest.chunk_bytes
        ranges = ShardRanges(self.link, shard.job, MEND_TIMEOUT_S)
        spans = [(index * chunk_bytes, self.manifest.chunks[index].nbytes) for index in wanted]
        opened = ranges.open(ranges.ask(shard.step, shard.rank, spans, chunk_bytes, attempt=shard.attempt))
        try:
            if opened.manifest != self.manifest:
                raise IntegrityError(f"{shard} was put anew while it was read: call get() again")
            use(opened.views)
        finally:
            opened.close()

    def close(self) -> None:
        """Let go of the slots."""
        self.link.notify({"k": "unpin", "pin": self._pin})
