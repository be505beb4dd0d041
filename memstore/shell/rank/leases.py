"""Which slots of the arena a rank may write, and what became of the others (R8, R11).

Every leased slot has one tenant, in one table: the put that has it. What the put's slots are, its state says:

    open --its bytes are complete--> filled --sent--> submitted --the holder answers--> over
      |                                ^--the link broke--'                              ^
      '--it is abandoned, or a signal's handler ends it by an exception, wherever it is--'

Slots of a put that is over are free to fill, but for those that were submitted: they are the holder's. A put changes
its state by one assignment, all its slots with it, so an exception loses nothing.

All of it belongs to one arena, that of `mapping`. With another arena earlier leases end: a put that still copies into
the old one, through the mapping that it began with, is refused when it submits.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import Enum

import msgspec

from memstore.core.wire.rank_messages import PutReady
from memstore.shell.rank.arena_view import RankMapping
from memstore.shell.threads import SafeCondition


class PutState(Enum):
    """Where a put stands."""

    OPEN = "open"
    FILLED = "filled"
    SUBMITTED = "submitted"
    OVER = "over"


OPEN, FILLED, SUBMITTED, OVER = PutState  # read by one step of Python: PutState.OPEN takes a call


class Tenant:
    """A put as its slots know it. Slot i takes stream bytes [i * chunk_bytes, ...), through `mapping`."""

    def __init__(self, state: PutState = OPEN) -> None:
        self.state = state
        self.slots: list[int] = []
        self.mapping: RankMapping | None = None  # None: it has no slots yet
        self.message: PutReady | None = None  # from filled on


NOBODY = Tenant(OVER)
ENTERING = Tenant()  # their pages are being entered


class Leases:
    """A rank's slots; `changed` guards all of it."""

    def __init__(self, mapping: RankMapping) -> None:
        self.changed = SafeCondition()
        self.mapping = mapping
        self.tenants: dict[int, Tenant] = {}  # of every slot that is leased to us, as far as we know
        self.unsealed: dict[tuple[int, int], Tenant] = {}  # (attempt, step) -> filled or submitted
        self.is_ended = False
        self._retired: list[RankMapping] = []  # of earlier arenas, as far as CUDA knows them

    @property
    def free(self) -> list[int]:
        """Slots that are free to fill."""
        return [n for n, tenant in list(self.tenants.items()) if tenant.state is OVER]

    @property
    def in_copy(self) -> set[int]:
        """Slots of open puts."""
        tenants = list(self.tenants.items())
        return {n for n, tenant in tenants if tenant.state is OPEN and tenant is not ENTERING}

    def entered_count(self) -> int:
        """Return how many slots are ours with their pages entered: free to fill, or of a put that is not over."""
        return sum(tenant is not ENTERING for tenant in list(self.tenants.values()))

    def held(self) -> list[int]:
        """Return every slot that is leased to us, as far as we know."""
        with self.changed:
            return sorted(self.tenants)

    def end(self) -> None:
        """Lease and submit nothing any more: the link is fenced or closed."""
        with self.changed:
            self.is_ended = True
            self.changed.notify_all()

    # -- of the holder ------------------------------------------------------------------------

    def take_arena(self, mapping: RankMapping, stale: Collection[int]) -> None:
        """Go on with the slots of the arena that the holder maps; never again write a slot that is not ours (R6, R8).

        Args:
            mapping: Of that arena. If it is another one than before, all that was held is stale.
            stale: Slots that the holder does not lease to us.
        """
        with self.changed:
            if mapping.arena != self.mapping.arena:
                # Its memory goes with the last put that has it; pages that CUDA knows have to stay.
                if self.mapping.has_pins:
                    self._retired.append(self.mapping)
                self.mapping = mapping
            for n in stale:
                self.tenants.pop(n, None)
            # A submission has a stale slot: the holder has taken it already. Send it again only to learn its level;
            # slots of it that were leased to us again may be filled.
            for put in self.unsealed.values():
                if put.message is not None and not set(stale).isdisjoint(put.slots):
                    self._move(put.slots, put, NOBODY)
                    put.slots, put.message = [], msgspec.structs.replace(put.message, is_lost=True)
            self.changed.notify_all()

    def _move(self, slots: Collection[int], before: Tenant, after: Tenant) -> None:
        """Pass on, in one step, what of these slots is still the former tenant's."""
        self.tenants.update({n: after for n in slots if self.tenants.get(n) is before})

    def grant(self, slots: Sequence[int]) -> RankMapping:
        """Take new slots, whose pages are still to be entered; return the mapping for that."""
        with self.changed:
            self.tenants.update(dict.fromkeys(slots, ENTERING))
            return self.mapping

    def granted(self, slots: Sequence[int], mapping: RankMapping) -> None:
        """Offer entered slots to puts, as far as they are ours: the link may have broken meanwhile (R8)."""
        with self.changed:
            if mapping is self.mapping:
                self._move(slots, ENTERING, NOBODY)
            self.changed.notify_all()

    def answered(self, attempt: int, step: int) -> None:
        """The holder has said how a put went: what was sent is leased to us no more, what was not yet is free."""
        with self.changed:
            put = self.unsealed.pop((attempt, step), None)
            if put is not None:
                if put.state is SUBMITTED:
                    for n in [n for n in put.slots if self.tenants.get(n) is put]:
                        del self.tenants[n]
                put.state = OVER
                self.changed.notify_all()

    # -- of puts ------------------------------------------------------------------------------

    def wait_free(self, count: int, budget_s: float) -> list[int]:
        """Wait until `count` slots are free to fill, at most `budget_s`; return those that are."""
        with self.changed:
            return self._wait_free(count, budget_s)

    def _wait_free(self, count: int, budget_s: float) -> list[int]:
        free: list[int] = []

        def is_over() -> bool:
            nonlocal free
            free = self.free
            return len(free) >= count or self.is_ended

        self.changed.wait_for(is_over, budget_s)
        return free

    def take(self, put: Tenant, count: int, budget_s: float) -> bool:
        """Give an open put `count` slots more; False if they are not free within `budget_s` (R11, R12).

        False, too, if the arena is another one than when it took the first.
        """
        with self.changed:
            taken = self._wait_free(count, budget_s)[:count]
            if not put.slots:
                put.mapping = self.mapping
            if len(taken) < count or put.state is not OPEN or put.mapping is not self.mapping:
                return False
            self.tenants.update(dict.fromkeys(taken, put))
            put.slots = [*put.slots, *taken]
            return True

    def keep(self, put: Tenant, kept: list[int]) -> None:
        """Free all slots of an open put but these, in this order."""
        with self.changed:
            self._move(set(put.slots).difference(kept), put, NOBODY)
            put.slots = kept
            self.changed.notify_all()

    def notify(self) -> None:
        """Wake who waits for slots: a put is over."""
        with self.changed:
            self.changed.notify_all()

    def fill(self, put: Tenant, message: PutReady) -> bool:
        """Note an open put's submission; False if its slots are not its own any more. Needs `changed`.

        It is noted whole or not, where a signal's handler raises.
        """
        is_ours = put.mapping is self.mapping and all(self.tenants.get(n) is put for n in put.slots)
        if not is_ours or put.state is not OPEN or self.is_ended:
            return False
        terms = message.terms
        self.unsealed[terms.attempt, terms.step] = put
        put.message, put.state = message, FILLED
        return True

    def begin_sending(self, put: Tenant) -> bool:
        """Note that a submission is sent now; False if it is not to be: it was sent, answered, or never complete."""
        with self.changed:
            if put.state is not FILLED:
                return False
            put.state = SUBMITTED
            return True

    def to_send_again(self) -> list[Tenant]:
        """Return what the holder has not answered, in order, as not sent yet: the link has come back."""
        with self.changed:
            again = [put for _, put in sorted(self.unsealed.items(), key=lambda item: item[0])]
            for put in again:
                put.state = FILLED
            return again

    def close_mappings(self) -> None:
        """Unpin, and unmap once the last view is gone."""
        for mapping in (*self._retired, self.mapping):
            mapping.close()
