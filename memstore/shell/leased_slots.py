"""Which slots of the arena a rank may write, and what became of the others (R8, R11).

    granted --pages entered--> pool --acquire--> in a put's copy --hand_over--> the holder's
                                 ^                     |--lend--> a child may have them
                                 '------ put_back -----'

All of it belongs to one arena, that of `mapping`. With another arena nothing of before is ours: who still copies into
the old one, through the mapping that his put began with, is refused when he hands over.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from memstore.shell.rank_mapping import RankMapping


@dataclass(frozen=True)
class Handover:
    """Slots on their way to the holder; kept until sealed, to be sent again if the holder dies."""

    attempt: int
    step: int
    slots: tuple[int, ...]
    body: dict[str, Any]


class Taken(NamedTuple):
    """Slots for one put, and what they are to be filled through."""

    slots: list[int]
    mapping: RankMapping


class LeasedSlots:
    """A rank's slots; `room` guards all of it."""

    def __init__(self, mapping: RankMapping) -> None:
        self.room = threading.Condition()
        self.mapping = mapping
        self._retired: list[RankMapping] = []  # of earlier arenas, as far as CUDA knows them
        self.granting: set[int] = set()  # leased, being pre-faulted
        self.pool: list[int] = []  # leased and free to fill
        self.in_copy: set[int] = set()  # taken by a put that has not handed over yet
        self.lent: set[int] = set()  # offered to a child, which may have them, or be done with them, by now
        # By step: what is offered, and what the offer says besides. A holder that restarts forgets it.
        self.offers: dict[int, tuple[Sequence[int], dict[str, Any]]] = {}
        self.handovers: dict[tuple[int, int], Handover] = {}  # (attempt, step) -> not yet sealed
        self.closed = threading.Event()
        self.fenced_by = 0

    def held(self) -> list[int]:
        """Return every slot that is leased to us, as far as we know."""
        with self.room:
            waiting = [n for h in self.handovers.values() for n in h.slots]
            return sorted({*self.granting, *self.pool, *self.in_copy, *self.lent, *waiting})

    def take_arena(self, mapping: RankMapping, stale: Collection[int]) -> None:
        """Go on with the slots of the arena that the holder maps; never again write a slot that is not ours (R6, R8).

        Args:
            mapping: Of that arena. If it is another one than before, all that was held is stale.
            stale: What the holder says is not ours.
        """
        with self.room:
            if mapping.arena != self.mapping.arena:
                # Its memory goes with the last put that has it; pages that CUDA knows have to stay.
                if self.mapping.has_pins:
                    self._retired.append(self.mapping)
                self.mapping = mapping
                self.offers.clear()
            self._drop_stale(set(stale))
            self.room.notify_all()

    def _drop_stale(self, stale: set[int]) -> None:
        self.granting -= stale
        self.in_copy -= stale
        self.lent -= stale
        # The holder took a hand-over that has a stale slot: it is sent again for its level only, and what of it
        # was leased to us anew is ours to fill.
        anew: set[int] = set()
        for key, handover in self.handovers.items():
            if stale.intersection(handover.slots):
                anew.update(handover.slots)
                body = {**handover.body, "lost": True}
                self.handovers[key] = Handover(handover.attempt, handover.step, (), body)
        taken = {n for h in self.handovers.values() for n in h.slots}
        self.granting -= taken
        self.pool = sorted({*self.pool, *anew} - stale - self.granting - self.in_copy - taken)

    def grant(self, slots: Sequence[int]) -> RankMapping:
        """Take new slots, whose pages are still to be entered; return the mapping for that."""
        with self.room:
            self.lent.difference_update(slots)  # a child is done with them
            self.granting.update(slots)
            return self.mapping

    def granted(self, slots: Sequence[int], mapping: RankMapping) -> None:
        """Offer entered slots to puts, as far as they are ours: the link may have broken meanwhile (R8)."""
        with self.room:
            if mapping is self.mapping:
                self.pool.extend(n for n in slots if n in self.granting)
                self.granting.difference_update(slots)
            self.room.notify_all()

    def acquire(self, count: int, budget_s: float) -> Taken | None:
        """Take `count` leased slots, waiting at most `budget_s`; None if there are not enough (R11, R12)."""
        deadline_s = time.monotonic() + budget_s
        with self.room:
            while len(self.pool) < count:
                left_s = deadline_s - time.monotonic()
                if left_s <= 0 or self.fenced_by or self.closed.is_set():
                    return None
                self.room.wait(left_s)
            slots, self.pool = self.pool[:count], self.pool[count:]
            self.in_copy.update(slots)
            return Taken(slots, self.mapping)

    def put_back(self, slots: Sequence[int], mapping: RankMapping) -> None:
        """A put failed before its hand-over: its slots are free to fill again, unless they were of another arena."""
        with self.room:
            if mapping is self.mapping:
                self.pool.extend(n for n in slots if n in self.in_copy)
                self.in_copy.difference_update(slots)
            self.room.notify_all()

    def close_mappings(self) -> None:
        """Unpin, and unmap once the last view is gone."""
        for mapping in (*self._retired, self.mapping):
            mapping.close()
