"""Planted bugs around files that go while processes live: replaced arenas, removed names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from memstore.core.holder import lost_files
from memstore.core.holder.puts import seal
from memstore.testing.faults.catalogue import Fault
from memstore.testing.simulator.planted.bug import planted, row
from memstore.testing.simulator.rank.rank import SimRank
from memstore.testing.simulator.world.memory import Memory

REPLACED, REMOVED = Fault(4.0, "replace-arena", (1,)), Fault(4.0, "remove-files", (1,))


def _first_only(self: SimRank, memory: Memory) -> None:
    self.mapping = self.mapping or memory.slots


@planted("old-arena-written", "R8", "R8", REPLACED)
@contextmanager
def old_arena_written() -> Iterator[None]:
    """A rank goes on writing into the arena that it mapped first, and its holder seals the zeros of the new one."""
    with patch.object(SimRank, "map_arena", _first_only), patch.object(seal, "_not_seen", _seen):
        yield


async def _seen(*_: Any) -> str:
    return ""


ROWS = (
    row("old-arena-kept", "R8", "I16", (SimRank, "map_arena"), _first_only,
        "A rank keeps its mapping of an arena that was replaced, so every put of it fails.", REPLACED),
    row("removed-files-unseen", "R35", "I16", (lost_files, "look"), lambda files, loss: None,
        "A holder does not notice that its files were removed; it stays, and can store nothing.", REMOVED),
    row("removed-files-not-written", "R35", "R19 I1", (lost_files, "_written_again"), lambda files: "",
        "A holder whose files were removed ends without writing them again.", REMOVED),
)  # fmt: skip
