"""Which chunks add up to which row of parity, and which chunks of a lost shard can be decoded from the rows.

A *parity set* has ranks in order, each on a host of its own, and one or two of these hosts may be lost. Of k + 1 ranks
every one keeps rows, each the exclusive or of one chunk of each of the k others. Of k + 2 every chunk goes into two
rows, on two hosts: a plain one, and one of the same chunks on the next rank's host, in which each is multiplied by a
factor of its rank. So of the parts of a row no two are on one host. Row `spare * t` of a rank holds chunk
`k * t + offset` of each other one, where the offset turns with the ranks' distance.

    chunks of     rank 0   rank 1   rank 2          rows at   rank 0   rank 1   rank 2
    k = 2          0 1      0 1      0 1                      1.1^2.0  0.0^2.1  0.1^1.0

Pure. Imports `inventory` only. Read `candidates.py` next.
Source: rotating parity (RAID 5), as in SCR's XOR sets, and P + Q over GF(2^8) with the polynomial 0x11d (H. P. Anvin,
"The mathematics of RAID-6"); whole chunks as its unit, and decoding at the rows, are ours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from recovery.inventory import Copy, ShardId, ShardSpec, Summand

# -- factors ------------------------------------------------------------------------------------------
# Bytes are elements of GF(2^8): a sum is the exclusive or.


def _powers() -> list[int]:
    found = [1]
    while len(found) < 255:
        twice = found[-1] << 1
        found.append(twice ^ 0x11D if twice > 0xFF else twice)
    return found


_POWERS = _powers()  # of 2, which has all elements but 0 among them
_LOGS = {power: number for number, power in enumerate(_POWERS)}


def product(one: int, other: int) -> int:
    """Return the product of two elements.

    >>> product(2, 128), product(3, 7)
    (29, 9)
    """
    return _POWERS[(_LOGS[one] + _LOGS[other]) % 255] if one and other else 0


def quotient(one: int, other: int) -> int:
    """Return what times the second element is the first. ZeroDivisionError.

    >>> quotient(29, 128)
    2
    """
    if not other:
        raise ZeroDivisionError("no element times 0 is another one than 0")
    return _POWERS[(_LOGS[one] - _LOGS[other]) % 255] if one else 0


# -- sets ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, order=True)
class ParitySet:
    """Ranks that keep parity for one another."""

    ranks: tuple[int, ...]
    spare: int = 1  # so many of their hosts may be lost: 1 or 2

    @property
    def data(self) -> int:
        """Return how many chunks, of as many ranks, a row has at most."""
        return len(self.ranks) - self.spare

    def others(self, rank: int) -> tuple[int, ...]:
        """Return the ranks of the set but one."""
        return tuple(each for each in self.ranks if each != rank)

    def next(self, rank: int) -> int:
        """Return the rank on whose host the second row of the same chunks is."""
        return self.ranks[(self.ranks.index(rank) + 1) % len(self.ranks)]

    def row_of(self, owner: int, rank: int, chunk: int) -> int | None:
        """Return the number of the row of one rank that a chunk of another is added into; None if into none."""
        for at in range(self.spare):
            if chunk % self.data == self._offset(owner, rank, at):
                return self.spare * (chunk // self.data) + at
        return None

    def chunk_in(self, owner: int, rank: int, row: int) -> int | None:
        """Return the chunk of a rank that a row of another one has, if its shard is that long; None if it has none."""
        offset = self._offset(owner, rank, row % self.spare)
        return self.data * (row // self.spare) + offset if 0 <= offset < self.data else None

    def rows_at(self, owner: int, rank: int, chunks_count: int) -> dict[int, int]:
        """Return the chunks of a rank's shard that are added into the rows of another rank -> the row of each.

        >>> ParitySet((4, 5, 6)).rows_at(6, 4, chunks_count=5)
        {1: 0, 3: 1}
        >>> ParitySet((4, 5, 6, 7), spare=2).rows_at(6, 4, chunks_count=4)
        {0: 1, 1: 0, 2: 3, 3: 2}
        """
        found: dict[int, int] = {}
        for at in reversed(range(self.spare)):
            offset = self._offset(owner, rank, at)
            chunks = range(offset, chunks_count, self.data) if 0 <= offset < self.data else ()
            found.update((chunk, self.spare * number + at) for number, chunk in enumerate(chunks))
        return found if self.spare == 1 else dict(sorted(found.items()))

    def rows_count(self, chunks_count: int) -> int:
        """Return how many rows parity has at most, if no shard in it has more chunks than this."""
        return self.spare * -(-chunks_count // self.data)

    def factor(self, row: int, rank: int) -> int:
        """Return by what a rank's chunk is multiplied before it is added into a row."""
        return _POWERS[self.ranks.index(rank)] if row % self.spare else 1

    def decoding(self, row: int, rank: int, lost: int | None, others: Sequence[int]) -> tuple[int, int, dict[int, int]]:
        """Return by what the parts of a row are multiplied so that they add up to one rank's chunk in it.

        Args:
            row: The row.
            rank: Whose chunk is wanted.
            lost: Another rank whose chunk in the row is not there either; None if there is no other.
            others: The ranks whose chunks in it are there.

        Returns:
            The factors of the row, of the row that the next rank has of the same chunks (0 if it is not needed), and of
            the others' chunks by rank.
        """
        if lost is None:
            first = quotient(1, self.factor(row, rank))
            return first, 0, {each: product(first, self.factor(row, each)) for each in others}
        mine, theirs = self.factor(row + 1, rank), self.factor(row + 1, lost)
        second = quotient(1, mine ^ theirs)
        first = product(second, theirs)
        return first, second, {each: first ^ product(second, self.factor(row + 1, each)) for each in others}

    def _offset(self, owner: int, rank: int, at: int) -> int:
        return (self.ranks.index(owner) - self.ranks.index(rank)) % len(self.ranks) - 1 - at


def set_of(parity: ShardId, spec: ShardSpec) -> ParitySet:
    """Return the set of which this is one rank's parity."""
    return ParitySet(tuple(sorted((parity.rank, *(summand.rank for summand in spec.summands)))), spec.spare)


def summand_spec(spec: ShardSpec, summand: Summand) -> ShardSpec:
    """Return the spec of a shard that is added into this parity."""
    count = -(-summand.nbytes // spec.chunk_bytes)
    return ShardSpec(summand.digest, summand.nbytes, spec.chunk_bytes, count, spec.world_size)


def decoded(parity: Copy, rank: int, copies: Mapping[int, Sequence[Copy]], others: Sequence[Copy] = ()) -> list[Copy]:
    """Return what one rank's parity can give of another rank's shard, as copies on its host; [] for another set's.

    A chunk can be decoded if its row is there, and of every other rank the chunk that is added into the same row; or if
    one of these lacks, too, and the next rank has the second row of the same chunks. Copies are by the work: a chunk
    that one of them misses may be in another.

    Args:
        parity: The parity.
        rank: Whose shard is wanted.
        copies: Rank -> copies of its shard, of any digest; those that the parity does not name are left out.
        others: The parity of other ranks, of any set.
    """
    by_rank = {summand.rank: summand for summand in parity.spec.summands}
    if rank not in by_rank:
        return []
    ranks, spec = set_of(parity.shard, parity.spec), summand_spec(parity.spec, by_rank[rank])
    lacking = dict.fromkeys(parity.missing, 2)  # row -> chunks in it that are nowhere, but the wanted one
    for other in by_rank.keys() - {rank}:
        held = [copy for copy in copies.get(other, ()) if copy.spec.digest == by_rank[other].digest]
        if any(not copy.missing for copy in held):
            continue
        nowhere = frozenset.intersection(*(copy.missing for copy in held)) if held else None
        count = summand_spec(parity.spec, by_rank[other]).chunks_count
        for chunk, row in ranks.rows_at(parity.shard.rank, other, count).items():
            if nowhere is None or chunk in nowhere:
                lacking[row] = lacking.get(row, 0) + 1
    second = _second_rows(parity, ranks, others) if 1 in lacking.values() and ranks.spare == 2 else frozenset()
    found: dict[int, list[int]] = {number: [] for number in range(1, 2 * ranks.spare)}
    for chunk, row in ranks.rows_at(parity.shard.rank, rank, spec.chunks_count).items():
        if row not in lacking:
            found[1 + row % ranks.spare].append(chunk)
        elif lacking[row] == 1 and row + 1 in second:
            found[3].append(chunk)
    shard = ShardId(parity.shard.job, parity.shard.attempt, parity.shard.step, rank)
    return [
        Copy(shard, spec, parity.host, frozenset(range(spec.chunks_count)).difference(chunks), decoding=number)
        for number, chunks in found.items()
        if chunks or number == 1
    ]


def _second_rows(parity: Copy, ranks: ParitySet, others: Sequence[Copy]) -> frozenset[int]:
    """Return which second rows, of the chunks that are in plain rows of this parity, the next rank's hosts have."""
    digests = {summand.rank: summand.digest for summand in parity.spec.summands}
    found: set[int] = set()
    for other in others:
        is_next = other.shard.rank == ranks.next(parity.shard.rank) and set_of(other.shard, other.spec) == ranks
        if is_next and all(each.digest == digests.get(each.rank, each.digest) for each in other.spec.summands):
            found.update(row for row in range(1, other.spec.chunks_count, 2) if row not in other.missing)
    return frozenset(found)
