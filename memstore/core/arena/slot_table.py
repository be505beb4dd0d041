"""The slot table of one arena: the owner and the content of each slot. Pure (R6, R8, R13).

    free --lease--> leased --submit--> receiving --digest--> sealed --last reference gone--> free
      '------------- offer, stage -----------^   '--abort--> free
    leased --owner proved dead--> free

    free --its pages are given back--> unbacked --they are claimed again--> free     (R9)

A sealed slot is never written. References are counted here and never stored: on adoption they are
counted again from the manifests (R6). `take_dirty` returns the slots whose header must be written.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import IntEnum

from memstore.core.wire.orders import Reserve


class SlotState(IntEnum):
    """The states of R6; the numbers are the ones in the header table."""

    FREE = 0
    LEASED = 1
    RECEIVING = 2
    SEALED = 3


@dataclass(frozen=True, slots=True, order=True)
class Owner:
    """One link of a process: pid and start time, so that a reused pid is another owner, and the link's number (R8)."""

    pid: int
    start: int
    link: int = 0


@dataclass(slots=True)
class Slot:
    """One chunk-sized place."""

    state: SlotState = SlotState.FREE
    nbytes: int = 0
    digest: bytes = b""
    owner: Owner | None = None
    attempt: int = 0
    verified_s: float = 0.0
    refs: int = 0  # shards and incoming replicas that use it while sealed


class SlotTable:
    """Slots by number plus the content index digest -> slot."""

    def __init__(self, slots_count: int = 0) -> None:
        self.slots: list[Slot] = [Slot() for _ in range(slots_count)]
        self.free: list[int] = list(range(slots_count - 1, -1, -1))  # popped from the end: low numbers first
        self.unbacked: list[int] = []  # state FREE as well, and without pages: not leased before it is filled
        self.index: dict[bytes, int] = {}
        self.leases: dict[Owner, set[int]] = {}
        # submitted and not sealed yet: no shard and no incoming replica counts them
        self.submitted: dict[Owner, set[int]] = {}
        self.dirty: set[int] = set()

    def grow(self, slots_count: int) -> None:
        """Add slots up to `slots_count` in all."""
        first = len(self.slots)
        self.slots += [Slot() for _ in range(first, slots_count)]
        self.free[:0] = range(slots_count - 1, first - 1, -1)

    def restore(self, number: int, slot: Slot) -> None:
        """Put back one slot of an adopted arena; sealed ones start without references (R6)."""
        self.slots[number] = slot
        if slot.state is SlotState.SEALED:
            self.index.setdefault(slot.digest, number)
        elif slot.state is SlotState.LEASED and slot.owner is not None:
            self.leases.setdefault(slot.owner, set()).add(number)

    def rebuild_free(self, unbacked: Collection[int] = ()) -> None:
        """Rebuild the free list after `restore` calls; some of the free slots have no pages."""
        free, without = [n for n, slot in enumerate(self.slots) if slot.state is SlotState.FREE], set(unbacked)
        self.unbacked = [n for n in free if n in without]
        self.free = [n for n in reversed(free) if n not in without]

    @property
    def claimed_count(self) -> int:
        """Slots that have pages."""
        return len(self.slots) - len(self.unbacked)

    def empty(self, count: int, kept: Collection[int]) -> list[int]:
        """Make up to `count` free slots unbacked, those that were free for longest, and none of `kept`; return them."""
        chosen = [n for n in self.free if n not in kept][:count]
        without = set(chosen)
        self.free = [n for n in self.free if n not in without]
        self.unbacked = sorted({*self.unbacked, *chosen})
        return sorted(chosen)

    def fill(self, numbers: Collection[int]) -> None:
        """Note that unbacked slots have their pages again."""
        self.unbacked = sorted(set(self.unbacked).difference(numbers))
        self.free[:0] = sorted(numbers, reverse=True)

    def take_dirty(self) -> set[int]:
        """Return the slots changed since the last call."""
        dirty, self.dirty = self.dirty, set()
        return dirty

    # -- leases -------------------------------------------------------------------------------

    def lease(self, owner: Owner, count: int, *, attempt: int) -> list[int]:
        """Give up to `count` free slots to a process (R8)."""
        numbers = [self._take(SlotState.LEASED) for _ in range(min(count, len(self.free)))]
        for number in numbers:
            slot = self.slots[number]
            slot.owner, slot.attempt = owner, attempt
        self.leases.setdefault(owner, set()).update(numbers)
        return numbers

    def submit(self, owner: Owner, numbers: Iterable[int]) -> bool:
        """Take leased slots over from their owner; False, changing nothing, if one is not leased to it (R8)."""
        wanted = list(numbers)
        mine = self.leases.get(owner, set())
        if len(set(wanted)) != len(wanted) or not mine.issuperset(wanted):
            return False
        mine.difference_update(wanted)
        self.submitted.setdefault(owner, set()).update(wanted)
        for number in wanted:
            self._enter(number, SlotState.RECEIVING)
        return True

    def held_count(self, owner: Owner) -> int:
        """Return how many slots a process has that no shard and no incoming replica counts (R10)."""
        return sum(len(held.get(owner, ())) for held in (self.leases, self.submitted))

    def confirm(self, owner: Owner, held: Collection[int]) -> tuple[list[int], list[int]]:
        """Compare the leases with those of a reconnected rank; return (still leased to it, not leased to it) (R8).

        Slots leased to it that it does not name are free again: it never got the grant.
        """
        mine = self.leases.get(owner, set())
        kept = [n for n in held if n in mine]
        stale = [n for n in held if n not in mine]
        for number in mine.difference(held):
            self.release(number)
        if kept:
            self.leases[owner] = set(kept)
        else:
            self.leases.pop(owner, None)
        return kept, stale

    def reclaim(self, owner: Owner) -> int:
        """Free every lease of a process that is proved gone; return how many (R8)."""
        numbers = self.leases.pop(owner, set())
        for number in numbers:
            self.release(number)
        return len(numbers)

    # -- receiving and sealing ----------------------------------------------------------------

    def receive(self) -> int | None:
        """Take a free slot to receive bytes into, or None if there is none."""
        return self._take(SlotState.RECEIVING) if self.free else None

    def seal(self, number: int, digest: bytes, nbytes: int, now: float) -> int:
        """Seal a receiving slot under its digest; return the slot that holds the content, with one reference.

        If the content is there already the slot is freed and the older one is used (content index).
        """
        known = self.index.get(digest)
        if known is not None and known != number and self.slots[known].nbytes == nbytes:
            self.release(number)
            self.slots[known].refs += 1
            return known
        slot = self.slots[number]
        slot.digest, slot.nbytes, slot.verified_s, slot.refs = digest, nbytes, now, slot.refs + 1
        self._disown(number)
        self._enter(number, SlotState.SEALED)
        self.index[digest] = number
        return number

    def lookup(self, digest: bytes, nbytes: int) -> int | None:
        """Return the sealed slot that holds this content, or None."""
        number = self.index.get(digest)
        return number if number is not None and self.slots[number].nbytes == nbytes else None

    def hold(self, number: int) -> None:
        """Add a reference to a sealed slot."""
        self.slots[number].refs += 1

    def unhold(self, number: int) -> None:
        """Drop a reference; the last one frees the slot."""
        slot = self.slots[number]
        slot.refs -= 1
        if slot.refs <= 0:
            self.release(number)

    def quarantine(self, number: int) -> None:
        """Quarantine a slot whose bytes no longer match: never serve or count it again (R30)."""
        slot = self.slots[number]
        if self.index.get(slot.digest) == number:
            del self.index[slot.digest]

    def release(self, number: int) -> None:
        """Make a slot free from any state."""
        slot = self.slots[number]
        if slot.state is SlotState.FREE:
            return
        self.quarantine(number)
        self._disown(number)
        self.slots[number] = Slot()
        self.free.append(number)
        self.dirty.add(number)

    def sweep_unreferenced(self) -> int:
        """Free sealed slots that no manifest named, after adoption; return how many."""
        stray = [n for n, s in enumerate(self.slots) if s.state is SlotState.SEALED and s.refs <= 0]
        for number in stray:
            self.release(number)
        return len(stray)

    def _disown(self, number: int) -> None:
        owner, self.slots[number].owner = self.slots[number].owner, None
        if owner is not None:
            self.leases.get(owner, set()).discard(number)
            submitted = self.submitted.get(owner, set())
            submitted.discard(number)
            if not submitted:
                self.submitted.pop(owner, None)

    def _take(self, state: SlotState) -> int:
        number = self.free.pop()
        self._enter(number, state)
        return number

    def _enter(self, number: int, state: SlotState) -> None:
        self.slots[number].state = state
        self.dirty.add(number)

    def validate(self) -> None:
        """Raise AssertionError naming the first broken invariant; for tests and the simulator."""
        free = {*self.free, *self.unbacked}
        assert len(free) == len(self.free) + len(self.unbacked), (
            "a slot is twice in the free list, or free and unbacked"
        )
        for number, slot in enumerate(self.slots):
            assert (slot.state is SlotState.FREE) == (number in free), f"slot {number} free list disagrees"
            assert slot.refs >= 0, f"slot {number} has {slot.refs} references"
            assert slot.refs == 0 or slot.state is SlotState.SEALED, f"slot {number} is referenced but not sealed"
        for digest, number in self.index.items():
            assert self.slots[number].state is SlotState.SEALED, f"index names slot {number}, which is not sealed"
            assert self.slots[number].digest == digest, f"index of slot {number} names another content"
        for owner, numbers in self.leases.items():
            for number in numbers:
                slot = self.slots[number]
                assert slot.state is SlotState.LEASED, f"slot {number} is leased to {owner} but {slot.state.name}"


# -- share --------------------------------------------------------------------------------------------
# Room that one host reserves for one job. Pure (R10).


@dataclass(slots=True)
class PeerShare:
    """Room reserved for one job on this host, in slots (R10)."""

    attempt: int
    ranks: dict[int, int]  # local rank -> slots
    peer_slots: int
    world_size: int = 0  # shards of another world size count for no rank's part; 0: all count
    versions: int = 1  # how many versions the slots are for
    may_lease: bool = True  # the attempt's ranks may put by now

    @property
    def total(self) -> int:
        """All slots the job may use here."""
        return sum(self.ranks.values()) + self.peer_slots

    def of_version(self, slots_count: int) -> int:
        """Return the part of so many of its slots that is for one version."""
        return slots_count // max(1, self.versions)


def share_of(order: Reserve) -> PeerShare:
    """Return the room that an order names."""
    ranks = dict(order.ranks)
    return PeerShare(order.attempt, ranks, order.peer_slots, order.world_size, order.versions, order.may_lease)
