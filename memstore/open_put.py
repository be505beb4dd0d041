"""The room of one put between the moment it is taken and the hand-over (R8, R11).

    taken --hand_over--> the holder's
      |--lend--> lent: a child process may adopt it, and nothing is written here any more
      '--abandon, or the holder says that some slots are no longer ours--> given back

The stream that is handed over need not be all that was copied: `keep` drops slots, and what stood behind them moves up.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import wait

from memstore.shell.rank_link import RankLink
from memstore.shell.rank_mapping import RankMapping
from memstore.ticket import Ticket

LEND_S = 30.0


class OpenPut:
    """Leased slots of one step; slot i takes stream bytes [i * chunk_bytes, ...).

    Whoever writes into them holds `lock` and has seen that the put is not over: it may be abandoned meanwhile.
    """

    def __init__(
        self, link: RankLink, mapping: RankMapping, ticket: Ticket, slots: list[int], *, chunk_bytes: int,
        attempt: int, world_size: int,
    ) -> None:  # fmt: skip
        """`mapping` is that of the slots: they are never written through a later one's."""
        self.mapping = mapping
        self.link, self.ticket, self.slots, self.chunk_bytes = link, ticket, slots, chunk_bytes
        self.step = ticket.step
        self.attempt, self.world_size = attempt, world_size
        self.is_over = False
        self.is_lent = False
        self.is_filled_late = False  # an overlapped copy writes into the slots and gives them back when it ends
        self.lock = threading.RLock()

    def views(self) -> list[memoryview]:
        """Return the slots' bytes, in order."""
        return [self.mapping.view(slot) for slot in self.slots]

    def keep(self, indices: Sequence[int]) -> None:
        """Give back all slots but these; the stream is made of them, in this order."""
        with self.lock:
            if not self.is_over:  # else all went back, and may be another put's by now
                self._keep(indices)

    def _keep(self, indices: Sequence[int]) -> None:
        kept = [self.slots[i] for i in indices]
        self.link.put_back(sorted(set(self.slots).difference(kept)), self.mapping)
        self.slots = kept

    def extend(self, count: int, budget_s: float) -> bool:
        """Take `count` slots more at the end; False if there are none within `budget_s`, or the put is over."""
        more = self.link.acquire(count, budget_s)
        if more is None:
            return False
        with self.lock:
            if self.is_over or more.mapping is not self.mapping:
                self.link.put_back(*more)
                return False
            self.slots = self.slots + more.slots
            return True

    def hand_over(self, layout: bytes, nbytes: int, shared_chunks: int | None = None) -> bool:
        """Queue the first `nbytes` for the holder, give back slots behind them; False if the slots are not ours."""
        with self.lock:
            if self.is_over:
                return False
            self.is_over = True
            self._keep(range(-(-nbytes // self.chunk_bytes)))
            body = {
                "attempt": self.attempt, "world_size": self.world_size, "layout": layout, "nbytes": nbytes,
                "began_s": self.ticket.began_s, "stall_s": self.stall_s(),  # for people
                "shared_chunks": shared_chunks,
            }  # fmt: skip
            return self.link.hand_over(self.step, self.slots, self.mapping, body)

    def stall_s(self) -> float:
        """Return how long training was blocked: until now, unless the copy ended before."""
        return self.ticket.stall_s or time.monotonic() - self.ticket.began_s

    def lend(self) -> None:
        """Let a child of this process take the slots over (R20)."""
        with self.lock:
            if self.is_over:
                return
            self.is_lent = True
            offered = self.link.lend(self.step, self.slots, self.mapping)
        wait([offered], LEND_S)  # without the lock: who gives the put up waits for no holder (R11)

    def abandon(self, *, is_patient: bool = True) -> None:
        """Give everything back; what was lent, as far as no child has it, and when the holder says so.

        Waits for whoever writes into the slots, or, not `is_patient`, leaves them to him. An overlapped copy is never
        waited for: it gives them back itself.
        """
        if not self.lock.acquire(blocking=is_patient):
            return
        try:
            if self.is_over or self.is_filled_late:
                return
            self.is_over = True
            if self.is_lent:
                self.link.take_back(self.step, self.slots, self.mapping)
            else:
                self.link.put_back(self.slots, self.mapping)
        finally:
            self.lock.release()
