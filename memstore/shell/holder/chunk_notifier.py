"""Notifies a reader of the chunks of its shard that have come, while others are still coming (R27).

EVENT bodies, holder -> rank: {"k": "came", "read", "chunks": [[index, slot], ...]}; the first one has the "manifest".
The reader copies and digests them meanwhile, which proves what it copied: should the draft be given up under it, its
slots are others', the digests differ, and the read fails anyway.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from memstore.core.arena.replica_index import IncomingReplica

TELL_S = 0.005  # how late a reader may learn of a chunk; it copies what came in that time in half of it


class ChunkNotifier:
    """The notifier of one read: it reports the chunks that have come to the reader."""

    def __init__(
        self, send: Callable[[dict[str, Any]], None], number: int, manifest: bytes, draft: IncomingReplica
    ) -> None:
        self._send, self._draft = send, draft
        self._message: dict[str, Any] = {"k": "came", "read": number, "manifest": manifest}
        self._untold = list(draft.wanted)

    def tell(self) -> None:
        """Send the chunks that have come since the last call."""
        slots = [(index, self._draft.slots[index]) for index in self._untold]
        came = [[index, slot] for index, slot in slots if slot is not None]
        if came or "manifest" in self._message:
            self._send({**self._message, "chunks": came})
            self._message.pop("manifest", None)
            self._untold = [index for index, slot in slots if slot is None]
