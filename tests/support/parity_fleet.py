"""A parity set of real holders over sockets, a rank each, and a connection on which a test says each frame (R37)."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from parity_sums import rows_by_definition

from memstore.core.arena.parity_rows import IncomingParity
from memstore.core.arena.replica_index import StoredReplica
from memstore.core.arena.replica_store import Store
from memstore.core.arena.slot_table import PeerShare
from memstore.core.format.manifest import Chunk, Manifest, chunk_digest, decode_manifest, encode_manifest, shard_digest
from memstore.core.holder.puts import push
from memstore.core.holder.puts.push import Push
from memstore.core.wire.codec import decode_reply
from memstore.core.wire.frame import Kind
from memstore.core.wire.handshake import HolderIdentity
from memstore.core.wire.ids import WireShard
from memstore.core.wire.peer_messages import (
    ChunkBatch,
    ChunkRun,
    Done,
    FetchChunks,
    Offer,
    OfferedChunk,
    ParityOf,
    Seal,
    ShardHost,
    decode_lacking,
)
from memstore.errors import PeerUnreachable
from memstore.shell.holder.holder import Holder
from memstore.shell.net.listener import connect_tcp
from memstore.shell.peer.chunk_frames import Damage
from memstore.shell.peer.client import PeerClient
from memstore.shell.peer.parity import OtherHolder, ParityServer
from recovery.inventory import Copy, ShardId
from recovery.parity import ParitySet

JOB, ATTEMPT, STEP = "train", 1, 2


@dataclass(frozen=True)
class RankShard:
    """The shard of a rank."""

    rank: int
    chunks: tuple[bytes, ...]
    manifest: bytes

    @classmethod
    def of(cls, rank: int, nbytes: int, chunk_bytes: int, *, seed: int = 0, layout: bytes = b"") -> RankShard:
        """Fill a shard with bytes that no other rank has."""
        data = random.Random(f"{seed} {rank}").randbytes(nbytes)
        chunks = tuple(data[at : at + chunk_bytes] for at in range(0, nbytes, chunk_bytes))
        return cls.made(ShardId(JOB, ATTEMPT, STEP, rank), chunks, chunk_bytes, layout)

    @classmethod
    def made(cls, shard: ShardId, chunks: tuple[bytes, ...], chunk_bytes: int, layout: bytes = b"") -> RankShard:
        """Make a shard of these chunks."""
        rows = tuple(Chunk(chunk_digest(chunk), len(chunk)) for chunk in chunks)
        nbytes = sum(map(len, chunks))
        return cls(shard.rank, chunks, encode_manifest(Manifest(shard, 64, layout, nbytes, chunk_bytes, rows)))

    def next_step(self, changed: Mapping[int, bytes], chunk_bytes: int) -> RankShard:
        """Return it at the next step, with some chunks changed."""
        chunks = tuple(changed.get(at, chunk) for at, chunk in enumerate(self.chunks))
        return self.made(self.shard._replace(step=self.shard.step + 1), chunks, chunk_bytes)

    @property
    def shard(self) -> ShardId:
        """Return its id."""
        return decode_manifest(self.manifest).shard

    @property
    def digest(self) -> str:
        """Return its digest."""
        return shard_digest(self.manifest)

    def at(self, ranks: ParitySet, owner: int) -> list[int]:
        """Return its chunks that are added into the parity of another rank."""
        return [*ranks.rows_at(owner, self.rank, len(self.chunks))]

    def name_in(self, parity: IncomingParity) -> None:
        """Note that it is in the parity whole, as its seal does."""
        assert not parity.lacking(self.rank, decode_manifest(self.manifest))
        parity.named[self.rank] = decode_manifest(self.manifest), self.manifest


def rows_of(ranks: ParitySet, owner: int, shards: Mapping[int, RankShard]) -> list[bytes]:
    """Return a rank's rows by definition."""
    chunk_bytes = decode_manifest(shards[owner].manifest).chunk_bytes
    return rows_by_definition(ranks, owner, {rank: shards[rank].chunks for rank in ranks.ranks}, chunk_bytes)


def open_parity(replicas: Store, ranks: ParitySet, owner: int, shards: Mapping[int, RankShard]) -> IncomingParity:
    """Begin the parity of a rank, as the offers of all others do."""
    parity = IncomingParity(ShardId(JOB, ATTEMPT, STEP, owner, is_parity=True), ranks, ATTEMPT, 0.0)
    parity.rows_count = max(ranks.rows_count(len(shards[rank].chunks)) for rank in ranks.others(owner))
    replicas.index.parity[parity.shard] = parity
    return parity


def nowhere(host: str) -> OtherHolder:
    """Reach no other holder."""
    raise PeerUnreachable(f"host {host} is not there", host=host)


def no_parity(replicas: Store, reach: Callable[[str], OtherHolder] = nowhere) -> ParityServer:
    """Return the parity of a host to which none has come."""
    return ParityServer(
        replicas, "a", is_fenced=lambda *_: False, on_sealed=lambda copy: None, damage=Damage(), reach=reach
    )


# -- a set of real holders --


CHUNK_BYTES = 64 << 10
HOSTS = "abcdef"  # of ranks 0, 1, ...
OWNER = 4  # its host e keeps the parity that is looked at
PARITY = ShardId(JOB, ATTEMPT, STEP, OWNER, is_parity=True)


class Fleet:
    """A holder for each rank, with the rank's shard."""

    def __init__(self, holders: Sequence[Holder], ranks: ParitySet, sizes: Sequence[int]) -> None:
        self.holders, self.ranks = list(holders), ranks
        self.shards = {r: RankShard.of(r, size, CHUNK_BYTES) for r, size in zip(ranks.ranks, sizes, strict=True)}
        self.sealed: dict[str, list[Copy]] = {host: [] for host in HOSTS[: len(holders)]}
        self.failed: list[Any] = []
        for host, holder in zip(self.sealed, holders, strict=True):
            holder.replicas.claim(JOB, PeerShare(ATTEMPT, {}, 40))
            holder.peer_server.parity.on_sealed = self.sealed[host].append
            holder.peer_server.on_sealed = self.sealed[host].append
            holder.state.report = self.failed.append

    @property
    def e(self) -> Holder:
        """The host with the parity."""
        return self.holders[OWNER]

    def seal(self, rank: int, shard: RankShard | None = None, *, by: int | None = None) -> StoredReplica:
        """Store a rank's shard on its host, or on rank `by`'s."""
        shard, holder = shard or self.shards[rank], self.holders[rank if by is None else by]
        slots = holder.replicas.take_slots(len(shard.chunks))
        for slot, chunk in zip(slots, shard.chunks, strict=True):
            holder.replicas.arena.view(slot, len(chunk))[:] = chunk
        nbytes = sum(map(len, shard.chunks))
        return holder.replicas.seal_local(
            shard.shard, world_size=64, layout=b"", nbytes=nbytes, slots=slots, attempt=ATTEMPT
        )

    def push(
        self, rank: int, owner: int = OWNER, digest: str = "", *, at: int | None = None, by: int | None = None
    ) -> None:
        """Have a rank's host, or rank `by`'s, add its shard into another rank's parity, on its host or rank `at`'s."""
        holder = self.holders[rank if by is None else by]
        shard = self.shards[rank]
        what = Push(
            shard.shard,
            digest or shard.digest,
            HOSTS[owner if at is None else at],
            is_repair=True,
            parity=ParityOf.of(owner, self.ranks),
        )
        assert push.begin(holder.state, what)
        holder.io.run(push.run, holder.state, what)

    def put(self) -> StoredReplica:
        """Have all others add theirs, at once, and return the parity."""
        for rank in self.ranks.ranks:
            self.seal(rank)
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(self.push, self.ranks.others(OWNER)))
        return self.parity()

    def put_everywhere(self) -> None:
        """Have every rank's shard added into the parity of all others."""
        for rank in self.ranks.ranks:
            self.seal(rank)
        for owner in self.ranks.ranks:
            for rank in self.ranks.others(owner):
                self.push(rank, owner)
        assert self.failed == []

    def parity(self) -> StoredReplica:
        """Return what e has stored for the step of the shards."""
        return self.stored_parity(OWNER)

    def rows(self) -> list[bytes]:
        """Return the rows of e, each digested."""
        stored = self.parity()
        assert self.e.replicas.verify(stored) == []
        return [bytes(self.e.replicas.chunk_view(stored, row) or b"") for row in range(len(stored.slots))]

    def others(self, rank: int, gone: Collection[int] = (OWNER,)) -> tuple[ShardHost, ...]:
        """Say where the other shards of the set are, and of one with two spare hosts the parity, as a controller does.

        Nothing is said of what the hosts of some ranks have.
        """
        left = [r for r in self.ranks.ranks if r not in gone]
        shards = [ShardHost(r, HOSTS[r]) for r in left if r != rank]
        return (*shards, *(ShardHost(r, HOSTS[r], self.stored_parity(r).spec.digest) for r in self._told(left)))

    def _told(self, left: Sequence[int]) -> Sequence[int]:
        return left if self.ranks.spare > 1 else []

    def stored_parity(self, rank: int) -> StoredReplica:
        """Return the parity that a rank's host has stored for the step of the shards."""
        parity = ShardId(JOB, ATTEMPT, self.shards[rank].shard.step, rank, is_parity=True)
        stored = self.holders[rank].replicas.index.find(parity)
        assert stored is not None, self.failed
        return stored

    def client(self, at: int, host: int) -> PeerClient:
        """Return one holder's connections to another."""
        return self.holders[at].peers.peer(HOSTS[host])

    def request(self, rank: int, chunks: Sequence[int], others: Sequence[ShardHost] | None = None) -> FetchChunks:
        """Return a request for chunks of a rank's shard."""
        wire, digest = WireShard.of(self.shards[rank].shard), self.shards[rank].digest
        told = self.others(rank) if others is None else tuple(others)
        return FetchChunks(shard=wire, digest=digest, chunks=tuple(chunks), others=told)

    def decode(self, rank: int, chunks: Sequence[int], others: Sequence[ShardHost] | None = None) -> list[bytearray]:
        """Ask e, from rank 3's host, for chunks of a rank's shard."""
        return self.client(3, OWNER).fetch_bytes(self.request(rank, chunks, others))

    def rot(self, holder: Holder, stored: StoredReplica, chunk: int) -> None:
        """Change a bit of a chunk where it lies."""
        slot = stored.slots[chunk]
        assert slot is not None
        view = holder.replicas.arena.view(slot, 1)
        view[0] ^= 1

    def lose(self, rank: int) -> None:
        """Have a rank's host forget its shard."""
        self.holders[rank].replicas.drop(self.shards[rank].shard)


class Sender:
    """A connection of a host to e, on which a test says each frame."""

    def __init__(self, fleet: Fleet, rank: int) -> None:
        self.shard, self.wire = fleet.shards[rank], WireShard.of(fleet.shards[rank].shard)
        self.of, self.host, e = ParityOf.of(OWNER, fleet.ranks), HOSTS[rank], fleet.e
        (endpoint, *_) = e.state.info.endpoints
        self.channel = connect_tcp(
            endpoint.address,
            endpoint.port,
            secret=e.secret,
            store=e.config.store,
            identity=HolderIdentity(host=self.host, incarnation=1),
            timeout_s=60.0,
            host="e",
        )

    def ask(self, request: Any) -> Any:
        """Send a request and return its reply."""
        return decode_reply(request, self.channel.request(request, timeout_s=60.0).data)

    def offer(self, *, is_known: bool = False) -> Any:
        """Offer the shard."""
        digest = self.shard.digest if is_known else None
        return self.ask(
            Offer(
                shard=self.wire,
                sender=self.host,
                parity=self.of,
                digest=digest,
                attempt=ATTEMPT,
                chunks_count=len(self.shard.chunks),
            )
        )

    def begin(self, chunks: Sequence[int]) -> list[int]:
        """Begin to send chunks; return those that e lacks."""
        offered = tuple(OfferedChunk(c, chunk_digest(self.shard.chunks[c]), len(self.shard.chunks[c])) for c in chunks)
        batch = ChunkBatch(shard=self.wire, sender=self.host, parity=self.of, chunks=offered)
        self.channel.send(Kind.CALL, 7, batch, deadline_s=60.0)
        frame = self.channel.recv(timeout_s=60.0)
        return list(decode_lacking(frame.data).chunks) if frame.kind is Kind.EVENT else [-1]

    def send(self, *chunks: bytes) -> None:
        """Send bytes as chunks."""
        run = ChunkRun(sizes=tuple(map(len, chunks)))
        self.channel.send(Kind.CHUNK, 7, run, [memoryview(c) for c in chunks], deadline_s=60.0)

    def end(self) -> Kind:
        """Take the reply of the batch."""
        return self.channel.recv(timeout_s=60.0).kind

    def send_all(self) -> None:
        """Offer, and send everything that belongs there."""
        assert self.offer() == Done()
        here = list(self.shard.at(self.of.set, OWNER))
        lacking = self.begin(here)
        assert lacking == here
        if lacking:
            self.send(*(self.shard.chunks[c] for c in lacking))
        assert self.end() is Kind.REPLY

    def seal(self) -> Any:
        """Seal it."""
        return self.ask(Seal(shard=self.wire, sender=self.host, parity=self.of, manifest=self.shard.manifest))


def until(is_so: Any) -> None:
    """Wait until something is so, which another thread does."""
    given = threading.Event()
    for _ in range(6000):
        if is_so():
            return
        given.wait(0.01)
    raise TimeoutError("it never came")
