"""Slots of reads that were given up: out of use until nothing can land there any more. Pure (R6, R13).

receiving --its read is given up--> withheld --the read has ended--> free
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from memstore.core.arena.slot_table import SlotTable


class WithheldSlots:
    """The receiving slots that a read may still write to, although it is waited for no longer."""

    def __init__(self, table: SlotTable) -> None:
        self._table = table
        self._reads: list[tuple[tuple[int, ...], Callable[[], bool]]] = []

    @property
    def count(self) -> int:
        """How many slots are out of use now."""
        return sum(len(numbers) for numbers, _ in self._reads)

    def withhold(self, numbers: Sequence[int], has_ended: Callable[[], bool]) -> None:
        """Keep the slots of a read until `has_ended` says that it cannot write any more."""
        self._reads.append((tuple(numbers), has_ended))

    def free_ended(self) -> list[int]:
        """Free the slots of reads that have ended; return them."""
        ended = [read for read in self._reads if read[1]()]
        self._reads = [read for read in self._reads if read not in ended]
        freed = [number for numbers, _ in ended for number in numbers]
        for number in freed:
            self._table.release(number)
        return freed
