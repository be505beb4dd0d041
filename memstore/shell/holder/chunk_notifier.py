"""Notifies a reader of the chunks of its shard that have come, while others are still coming (R27).

The reader copies and digests them meanwhile, which proves what it copied: should the incoming replica be given up under
it, its slots are others', the digests differ, and the read fails anyway.
"""

from __future__ import annotations

from collections.abc import Callable

from memstore.core.arena.replica_index import IncomingReplica
from memstore.core.wire.rank_messages import ArrivedChunk, ChunksArrived

NOTIFY_S = 0.005  # how late a reader may learn of a chunk; it copies what came in that time in half of it


class ChunkNotifier:
    """The notifier of one read: it reports the chunks that have come to the reader."""

    def __init__(
        self, send: Callable[[ChunksArrived], None], number: int, manifest: bytes, replica: IncomingReplica
    ) -> None:
        self._send, self._number, self._replica = send, number, replica
        self._manifest: bytes | None = manifest  # until it was sent
        self._untold = list(replica.wanted)

    def notify(self) -> None:
        """Send the chunks that have come since the last call."""
        slots = [(index, self._replica.slots[index]) for index in self._untold]
        chunks = tuple(ArrivedChunk(index, slot) for index, slot in slots if slot is not None)
        if chunks or self._manifest is not None:
            self._send(ChunksArrived(read=self._number, chunks=chunks, manifest=self._manifest))
            self._manifest = None
            self._untold = [index for index, slot in slots if slot is None]
