"""Which chunks add up to which row of parity, and which chunks of a lost shard can be decoded from the rows.

A *parity set* is a tuple of ranks, in order, each on a host of its own. Of k + 1 ranks every one keeps rows, each the
exclusive or of one chunk of each of the k others: so of one row no two parts are on one host, and any one host may be
lost. Row `t` of a rank holds chunk `k * t + offset` of each other one, where the offset turns with the ranks' distance.

    chunks of     rank 0   rank 1   rank 2          rows at   rank 0   rank 1   rank 2
    k = 2          0 1      0 1      0 1                      1.1^2.0  0.0^2.1  0.1^1.0

Pure. Imports `inventory` only. Read `candidates.py` next.
Source: rotating parity (RAID 5), as in SCR's XOR sets; whole chunks as its unit, and decoding at the rows, are ours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from recovery.inventory import Copy, ShardId, ShardSpec, Summand

ParitySet = tuple[int, ...]


def parity_rank(ranks: ParitySet, rank: int, chunk: int) -> int:
    """Return the rank on whose host a chunk is added into a row.

    >>> [parity_rank((4, 5, 6), 4, chunk) for chunk in range(4)]
    [5, 6, 5, 6]
    """
    return ranks[(ranks.index(rank) + 1 + chunk % (len(ranks) - 1)) % len(ranks)]


def row_of(ranks: ParitySet, chunk: int) -> int:
    """Return the number of the row that a chunk is added into, at its `parity_rank`."""
    return chunk // (len(ranks) - 1)


def chunks_at(ranks: ParitySet, owner: int, rank: int, chunks_count: int) -> range:
    """Return the chunks of a rank's shard that are added into the rows of another rank: one a row, from row 0 on.

    >>> chunks_at((4, 5, 6), 6, 4, chunks_count=5)
    range(1, 5, 2)
    """
    offset = (ranks.index(owner) - ranks.index(rank) - 1) % len(ranks)
    return range(offset, chunks_count, len(ranks) - 1)


def rows_count(ranks: ParitySet, chunks_count: int) -> int:
    """Return how many rows parity has at most, if no shard in it has more chunks than this."""
    return -(-chunks_count // (len(ranks) - 1))


def set_of(parity: ShardId, spec: ShardSpec) -> ParitySet:
    """Return the set of which this is one rank's parity."""
    return tuple(sorted((parity.rank, *(summand.rank for summand in spec.summands))))


def summand_spec(spec: ShardSpec, summand: Summand) -> ShardSpec:
    """Return the spec of a shard that is added into this parity."""
    count = -(-summand.nbytes // spec.chunk_bytes)
    return ShardSpec(summand.digest, summand.nbytes, spec.chunk_bytes, count, spec.world_size)


def decoded(parity: Copy, rank: int, copies: Mapping[int, Sequence[Copy]]) -> Copy | None:
    """Return what one rank's parity can give of another rank's shard, as a copy on its host; None for another set's.

    A chunk can be decoded if its row is there, and of every other rank the chunk that is added into the same row.

    Args:
        parity: The parity.
        rank: Whose shard is wanted.
        copies: Rank -> copies of its shard, of any digest; those that the parity does not name are left out.
    """
    by_rank = {summand.rank: summand for summand in parity.spec.summands}
    if rank not in by_rank:
        return None
    ranks, spec = set_of(parity.shard, parity.spec), summand_spec(parity.spec, by_rank[rank])
    here = chunks_at(ranks, parity.shard.rank, rank, spec.chunks_count)
    lost_rows = set(parity.missing)
    for other in by_rank.keys() - {rank}:
        held = [copy for copy in copies.get(other, ()) if copy.spec.digest == by_rank[other].digest]
        if any(not copy.missing for copy in held):
            continue
        count = summand_spec(parity.spec, by_rank[other]).chunks_count
        added = chunks_at(ranks, parity.shard.rank, other, count)
        nowhere = frozenset.intersection(*(copy.missing for copy in held)) if held else added
        lost_rows.update(row for row, chunk in enumerate(added) if chunk in nowhere)
    found = here if not lost_rows else [chunk for row, chunk in enumerate(here) if row not in lost_rows]
    shard = ShardId(parity.shard.job, parity.shard.attempt, parity.shard.step, rank)
    missing = frozenset(range(spec.chunks_count)).difference(found)
    return Copy(shard, spec, parity.host, missing, is_decoded=True)
