"""Which chunks add up to which row of parity, what can be decoded from the rows, and what the planner makes of it."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce

from hypothesis import given
from hypothesis import strategies as st

from recovery import CommitFact, Copy, DurableMarker, Inventory, ShardId, ShardSpec, Span, StepId, plan
from recovery.inventory import Summand
from recovery.parity import ParitySet, chunks_at, decoded, parity_rank, row_of, rows_count, set_of, summand_spec
from recovery.planner import RecoveryPlan

JOB, STEP, CHUNK_BYTES = "job", StepId(1, 7), 4
SPANS = (Span(1, None),)
sets = (
    st.integers(3, 7).flatmap(lambda n: st.lists(st.integers(0, 40), min_size=n, max_size=n, unique=True)).map(sorted)
)
sizes = st.integers(0, 45)  # bytes of a shard, in chunks of four


@given(sets.map(tuple), st.integers(0, 60))
def test_every_chunk_is_in_one_row_at_another_rank_and_no_row_has_two_of_a_rank(ranks: ParitySet, count: int) -> None:
    """The rows of a rank tile what the others have: so of any row no two parts are on one host (R37)."""
    places: Counter[tuple[int, int, int]] = Counter()
    for rank in ranks:
        found = []
        for owner in ranks:
            here = chunks_at(ranks, owner, rank, count) if owner != rank else range(0)
            assert [row_of(ranks, chunk) for chunk in here] == list(range(len(here)))
            assert all(parity_rank(ranks, rank, chunk) == owner for chunk in here)
            assert len(here) <= rows_count(ranks, count)
            found += here
            places.update((owner, row, rank) for row in range(len(here)))
        assert sorted(found) == list(range(count))
    assert set(places.values()) <= {1}
    if count:
        assert max(row for _, row, _ in places) + 1 == rows_count(ranks, count)


@dataclass
class Hosts:
    """A set of ranks with real bytes: rank r's shard and parity are on host h<r>, whole."""

    ranks: ParitySet
    chunks: dict[int, list[bytes]]  # by rank
    rows: dict[int, list[bytes]]

    @classmethod
    def of(cls, ranks: ParitySet, nbytes: Sequence[int], seed: int) -> Hosts:
        """Fill shards of these sizes, and add them up by definition: every chunk at the rank that it is added at."""
        pick, chunks = random.Random(seed), dict[int, list[bytes]]()
        for rank, size in zip(ranks, nbytes, strict=True):
            data = pick.randbytes(size)
            chunks[rank] = [data[at : at + CHUNK_BYTES] for at in range(0, size, CHUNK_BYTES)]
        rows: dict[int, dict[int, bytes]] = {rank: {} for rank in ranks}
        for rank, held in chunks.items():
            for number, chunk in enumerate(held):
                row, owner = row_of(ranks, number), parity_rank(ranks, rank, number)
                rows[owner][row] = xor(rows[owner].get(row, b""), chunk)
        assert all(sorted(held) == list(range(len(held))) for held in rows.values())
        return cls(ranks, chunks, {rank: [held[row] for row in sorted(held)] for rank, held in rows.items()})

    def spec(self, rank: int) -> ShardSpec:
        """Return the spec of a rank's shard."""
        nbytes, count = sum(map(len, self.chunks[rank])), len(self.chunks[rank])
        return ShardSpec(f"d{rank}", nbytes, CHUNK_BYTES, count, len(self.ranks))

    def copy(self, rank: int, missing: frozenset[int] = frozenset(), host: str = "") -> Copy:
        """Return the copy of a rank's shard."""
        return Copy(ShardId(JOB, 1, 7, rank), self.spec(rank), host or f"h{rank}", missing)

    def parity(self, rank: int, missing: frozenset[int] = frozenset()) -> Copy:
        """Return the parity that a rank's host keeps."""
        summands = tuple(Summand(r, f"d{r}", self.spec(r).nbytes) for r in self.ranks if r != rank)
        rows = self.rows[rank]
        spec = ShardSpec(f"p{rank}", sum(map(len, rows)), CHUNK_BYTES, len(rows), len(self.ranks), summands)
        return Copy(ShardId(JOB, 1, 7, rank, is_parity=True), spec, f"h{rank}", missing)


def xor(left: bytes, right: bytes) -> bytes:
    """Add bytes; the shorter ones count as followed by zeros."""
    size = max(len(left), len(right))
    return bytes(a ^ b for a, b in zip(left.ljust(size, b"\0"), right.ljust(size, b"\0"), strict=True))


@st.composite
def hosts(draw: st.DrawFn) -> Hosts:
    """Unequal shards in a set, of ranks that are 0, 1, ... for the planner."""
    count = draw(st.integers(3, 6))
    return Hosts.of(tuple(range(count)), [draw(sizes) for _ in range(count)], draw(st.integers(0, 99)))


@given(hosts(), st.data())
def test_what_is_decoded_is_what_adding_up_the_rest_of_the_rows_gives(all_hosts: Hosts, data: st.DataObject) -> None:
    """Whatever chunks and rows are lost: a chunk counts as decoded exactly if all the rest of its row is there."""
    some = {rank: data.draw(st.sets(st.integers(0, 12)).map(frozenset), f"lost of {rank}") for rank in all_hosts.ranks}
    lost = {rank: lost & {*range(len(all_hosts.chunks[rank]))} for rank, lost in some.items()}
    owner, rank = data.draw(st.permutations(all_hosts.ranks))[:2]
    rows_lost = data.draw(st.sets(st.integers(0, 12))) & {*range(len(all_hosts.rows[owner]))}
    absent = data.draw(st.sets(st.sampled_from(all_hosts.ranks)))
    copies = {r: [all_hosts.copy(r, lost[r])] for r in all_hosts.ranks if r not in absent}
    found = decoded(all_hosts.parity(owner, frozenset(rows_lost)), rank, copies)
    assert found is not None
    assert (found.host, found.is_decoded, found.spec) == (f"h{owner}", True, all_hosts.spec(rank))
    for number, chunk in enumerate(all_hosts.chunks[rank]):
        parts, row = [], row_of(all_hosts.ranks, number)
        is_there = parity_rank(all_hosts.ranks, rank, number) == owner and row not in rows_lost
        for other in {*all_hosts.ranks} - {owner, rank}:
            added = [c for c in range(len(all_hosts.chunks[other])) if row_of(all_hosts.ranks, c) == row]
            for each in (c for c in added if parity_rank(all_hosts.ranks, other, c) == owner):
                is_there = is_there and other not in absent and each not in lost[other]
                parts.append(all_hosts.chunks[other][each])
        assert (number not in found.missing) is is_there
        if is_there:
            assert reduce(xor, parts, all_hosts.rows[owner][row])[: len(chunk)] == chunk


def test_shards_that_the_parity_does_not_name_decode_nothing() -> None:
    """A sibling's copy with other bytes is not what was added; a rank outside the set, or its own, gives nothing."""
    found = Hosts.of((0, 1, 2), [12, 12, 12], seed=1)
    other = replace(found.copy(2), spec=replace(found.spec(2), digest="x"))
    partial = decoded(found.parity(0), 1, {2: [other]})
    assert partial is not None
    assert partial.missing == {0, 1, 2}
    assert decoded(found.parity(0), 0, {2: [found.copy(2)]}) is None
    assert decoded(found.parity(0), 9, {}) is None
    assert set_of(found.parity(1).shard, found.parity(1).spec) == (0, 1, 2)
    assert [summand_spec(found.parity(1).spec, each) for each in found.parity(1).spec.summands] == [
        replace(found.spec(rank), summands=()) for rank in (0, 2)
    ]


def commit_of(all_hosts: Hosts) -> CommitFact:
    """The fact of a commit of all."""
    named = {rank: tuple(f"h{each}" for each in all_hosts.ranks) for rank in all_hosts.ranks}
    return CommitFact(STEP, len(all_hosts.ranks), {rank: f"d{rank}" for rank in all_hosts.ranks}, named)


def planned(all_hosts: Hosts, lost: set[int], at: Mapping[int, str], *, markers=(), more=(), is_committed=True):
    """Plan with the hosts of some ranks lost."""
    live = [rank for rank in all_hosts.ranks if rank not in lost]
    held = (*map(all_hosts.copy, live), *map(all_hosts.parity, live), *more)
    commits = (commit_of(all_hosts),) if is_committed else ()
    inventory = Inventory(JOB, held, commits, tuple(markers))
    return plan(inventory, SPANS, world_size=len(all_hosts.ranks), rank_hosts=at)


def brought(all_hosts: Hosts, found: RecoveryPlan, lost: set[int], rank: int) -> list[bytes | None]:
    """Do what a plan says for a rank, with nothing but what live hosts have; None for a chunk that nothing brings."""
    chunks: list[bytes | None] = [None] * len(all_hosts.chunks[rank])
    for item in (each for each in found.transfers if each.rank == rank):
        numbers = range(item.first_chunk, item.first_chunk + item.chunks_count * item.stride, item.stride)
        sent = 0
        for number in numbers:
            assert chunks[number] is None, "a chunk is brought twice"
            if item.tier == "parity":
                owner = int(str(item.source)[1:])
                row = row_of(all_hosts.ranks, number)
                assert owner not in lost
                assert parity_rank(all_hosts.ranks, rank, number) == owner
                rest = [(r, chunks_at(all_hosts.ranks, owner, r, len(all_hosts.chunks[r]))) for r in all_hosts.ranks]
                rest = [(r, added) for r, added in rest if r not in (owner, rank) and row < len(added)]
                assert not {r for r, _ in rest} & lost
                parts = [all_hosts.chunks[r][added[row]] for r, added in rest]
                chunks[number] = reduce(xor, parts, all_hosts.rows[owner][row])[: len(all_hosts.chunks[rank][number])]
            elif item.tier == "durable":
                chunks[number] = all_hosts.chunks[rank][number]
            else:
                assert (item.source == item.target_host) is (item.tier == "local")
                assert item.source == f"h{rank}"
                assert rank not in lost
                chunks[number] = all_hosts.chunks[rank][number]
            sent += len(all_hosts.chunks[rank][number])
        assert sent == item.nbytes
    return chunks


@given(hosts(), st.data())
def test_any_one_host_of_a_set_may_be_lost(all_hosts: Hosts, data: st.DataObject) -> None:
    """Doing what the plan says brings every rank its bytes, on a new host or on one that has parity itself."""
    gone = data.draw(st.sampled_from(all_hosts.ranks))
    target = data.draw(st.sampled_from(["new", *(f"h{rank}" for rank in all_hosts.ranks if rank != gone)]))
    at = {rank: target if rank == gone else f"h{rank}" for rank in all_hosts.ranks}
    found = planned(all_hosts, {gone}, at, is_committed=data.draw(st.booleans()))
    assert (found.step, found.verdict) == (STEP, "peer")
    for rank in all_hosts.ranks:
        assert brought(all_hosts, found, {gone}, rank) == all_hosts.chunks[rank]
    assert found.bytes_durable == 0
    assert found.bytes_peer == all_hosts.spec(gone).nbytes
    assert found.bytes_local + found.bytes_peer == sum(all_hosts.spec(rank).nbytes for rank in all_hosts.ranks)
    assert any(item.rank == gone for item in found.transfers)


@given(hosts(), st.data())
def test_two_lost_hosts_of_a_set_are_named_unless_durable_storage_has_them(
    all_hosts: Hosts, data: st.DataObject
) -> None:
    """What no row gives comes from durable storage, and only that; without it the step is refused by its ranks."""
    gone = set(data.draw(st.permutations(all_hosts.ranks))[:2])
    at = {rank: f"new{rank}" if rank in gone else f"h{rank}" for rank in all_hosts.ranks}
    found = planned(all_hosts, gone, at)
    first, second = sorted(gone)
    lacking = {
        rank: [
            chunk
            for chunk in range(len(all_hosts.chunks[rank]))
            if parity_rank(all_hosts.ranks, rank, chunk) == other
            or row_of(all_hosts.ranks, chunk)
            < len(
                chunks_at(
                    all_hosts.ranks, parity_rank(all_hosts.ranks, rank, chunk), other, len(all_hosts.chunks[other])
                )
            )
        ]
        for rank, other in ((first, second), (second, first))
    }
    lost = [str(rank) for rank in sorted(gone) if lacking[rank]]
    if lost:
        assert found.step is None
        assert all(rank in str(found.rejected[0]) for rank in lost), found.rejected
    else:
        assert found.step == STEP
    marker = DurableMarker(STEP, len(all_hosts.ranks), {rank: all_hosts.spec(rank) for rank in all_hosts.ranks})
    found = planned(all_hosts, gone, at, markers=[marker])
    assert found.step == STEP
    stored = {
        (item.rank, chunk)
        for item in found.transfers
        if item.tier == "durable"
        for chunk in range(item.first_chunk, item.first_chunk + item.chunks_count * item.stride, item.stride)
    }
    assert stored == {(rank, chunk) for rank in gone for chunk in lacking[rank]}
    for rank in all_hosts.ranks:
        assert brought(all_hosts, found, gone, rank) == all_hosts.chunks[rank]


def test_chunks_of_partial_copies_come_before_decoded_ones() -> None:
    """A lost rank's shard of which another host has some chunks: those are read, the others are decoded."""
    found = Hosts.of((0, 1, 2, 3), [40, 40, 40, 40], seed=3)
    part = found.copy(1, frozenset({0, 4, 5}), host="h2")
    result = planned(found, {1}, {0: "h0", 1: "new", 2: "h2", 3: "h3"}, more=[part])
    by_tier: dict[str, set[int]] = {}
    for item in (each for each in result.transfers if each.rank == 1):
        numbers = range(item.first_chunk, item.first_chunk + item.chunks_count * item.stride, item.stride)
        by_tier.setdefault(item.tier, set()).update(numbers)
    assert by_tier == {"peer": {1, 2, 3, 6, 7, 8, 9}, "parity": {0, 4, 5}}
