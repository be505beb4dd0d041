"""The room of one put between the moment it is taken and its submission (R8, R11).

    taken --submit--> the holder's
      '--abandon, or the holder says that some slots are no longer ours--> given back

The stream that is submitted need not be all that was copied: `keep` drops slots, and what stood behind them moves up.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from memstore.client.ticket import LEVELS, Ticket
from memstore.shell.rank.holder_link import HolderLink
from memstore.shell.rank.lease_pool import Tenant


class PendingPut(Tenant):
    """Leased slots of one step; slot i takes stream bytes [i * chunk_bytes, ...).

    A thread that writes into them holds `lock` and has checked `is_over`: the put may be abandoned meanwhile.
    """

    def __init__(self, link: HolderLink, ticket: Ticket, *, world_size: int) -> None:
        """Begin without slots; `extend` takes some."""
        super().__init__()
        self.mapping = link.mapping  # of the slots: they are never written through a later one's
        self.link, self.ticket, self.chunk_bytes = link, ticket, link.welcome.chunk_bytes
        self.slots: list[int] = []
        self.step = ticket.step
        self.attempt, self.world_size = link.attempt, world_size
        self.is_filled_late = False  # an overlapped copy writes into the slots and gives them back when it ends
        self.lock = threading.RLock()

    @property
    def is_passed_on(self) -> bool:
        """Return whether it goes on without the caller: it is copied late, or on its way to the holder, or there."""
        is_submitted = (self.attempt, self.step) in self.link.unsealed_puts or self.ticket.level in LEVELS[1:]
        return self.is_filled_late or is_submitted

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
        self.link.put_back(set(self.slots).difference(kept), self)
        self.slots = kept

    def extend(self, count: int, budget_s: float) -> bool:
        """Take `count` slots more at the end; False if there are none within `budget_s`, or the put is over."""
        more = self.link.acquire(self, count, budget_s)
        if more is None:
            return False
        with self.lock:
            if not self.slots:
                self.mapping = more.mapping
            if self.is_over or more.mapping is not self.mapping:
                self.link.put_back(more.slots, self)
                return False
            self.slots = self.slots + more.slots
            return True

    def submit(
        self, layout: bytes, nbytes: int, shared_chunks: int | None = None, digests: Sequence[bytes] | None = None
    ) -> bool:
        """Queue the first `nbytes` for the holder, give back slots behind them; False if the slots are not ours.

        Args:
            digests: Of its chunks, if they were taken with the copy.
        """
        with self.lock:
            if self.is_over:
                return False
            try:
                self._keep(range(-(-nbytes // self.chunk_bytes)))
                return self.link.submit(
                    self, self.step, self.slots, self.mapping, attempt=self.attempt, world_size=self.world_size,
                    layout=layout, nbytes=nbytes, shared_chunks=shared_chunks, began_s=self.ticket.began_s,
                    stall_s=self.stall_s(), digests=None if digests is None else b"".join(digests),
                )  # fmt: skip
            finally:
                self.is_over = True

    def stall_s(self) -> float:
        """Return how long training was blocked: until now, unless the copy ended before."""
        return self.ticket.stall_s or time.monotonic() - self.ticket.began_s

    def abandon(self) -> None:
        """Give everything back.

        Waits for a thread that writes into the slots, except an overlapped copy: that gives them back itself.
        """
        with self.lock:
            if self.is_over or self.is_filled_late:
                return
            self.is_over = True
            self.link.put_back((), self)

    def end_late(self) -> None:
        """End an overlapped copy: slots that it did not submit are free."""
        self.is_over = True  # first, so that no thread writes any more: what comes next may be interrupted
        self.is_filled_late = False
        self.link.put_back((), self)

    def abandon_unwritten(self) -> None:
        """Abandon it, unless a thread writes into the slots: that thread gives them back. Never waits."""
        if self.lock.acquire(blocking=False):
            try:
                self.abandon()
            finally:
                self.lock.release()
