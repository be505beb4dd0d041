"""One put of this rank, from its first slots to its submission (R8, R11). Its states: `shell/rank/leases.py`.

The stream that is submitted need not be all that was copied: `keep` drops slots, and what stood behind them moves up.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from memstore.client.steps import Steps
from memstore.client.ticket import Ticket
from memstore.core.wire.rank_messages import PutTerms
from memstore.shell.codec.encode import StatePlan, copy_into
from memstore.shell.codec.nonfinite import Nonfinite
from memstore.shell.rank.holder_link import HolderLink
from memstore.shell.rank.leases import OPEN, OVER, Tenant


class Put(Tenant):
    """A put and its ticket.

    A thread that writes into its slots holds `lock` and has checked `is_open`: the put may be abandoned meanwhile.
    """

    def __init__(self, link: HolderLink, steps: Steps, ticket: Ticket, terms: PutTerms) -> None:
        """Begin without slots; `extend` takes some."""
        super().__init__()
        self.ticket, self.step, self.chunk_bytes = ticket, terms.step, link.welcome.chunk_bytes
        self.is_late = False  # an overlapped copy writes into the slots: it alone ends the put
        self.lock = threading.RLock()
        self._link, self._steps, self._terms = link, steps, terms
        self.look: Nonfinite | None = None  # takes the tensors that have numbers which are not finite (R39)
        self.skips_nonfinite = False  # such a state is not submitted

    @property
    def is_open(self) -> bool:
        """Return whether its bytes may still be written."""
        return self.state is OPEN

    @property
    def is_passed_on(self) -> bool:
        """Return whether it goes on without the caller: it is copied late, or was submitted."""
        return self.is_late or self.message is not None

    def views(self) -> list[memoryview]:
        """Return the slots' bytes, in order."""
        mapping = self.mapping
        return [] if mapping is None else [mapping.view(slot) for slot in self.slots]

    def extend(self, count: int, budget_s: float) -> bool:
        """Take `count` slots more at the end; False if there are none within `budget_s`, or the put is over."""
        return self._link.leases.take(self, count, budget_s)

    def keep(self, indices: Sequence[int]) -> None:
        """Give back all slots but these; the stream is made of them, in this order."""
        with self.lock:
            self._link.leases.keep(self, [self.slots[i] for i in indices])

    # -- its end ------------------------------------------------------------------------------

    def copy(self, plan: StatePlan) -> None:
        """Copy a state now, and submit it."""
        try:
            with self.lock:
                digests = copy_into(plan, self.views(), self.chunk_bytes, look=self.look)
        except BaseException as exc:
            self.fail(f"its state could not be copied: {exc!r}")
            raise
        self.complete(plan, digests)

    def complete(self, plan: StatePlan, digests: Sequence[bytes] | None = None) -> None:
        """Submit the copied state; skip its step if the slots are not ours any more (R8), or for a number (R39)."""
        names = self.look.names(plan.name_at) if self.look is not None else []
        self._steps.looked(self.step, names, is_skipped=self.skips_nonfinite)
        if names and self.skips_nonfinite:
            self.fail(f"numbers that are not finite in {', '.join(names)}")
            return
        if not self.submit(plan.layout, plan.nbytes, digests):
            self._steps.skip(self.ticket, "this host's holder restarted while the state was copied")

    def submit(self, layout: bytes, nbytes: int, digests: Sequence[bytes] | None = None) -> bool:
        """Queue the first `nbytes` for the holder, give back slots behind them; False if the slots are not ours.

        Args:
            digests: Of its chunks, if they were taken with the copy.
        """
        with self.lock:
            try:
                if self.state is OPEN:
                    self.keep(range(-(-nbytes // self.chunk_bytes)))
                return self._link.submit(
                    self,
                    self._terms,
                    layout=layout,
                    nbytes=nbytes,
                    stall_s=self.ticket.stall_s
                    or time.monotonic() - self.ticket.began_s,  # the copy may have ended before
                    digests=None if digests is None else b"".join(digests),
                )
            finally:
                if self.state is OPEN:
                    self.state = OVER

    def fail(self, why: str) -> None:
        """Give everything back, and the step up on all ranks (R12)."""
        self.abandon()
        self._steps.skip(self.ticket, why, "failed")

    def retire(self, why: str) -> None:
        """Give the step up, committed or not: its bytes mix two moments."""
        self._steps.retire(self.ticket, why)

    def abandon(self) -> None:
        """Give everything back, unless it is complete.

        Waits for a thread that writes into the slots, except an overlapped copy: that gives them back itself.
        """
        with self.lock:
            if self.state is OPEN and not self.is_late:
                self.state = OVER
                self._link.leases.notify()

    def abandon_unwritten(self) -> None:
        """Abandon it, unless a thread writes into the slots: that thread gives them back. Never waits."""
        if self.lock.acquire(blocking=False):
            try:
                self.abandon()
            finally:
                self.lock.release()

    def end_late(self) -> None:
        """End an overlapped copy: slots that it did not submit are free."""
        if self.state is OPEN:
            self.state = OVER  # first, so that no thread writes any more: what comes next may be interrupted
        self.is_late = False
        self._link.leases.notify()
