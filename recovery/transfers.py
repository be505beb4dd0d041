"""Which chunks travel from where to where, so that every rank's host has its whole shard? (R24, R27)

Pure. Imports `balance`, `candidates` and `inventory`. Read `planner.py` next.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter
from typing import Literal

from recovery.balance import share
from recovery.candidates import Whole
from recovery.inventory import Copy, ShardSpec

Tier = Literal["local", "peer", "parity", "durable"]
LOCAL: Tier = "local"
PEER: Tier = "peer"
PARITY: Tier = "parity"  # the source has parity of the shard, and decodes the chunks
DURABLE: Tier = "durable"


@dataclass(frozen=True, slots=True)
class Transfer:
    """Chunks of one rank's shard, each so many behind the one before, and where they come from.

    Local runs are listed too, so that the staging host verifies them (R23). A shard without chunks is listed once with
    `chunks_count` 0: its manifest still has to come from somewhere.
    """

    rank: int
    target_host: str
    source: str | None  # a host; None: durable storage
    tier: Tier
    first_chunk: int
    chunks_count: int
    nbytes: int
    stride: int = 1


@dataclass(frozen=True, slots=True)
class _Run:
    rank: int
    target_host: str
    first_chunk: int
    chunks_count: int


def transfers_for(whole: Whole, rank_hosts: Mapping[int, str]) -> tuple[tuple[Transfer, ...], tuple[int, ...]]:
    """Return the transfers that stage `whole` on its ranks' hosts, by rank and chunk, and the ranks that moved.

    Each chunk comes from the rank's own host if it is there, else from a peer, else decoded, else from durable storage
    (R24). Of all ways to choose the peers, the one taken has the least maximum of chunks sent by one host
    (`balance.share`), every chunk counting as one. A rank has moved if its host lacks a complete copy and another host
    has one (R27).

    Complexity: linear in ranks, copies and missing chunks; a rank whose host holds a complete copy costs one object.
    """
    ready: list[Transfer] = []
    moved: list[int] = []
    waiting: dict[tuple[str, ...], list[_Run]] = {}
    for rank, spec in whole.specs.items():
        target = rank_hosts[rank]
        copies = whole.copies[rank]
        if any(copy.host == target and not copy.missing and not copy.decoding for copy in copies):
            ready.append(Transfer(rank, target, target, LOCAL, 0, spec.chunks_count, spec.nbytes))
            continue
        if any(copy.decoding for copy in copies):
            ready.extend(_with_decoded(rank, target, spec, copies))
            continue
        if any(not copy.missing for copy in copies):
            moved.append(rank)
        for first, count, hosts in _segments(spec, copies):
            run = _Run(rank, target, first, count)
            if target in hosts:
                ready.append(_transfer(run, spec, target, LOCAL))
            elif not hosts:
                ready.append(_transfer(run, spec, None, DURABLE))
            elif not count:
                ready.append(_transfer(run, spec, hosts[0], PEER))
            else:
                waiting.setdefault(hosts, []).append(run)
    ready.extend(_from_peers(waiting, whole.specs))
    ready.sort(key=lambda transfer: (transfer.rank, transfer.first_chunk))
    return tuple(_merged(ready)), tuple(moved)


def _segments(spec: ShardSpec, copies: Sequence[Copy]) -> Iterator[tuple[int, int, tuple[str, ...]]]:
    """Yield (first chunk, count, sorted hosts) for each run of chunks that the same hosts hold."""
    everyone = tuple(sorted({copy.host for copy in copies}))
    gaps = sorted({chunk for copy in copies for chunk in copy.missing if 0 <= chunk < spec.chunks_count})
    if not gaps:
        yield 0, spec.chunks_count, everyone
        return
    pieces: list[tuple[int, int, tuple[str, ...]]] = []  # begin, end, holders
    position = 0  # first chunk that no piece covers yet
    for chunk in gaps:
        if position < chunk:
            pieces.append((position, chunk, everyone))
        pieces.append((chunk, chunk + 1, tuple(sorted({copy.host for copy in copies if chunk not in copy.missing}))))
        position = chunk + 1
    if position < spec.chunks_count:
        pieces.append((position, spec.chunks_count, everyone))
    for holders, alike in groupby(pieces, key=itemgetter(2)):
        run = list(alike)
        yield run[0][0], run[-1][1] - run[0][0], holders


def _with_decoded(rank: int, target: str, spec: ShardSpec, copies: Sequence[Copy]) -> Iterator[Transfer]:
    """Yield the transfers of a shard of which chunks are decoded: the target's own and peers' copies come first."""
    ordered = sorted(copies, key=lambda copy: (copy.decoding, copy.host != target, copy.host))
    by_source: dict[tuple[str | None, Tier], list[int]] = {} if spec.chunks_count else {(ordered[0].host, PARITY): []}
    for chunk in range(spec.chunks_count):
        found = next((copy for copy in ordered if chunk not in copy.missing), None)
        if found is None:
            source: tuple[str | None, Tier] = None, DURABLE
        elif found.decoding:
            source = found.host, PARITY
        else:
            source = found.host, LOCAL if found.host == target else PEER
        by_source.setdefault(source, []).append(chunk)
    for (host, tier), chunks in by_source.items():
        for first, count, stride in _progressions(chunks) if chunks else [(0, 0, 1)]:
            nbytes = sum(map(spec.chunk_nbytes, range(first, first + count * stride, stride)))
            yield Transfer(rank, target, host, tier, first, count, nbytes, stride)


def _progressions(chunks: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield (first, count, stride) of runs of ascending numbers at equal distances.

    >>> list(_progressions([1, 4, 7, 8, 9]))
    [(1, 3, 3), (8, 2, 1)]
    """
    at = 0
    while at < len(chunks):
        end = at + 1
        stride = chunks[end] - chunks[at] if end < len(chunks) else 1
        while end < len(chunks) and chunks[end] - chunks[end - 1] == stride:
            end += 1
        yield chunks[at], end - at, stride
        at = end


def _from_peers(waiting: Mapping[tuple[str, ...], Sequence[_Run]], specs: Mapping[int, ShardSpec]) -> list[Transfer]:
    demands = [(hosts, sum(run.chunks_count for run in runs)) for hosts, runs in waiting.items()]
    transfers: list[Transfer] = []
    for (hosts, runs), (_, total), shares in zip(waiting.items(), demands, share(demands), strict=True):
        left = [shares.get(host, 0) for host in hosts]
        for run in runs:
            first = run.first_chunk
            for position, count in enumerate(_portions(left, total, run.chunks_count)):
                if count:
                    part = _Run(run.rank, run.target_host, first, count)
                    transfers.append(_transfer(part, specs[run.rank], hosts[position], PEER))
                    first += count
                    left[position] -= count
            total -= run.chunks_count
    return transfers


def _portions(left: Sequence[int], total: int, count: int) -> list[int]:
    """Return `count` split in proportion to `left` (which sums to `total` >= count), never above it.

    Every shard then has several sources rather than each source its own shards.
    """
    portions = [count * room // total for room in left]
    rest = count - sum(portions)
    by_remainder = sorted(range(len(left)), key=lambda i: (-(count * left[i] % total), i))
    for position in by_remainder[:rest]:  # a remainder above zero means room for one more
        portions[position] += 1
    return portions


def _transfer(run: _Run, spec: ShardSpec, source: str | None, tier: Tier) -> Transfer:
    begin = run.first_chunk * spec.chunk_bytes
    end = min(spec.nbytes, begin + run.chunks_count * spec.chunk_bytes)
    return Transfer(run.rank, run.target_host, source, tier, run.first_chunk, run.chunks_count, end - begin)


def _merged(transfers: Iterable[Transfer]) -> Iterator[Transfer]:
    """Yield the transfers, in order, with neighbours from one source joined into one run."""
    last: Transfer | None = None
    for item in transfers:
        if last is not None and _is_next(last, item):
            count, nbytes = last.chunks_count + item.chunks_count, last.nbytes + item.nbytes
            last = replace(last, chunks_count=count, nbytes=nbytes)
            continue
        if last is not None:
            yield last
        last = item
    if last is not None:
        yield last


def _is_next(last: Transfer, item: Transfer) -> bool:
    """Return whether a run goes on where another one ends: chunks that are decoded may be between them."""
    is_near = last.stride == item.stride == 1 and last.first_chunk + last.chunks_count == item.first_chunk
    return is_near and (last.rank, last.source, last.tier) == (item.rank, item.source, item.tier)
