"""What one host holds: shards on slots, incoming replicas, pins and shares. Pure (R6, R7, R10, R13).

    incoming replica --every chunk sealed, manifest saved--> shard --dropped, not pinned--> gone
      '--aborted--> gone                            '--dropped while pinned--> doomed --unpinned--> gone

A shard may miss chunks (a quarantined slot, R30); it then counts and serves only the chunks it has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from memstore.core.arena.parity_rows import IncomingParity
from memstore.core.arena.slot_table import Owner, PeerShare, SlotTable
from recovery.inventory import Copy, ShardId, ShardSpec

# an incoming replica costs memory of ours; a group of ten hosts with eight ranks each has 160 under way
PEER_INCOMING_MAX = 512
# the name of a local rank's incoming replica; others are named for the sending host, and no host has this name
LOCAL_SENDER = ".own"
Key = tuple[ShardId, str]  # a shard and its digest: copies with different digests are different shards (R14)


@dataclass(slots=True)
class IncomingReplica:
    """A shard under construction: it holds a reference for every chunk that is there."""

    shard: ShardId
    digests: list[bytes]  # b"" where the sender has not named the chunk yet
    slots: list[int | None]
    attempt: int  # the attempt that makes it; a fence aborts older ones (R21)
    part: tuple[int, ...] | None = None  # the only chunks a reader asked for: aborted when it is done
    deadline_s: float = math.inf  # of a partial read of a dropped replica

    @property
    def wanted(self) -> Sequence[int]:
        """Chunk indices that are to come."""
        return range(len(self.slots)) if self.part is None else self.part

    @property
    def missing(self) -> list[int]:
        """Chunk indices that are not there yet."""
        return [i for i in self.wanted if self.slots[i] is None]


@dataclass(slots=True)
class StoredReplica:
    """A stored replica."""

    shard: ShardId
    spec: ShardSpec
    digests: tuple[bytes, ...]
    slots: list[int | None]
    pins: dict[int, float] = field(default_factory=dict)  # pin number -> deadline (R7)
    readers: set[int] = field(default_factory=set)  # pins of processes that copy it out
    is_doomed: bool = False
    is_nameless: bool = False  # its manifest is damaged: nothing here says what the chunks are

    @property
    def missing(self) -> frozenset[int]:
        """Chunk indices this host does not have; all of them if it does not know what they are."""
        return frozenset(i for i, slot in enumerate(self.slots) if slot is None or self.is_nameless)


@dataclass(frozen=True, slots=True)
class JobRoom:
    """What a job has on this host, in slots, and the processes that have slots of it now."""

    job: str
    reserved_count: int
    held_count: int
    pids: list[int]


class ReplicaIndex:
    """Shards by (id, digest) on top of a SlotTable."""

    def __init__(self, table: SlotTable) -> None:
        self.table = table
        self.shards: dict[Key, StoredReplica] = {}
        self.incoming: dict[Key | tuple[ShardId, str, str], IncomingReplica] = {}
        self.parity: dict[ShardId, IncomingParity] = {}  # that is being added up
        self.shares: dict[str, PeerShare] = {}
        self.prepared: dict[str, PeerShare] = {}  # what jobs that restored will claim if they put
        self.lessees: dict[Owner, tuple[str, int]] = {}  # who has leased slots -> job and rank
        self.users: dict[int, list[Key]] = {}  # sealed slot -> shards that use it; sets are slow here
        self.pins_count = 0

    # -- incoming replicas ---------------------------------------------------------------------

    def open_incoming(
        self, name: str, shard: ShardId, digests: Sequence[bytes], *, attempt: int, part: tuple[int, ...] | None = None
    ) -> IncomingReplica:
        """Begin a shard; `name` tells incoming replicas of one shard from several senders apart."""
        replica = IncomingReplica(shard, list(digests), [None] * len(digests), attempt, part)
        self.abort_incoming(name, shard)
        self.incoming[shard, name, "incoming"] = replica
        return replica

    def find_incoming(self, name: str, shard: ShardId) -> IncomingReplica | None:
        """Return an open incoming replica."""
        return self.incoming.get((shard, name, "incoming"))

    def expect(self, replica: IncomingReplica, index: int, digest: bytes) -> bool:
        """Name a chunk of an incoming replica by its digest; False if it was named otherwise before."""
        replica.digests[index] = replica.digests[index] or digest
        return replica.digests[index] == digest

    def hold_known(self, replica: IncomingReplica, index: int, nbytes: int) -> int | None:
        """Take a reference to content that is here already; its slot, or None (R13: a have is a reference)."""
        number = self.table.lookup(replica.digests[index], nbytes)
        if number is not None and replica.slots[index] is None:
            self.table.hold(number)
            replica.slots[index] = number
        return number

    def fill(self, replica: IncomingReplica, index: int, number: int, digest: bytes, nbytes: int, now: float) -> None:
        """Take chunk `index`, verified in receiving slot `number`."""
        used = self.table.seal(number, digest, nbytes, now)
        old = replica.slots[index]
        replica.slots[index] = used
        if old is not None:
            self.table.unhold(old)

    def abort_incoming(self, name: str, shard: ShardId) -> None:
        """Give back everything an incoming replica holds."""
        replica = self.incoming.pop((shard, name, "incoming"), None)
        for number in replica.slots if replica is not None else ():
            if number is not None:
                self.table.unhold(number)

    def abort_older(self, job: str, attempt: int) -> list[ShardId]:
        """Fence older attempts: drop their half-received shards; this host's own were submitted whole (R21)."""
        incoming = self.incoming.items()
        half = [(k, d) for k, d in incoming if k[1] != LOCAL_SENDER and d.part is None]
        old = [k for k, d in half if d.shard.job == job and d.attempt < attempt]
        for key in old:
            self.abort_incoming(key[1], key[0])
        for parity in [p for p in self.parity.values() if p.shard.job == job and p.attempt < attempt]:
            self.abort_parity(parity)
        return [key[0] for key in old]

    def abort_parity(self, parity: IncomingParity) -> None:
        """Give up parity that is being added up; a slot that is being written is given back after that."""
        if self.parity.get(parity.shard) is parity:
            del self.parity[parity.shard]
        parity.is_over = True
        for number, row in parity.rows.items():
            if number != parity.row_in_use:
                self.table.release(row.slot)

    def finish(self, name: str, shard: ShardId, spec: ShardSpec) -> StoredReplica:
        """Store a complete replica whose manifest is saved: its references become the shard's."""
        replica = self.incoming.pop((shard, name, "incoming"))
        if replica.missing:
            self.incoming[shard, name, "incoming"] = replica
            raise ValueError(f"shard {shard} lacks {len(replica.missing)} chunks")
        known = self.shards.get((shard, spec.digest))
        if known is not None:
            # The same bytes came twice, or repair a copy with bad chunks: keep one set of references.
            for index, number in enumerate(replica.slots):
                if known.slots[index] is None and number is not None:
                    known.slots[index] = number
                    self._use(number, (shard, spec.digest))
                elif number is not None:
                    self.table.unhold(number)
            known.is_doomed = known.is_nameless = False
            return known
        return self._store(StoredReplica(shard, spec, tuple(replica.digests), replica.slots))

    def adopt(self, shard: ShardId, spec: ShardSpec, digests: Sequence[bytes], sizes: Sequence[int]) -> StoredReplica:
        """Count a manifest, as one found on adoption; chunks that are not here are missing (R6)."""
        known = self.shards.get((shard, spec.digest)) or StoredReplica(
            shard, spec, tuple(digests), [None] * len(digests)
        )
        for index, (digest, nbytes) in enumerate(zip(digests, sizes, strict=True)):
            number = self.table.lookup(digest, nbytes) if known.slots[index] is None else None
            if number is not None:
                self.table.hold(number)
                known.slots[index] = number
        known.is_nameless = False
        return self._store(known)

    def _store(self, stored: StoredReplica) -> StoredReplica:
        key = (stored.shard, stored.spec.digest)
        self.shards[key] = stored
        for number in stored.slots:
            if number is not None:
                self._use(number, key)
        return stored

    def _use(self, number: int, key: Key) -> None:
        users = self.users.setdefault(number, [])
        if key not in users:
            users.append(key)

    # -- shards -------------------------------------------------------------------------------

    def find(self, shard: ShardId, digest: str | None = None) -> StoredReplica | None:
        """Return a stored replica, by digest or any of that id."""
        if digest is not None:
            return self.shards.get((shard, digest))
        return next((s for (held, _), s in self.shards.items() if held == shard), None)

    def drop(self, shard: ShardId, readers_until_s: float = math.inf) -> list[StoredReplica]:
        """Remove every replica of a shard; those being read are doomed instead. Return what may go now, still whole.

        Readers have until `readers_until_s`: their slots are those of the puts to come (R11). The caller unlinks the
        manifests first and then calls `free` (R7: out is manifest, then slots).
        """
        gone = []
        for key in [k for k in self.shards if k[0] == shard]:
            if self.shards[key].pins:
                self.shards[key].is_doomed = True
            else:
                gone.append(self.shards.pop(key))
        self._hurry_readers(shard, readers_until_s)
        return gone

    def free(self, stored: StoredReplica) -> None:
        """Give back the slots of a replica that `drop` or `unpin` returned."""
        key = (stored.shard, stored.spec.digest)
        for number in stored.slots:
            if number is not None:
                left = [each for each in self.users.pop(number, ()) if each != key]
                if left:
                    self.users[number] = left
                self.table.unhold(number)

    def quarantine(self, number: int) -> list[StoredReplica]:
        """Take a bad slot out of every shard and incoming replica, which now miss that chunk.

        Return those shards (R30).
        """
        self.table.quarantine(number)
        for replica in self.incoming.values():
            for index, slot in enumerate(replica.slots):
                if slot == number:
                    replica.slots[index] = None
                    self.table.unhold(number)
        damaged = [self.shards[key] for key in self.users.pop(number, ()) if key in self.shards]
        for stored in damaged:
            for index, slot in enumerate(stored.slots):
                if slot == number:
                    stored.slots[index] = None
                    self.table.unhold(number)
        return damaged

    def pin(self, stored: StoredReplica, deadline_s: float, *, is_reader: bool = False) -> int:
        """Keep a replica while a reader uses it, at most until the deadline (R7)."""
        self.pins_count += 1
        stored.pins[self.pins_count] = deadline_s
        stored.readers &= stored.pins.keys()
        if is_reader:
            stored.readers.add(self.pins_count)
        return self.pins_count

    def _hurry_readers(self, shard: ShardId, deadline_s: float) -> None:
        for (held, _), stored in self.shards.items():
            if held == shard and stored.is_doomed:
                for pin in stored.readers & stored.pins.keys():
                    stored.pins[pin] = min(stored.pins[pin], deadline_s)
        for replica in self.incoming.values():
            if replica.shard == shard and replica.part is not None:
                replica.deadline_s = min(replica.deadline_s, deadline_s)

    def unpin(self, stored: StoredReplica, pin: int) -> StoredReplica | None:
        """Release a pin; return the replica if it was doomed and nothing pins it any more."""
        stored.pins.pop(pin, None)
        return self._reap(stored)

    def expire_pins(self, now: float) -> list[StoredReplica]:
        """Drop pins past their deadline: their readers failed. Return replicas that may go."""
        gone = []
        for stored in list(self.shards.values()):
            expired = [p for p, deadline in stored.pins.items() if deadline < now]
            for pin in expired:
                del stored.pins[pin]
            doomed = self._reap(stored) if expired else None
            if doomed is not None:
                gone.append(doomed)
        return gone

    def _reap(self, stored: StoredReplica) -> StoredReplica | None:
        if not stored.is_doomed or stored.pins:
            return None
        return self.shards.pop((stored.shard, stored.spec.digest), None)

    def copies(self, host_id: str, job: str | None = None) -> list[Copy]:
        """Return the inventory: replicas that are not doomed, with their missing chunks (R21)."""
        return [
            Copy(s.shard, s.spec, host_id, s.missing)
            for s in self.shards.values()
            if not s.is_doomed and job in (None, s.shard.job)
        ]

    # -- shares (R10) -------------------------------------------------------------------------

    def set_share(self, job: str, share: PeerShare) -> None:
        """Reserve room for a job in place of its earlier share; the caller has grown the arena to `slots_needed`."""
        self.shares[job] = share
        self.prepared.pop(job, None)

    def end_preparation(self, job: str, before: int | None = None) -> None:
        """Keep no more room for what a job may claim: its ranks here are gone, or its attempt `before` has begun."""
        share = self.prepared.get(job)
        if share is not None and (before is None or share.attempt < before):
            del self.prepared[job]

    def drop_share(self, job: str, attempt: int) -> None:
        """Give up the room of a removed job, unless an attempt opened since then has claimed it again."""
        self.end_preparation(job, before=attempt + 1)
        share = self.shares.get(job)
        if share is not None and share.attempt <= attempt:
            del self.shares[job]

    def rooms(self) -> list[JobRoom]:
        """Return what each job has here, the one that has reserved most first."""
        pids: dict[str, set[int]] = {}
        for owner, (job, _) in self.lessees.items():
            if self.table.held_count(owner):
                pids.setdefault(job, set()).add(owner.pid)
        reserved = {stored.shard.job: 0 for stored in self.shards.values()}
        reserved |= {job: share.total for job, share in self.shares.items() if share.total}
        most_first = sorted(reserved.items(), key=lambda item: (-item[1], item[0]))
        return [JobRoom(job, slots, self._held_count(job), sorted(pids.get(job, ()))) for job, slots in most_first]

    def slots_needed(self, job: str, share: PeerShare) -> int:
        """Return the slots the arena must have for this share beside all other jobs' shares and strays.

        Another job may hold more than its share: a restored step, until the job puts again (R26).
        """
        others = [(name, s) for name, s in self.shares.items() if name != job]
        taken = sum(max(self._claim_of(name, s), self._held_count(name)) for name, s in others)
        shared = {job, *self.shares}
        unshared = sum(len(s.slots) for s in self.shards.values() if s.shard.job not in shared)
        return taken + unshared + self._claim_of(job, share)

    def beside(self, job: str, share: PeerShare) -> int:
        """Return the slots that a share is better off with, and can do without for a while (R10).

        Those that living processes of older attempts have leased, and those of a kept step of another world size that
        lies in the place of one version.
        """
        leased = sum(
            self.table.slots[number].attempt < share.attempt
            for owner, numbers in self.table.leases.items()
            if self.lessees.get(owner, (job, 0))[0] == job
            for number in numbers
        )
        return leased + min(self._foreign_count(job, share), share.of_version(share.total))

    def _claim_of(self, job: str, share: PeerShare) -> int:
        """A share and its kept step of another world size: beyond one version's place that comes on top (R10)."""
        return share.total + max(0, self._foreign_count(job, share) - share.of_version(share.total))

    def _foreign_count(self, job: str, share: PeerShare) -> int:
        return sum(len(s.slots) for s in self.shards.values() if s.shard.job == job and _is_foreign(s, share))

    def spare_count(self) -> int:
        """Free slots that no present job's reservation or first put needs beside what its replicas lie in (R9)."""
        wanted: dict[str, int] = {}
        for shares in (self.shares, self.prepared):
            for name, share in shares.items():
                wanted[name] = max(wanted.get(name, 0), self._unmet_count(name, share))
        return max(0, len(self.table.free) - sum(wanted.values()))

    def _unmet_count(self, job: str, share: PeerShare) -> int:
        """Return how many slots of a share are still empty.

        What peers have beyond their part fills no rank's part, and a step of another world size fills none at all.
        """
        peer_slots: set[int] = set()
        by_rank: dict[int, set[int]] = {rank: set() for rank in share.ranks}
        seen: set[int] = set()  # a slot that several replicas lie in fills one part
        for stored in self.shards.values():
            if stored.shard.job == job and not _is_foreign(stored, share):
                part = peer_slots if stored.shard.is_parity else by_rank.get(stored.shard.rank, peer_slots)
                part.update(slot for slot in stored.slots if slot is not None and slot not in seen)
                seen |= part
        unmet = sum(max(0, slots - len(by_rank[rank])) for rank, slots in share.ranks.items())
        return unmet + max(0, share.peer_slots - len(peer_slots))

    def _held_count(self, job: str) -> int:
        """Return the slots of a job's replicas; those that several of them share count once."""
        held = (stored.slots for stored in self.shards.values() if stored.shard.job == job)
        return len({slot for slots in held for slot in slots if slot is not None})

    def used_by_rank(self, job: str, rank: int) -> int:
        """Return the slots that a local rank's stored and incoming shards count for."""
        return self._count(job, lambda shard: shard.rank == rank and not shard.is_parity)

    def used_by_peers(self, job: str) -> int:
        """Return the slots that other hosts' shards of the job, and their parity, count for."""
        share = self.shares.get(job)
        local = set(share.ranks) if share is not None else set()
        added = (p.rows_count for p in self.parity.values() if p.shard.job == job and not p.stored_rows)
        return sum(added) + self._count(job, lambda shard: shard.is_parity or shard.rank not in local)

    def _count(self, job: str, is_meant: Callable[[ShardId], bool]) -> int:
        share = self.shares.get(job)
        held = [s for s in self.shards.values() if s.shard.job == job and is_meant(s.shard)]
        stored = sum(len(s.slots) for s in held if share is None or not _is_foreign(s, share))
        repaired = {s.shard for s in held if s.missing}  # what comes takes the places that are counted
        incoming = (d for d in self.incoming.values() if d.shard.job == job and is_meant(d.shard))
        return stored + self._slots_for(d for d in incoming if d.part is not None or d.shard not in repaired)

    def _slots_for(self, replicas: Iterable[IncomingReplica]) -> int:
        """Return the slots that incoming replicas take in the end.

        Of what is kept for readers a chunk that a stored replica has takes none, and one that several have takes one.
        """
        whole_count, empty_count, filled = 0, 0, set[int]()
        for replica in replicas:
            whole_count += len(replica.slots) if replica.part is None else 0
            for slot in (replica.slots[i] for i in replica.part or ()):
                if slot is None:
                    empty_count += 1
                elif slot not in self.users:
                    filled.add(slot)
        return whole_count + empty_count + len(filled)

    def may_lease(self, job: str, attempt: int) -> bool:
        """Return whether an attempt's ranks may put by now: until then a restore has the version in flight (R10)."""
        known = (self.shares.get(job), self.prepared.get(job))
        return any(share is not None and share.attempt == attempt and share.may_lease for share in known)

    def leasable(self, job: str, rank: int, owner: Owner) -> int:
        """Free slots a rank may still lease: its share less what its shards and leases use.

        A kept step of another world size lies in the place of one version. Then no rank takes two, while another one
        or the peers have no place for their first.
        """
        share = self.shares.get(job)
        if share is None:
            return 0
        allowed = max(0, share.ranks.get(rank, 0) - self.used_by_rank(job, rank) - self.table.held_count(owner))
        if not any(key[0].job == job and _is_foreign(stored, share) for key, stored in self.shards.items()):
            return allowed
        taken = {r: self.used_by_rank(job, r) for r in share.ranks if r != rank}
        for other, place in self.lessees.items():
            if other != owner and place[0] == job and place[1] in taken:
                taken[place[1]] += self.table.held_count(other)
        owed = sum(max(0, share.of_version(share.ranks[r]) - count) for r, count in taken.items())
        owed += max(0, share.of_version(share.peer_slots) - self.used_by_peers(job))
        return min(allowed, max(0, len(self.table.free) - owed))

    def peer_refusal(self, shard: ShardId, chunks_count: int, known: StoredReplica | None = None) -> str | None:
        """Say why an incoming copy does not fit the peer share, or None; `known` is what is here of it already.

        The places of the chunks that it lacks are counted with it.
        """
        share = self.shares.get(shard.job)
        incoming = [replica for (_, sender, *_), replica in self.incoming.items() if sender != LOCAL_SENDER]
        unfinished_count = sum(replica.part is None for replica in incoming)
        if unfinished_count >= PEER_INCOMING_MAX:
            return f"{unfinished_count} shards of other hosts are unfinished here, the limit is {PEER_INCOMING_MAX}"
        expected = self._slots_for(incoming)
        if expected + chunks_count > self.table.claimed_count:
            return f"{expected} chunks of unfinished shards are expected, {chunks_count} more are more than slots"
        if share is None:
            return self._unshared_refusal(shard.job, chunks_count)
        if shard.rank in share.ranks:
            return None  # its own rank's shard comes back: that is the in-flight share
        if known is not None and not _is_foreign(known, share):
            return None
        used = self.used_by_peers(shard.job)
        if used + chunks_count <= share.peer_slots:
            return None
        return f"peer share full: {used} of {share.peer_slots} slots used, {chunks_count} needed"

    def _unshared_refusal(self, job: str, slots_count: int) -> str | None:
        """Say why what comes of a job that has reserved nothing here does not fit, or None."""
        # What is under way of such jobs holds no slots yet for what has not arrived.
        awaited = sum(len(d.missing) for d in self.incoming.values() if d.shard.job not in self.shares)
        awaited += sum(p.rows_count - len(p.rows) for p in self.parity.values() if p.shard.job not in self.shares)
        free = max(0, len(self.table.free) - self._promised() - awaited)
        if slots_count <= free:
            return None
        return f"no room is reserved for job {job!r} here and {free} slots are free, {slots_count} needed"

    def parity_refusal(self, parity: ShardId, rows_count: int) -> str | None:
        """Say why parity with so many rows does not fit the peer share, or None; rows that it has already count."""
        share, begun = self.shares.get(parity.job), self.parity.get(parity)
        more_count = rows_count - (begun.rows_count if begun is not None else 0)
        if more_count <= 0 or self.find(parity) is not None:
            return None
        if share is None:
            return self._unshared_refusal(parity.job, more_count)
        used = self.used_by_peers(parity.job)
        if used + more_count <= share.peer_slots:
            return None
        return f"peer share full: {used} of {share.peer_slots} slots used, {more_count} needed for rows of parity"

    def _promised(self) -> int:
        """Free slots that shares still have a claim on."""
        claimed = sum(s.total for s in self.shares.values())
        used = sum(len(s.slots) for s in self.shards.values() if s.shard.job in self.shares)
        leased = sum(len(numbers) for numbers in self.table.leases.values())
        return max(0, claimed - used - leased)


def _is_foreign(stored: StoredReplica, share: PeerShare) -> bool:
    return share.world_size not in (0, stored.spec.world_size)
