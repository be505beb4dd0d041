"""The replica index with its arena: bytes, headers and manifests in the order R7 demands. One lock; decides nothing.

In:  bytes, digest, slot header, manifest (temp + rename), then the caller acknowledges.
Out: unlink the manifest, then free the slots.

Digesting and copying happen outside the lock, on slots that no other thread may write (receiving) or
that are referenced (sealed). Read core/arena/replica_index.py and core/arena/slot_table.py first.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Generic, TypeVar

from memstore.core.arena.adoption import adopt
from memstore.core.arena.claimed_memory import ClaimedMemory, Limit
from memstore.core.arena.memory_ports import Clock, ManifestFiles, SealFollower, SlotHeader, SlotMemory
from memstore.core.arena.parity_rows import AddInto, IncomingParity, ParityBefore, ParityRow, add_into
from memstore.core.arena.replica_index import LOCAL_SENDER, IncomingReplica, ReplicaIndex, StoredReplica
from memstore.core.arena.slot_table import Owner, PeerShare, SlotState, SlotTable
from memstore.core.format.manifest import (
    Chunk,
    Manifest,
    chunk_digest,
    chunk_sizes,
    decode_manifest,
    encode_manifest,
    manifest_name,
    shard_digest,
    spec_of,
    summand_manifest,
)
from memstore.errors import CapacityError, ConfigError, DigestMismatch, IntegrityError
from recovery.inventory import ShardId
from recovery.parity import ParitySet, set_of

M_co = TypeVar("M_co", bound=SlotMemory, covariant=True)
F_co = TypeVar("F_co", bound=ManifestFiles, covariant=True)
_NO_DIGEST, _WITHOUT_OWNER = bytes(16), Owner(0, 0)
PIN_S = 600.0  # longest a reader may keep a replica (R7)
# After its step was dropped a reader keeps a replica only this long: puts wait for its slots, by default 5 s (R11).
DROPPED_READ_S = 2.0
MapChunks = Callable[[Callable[[memoryview], bytes], Sequence[memoryview]], Iterable[bytes]]
VERIFY_AGE_S = 300.0  # an older slot is digested again before it stands in for an offered chunk (R13)


class ReplicaStore(Generic[M_co, F_co]):
    """Everything one host stores, behind one lock."""

    def __init__(
        self,
        arena: M_co,
        manifests: F_co,
        *,
        chunk_bytes: int,
        limit: Limit,
        clock: Clock,
        is_alive: Callable[[int, int], bool],
        lock: AbstractContextManager[Any],
        room_lock: AbstractContextManager[Any],
        parity_lock: AbstractContextManager[Any],
        add: AddInto = add_into,
    ) -> None:
        """Adopt what an earlier holder left (R6).

        Args:
            arena: The memory of its slots.
            manifests: The manifests of what is stored.
            chunk_bytes: The size of a slot.
            limit: The most that it may claim.
            clock: Says when slots were verified, and when pins end.
            is_alive: Says of (pid, start time) whether that process lives: its leases outlive the holder (R8).
            lock: The lock of all that it has; a thread may take it again.
            room_lock: Held while the arena grows or shrinks.
            parity_lock: Held while a chunk is added to a row of parity.
            add: Adds it.
        """
        self.lock, self.parity_lock, self.add_into = lock, parity_lock, add
        self.arena, self.manifests, self.clock = arena, manifests, clock
        self.chunk_bytes = chunk_bytes
        self.table = SlotTable(arena.slots_count)
        self.index = ReplicaIndex(self.table)
        self.room = ClaimedMemory(
            arena, self.index, lock, room_lock, lambda: self.flush(), chunk_bytes=chunk_bytes, limit=limit
        )
        self.on_damaged: Callable[[StoredReplica], None] = lambda stored: None  # gets copies found damaged on the way
        self.adoption_notes = adopt(arena, manifests, self.index, clock.time(), is_alive)
        self.flush()

    def close(self) -> None:
        """Unmap; the files stay for the next holder."""
        with self.lock:
            self.arena.close()
            self.manifests.close()

    # -- headers ------------------------------------------------------------------------------

    def flush(self) -> None:
        """Write the headers of changed slots; the caller holds the lock."""
        for number in sorted(self.table.take_dirty()):
            slot = self.table.slots[number]
            owner = slot.owner or _WITHOUT_OWNER
            header = SlotHeader(
                slot.state,
                slot.nbytes,
                slot.digest or _NO_DIGEST,
                owner.pid,
                slot.attempt,
                owner.start,
                owner.link,
                slot.verified_s,
            )
            self.arena.headers.write(number, header)

    # -- room (R9, R10) -----------------------------------------------------------------------

    def claim(self, job: str, share: PeerShare) -> None:
        """Reserve room for a job; see ClaimedMemory.claim."""
        self.room.claim(job, share)

    def ensure_free(self, count: int) -> None:
        """Have so many slots free for staging; see ClaimedMemory.ensure_free."""
        self.room.ensure_free(count)

    def lease(self, owner: Owner, job: str, rank: int, attempt: int) -> list[int]:
        """Lease the slots that the rank's share still allows beside its own (R10)."""
        with self.lock:
            count = self.index.leasable(job, rank, owner) if self.index.may_lease(job, attempt) else 0
            numbers = self.table.lease(owner, count, attempt=attempt)
            self.index.lessees = {o: place for o, place in self.index.lessees.items() if self.table.held_count(o)}
            self.index.lessees[owner] = (job, rank)
            self.flush()
            return numbers

    def confirm(self, owner: Owner, held: Sequence[int]) -> list[int]:
        """Keep those leases of a process that it names; return what it names and has not leased (R8)."""
        with self.lock:
            _, stale = self.table.confirm(owner, held)
            self.flush()
            return stale

    def reclaim(self, owner: Owner) -> None:
        """Free what a process leased and did not submit."""
        with self.lock:
            self.table.reclaim(owner)
            self.flush()

    def reclaim_dead(self, known: Collection[Owner], is_alive: Callable[[Owner], bool]) -> None:
        """Free what processes leased that are neither known nor alive, as those of a life of this holder before."""
        with self.lock:
            for owner in [o for o in self.table.leases if o not in known and not is_alive(o)]:
                self.table.reclaim(owner)
            self.flush()

    # -- a put (R7, R14) ----------------------------------------------------------------------

    def seal_local(
        self,
        shard: ShardId,
        *,
        world_size: int,
        layout: bytes,
        nbytes: int,
        slots: Sequence[int],
        attempt: int,
        given: Sequence[bytes] | None = None,
        follower: SealFollower | None = None,
    ) -> StoredReplica:
        """Digest submitted slots, in order, unless their digests are given; store the shard. They are receiving."""
        left = set(slots)  # not in the incoming replica yet
        try:
            sizes = chunk_sizes(nbytes, self.chunk_bytes)
            digests = list(given or ())
            for digest in () if given else self._digested(slots, sizes):
                digests.append(digest)
                if follower is not None:
                    follower.add(digest)  # its pushes may send this chunk now
            self.verify_old(digests, sizes)  # fresh bytes are dropped only for content that is still good
            # If the digest was given, the slot is not verified yet: it is before it answers for another chunk (R13).
            verified_s = 0.0 if given else self.clock.time()
            with self.lock:
                replica = self.index.open_incoming(LOCAL_SENDER, shard, digests, attempt=attempt)
                for index, (number, digest, size) in enumerate(zip(slots, digests, sizes, strict=True)):
                    left.discard(number)
                    self.index.fill(replica, index, number, digest, size, verified_s)
                self.flush()
            chunks = tuple(Chunk(d, n) for d, n in zip(digests, sizes, strict=True))
            manifest = Manifest(shard, world_size, layout, nbytes, self.chunk_bytes, chunks)
            with self.lock:
                stored = self.finish(LOCAL_SENDER, encode_manifest(manifest), manifest)
                if follower is not None:
                    follower.seal(stored)
            return stored
        except BaseException:
            self.abort_incoming(LOCAL_SENDER, shard)
            self.give_back(sorted(left))
            raise

    def _digested(self, slots: Sequence[int], sizes: Sequence[int]) -> Iterator[bytes]:
        return (chunk_digest(self.arena.view(number, size)) for number, size in zip(slots, sizes, strict=True))

    @property
    def arena_identity(self) -> str:
        """Return the identity of this arena, by which another one in its place is known."""
        return self.arena.identity

    def take_over(self, shard: ShardId, owner: Owner, slots: Sequence[int] | None) -> tuple[StoredReplica | None, bool]:
        """Take slots, if any, from the process that leases them; say whether it had them. One step with a look.

        Returns the shard too, if it is stored already.
        """
        with self.lock:
            return self.index.find(shard), slots is not None and self.table.submit(owner, slots)

    def abort_older(self, job: str, attempt: int) -> None:
        """Give up the incoming replicas of a job's older attempts."""
        with self.lock:
            self.index.abort_older(job, attempt)
            self.flush()

    def give_back(self, slots: Sequence[int]) -> None:
        """Free submitted slots of a put that will not be stored."""
        with self.lock:
            for number in slots:
                self.table.release(number)
            self.flush()

    # -- receiving from a peer or from durable storage ------------------------------------------

    def open_incoming(
        self,
        name: str,
        shard: ShardId,
        digests: Sequence[bytes],
        sizes: Sequence[int],
        attempt: int,
        part: tuple[int, ...] | None = None,
    ) -> IncomingReplica:
        """Begin to bring a shard to a reader, or a part of it; hold what is here of it, however long unverified."""
        with self.lock:
            replica = self.index.open_incoming(name, shard, digests, attempt=attempt, part=part)
            for index in replica.wanted:
                self.index.hold_known(replica, index, sizes[index])
        return replica

    def expect(
        self, replica: IncomingReplica, indices: Sequence[int], digests: Sequence[bytes], sizes: Sequence[int]
    ) -> list[int]:
        """Name chunks of an incoming replica, hold those that are here, return the others (R13). IntegrityError."""
        self.verify_old(digests, sizes)
        with self.lock:
            if not any(replica is known for known in self.index.incoming.values()):
                raise IntegrityError(f"the incoming replica of {replica.shard} was aborted meanwhile: offer it again")
            for index, digest, size in zip(indices, digests, sizes, strict=True):
                if not self.index.expect(replica, index, digest):
                    raise IntegrityError(f"chunk {index} of {replica.shard} was announced with two digests")
                self.index.hold_known(replica, index, size)
            return [i for i in indices if replica.slots[i] is None]

    def verify_old(self, digests: Sequence[bytes], sizes: Sequence[int]) -> None:
        """Digest old slots again before they answer for offered chunks (R13)."""
        now = self.clock.time()
        with self.lock:
            known = [self.table.lookup(d, n) for d, n in zip(digests, sizes, strict=True)]
            # A time in the future means that the clock was set back: it says nothing.
            old = {n for n in known if n is not None and abs(now - self.table.slots[n].verified_s) > VERIFY_AGE_S}
        self.verify_slots(old)

    def take_slots(self, count: int) -> list[int]:
        """Take up to `count` slots to receive into; CapacityError if none is free."""
        with self.lock:
            numbers = [n for n in (self.table.receive() for _ in range(count)) if n is not None]
            self.flush()
        if count and not numbers:
            raise CapacityError("no free slot to receive into: the arena's shares are used up")
        return numbers

    def take_slots_growing(self, count: int) -> list[int]:
        """Take slots for a restore, growing the arena if its shares are used up (R10); CapacityError at the limit."""
        while True:
            self.ensure_free(count)
            with self.lock:
                if count <= len(self.table.free):  # else others were quicker
                    return self.take_slots(count)

    def keep_chunks(self, replica: IncomingReplica, arrived: Sequence[tuple[int, int, int, bytes]]) -> list[int]:
        """Keep received chunks (index, slot, bytes, digest) of an incoming replica; free the others, return which."""
        bad = [index for index, _, _, digest in arrived if digest != replica.digests[index]]
        with self.lock:
            is_known = any(replica is known for known in self.index.incoming.values())
            for index, number, nbytes, digest in arrived:
                if is_known and index not in bad:
                    self.index.fill(replica, index, number, digest, nbytes, self.clock.time())
                else:
                    self.table.release(number)
            self.flush()
        return bad

    def finish(self, name: str, manifest_data: bytes, decoded: Manifest | None = None) -> StoredReplica:
        """Save the manifest and turn the incoming replica into a stored replica.

        Under one lock: no abort comes between, and no drop of the same shard unlinks the manifest just saved.
        `decoded`: the same manifest, if the caller has it.

        Raises:
            IntegrityError: It was aborted meanwhile, lacks chunks, or has others than the manifest says.
        """
        manifest = decode_manifest(manifest_data) if decoded is None else decoded
        digest = shard_digest(manifest_data)
        with self.lock:
            replica = self.index.find_incoming(name, manifest.shard)
            sizes = [self.table.slots[n].nbytes for n in (replica.slots if replica else ()) if n is not None]
            if replica is None or sizes != [chunk.nbytes for chunk in manifest.chunks]:
                what = "was aborted" if replica is None else f"lacks {len(replica.missing)} chunks or has other sizes"
                raise IntegrityError(f"{manifest.shard} of {name} {what} before it was sealed: put it again")
            known = self.index.find(manifest.shard, digest)
            if known is None or known.is_nameless:  # else only lost chunks came back: it is there
                self.manifests.save(manifest_name(manifest.shard, digest), manifest_data)
            stored = self.index.finish(name, manifest.shard, spec_of(manifest, digest))
            self.flush()
        return stored

    # -- parity (R37) ---------------------------------------------------------------------------

    def add_to_parity(self, parity: IncomingParity, rank: int, chunk: int, digest: bytes, data: memoryview) -> None:
        """Add a verified chunk of another host's rank to its row, once.

        It is dropped where there is no slot for the row, and where the parity was given up meanwhile: the sender finds
        it lacking.
        """
        number = parity.row_of(rank, chunk)
        with self.parity_lock:
            with self.lock:
                if number is None or parity.is_over or parity.is_added(rank, chunk, digest):
                    return
                row = parity.rows.get(number)
                slot = row.slot if row is not None else self.table.receive()
                if slot is None:
                    return
                row = row or parity.rows.setdefault(number, ParityRow(slot))
                parity.row_in_use, parity.touched_s = number, self.clock.monotonic()
                self.flush()
            is_added = False
            try:
                self.add_into(self.arena.view(slot), row.nbytes, data, parity.ranks.factor(number, rank))
                row.nbytes = max(row.nbytes, data.nbytes)
                is_added = True
            finally:
                with self.lock:
                    parity.row_in_use = None
                    if parity.is_over:
                        self.table.release(slot)
                    elif is_added:  # not before: another thread stores the parity once all is added
                        row.added[rank] = digest
                    else:  # what its bytes are now is unknown
                        self.index.abort_parity(parity)
                    self.flush()

    def finish_parity(self, parity: IncomingParity) -> StoredReplica | None:
        """Digest the rows of parity in which every shard is, and store it; None if it was given up meanwhile.

        Raises:
            CapacityError: There is no slot for a row that has no chunk in it.
            IntegrityError: A row that was stored before went bad meanwhile.
        """
        with self.lock:  # another shard's seal may be storing it, too, or has
            if parity.is_over:
                return None
            sizes, shared = parity.row_sizes(), parity.shared_rows()
            stored_rows = {**shared, **parity.stored_rows}
            for number in range(len(sizes)):
                if number not in parity.rows and number not in stored_rows:
                    self._open_empty_row(parity, number)
            self.flush()
            slots = {number: row.slot for number, row in parity.rows.items()}
            for number, begun in parity.rows.items():
                self.arena.view(begun.slot)[begun.nbytes : sizes[number]] = bytes(sizes[number] - begun.nbytes)
        self.verify_old(list(shared.values()), [sizes[number] for number in shared])
        fresh = {n: chunk_digest(self.arena.view(slot, sizes[n])) for n, slot in slots.items()}
        with self.lock:
            if parity.is_over:
                return None
            digests = [fresh[n] if n in fresh else stored_rows.get(n, b"") for n in range(len(sizes))]
            manifest = parity.manifest(digests)
            replica = self.index.open_incoming(LOCAL_SENDER, parity.shard, digests, attempt=parity.attempt)
            now = self.clock.time()
            for number, nbytes in enumerate(sizes):
                row = parity.rows.pop(number, None)
                if row is not None:
                    self.index.fill(replica, number, row.slot, digests[number], nbytes, now)
                else:
                    self.index.hold_known(replica, number, nbytes)
            self.index.abort_parity(parity)
            self.flush()  # the manifest is stored only where the slots that it names are sealed (R7)
            try:
                return self.finish(LOCAL_SENDER, encode_manifest(manifest), manifest)
            finally:
                self.abort_incoming(LOCAL_SENDER, parity.shard)

    def _open_empty_row(self, parity: IncomingParity, number: int) -> None:
        slot = self.table.receive()
        if slot is None:
            raise CapacityError(f"row {number} of {parity.shard} has no chunk in it, and there is no slot for it")
        parity.rows[number] = ParityRow(slot)

    def parity_before(self, parity: ShardId, ranks: ParitySet) -> ParityBefore:
        """Return the newest parity of the rank's host in this set, of an older step; an empty one if there is none."""
        with self.lock:
            older = [
                stored
                for stored in self.index.shards.values()
                if stored.shard.is_parity and stored.shard < parity and set_of(stored.shard, stored.spec) == ranks
                if (stored.shard.job, stored.shard.rank) == (parity.job, parity.rank)
            ]
            newest = max(older, key=lambda stored: stored.shard, default=None)
            pinned = self.pin(newest.shard, newest.spec.digest) if newest is not None else None
        if pinned is None:
            return ParityBefore()
        stored, pin = pinned
        try:
            manifest = decode_manifest(self.manifest(stored))
        except (DigestMismatch, FileNotFoundError):
            return ParityBefore()
        finally:
            self.unpin(stored, pin)
        data = {summand.rank: summand_manifest(manifest, summand.rank) for summand in stored.spec.summands}
        chunks = {rank: decode_manifest(each).chunks for rank, each in data.items() if each is not None}
        rows = {number: manifest.chunks[number] for number, slot in enumerate(stored.slots) if slot is not None}
        return ParityBefore(rows, chunks)

    def abort_parity(self, is_meant: Callable[[IncomingParity], bool]) -> None:
        """Give up parity that is being added up."""
        with self.lock:
            for parity in [p for p in self.index.parity.values() if is_meant(p)]:
                self.index.abort_parity(parity)
            self.flush()

    def manifest_in_parity(self, shard: ShardId, digest: str) -> bytes:
        """Return the manifest of a shard of which this host keeps parity. IntegrityError, DigestMismatch."""
        pinned = self.pin_parity_of(shard, digest)
        if pinned is None:
            raise IntegrityError(f"this host has neither {shard} {digest} nor parity of it")
        try:
            data = summand_manifest(decode_manifest(self.manifest(pinned[0])), shard.rank)
        finally:
            self.unpin(*pinned)
        if data is None or shard_digest(data) != digest:
            raise DigestMismatch(f"{pinned[0].shard} has another manifest of rank {shard.rank}", shard=str(shard))
        return data

    def pin_parity_of(self, shard: ShardId, digest: str) -> tuple[StoredReplica, int] | None:
        """Pin parity that this host keeps of another rank's shard; None if it keeps none."""
        with self.lock:
            return next((self.pin(each.shard, each.spec.digest) for each in self._parities_of(shard, digest)), None)

    def pin_parities_of(self, shard: ShardId, digest: str) -> list[tuple[StoredReplica, int]]:
        """Pin all parity that this host keeps of a shard: a host to which ranks have moved may have several ranks'."""
        with self.lock:
            pins = [self.pin(each.shard, each.spec.digest) for each in self._parities_of(shard, digest)]
            return [pin for pin in pins if pin is not None]

    def _parities_of(self, shard: ShardId, digest: str) -> Iterator[StoredReplica]:
        for stored in list(self.index.shards.values()):
            of = stored.shard
            is_meant = of.is_parity and (of.job, of.attempt, of.step) == (shard.job, shard.attempt, shard.step)
            if is_meant and any((s.rank, s.digest) == (shard.rank, digest) for s in stored.spec.summands):
                yield stored

    def abort_incoming(self, name: str, shard: ShardId, *, only: IncomingReplica | None = None) -> None:
        """Give back an incoming replica's slots; with `only`, if it is still that one."""
        with self.lock:
            if only is None or self.index.find_incoming(name, shard) is only:
                self.index.abort_incoming(name, shard)
                self.flush()

    # -- reading ------------------------------------------------------------------------------

    def manifest(self, stored: StoredReplica) -> bytes:
        """Return the manifest bytes of a stored replica; DigestMismatch if they are not those that were stored."""
        try:
            data = self.manifests.load(manifest_name(stored.shard, stored.spec.digest))
        except ConfigError as exc:  # it is no regular file any more, or longer than a manifest can be
            raise DigestMismatch(f"the manifest of {stored.shard}: {exc}", shard=str(stored.shard)) from exc
        found = shard_digest(data)
        if found != stored.spec.digest:
            raise DigestMismatch(
                f"the manifest of {stored.shard} has digest {found}, expected {stored.spec.digest}: its file was "
                "damaged after it was written; call get() again, which brings it from another copy",
                shard=str(stored.shard),
            )
        return data

    def lose_manifest(self, stored: StoredReplica) -> bool:
        """Note that a replica's manifest is damaged, so nothing says what its chunks are; False if that is no news."""
        with self.lock:
            is_here = self.index.find(stored.shard, stored.spec.digest) is stored
            is_news = is_here and not stored.is_nameless
            stored.is_nameless = stored.is_nameless or is_news
            return is_news

    def repair_manifest(self, stored: StoredReplica, data: bytes) -> None:
        """Write the manifest of a stored replica again, from another copy, unless the replica was dropped meanwhile."""
        with self.lock:
            if self.index.find(stored.shard, stored.spec.digest) is stored:
                self.manifests.save(manifest_name(stored.shard, stored.spec.digest), data)
                stored.is_nameless = False

    def pin(
        self, shard: ShardId, digest: str | None = None, *, is_reader: bool = False
    ) -> tuple[StoredReplica, int] | None:
        """Pin a replica for reading; None if it is not here, or only for readers that came before its drop (R7)."""
        with self.lock:
            stored = self.index.find(shard, digest)
            if stored is None or stored.is_doomed:
                return None
            return stored, self.index.pin(stored, self.clock.monotonic() + PIN_S, is_reader=is_reader)

    def unpin(self, stored: StoredReplica, pin: int) -> None:
        """Release a pin."""
        with self.lock:
            self._discard([gone] if (gone := self.index.unpin(stored, pin)) is not None else [])

    def chunk_view(self, stored: StoredReplica, index: int) -> memoryview | None:
        """Return the bytes of a chunk of a pinned replica, or None if this host lacks it."""
        number = stored.slots[index]
        return None if number is None else self.arena.view(number, stored.spec.chunk_nbytes(index))

    @contextmanager
    def held(self, digest: bytes, nbytes: int) -> Iterator[int | None]:
        """Hold a slot with this content while it is read; None if there is none."""
        with self.lock:
            number = self.table.lookup(digest, nbytes)
            if number is not None:
                self.table.hold(number)
        try:
            yield number
        finally:
            if number is not None:
                with self.lock:
                    self.table.unhold(number)
                    self.flush()

    def verify(
        self, stored: StoredReplica, map_chunks: MapChunks = map, chunks: Container[int] | None = None
    ) -> list[int]:
        """Re-digest a pinned replica; quarantine what is bad; return the chunk indices this host now lacks (R30).

        `on_damaged` gets the other replicas that used the same slots. `map_chunks` is a `map` that may use threads.
        With `chunks` only these are digested.
        """
        damaged: dict[int, StoredReplica] = {}
        held = [(i, n) for i, n in enumerate(stored.slots) if n is not None and (chunks is None or i in chunks)]
        views = [self.arena.view(number, stored.spec.chunk_nbytes(index)) for index, number in held]
        for (index, number), digest in zip(held, map_chunks(chunk_digest, views), strict=True):
            if digest != stored.digests[index]:
                with self.lock:
                    if stored.slots[index] == number:  # else the scrub was faster, and the slot may be another's now
                        damaged.update({id(s): s for s in self.index.quarantine(number) if s is not stored})
                        self.flush()
        for other in damaged.values():
            self.on_damaged(other)
        return sorted(stored.missing)

    def verify_slot(self, number: int) -> list[StoredReplica]:
        """Re-digest one slot if it is sealed; return the replicas that it damages if it is bad (R30)."""
        with self.lock:
            slot = self.table.slots[number]
            if slot.state is not SlotState.SEALED or slot.refs <= 0:
                return []
            digest, view = slot.digest, self.arena.view(number, slot.nbytes)
            self.table.hold(number)
        is_good = chunk_digest(view) == digest
        with self.lock:
            slot.verified_s = self.clock.time() if is_good else slot.verified_s
            damaged = [] if is_good else self.index.quarantine(number)
            self.table.unhold(number)
            self.flush()
        return damaged

    def verify_slots(self, slots: Iterable[int], map_slots: Callable[..., Iterable[list[StoredReplica]]] = map) -> None:
        """Digest slots again and quarantine the bad ones; call `on_damaged` with the replicas that used them.

        `map_slots` is a `map` that may use threads.
        """
        for replicas in map_slots(self.verify_slot, slots):
            for damaged in replicas:
                self.on_damaged(damaged)

    # -- dropping -----------------------------------------------------------------------------

    def drop(self, shard: ShardId) -> None:
        """Remove every replica of a shard, and parity that is being added up (R7)."""
        with self.lock:
            self.abort_parity(lambda parity: parity.shard == shard)
            self._discard(self.index.drop(shard, self.clock.monotonic() + DROPPED_READ_S))

    def drop_all(self, shards: Iterable[ShardId], removed: tuple[str, int] | None) -> None:
        """Remove shards, and the room of a removed job up to an attempt (R10)."""
        for shard in shards:
            self.drop(shard)
        if removed is not None:
            with self.room.lock, self.lock:  # after a claim that is under way, which would put it back
                self.index.drop_share(*removed)
            self.room.release()

    def drop_step(self, job: str, attempt: int, step: int) -> None:
        """Remove what is stored of a step, and give up what is being received of it (R12)."""
        with self.lock:
            for shard, name, _ in [key for key in self.index.incoming if len(key) == 3]:
                if (shard.job, shard.attempt, shard.step) == (job, attempt, step):
                    self.index.abort_incoming(name, shard)
            for shard in sorted({shard for shard, _ in self.index.shards}):
                if (shard.job, shard.attempt, shard.step) == (job, attempt, step):
                    self.drop(shard)
            self.abort_parity(lambda p: (p.shard.job, p.shard.attempt, p.shard.step) == (job, attempt, step))

    def expire_pins(self) -> None:
        """Let go of what readers kept past their deadline."""
        with self.lock:
            expired = self.index.expire_pins(self.clock.monotonic())
            self.room.overlooked.update(n for stored in expired for n in stored.slots if n is not None)
            self._discard(expired)

    def _discard(self, gone: Sequence[StoredReplica]) -> None:
        """Unlink, then free (R7); the caller holds the lock since it took the replicas out of the index."""
        for stored in gone:
            self.manifests.remove(manifest_name(stored.shard, stored.spec.digest))
            self.index.free(stored)
            self.flush()

    def stats(self) -> dict[str, int]:
        """Return the bytes used, reserved, claimed and allowed, for status."""
        with self.lock:
            used = self.table.claimed_count - len(self.table.free)
            reserved = sum(share.total for share in self.index.shares.values())
            return {
                "used_bytes": used * self.chunk_bytes,
                "reserved_bytes": max(reserved, used) * self.chunk_bytes,
                "claimed_bytes": self.table.claimed_count * self.chunk_bytes,
                "limit_bytes": self.room.limit.nbytes,
                "shards": len(self.index.shards),
                "leased_slots": sum(len(n) for n in self.table.leases.values()),
            }


Store = ReplicaStore[SlotMemory, ManifestFiles]  # of any host, real or simulated
