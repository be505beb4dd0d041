"""Shards of a parity set with real bytes, what their rows are by definition, and the parity of hosts in tests."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from parity_sums import rows_by_definition

from memstore.core.arena.parity_rows import IncomingParity
from memstore.core.arena.replica_store import Store
from memstore.core.format.manifest import Chunk, Manifest, chunk_digest, decode_manifest, encode_manifest, shard_digest
from memstore.errors import PeerUnreachable
from memstore.shell.peer.chunk_frames import Damage
from memstore.shell.peer.parity import OtherHolder, ParityServer
from recovery.inventory import ShardId
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
        return self.made(replace(self.shard, step=self.shard.step + 1), chunks, chunk_bytes)

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
