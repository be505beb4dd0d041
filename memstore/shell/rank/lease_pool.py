"""Which slots of the arena a rank may write, and what became of the others (R8, R11).

    granted --pages mapped in (pre-faulted)--> free --acquire--> a put's --submit--> the holder's
                                                '-- the put is over'

Every leased slot has one tenant, in one table, and all slots of a put change hands in one step of it. What a put that
is over still has is free: a put that a signal's handler ends by an exception, wherever it was, loses nothing.

All of it belongs to one arena, that of `mapping`. With another arena earlier leases end: a put that still copies into
the old one, through the mapping that it began with, is refused when it submits.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from memstore.core.wire.rank_messages import PutReady
from memstore.shell.rank.arena_view import RankMapping
from memstore.shell.threads.waits import LOOK_S, SafeCondition


class Tenant:
    """Who has slots; once it is over they are free to fill."""

    def __init__(self, *, is_over: bool = False) -> None:
        self.is_over = is_over


NO_TENANT = Tenant(is_over=True)
ENTERING = Tenant()  # their pages are being entered


@dataclass(eq=False)
class UnsealedPut(Tenant):
    """Slots on their way to the holder; kept until sealed, to be sent again if the holder dies."""

    message: PutReady
    slots: tuple[int, ...]  # those that are still its own
    is_over: bool = False
    is_sent: bool = False  # on the link as it is now


class Taken(NamedTuple):
    """Slots for one put, and what they are to be filled through."""

    slots: list[int]
    mapping: RankMapping


class LeasedSlots:
    """A rank's slots; `room` guards all of it."""

    def __init__(self, mapping: RankMapping) -> None:
        self.room = SafeCondition()
        self.mapping = mapping
        self._retired: list[RankMapping] = []  # of earlier arenas, as far as CUDA knows them
        self.tenants: dict[int, Tenant] = {}  # of every slot that is leased to us, as far as we know
        self.unsealed_puts: dict[tuple[int, int], UnsealedPut] = {}  # (attempt, step) -> not yet sealed
        self.closed = threading.Event()
        self.fenced_by = 0

    @property
    def pool(self) -> list[int]:
        """Slots that are free to fill."""
        return [n for n, tenant in list(self.tenants.items()) if tenant.is_over]

    @property
    def in_copy(self) -> set[int]:
        """Slots of puts that are not over."""
        return {
            n for n, tenant in list(self.tenants.items())
            if not tenant.is_over and tenant is not ENTERING and not isinstance(tenant, UnsealedPut)
        }  # fmt: skip

    @property
    def granting(self) -> set[int]:
        """Slots whose pages are being entered."""
        return {n for n, tenant in list(self.tenants.items()) if tenant is ENTERING}

    def held(self) -> list[int]:
        """Return every slot that is leased to us, as far as we know."""
        with self.room:
            return sorted(self.tenants)

    def take_arena(self, mapping: RankMapping, stale: Collection[int]) -> None:
        """Go on with the slots of the arena that the holder maps; never again write a slot that is not ours (R6, R8).

        Args:
            mapping: Of that arena. If it is another one than before, all that was held is stale.
            stale: Slots that the holder does not lease to us.
        """
        with self.room:
            if mapping.arena != self.mapping.arena:
                # Its memory goes with the last put that has it; pages that CUDA knows have to stay.
                if self.mapping.has_pins:
                    self._retired.append(self.mapping)
                self.mapping = mapping
            self._drop_stale(set(stale))
            self.room.notify_all()

    def _drop_stale(self, stale: set[int]) -> None:
        self._drop(stale)
        # A submission has a stale slot: the holder has taken it already. Send it again only to learn its level; slots
        # of it that were leased to us again may be filled.
        for key, unsealed in self.unsealed_puts.items():
            if stale.intersection(unsealed.slots):
                self._move(unsealed.slots, unsealed, NO_TENANT)
                self.unsealed_puts[key] = UnsealedPut(msgspec.structs.replace(unsealed.message, is_lost=True), ())

    def _drop(self, slots: Collection[int]) -> None:
        for n in slots:
            self.tenants.pop(n, None)

    def _move(self, slots: Collection[int], before: Tenant, after: Tenant) -> None:
        """Pass on, in one step, what of these slots is still the former tenant's."""
        self.tenants.update({n: after for n in slots if self.tenants.get(n) is before})

    def grant(self, slots: Sequence[int]) -> RankMapping:
        """Take new slots, whose pages are still to be entered; return the mapping for that."""
        with self.room:
            self.tenants.update(dict.fromkeys(slots, ENTERING))
            return self.mapping

    def granted(self, slots: Sequence[int], mapping: RankMapping) -> None:
        """Offer entered slots to puts, as far as they are ours: the link may have broken meanwhile (R8)."""
        with self.room:
            if mapping is self.mapping:
                self._move(slots, ENTERING, NO_TENANT)
            self.room.notify_all()

    def acquire(self, tenant: Tenant, count: int, budget_s: float) -> Taken | None:
        """Take `count` leased slots, waiting at most `budget_s`; None if there are not enough (R11, R12)."""
        with self.room:
            free = self._wait_free(count, budget_s)
            if free is None:
                return None
            self.tenants.update(dict.fromkeys(free, tenant))
            return Taken(free, self.mapping)

    def wait_free(self, count: int, budget_s: float) -> None:
        """Wait until `count` slots are free to fill, at most `budget_s`."""
        with self.room:
            self._wait_free(count, budget_s)

    def _wait_free(self, count: int, budget_s: float) -> list[int] | None:
        deadline_s = time.monotonic() + budget_s
        while len(free := self.pool) < count:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or self.fenced_by or self.closed.is_set():
                return None
            self.room.wait(min(left_s, LOOK_S))
        return free[:count]

    def are_of(self, tenant: Tenant, slots: Collection[int], mapping: RankMapping) -> bool:
        """Return whether slots that were filled through `mapping` are a tenant's. Needs `room`."""
        return mapping is self.mapping and all(self.tenants.get(n) is tenant for n in slots)

    def put_back(self, slots: Collection[int], tenant: Tenant) -> None:
        """Free some slots of a put, or all if it is over, and notify the waiting threads."""
        with self.room:
            self._move(slots, tenant, NO_TENANT)
            self.room.notify_all()

    def begin_sending(self, unsealed: UnsealedPut) -> bool:
        """Note that a submission is sent now; False if it is not to be: it was answered, or torn, and is forgotten."""
        with self.room:
            key = unsealed.message.attempt, unsealed.message.step
            if self.unsealed_puts.get(key) is not unsealed:
                return False
            unsealed.is_sent = all(self.tenants.get(n) is unsealed for n in unsealed.slots)
            if not unsealed.is_sent:
                del self.unsealed_puts[key]
            return unsealed.is_sent

    def answered(self, attempt: int, step: int) -> None:
        """The holder has said how a put went: what was sent is leased to us no more, what was not yet is free."""
        with self.room:
            unsealed = self.unsealed_puts.pop((attempt, step), None)
            if unsealed is not None and unsealed.is_sent:
                self._drop([n for n in unsealed.slots if self.tenants.get(n) is unsealed])
            elif unsealed is not None:
                self._move(unsealed.slots, unsealed, NO_TENANT)
                self.room.notify_all()

    def close_mappings(self) -> None:
        """Unpin, and unmap once the last view is gone."""
        for mapping in (*self._retired, self.mapping):
            mapping.close()
