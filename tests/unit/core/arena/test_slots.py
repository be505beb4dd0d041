"""The slot table under any order of leases, submissions, seals and deaths keeps its invariants (R6, R8, R13)."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from memstore.core.arena.replica_index import PEER_INCOMING_MAX, ReplicaIndex, StoredReplica
from memstore.core.arena.slot_table import Owner, PeerShare, SlotState, SlotTable
from recovery.inventory import ShardId, ShardSpec

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


# -- replica index ------------------------------------------------------------------------------------
# A host's replica index under any order of incoming replicas, drops, pins and damage.
#
# References add up, pins hold (R7, R10, R13).


INDEX_DIGESTS = [b"a" * 16, b"b" * 16, b"c" * 16, b"d" * 16]
SHARDS = [ShardId("job", 1, step, rank) for step in (1, 2) for rank in (0, 1)]
SENDERS = ["h1", "h2"]


class Replicas(RuleBasedStateMachine):
    """After any sequence, every reference of a slot is one chunk of a shard or an incoming replica."""

    def __init__(self) -> None:
        super().__init__()
        self.table = SlotTable(16)
        self.index = ReplicaIndex(self.table)
        self.pins: list[tuple[StoredReplica, int]] = []

    @rule(
        sender=st.sampled_from(SENDERS),
        shard=st.sampled_from(SHARDS),
        attempt=st.integers(1, 2),
        digests=st.lists(st.sampled_from(INDEX_DIGESTS), min_size=1, max_size=3),
    )
    def open_incoming(self, sender: str, shard: ShardId, attempt: int, digests: list[bytes]) -> None:
        """A sender begins, or begins again; what is here already is held at once."""
        replica = self.index.open_incoming(sender, shard, digests, attempt=attempt)
        for index in range(len(digests)):
            self.index.hold_known(replica, index, 8)

    @rule(sender=st.sampled_from(SENDERS), shard=st.sampled_from(SHARDS))
    def fill_and_finish(self, sender: str, shard: ShardId) -> None:
        """The bytes of every missing chunk arrive; the incoming replica becomes a shard."""
        replica = self.index.find_incoming(sender, shard)
        if replica is None:
            return
        for index in replica.missing:
            number = self.table.receive()
            if number is None:
                return
            self.index.fill(replica, index, number, replica.digests[index], 8, 1.0)
        name = b"".join(replica.digests).hex()
        spec = ShardSpec(name, 8 * len(replica.digests), 8, len(replica.digests), 2)
        stored = self.index.finish(sender, shard, spec)
        assert not stored.missing
        assert not stored.is_doomed

    @rule(sender=st.sampled_from(SENDERS), shard=st.sampled_from(SHARDS))
    def abort(self, sender: str, shard: ShardId) -> None:
        """A sender is gone."""
        self.index.abort_incoming(sender, shard)

    @rule()
    def fence(self) -> None:
        """Half-received shards of older attempts go (R21)."""
        self.index.abort_older("job", 2)
        assert all(replica.attempt >= 2 for replica in self.index.incoming.values())

    @rule(shard=st.sampled_from(SHARDS))
    def drop(self, shard: ShardId) -> None:
        """Out: manifest first, then slots; a pinned shard stays until it is read."""
        for stored in self.index.drop(shard):
            assert not stored.pins
            self.index.free(stored)
        assert all(s.is_doomed for (held, _), s in self.index.shards.items() if held == shard)

    @precondition(lambda self: self.index.shards)
    @rule(data=st.data(), deadline_s=st.floats(0, 10))
    def pin(self, data: st.DataObject, deadline_s: float) -> None:
        """A reader keeps a shard."""
        key = data.draw(st.sampled_from(sorted(self.index.shards)))
        stored = self.index.shards[key]
        self.pins.append((stored, self.index.pin(stored, deadline_s)))

    @precondition(lambda self: self.pins)
    @rule()
    def unpin(self) -> None:
        """A reader is done; the last one lets a doomed shard go."""
        stored, pin = self.pins.pop()
        gone = self.index.unpin(stored, pin)
        if gone is not None:
            self.index.free(gone)

    @rule(now=st.floats(0, 12))
    def expire(self, now: float) -> None:
        """Readers past their deadline failed: they hold nothing any more."""
        for stored in self.index.expire_pins(now):
            self.index.free(stored)
        assert all(d >= now for s in self.index.shards.values() for d in s.pins.values())

    @rule(data=st.data())
    def quarantine(self, data: st.DataObject) -> None:
        """A slot that went bad is missing from every shard on it and never found again (R30)."""
        sealed = [n for n, s in enumerate(self.table.slots) if s.state is SlotState.SEALED]
        if not sealed:
            return
        number = data.draw(st.sampled_from(sealed))
        damaged = self.index.quarantine(number)
        assert all(stored.missing for stored in damaged)
        assert all(number not in s.slots for s in self.index.shards.values())

    @invariant()
    def adds_up(self) -> None:
        """Slots are referenced exactly as often as shards and incoming replicas use them."""
        self.table.validate()
        refs = [0] * len(self.table.slots)
        for holder in (*self.index.shards.values(), *self.index.incoming.values()):
            for number in holder.slots:
                if number is not None:
                    refs[number] += 1
        assert refs == [slot.refs for slot in self.table.slots]


Replicas.TestCase.settings = settings(max_examples=80, stateful_step_count=30, derandomize=True, deadline=None)
TestReplicas = Replicas.TestCase


def stored(replica_index: ReplicaIndex, shard: ShardId, count: int) -> StoredReplica:
    """Store a shard of `count` chunks."""
    digests = [f"{shard.step}-{shard.rank}-{n}".encode().ljust(16) for n in range(count)]
    replica = replica_index.open_incoming("h", shard, digests, attempt=1)
    for index in range(count):
        number = replica_index.table.receive()
        assert number is not None
        replica_index.fill(replica, index, number, digests[index], 8, 0.0)
    return replica_index.finish("h", shard, ShardSpec(f"{shard}", count * 8, 8, count, 2))


def test_ranks_and_peers_cannot_starve_each_other() -> None:
    """Leases come from the rank's share and copies from the peers' share, independently of each other (R10)."""
    replica_index = ReplicaIndex(SlotTable(20))
    replica_index.set_share("job", PeerShare(1, {0: 4}, peer_slots=4))
    assert replica_index.leasable("job", 0, OWNERS[0]) == 4
    stored(replica_index, SHARDS[1], 3)  # rank 1 is a peer
    assert replica_index.leasable("job", 0, OWNERS[0]) == 4
    assert replica_index.peer_refusal(SHARDS[3], 1) is None
    assert "3 of 4 slots used, 2 needed" in str(replica_index.peer_refusal(SHARDS[3], 2))
    stored(replica_index, SHARDS[0], 3)
    replica_index.table.lease(OWNERS[0], 1, attempt=1)
    assert replica_index.leasable("job", 0, OWNERS[0]) == 0
    assert replica_index.peer_refusal(SHARDS[0], 9) is None  # its own rank's shard comes back


def test_a_step_of_another_world_size_takes_no_ranks_part_of_the_share() -> None:
    """Two ranks' large shards do not keep eight ranks from their first put; the excess comes on top (R10, R27)."""
    replica_index = ReplicaIndex(SlotTable(20))
    stored(replica_index, SHARDS[0], 6)  # the helper's shards are of a world of 2
    stored(replica_index, SHARDS[1], 6)
    share = PeerShare(2, {0: 2, 4: 2}, peer_slots=5, world_size=8, versions=2)
    assert replica_index.slots_needed("job", share) == 9 + 12 - 9 // 2
    replica_index.set_share("job", share)
    assert [replica_index.leasable("job", rank, OWNERS[0]) for rank in (0, 4)] == [2, 2]
    assert replica_index.used_by_peers("job") == 0
    replica_index.set_share("job", PeerShare(2, {0: 2, 4: 2}, peer_slots=5, world_size=2, versions=2))
    assert replica_index.leasable("job", 0, OWNERS[0]) == 0


def test_beside_a_step_of_another_world_size_every_rank_has_a_place_for_one_version_first() -> None:
    """The step lies in the place of one version: the rank that asks first may not lease both of its own (R10)."""
    replica_index = ReplicaIndex(SlotTable(8))
    stored(replica_index, SHARDS[0], 3)  # the helper's shards are of a world of 2
    share = PeerShare(2, {0: 4, 4: 4}, peer_slots=0, world_size=8, versions=2)
    replica_index.set_share("job", share)
    assert (replica_index.slots_needed("job", share), replica_index.beside("job", share)) == (8, 3)
    first, second = OWNERS[:2]
    assert replica_index.leasable("job", 0, first) == 3
    replica_index.table.lease(first, 3, attempt=2)
    replica_index.lessees[first] = ("job", 0)
    assert replica_index.leasable("job", 4, second) == 2
    newer = PeerShare(3, {0: 4, 4: 4}, peer_slots=0, world_size=8, versions=2)
    assert replica_index.beside("job", newer) == 3 + 3  # the first one's process lives, and is of an older attempt


def test_what_fills_no_part_of_a_share_makes_none_of_it_spare() -> None:
    """Neither a kept step of another world size nor peers beyond their part leave a rank without slots (R9, R10)."""
    replica_index = ReplicaIndex(SlotTable(8))
    stored(replica_index, SHARDS[0], 3)  # the helper's shards are of a world of 2
    replica_index.set_share("job", PeerShare(2, {0: 3}, peer_slots=0, world_size=7))
    assert (replica_index.leasable("job", 0, OWNERS[0]), replica_index.spare_count()) == (3, 2)
    assert replica_index.slots_needed("new", PeerShare(1, {0: 1}, peer_slots=0)) == 3 + 3 - 3 // 1 + 1
    replica_index.set_share("job", PeerShare(2, {4: 3}, peer_slots=2, world_size=2))  # rank 0 is a peer
    assert (replica_index.leasable("job", 4, OWNERS[0]), replica_index.spare_count()) == (3, 2)
    replica_index.set_share("job", PeerShare(2, {4: 1}, peer_slots=2, world_size=2))
    assert replica_index.spare_count() == 4


def test_reads_that_share_chunks_take_no_room_of_peers_twice() -> None:
    """A stored replica's chunks count for it, what several reads hold once; reads are no unfinished shards (R10)."""
    replica_index = ReplicaIndex(SlotTable(8))
    replica_index.set_share("job", PeerShare(1, {0: 4}, peer_slots=4))
    kept = stored(replica_index, SHARDS[0], 3)
    for number in range(PEER_INCOMING_MAX):
        read = replica_index.open_incoming(f"direct-{number}", SHARDS[1], kept.digests, attempt=1, part=(0, 1, 2))
        assert all(replica_index.hold_known(read, index, 8) is not None for index in range(3))
    assert replica_index.peer_refusal(SHARDS[1], 3) is None
    replica_index.free(replica_index.drop(SHARDS[0])[0])
    assert replica_index.used_by_peers("job") == 3
    assert "3 of 4 slots used, 3 needed" in str(replica_index.peer_refusal(SHARDS[1], 3))


def test_a_stranger_gets_only_what_no_process_has_a_claim_on() -> None:
    """Copies of a job without a share here take free slots that no share was promised."""
    replica_index = ReplicaIndex(SlotTable(10))
    replica_index.set_share("job", PeerShare(1, {0: 4}, peer_slots=4))
    other = ShardId("other", 1, 1, 0)
    assert replica_index.peer_refusal(other, 2) is None
    assert "2 slots are free, 3 needed" in str(replica_index.peer_refusal(other, 3))


def test_what_another_job_holds_beyond_its_share_is_nobodys_room() -> None:
    """A restored step may be larger than its rank's share; the arena grows by it for the next job (R10)."""
    replica_index = ReplicaIndex(SlotTable(20))
    replica_index.set_share("job", PeerShare(1, {0: 1}, peer_slots=1))
    asked = PeerShare(1, {0: 4}, peer_slots=4)
    stored(replica_index, SHARDS[0], 2)
    assert replica_index.slots_needed("new", asked) == 2 + 8
    stored(replica_index, SHARDS[1], 7)
    assert replica_index.slots_needed("new", asked) == 2 + 7 + 8
    assert replica_index.slots_needed("job", PeerShare(1, {0: 1}, peer_slots=1)) == 2


def test_a_removed_job_gives_its_room_back() -> None:
    """Its share counts for no rank any more; one that a newer attempt of the name has claimed since stays (R10)."""
    replica_index = ReplicaIndex(SlotTable(8))
    replica_index.set_share("old", PeerShare(3, {0: 4}, peer_slots=4))
    assert replica_index.slots_needed("new", PeerShare(1, {0: 4}, peer_slots=4)) == 16
    replica_index.drop_share("old", 2)
    assert replica_index.slots_needed("new", PeerShare(1, {0: 4}, peer_slots=4)) == 16
    replica_index.drop_share("old", 3)
    assert replica_index.slots_needed("new", PeerShare(1, {0: 4}, peer_slots=4)) == 8
    replica_index.drop_share("unknown", 1)
