"""What rows of parity are by definition, and sets of ranks whose bytes are added up so: the oracle of parity's tests.

It shares no code with the product: bytes are multiplied as polynomials, and where a chunk belongs is said once more.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache, reduce

from recovery import Copy, ShardId, ShardSpec
from recovery.inventory import Summand
from recovery.parity import ParitySet

JOB, STEP = "job", 7
CHUNK_BYTES = 4


def times(left: int, right: int) -> int:
    """Multiply two bytes as polynomials over GF(2), modulo x^8 + x^4 + x^3 + x^2 + 1: shift and add."""
    total = 0
    while right:
        total ^= left if right & 1 else 0
        left = left << 1 ^ (0x11D if left & 0x80 else 0)
        right >>= 1
    return total


@cache
def table(factor: int) -> bytes:
    """Return what each byte is times a factor."""
    return bytes(times(factor, each) for each in range(256))


def scaled(data: bytes, factor: int) -> bytes:
    """Multiply bytes."""
    return data.translate(table(factor))


def xor(left: bytes, right: bytes) -> bytes:
    """Add bytes; the shorter ones count as followed by zeros."""
    size = max(len(left), len(right))
    return (int.from_bytes(left, "little") ^ int.from_bytes(right, "little")).to_bytes(size, "little")


def added(parts: Iterable[bytes]) -> bytes:
    """Add bytes of any length."""
    return reduce(xor, parts, b"")


@dataclass(frozen=True)
class Place:
    """A row that a chunk is added into: the rank on whose host it is, its number there, and the chunk's factor."""

    owner: int
    row: int
    factor: int


@cache
def places(ranks: ParitySet, rank: int, chunk: int) -> list[Place]:
    """Return the rows that a chunk is added into: the plain one, and of a set with two spare hosts the second."""
    count, at = len(ranks.ranks), ranks.ranks.index(rank)
    in_row = count - ranks.spare
    factor = reduce(times, [2] * at, 1)
    found = []
    for second in range(ranks.spare):
        owner = ranks.ranks[(at + 1 + chunk % in_row + second) % count]
        found.append(Place(owner, ranks.spare * (chunk // in_row) + second, factor if second else 1))
    return found


def rows_by_definition(ranks: ParitySet, owner: int, chunks: dict[int, Sequence[bytes]], nbytes: int) -> list[bytes]:
    """Return the rows at a rank, each filled with zeros up to a whole chunk but the last."""
    sums: dict[int, bytes] = {}
    for rank in (rank for rank in ranks.ranks if rank != owner):
        for number, chunk in enumerate(chunks[rank]):
            for place in (each for each in places(ranks, rank, number) if each.owner == owner):
                sums[place.row] = xor(sums.get(place.row, b""), scaled(chunk, place.factor))
    last = max(sums, default=-1)
    return [sums.get(row, b"") if row == last else sums.get(row, b"").ljust(nbytes, b"\0") for row in range(last + 1)]


@dataclass
class Hosts:
    """A set of ranks with real bytes: rank r's shard and parity are on host h<r>, whole."""

    ranks: ParitySet
    chunks: dict[int, Sequence[bytes]]  # by rank
    rows: dict[int, list[bytes]]
    parts: dict[tuple[int, int], dict[int, int]] = field(init=False, repr=False)  # owner and row -> rank -> chunk

    def __post_init__(self) -> None:
        self.parts = {}
        for rank, chunks in self.chunks.items():
            for number in range(len(chunks)):
                for place in places(self.ranks, rank, number):
                    self.parts.setdefault((place.owner, place.row), {})[rank] = number

    @classmethod
    def of(cls, ranks: ParitySet, nbytes: Sequence[int], seed: int) -> Hosts:
        """Fill shards of these sizes, and add them up by definition."""
        pick, chunks = random.Random(seed), dict[int, Sequence[bytes]]()
        for rank, size in zip(ranks.ranks, nbytes, strict=True):
            data = pick.randbytes(size)
            chunks[rank] = [data[at : at + CHUNK_BYTES] for at in range(0, size, CHUNK_BYTES)]
        rows = {rank: rows_by_definition(ranks, rank, chunks, CHUNK_BYTES) for rank in ranks.ranks}
        return cls(ranks, chunks, rows)

    def spec(self, rank: int) -> ShardSpec:
        """Return the spec of a rank's shard."""
        nbytes, count = sum(map(len, self.chunks[rank])), len(self.chunks[rank])
        return ShardSpec(f"d{rank}", nbytes, CHUNK_BYTES, count, len(self.ranks.ranks))

    def copy(self, rank: int, missing: Collection[int] = (), host: str = "") -> Copy:
        """Return the copy of a rank's shard."""
        return Copy(ShardId(JOB, 1, STEP, rank), self.spec(rank), host or f"h{rank}", frozenset(missing))

    def parity(self, rank: int, missing: Collection[int] = ()) -> Copy:
        """Return the parity that a rank's host keeps."""
        summands = tuple(Summand(r, f"d{r}", self.spec(r).nbytes) for r in self.ranks.ranks if r != rank)
        rows, size, spare = self.rows[rank], len(self.ranks.ranks), self.ranks.spare
        spec = ShardSpec(f"p{rank}", sum(map(len, rows)), CHUNK_BYTES, len(rows), size, summands, spare)
        return Copy(ShardId(JOB, 1, STEP, rank, is_parity=True), spec, f"h{rank}", frozenset(missing))

    def in_row(self, place: Place) -> dict[int, int]:
        """Return, by rank, the chunks that are added into a row."""
        return self.parts[place.owner, place.row]

    def is_decodable(self, rank: int, chunk: int, lost: Lost) -> bool:
        """Return whether a chunk follows from what is left: as many whole rows of it as lost chunks in them."""
        rows = places(self.ranks, rank, chunk)
        whole = sum((each.owner, each.row) not in lost.rows for each in rows)
        return whole >= sum(each in lost.chunks or each[0] == rank for each in self.in_row(rows[0]).items())

    def decode(self, owner: int, rank: int, chunk: int, lost: Lost) -> bytes:
        """Return a chunk as a rank's host decodes it, from nothing that is lost."""
        place = next(each for each in places(self.ranks, rank, chunk) if each.owner == owner)
        others = {other: number for other, number in self.in_row(place).items() if other != rank}
        gone = [other for other, number in others.items() if (other, number) in lost.chunks]
        there = {other: number for other, number in others.items() if other not in gone}
        assert len(gone) <= 1, gone
        first, second, factors = self.ranks.decoding(place.row, rank, gone[0] if gone else None, [*there])
        assert (owner, place.row) not in lost.rows
        parts = [scaled(self.rows[owner][place.row], first)]
        if second:
            next_owner = self.ranks.ranks[(self.ranks.ranks.index(owner) + 1) % len(self.ranks.ranks)]
            assert (next_owner, place.row + 1) not in lost.rows
            parts.append(scaled(self.rows[next_owner][place.row + 1], second))
        parts += [scaled(self.chunks[other][number], factors[other]) for other, number in there.items()]
        return added(parts)[: len(self.chunks[rank][chunk])]

    def lost(self, gone: Collection[int]) -> Lost:
        """Return what goes with the hosts of some ranks."""
        chunks = {(rank, number) for rank in gone for number in range(len(self.chunks[rank]))}
        return Lost(chunks, {(rank, row) for rank in gone for row in range(len(self.rows[rank]))})


@dataclass
class Lost:
    """What is nowhere: chunks of ranks, and rows at ranks."""

    chunks: set[tuple[int, int]]
    rows: set[tuple[int, int]]
