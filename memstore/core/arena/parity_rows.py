"""Rows of parity that a host adds up from the chunks that other ranks' hosts send it. Pure (R37).

    row: begun with a rank's first chunk --each rank's chunk is added, once--> full
    parity: open --every other rank has named its whole shard, all rows are full--> digested, and stored as a shard
              '--its step is dropped, an older attempt's is fenced, nothing came for long, the holder ends--> gone

A row in which no chunk has changed since the parity before is not sent: the two share it. Of a row in which some have,
the others are fetched once every shard is named.
Rows that are not full are never read: bytes that were added cannot be told apart again.
All rows but the last are filled with zeros up to a whole chunk, and so is one between others that has no chunk in it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy

from memstore.core.format.manifest import PARITY_FORMAT, Chunk, Manifest, encode_summands
from memstore.errors import IntegrityError
from recovery.inventory import ShardId
from recovery.parity import ParitySet, product


@dataclass(slots=True)
class ParityRow:
    """One row while it is added up."""

    slot: int
    nbytes: int = 0
    added: dict[int, bytes] = field(default_factory=dict)  # rank -> digest of its chunk


@dataclass(frozen=True, slots=True)
class ParityBefore:
    """The parity of an older step, whose rows a newer one may share."""

    rows: Mapping[int, Chunk] = field(default_factory=dict)  # those that are there
    chunks: Mapping[int, Sequence[Chunk]] = field(default_factory=dict)  # rank -> all chunks of its shard


@dataclass(slots=True)
class IncomingParity:
    """The parity of one rank's host while it is added up."""

    shard: ShardId
    ranks: ParitySet
    attempt: int  # the attempt that makes it; a fence aborts older ones (R21)
    touched_s: float  # when something last came for it
    rows_count: int = 0  # as the largest shard needs that was offered
    stored_rows: Mapping[int, bytes] = field(default_factory=dict)  # what a repair need not bring -> digest
    before: ParityBefore = ParityBefore()
    rows: dict[int, ParityRow] = field(default_factory=dict)
    named: dict[int, tuple[Manifest, bytes]] = field(default_factory=dict)  # by rank: the shard that was added
    senders: dict[int, str] = field(default_factory=dict)  # rank -> the host that named its shard
    row_in_use: int | None = None  # its slot is being written
    is_over: bool = False  # stored or given up: what still comes is dropped

    def row_of(self, rank: int, chunk: int) -> int | None:
        """Return the row that a rank's chunk is added into; None if into none here."""
        return self.ranks.row_of(self.shard.rank, rank, chunk)

    def _rows_at(self, rank: int, chunks_count: int) -> dict[int, int]:
        return self.ranks.rows_at(self.shard.rank, rank, chunks_count)

    def is_added(self, rank: int, chunk: int, digest: bytes) -> bool:
        """Return whether a rank's chunk is in its row; IntegrityError if another one in its place is."""
        number = self.row_of(rank, chunk)
        row = self.rows.get(number) if number is not None else None
        known = row.added.get(rank) if row is not None else None
        if known is not None and known != digest:
            raise IntegrityError(f"chunk {chunk} of rank {rank} was added to {self.shard} with other bytes before")
        return known is not None or number in self.stored_rows

    def is_here(self, rank: int, chunk: int, digest: bytes) -> bool:
        """Return whether a rank's chunk need not be sent: it is in its row, or as it was in the parity before."""
        if self.is_added(rank, chunk, digest):
            return True
        before = self.before.chunks.get(rank, ())
        is_same = chunk < len(before) and before[chunk].digest == digest
        return is_same and self.row_of(rank, chunk) in self.before.rows

    def lacking(self, rank: int, manifest: Manifest) -> list[int]:
        """Return the chunks of a rank's shard that are to be sent; IntegrityError if others are added."""
        rows = self._rows_at(rank, len(manifest.chunks))
        numbers = {*rows.values()}
        if any(rank in row.added for number, row in self.rows.items() if number not in numbers):
            raise IntegrityError(f"more chunks of rank {rank} were added to {self.shard} before, with other bytes")
        return [chunk for chunk in rows if not self.is_here(rank, chunk, manifest.chunks[chunk].digest)]

    def shared_rows(self) -> dict[int, bytes]:
        """Return the rows that are as they were in the parity before, with their digests, once every shard is named."""
        changed, sizes = set(self.rows), self.row_sizes()
        for rank, (manifest, _) in self.named.items():
            now, before = manifest.chunks, self.before.chunks.get(rank, ())
            for chunk, row in self._rows_at(rank, max(len(now), len(before))).items():
                if now[chunk : chunk + 1] != tuple(before[chunk : chunk + 1]):
                    changed.add(row)
        before_rows = self.before.rows.items()
        return {n: row.digest for n, row in before_rows if n not in changed and sizes[n : n + 1] == [row.nbytes]}

    def owed(self) -> dict[int, list[int]]:
        """Return, by rank, the chunks that have not changed, in rows in which another one has."""
        shared, found = self.shared_rows(), dict[int, list[int]]()
        for rank, (manifest, _) in self.named.items():
            for chunk, row in self._rows_at(rank, len(manifest.chunks)).items():
                if row not in shared and not self.is_added(rank, chunk, manifest.chunks[chunk].digest):
                    found.setdefault(rank, []).append(chunk)
        return found

    @property
    def is_named(self) -> bool:
        """Return whether every shard is in: nothing more is to come."""
        return len(self.named) == len(self.ranks.ranks) - 1

    def row_sizes(self) -> list[int]:
        """Return the bytes of each row, once every shard is named: the last has those of the largest chunk in it."""
        count, last_nbytes, chunk_bytes = 0, 0, 0
        for rank, (manifest, _) in self.named.items():
            chunk_bytes = manifest.chunk_bytes
            for chunk, row in self._rows_at(rank, len(manifest.chunks)).items():
                last_nbytes = max(last_nbytes * (row < count), manifest.chunks[chunk].nbytes * (row + 1 >= count))
                count = max(count, row + 1)
        return [chunk_bytes] * (count - 1) + [last_nbytes] * (count > 0)

    def manifest(self, digests: Sequence[bytes]) -> Manifest:
        """Return the manifest for rows with these digests, once every shard is named."""
        first, sizes = next(iter(self.named.values()))[0], self.row_sizes()
        layout = encode_summands({rank: data for rank, (_, data) in self.named.items()}, self.ranks.spare)
        chunks = tuple(Chunk(digest, nbytes) for digest, nbytes in zip(digests, sizes, strict=True))
        return Manifest(self.shard, first.world_size, layout, sum(sizes), first.chunk_bytes, chunks, PARITY_FORMAT)


AddInto = Callable[[memoryview, int, memoryview, int], None]  # as `add_into`


def add_into(row: memoryview, row_nbytes: int, chunk: memoryview, factor: int = 1) -> None:
    """Add a chunk, times a factor, to the bytes that a row has so far: exclusive or, as far as both reach."""
    both, source = min(row_nbytes, chunk.nbytes), numpy.frombuffer(chunk, numpy.uint8)
    if factor != 1:
        source = numpy.frombuffer(bytes(chunk).translate(_products(factor)), numpy.uint8)
    mine = numpy.frombuffer(row, numpy.uint8, chunk.nbytes)
    numpy.bitwise_xor(mine[:both], source[:both], out=mine[:both])
    mine[both:] = source[both:]


@lru_cache(maxsize=256)
def _products(factor: int) -> bytes:
    return bytes([product(factor, other) for other in range(256)])
