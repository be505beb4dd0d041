"""What arrived damaged at one holder, as receiver or as client, or at a rank of its host, counted for status (R14)."""

from __future__ import annotations

import logging
import threading

from memstore.errors import ProtocolError

log = logging.getLogger("memstore")


class Damage:
    """Two counts that any thread may raise."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._chunks_count = 0  # their digest was wrong: they are asked for again
        self._frames_count = 0  # their header or body was: the connection is ended

    def chunk(self) -> None:
        """Count a chunk whose digest is wrong."""
        self.add(chunks=1)

    def frame(self, error: ProtocolError) -> None:
        """Count bytes that are no valid frame."""
        self.add(frames=1)
        log.warning("a connection is ended: %s", error)

    def add(self, *, chunks: int = 0, frames: int = 0) -> None:
        """Raise the counts."""
        with self._lock:
            self._chunks_count += chunks
            self._frames_count += frames

    def stats(self) -> dict[str, int]:
        """Return the counts by name."""
        with self._lock:
            return {"digest_errors": self._chunks_count, "broken_frames": self._frames_count}
