"""The arena as one rank maps it: on first use, anew once the file has become longer, pre-faulted step by step (R9)."""

from __future__ import annotations

import contextlib
from pathlib import Path

from memstore.errors import ClosedError
from memstore.shell.arena_mapping import STEP_NBYTES, ArenaMapping


class RankMapping:
    """Tools that only ask never map anything. `prefault` is for one thread, off the training thread."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._mapping: ArenaMapping | None = None
        self._outgrown: list[ArenaMapping] = []  # still under somebody's copy, perhaps

    def open(self) -> ArenaMapping:
        """Map the arena on first use."""
        if self._mapping is None:
            self._mapping = ArenaMapping.open(self._folder)
        return self._mapping

    def view(self, slot: int, nbytes: int | None = None) -> memoryview:
        """Return a slot's bytes; map again if the arena may have grown beyond the mapping (R9)."""
        try:
            return self.open().view(slot, nbytes)
        except IndexError:
            return self._open_anew().view(slot, nbytes)

    def prefault(self, slots: list[int]) -> int:
        """Enter the pages of the first slots, some 64 MiB; return how many slots that were. A closed one does nothing.

        Little at a time: the thread that does it also sends what this rank hands over.
        """
        step = slots[: max(1, STEP_NBYTES // self.open().chunk_bytes)]
        with contextlib.suppress(ClosedError):
            try:
                self.open().prefault(step)
            except IndexError:
                self._open_anew().prefault(step)
        return len(step)

    def close(self) -> None:
        """Unmap, once the last view is gone."""
        for mapping in (self._mapping, *self._outgrown):
            if mapping is not None:
                mapping.close()

    def _open_anew(self) -> ArenaMapping:
        """The arena's limit was raised since it was mapped; views of the old mapping stay good."""
        mapping = ArenaMapping.open(self._folder)
        if self._mapping is not None:
            self._outgrown.append(self._mapping)
        self._mapping = mapping
        return mapping
