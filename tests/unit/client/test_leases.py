"""Slots and puts through any course of a link: every slot is somebody's, no two puts have one, none is lost (R8)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from memstore.core.wire.rank_messages import PutReady, PutTerms, SlotSample
from memstore.shell.rank.leases import ENTERING, FILLED, OPEN, OVER, SUBMITTED, Leases, Tenant


class Course(RuleBasedStateMachine):
    """A rank's leases, and which slots its holder leases to it; any order of grants, puts, breaks and answers."""

    puts = Bundle("puts")

    @initialize()
    def begin(self) -> None:
        self.leases = Leases(arena(0))
        self.arenas = 0
        self.ours: set[int] = set()  # by the holder
        self.made: list[Tenant] = []

    @rule(count=st.integers(1, 4), is_entered=st.booleans())
    def grant(self, count: int, is_entered: bool) -> None:
        """The lowest numbers that are not leased."""
        slots = [n for n in range(40) if n not in self.ours][:count]
        self.ours.update(slots)
        mapping = self.leases.grant(slots)
        if is_entered:
            self.leases.granted(slots, mapping)

    @rule()
    def enter(self) -> None:
        entering = [n for n, tenant in self.leases.tenants.items() if tenant is ENTERING]
        self.leases.granted(entering, self.leases.mapping)

    @rule(target=puts, count=st.integers(0, 4))
    def take(self, count: int) -> Tenant:
        put, free = Tenant(), len(self.leases.free)
        assert self.leases.take(put, count, 0.0) == (count <= free)
        self.made.append(put)
        return put

    @rule(put=puts, count=st.integers(0, 3))
    def extend(self, put: Tenant, count: int) -> None:
        """Never an arena's slots beside another's, and none for a put that is not open."""
        may_take = put.state is OPEN and (not put.slots or put.mapping is self.leases.mapping)
        may_take = may_take and count <= len(self.leases.free)
        assert self.leases.take(put, count, 0.0) == may_take

    @rule(put=puts, first=st.integers(0, 2))
    def keep(self, put: Tenant, first: int) -> None:
        if put.state is OPEN:
            self.leases.keep(put, put.slots[first:])

    @rule(put=puts)
    def fill(self, put: Tenant) -> None:
        """As HolderLink.submit; a refused put is over."""
        terms = PutTerms(attempt=1, step=self.made.index(put), world_size=1)
        if put.state is OPEN and not self.leases.fill(put, ready(terms, put.slots)):
            put.state = OVER

    @rule(put=puts)
    def abandon(self, put: Tenant) -> None:
        """By its caller, or a signal's handler."""
        if put.state is OPEN:
            put.state = OVER

    @rule(put=puts, is_taken=st.booleans())
    def send(self, put: Tenant, is_taken: bool) -> None:
        """It may be queued twice; the holder takes the slots of what it has read."""
        was = put.state
        assert self.leases.begin_sending(put) == (was is FILLED)
        if was is FILLED and is_taken:
            self.ours.difference_update(put.slots)

    @rule(put=puts)
    def answer(self, put: Tenant) -> None:
        """What was sent has been taken by then, sealed or freed; and another rank may have given the step up before."""
        if put.state in (FILLED, SUBMITTED):
            if put.state is SUBMITTED:
                self.ours.difference_update(put.slots)
            self.leases.answered(1, self.made.index(put))
            assert put.state is OVER

    @rule(is_replaced=st.booleans())
    def break_link(self, is_replaced: bool) -> None:
        """The next connection names what the holder does not lease; all of it, if there is another arena."""
        if is_replaced:
            self.arenas += 1
            self.ours.clear()
        mapping = self.leases.mapping if not is_replaced else arena(self.arenas)
        self.leases.take_arena(mapping, set(self.leases.held()) - self.ours)
        assert all(put.state is FILLED for put in self.leases.to_send_again())

    @rule()
    def fence(self) -> None:
        """Nothing that is not filled is submitted any more; then the next attempt."""
        self.leases.end()
        for step, put in enumerate(self.made):
            assert not self.leases.fill(put, ready(PutTerms(attempt=1, step=step, world_size=1), put.slots))
        self.leases.is_ended = False

    @invariant()
    def no_slot_is_lost(self) -> None:
        """What the holder leases is free, or being entered, or of one put that has it."""
        tenants = self.leases.tenants
        assert self.ours <= tenants.keys()
        for number, tenant in tenants.items():
            assert tenant is ENTERING or tenant.state is OVER or number in tenant.slots
        assert set(self.leases.free).isdisjoint(self.leases.in_copy)

    @invariant()
    def what_is_to_be_sent_is_known_until_it_is_answered(self) -> None:
        known = set(map(id, self.leases.unsealed.values()))
        assert known == {id(put) for put in self.made if put.state in (FILLED, SUBMITTED)}


def arena(number: int) -> Any:
    return SimpleNamespace(arena=str(number), has_pins=False)


def ready(terms: PutTerms, slots: list[int]) -> PutReady:
    sample = SlotSample(seed=0, digests=b"")
    return PutReady(terms=terms, slots=tuple(slots), arena="", sample=sample, layout=b"", nbytes=0, stall_s=0.0)


TestCourse = Course.TestCase
TestCourse.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
