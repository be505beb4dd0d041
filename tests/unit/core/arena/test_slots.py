"""The slot table under any order of leases, submissions, seals and deaths keeps its invariants (R6, R8, R13)."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from memstore.core.arena.slot_table import Owner, SlotState, SlotTable

OWNERS = [Owner(1, 10), Owner(1, 11), Owner(2, 10, 1)]
DIGESTS = [b"a" * 16, b"b" * 16, b"c" * 16]


class Slots(RuleBasedStateMachine):
    """A dict of what every slot must be beside the table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = SlotTable(6)
        self.leased: dict[Owner, set[int]] = {owner: set() for owner in OWNERS}
        self.receiving: set[int] = set()
        self.held: dict[int, int] = {}  # sealed slot -> references

    @rule(owner=st.sampled_from(OWNERS), count=st.integers(0, 4))
    def lease(self, owner: Owner, count: int) -> None:
        """Leases come from free slots only."""
        free = len(self.table.free)
        numbers = self.table.lease(owner, count, attempt=1)
        assert len(numbers) == min(count, free)
        self.leased[owner].update(numbers)

    @rule(owner=st.sampled_from(OWNERS), data=st.data())
    def submit(self, owner: Owner, data: st.DataObject) -> None:
        """Only what is leased to the owner can be submitted, all or nothing."""
        numbers = data.draw(st.lists(st.integers(0, 5), max_size=3))
        is_mine = self.leased[owner].issuperset(numbers) and len(set(numbers)) == len(numbers)
        assert self.table.submit(owner, numbers) == is_mine
        if is_mine:
            self.leased[owner].difference_update(numbers)
            self.receiving.update(numbers)

    @rule(owner=st.sampled_from(OWNERS), data=st.data())
    def confirm(self, owner: Owner, data: st.DataObject) -> None:
        """A link that came back keeps what it names and gives the rest back."""
        held = data.draw(st.sets(st.integers(0, 5)))
        kept, stale = self.table.confirm(owner, held)
        assert set(kept) == held & self.leased[owner]
        assert set(stale) == held - self.leased[owner]
        self.leased[owner] = set(kept)

    @rule(owner=st.sampled_from(OWNERS))
    def reclaim(self, owner: Owner) -> None:
        """A dead process gives everything back."""
        assert self.table.reclaim(owner) == len(self.leased[owner])
        self.leased[owner] = set()

    @rule()
    def receive(self) -> None:
        """A slot to receive into, or none."""
        number = self.table.receive()
        if number is not None:
            self.receiving.add(number)

    @precondition(lambda self: self.receiving)
    @rule(digest=st.sampled_from(DIGESTS), data=st.data())
    def seal(self, digest: bytes, data: st.DataObject) -> None:
        """Equal content lies in one slot."""
        number = data.draw(st.sampled_from(sorted(self.receiving)))
        self.receiving.discard(number)
        used = self.table.seal(number, digest, 8, 1.0)
        self.held[used] = self.held.get(used, 0) + 1
        assert self.table.lookup(digest, 8) == used
        assert self.table.lookup(digest, 9) is None

    @precondition(lambda self: self.held)
    @rule(data=st.data(), what=st.sampled_from(["hold", "unhold", "condemn"]))
    def reference(self, data: st.DataObject, what: str) -> None:
        """The last reference frees a slot; a quarantined one is found no more."""
        number = data.draw(st.sampled_from(sorted(self.held)))
        if what == "condemn":
            self.table.quarantine(number)
            assert number not in self.table.index.values()
            return
        self.held[number] += 1 if what == "hold" else -1
        (self.table.hold if what == "hold" else self.table.unhold)(number)
        if not self.held[number]:
            del self.held[number]

    @rule()
    def grow(self) -> None:
        """The arena grows at most once here."""
        self.table.grow(6)

    @invariant()
    def agrees(self) -> None:
        """Every slot is what the model says."""
        self.table.validate()
        for number, slot in enumerate(self.table.slots):
            owner = next((o for o, numbers in self.leased.items() if number in numbers), None)
            expected = (
                SlotState.LEASED
                if owner is not None
                else SlotState.RECEIVING
                if number in self.receiving
                else SlotState.SEALED
                if number in self.held
                else SlotState.FREE
            )
            assert slot.state is expected
            assert slot.refs == self.held.get(number, 0)


Slots.TestCase.settings = settings(max_examples=60, stateful_step_count=30, derandomize=True, deadline=None)
TestSlots = Slots.TestCase
