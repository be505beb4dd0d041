"""One arena as a rank maps it: on first use, and again once the file has become longer, pre-faulted step by step (R9).

A rank has one of these for each arena file: slots granted of one are never written through another (R8).

Where the rank's states lie on a GPU its slots are pinned as well, as they are leased (`pinned_slots`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from memstore.errors import ClosedError, IntegrityError
from memstore.shell.arena.mapping import STEP_NBYTES, ArenaMapping
from memstore.shell.device.pinned_memory import PinnedSlots


class RankMapping:
    """Tools that only ask never map anything. `prefault` is for one thread, off the training thread."""

    def __init__(self, folder: Path, arena: str) -> None:
        """`arena` is the identity of the file that the holder maps, by its welcome."""
        self._folder, self.arena = folder, arena
        self._mapping: ArenaMapping | None = None
        self._pinned: PinnedSlots | None = None  # of the present mapping
        self._outgrown: list[tuple[ArenaMapping, PinnedSlots | None]] = []  # a copy may still use them
        self._device: int | None = None  # the CUDA device that slots are pinned for
        self._unpinned: set[int] = set()  # entered while there was none

    def open(self) -> ArenaMapping:
        """Map the arena on first use.

        Raises:
            IntegrityError: The file in the folder is not the one that the holder maps.
        """
        if self._mapping is None:
            self._map()
        mapping = self._mapping
        assert mapping is not None
        return mapping

    def view(self, slot: int, nbytes: int | None = None) -> memoryview:
        """Return a slot's bytes; map again if the arena may have grown beyond the mapping (R9)."""
        try:
            return self.open().view(slot, nbytes)
        except IndexError:
            return self._reopen().view(slot, nbytes)

    def prefault(self, slots: Sequence[int]) -> int:
        """Enter the pages of the first slots, some 64 MiB; return how many slots that were. A closed one does nothing.

        Little at a time: the thread that does it also sends what this rank submits.
        """
        step = slots[: max(1, STEP_NBYTES // self.open().chunk_bytes)]
        with contextlib.suppress(ClosedError):
            try:
                self.open().prefault(step)
            except IndexError:
                self._reopen().prefault(step)
            if self._device is None:
                self._unpinned.update(step)
            else:
                self.pin(step)
        return len(step)

    def pin_for(self, device: int, later: Callable[[Callable[[], None]], None]) -> None:
        """Pin what is leased from now on for a CUDA device, and what was before, bit by bit; the first call counts.

        Args:
            device: Its index.
            later: Queues work for the thread that calls `prefault`.

        What was leased before an arena was mapped again (its limit was raised) goes on unpinned.
        """
        if self._device is None:
            self._device = device
            later(lambda: self._pin_some(later))

    def _pin_some(self, later: Callable[[Callable[[], None]], None]) -> None:
        count = max(1, STEP_NBYTES // self.open().chunk_bytes)
        step = sorted(self._unpinned)[:count]
        self._unpinned.difference_update(step)
        with contextlib.suppress(ClosedError, IndexError):
            self.pin(step)
        if self._unpinned:
            later(lambda: self._pin_some(later))

    def pin(self, slots: Iterable[int], device: int | None = None) -> None:
        """Pin slots now, for the device of `pin_for` or another. Not in a thread that computes. Errors as `view`."""
        index = self._device if device is None else device
        self.open()
        if self._pinned is not None and index is not None:
            self._pinned.add(slots, index)

    def pin_at(self, addresses: Iterable[int], device: int) -> None:
        """Pin the slots that these addresses lie in, as far as they are of the present mapping."""
        found = [self.open().slot_at(address) for address in addresses]
        with contextlib.suppress(ClosedError, IndexError):
            self.pin([slot for slot in found if slot is not None], device)

    def close(self) -> None:
        """Unpin, and unmap once the last view is gone."""
        for mapping, pinned in (*self._outgrown, (self._mapping, self._pinned)):
            if mapping is not None:
                if pinned is not None:
                    pinned.close()
                mapping.close()

    @property
    def has_pins(self) -> bool:
        """Whether some of it is registered with CUDA, which must be taken back before it is unmapped."""
        known = [pinned for _, pinned in self._outgrown] + [self._pinned]
        return any(pinned is not None and not pinned.is_empty for pinned in known)

    def _map(self) -> None:
        mapping = ArenaMapping.open(self._folder)
        if mapping.identity != self.arena:
            mapping.close()
            raise IntegrityError(
                f"the arena in {self._folder} is {mapping.identity}, this host's holder maps {self.arena}: its files "
                "were replaced while the holder runs; it ends by itself, and what is asked again then is answered"
            )
        self._mapping, self._pinned = mapping, PinnedSlots(mapping)

    def _reopen(self) -> ArenaMapping:
        """Map the arena again, as its limit was raised; views of the old mapping stay valid."""
        if self._mapping is not None:
            self._outgrown.append((self._mapping, self._pinned))
        self._map()
        return self.open()
