"""Which chunks add up to which row of parity, what can be decoded from the rows, and what the planner makes of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parity_sums import JOB, Hosts, Lost, places, times

from recovery import CommitFact, DurableMarker, Inventory, Span, StepId, plan
from recovery.parity import ParitySet, decoded, product, quotient, set_of, summand_spec
from recovery.planner import RecoveryPlan

STEP = StepId(1, 7)
SPANS = (Span(1, None),)
SIZES = st.integers(0, 45)  # bytes of a shard, in chunks of four


def test_products_and_quotients_of_all_bytes() -> None:
    """They are those of polynomials; what is divided by a factor, and multiplied by it, is as before (R37)."""
    for one in range(256):
        for other in range(256):
            expected = times(one, other)
            assert product(one, other) == expected
            if other:
                assert quotient(expected, other) == one
    with pytest.raises(ZeroDivisionError):
        quotient(1, 0)


@st.composite
def sets(draw: st.DrawFn) -> ParitySet:
    """Ranks in order, of which one or two hosts may be lost."""
    spare = draw(st.integers(1, 2))
    ranks = draw(st.lists(st.integers(0, 40), min_size=spare + 2, max_size=12, unique=True))
    return ParitySet(tuple(sorted(ranks)), spare)


@given(sets(), st.integers(0, 60))
def test_every_chunk_is_in_rows_of_other_hosts_and_no_row_has_two_of_a_rank(ranks: ParitySet, count: int) -> None:
    """A chunk is in as many rows as hosts may be lost, each on another one: no two parts of a row are on one (R37)."""
    parts: Counter[tuple[int, int, int]] = Counter()
    for rank in ranks.ranks:
        expected = {chunk: places(ranks, rank, chunk) for chunk in range(count)}
        for owner in ranks.others(rank):
            here = ranks.rows_at(owner, rank, count)
            mine = {chunk: place for chunk, found in expected.items() for place in found if place.owner == owner}
            assert [*here.items()] == [(chunk, place.row) for chunk, place in sorted(mine.items())]
            assert [ranks.row_of(owner, rank, chunk) for chunk in range(count)] == list(map(here.get, range(count)))
            in_rows = {row: ranks.chunk_in(owner, rank, row) for row in range(ranks.rows_count(count))}
            assert {row: chunk for row, chunk in in_rows.items() if chunk is not None and chunk < count} == {
                row: chunk for chunk, row in here.items()
            }
            assert all(ranks.factor(place.row, rank) == place.factor for place in mine.values())
            parts.update((owner, row, rank) for row in here.values())
        for found in expected.values():
            assert len({rank, *(place.owner for place in found)}) == ranks.spare + 1
            assert [ranks.next(place.owner) for place in found[:-1]] == [place.owner for place in found[1:]]
    assert set(parts.values()) <= {1}
    rows = {(owner, row) for owner, row, _ in parts}
    assert all(len({rank for o, r, rank in parts if (o, r) == row}) <= ranks.data for row in rows)
    assert max((row for _, row in rows), default=-1) + 1 == ranks.rows_count(count)


@st.composite
def hosts(draw: st.DrawFn) -> Hosts:
    """Unequal shards in a set, of ranks that are 0, 1, ... for the planner; one host may be lost."""
    count = draw(st.integers(3, 6))
    return Hosts.of(ParitySet(tuple(range(count))), [draw(SIZES) for _ in range(count)], draw(st.integers(0, 99)))


def owner_of(all_hosts: Hosts, rank: int, chunk: int) -> int:
    """Return the rank on whose host the one row of a chunk is."""
    (place,) = places(all_hosts.ranks, rank, chunk)
    return place.owner


@given(hosts(), st.data())
def test_what_is_decoded_is_what_adding_up_the_rest_of_the_rows_gives(all_hosts: Hosts, data: st.DataObject) -> None:
    """Whatever chunks and rows are lost: a chunk counts as decoded exactly if all the rest of its row is there."""
    ranks = all_hosts.ranks.ranks
    some = {rank: data.draw(st.sets(st.integers(0, 12)), f"lost of {rank}") for rank in ranks}
    lost = {rank: some[rank] & {*range(len(all_hosts.chunks[rank]))} for rank in ranks}
    owner, rank = data.draw(st.permutations(ranks))[:2]
    rows_lost = data.draw(st.sets(st.integers(0, 12))) & {*range(len(all_hosts.rows[owner]))}
    absent = data.draw(st.sets(st.sampled_from(ranks)))
    copies = {r: [all_hosts.copy(r, lost[r])] for r in ranks if r not in absent}
    (found,) = decoded(all_hosts.parity(owner, rows_lost), rank, copies)
    assert (found.host, found.decoding, found.spec) == (f"h{owner}", 1, all_hosts.spec(rank))
    gone = all_hosts.lost(absent).chunks | {(r, chunk) for r in ranks for chunk in lost[r]}
    left = Lost(gone, {(owner, row) for row in rows_lost})
    for number, chunk in enumerate(all_hosts.chunks[rank]):
        is_there = owner_of(all_hosts, rank, number) == owner and all_hosts.is_decodable(rank, number, left)
        assert (number not in found.missing) is is_there
        if is_there:
            assert all_hosts.decode(owner, rank, number, left) == chunk


@pytest.mark.parametrize("ranks", [ParitySet((0, 1, 2)), ParitySet((0, 1, 2, 3), spare=2)])
def test_shards_that_the_parity_does_not_name_decode_nothing(ranks: ParitySet) -> None:
    """A sibling's copy with other bytes is not what was added; a rank outside the set, or its own, gives nothing."""
    found = Hosts.of(ranks, [12] * len(ranks.ranks), seed=1)
    others = [found.copy(r)._replace(spec=found.spec(r)._replace(digest="x")) for r in ranks.ranks[2:]]
    (partial,) = decoded(found.parity(0), 1, {copy.shard.rank: [copy] for copy in others})
    assert partial.missing == {0, 1, 2}
    assert decoded(found.parity(0), 0, {r: [found.copy(r)] for r in ranks.ranks}) == []
    assert decoded(found.parity(0), 9, {}) == []
    assert set_of(found.parity(1).shard, found.parity(1).spec) == ranks
    assert [summand_spec(found.parity(1).spec, each) for each in found.parity(1).spec.summands] == [
        found.spec(rank)._replace(summands=()) for rank in ranks.others(1)
    ]


def commit_of(all_hosts: Hosts) -> CommitFact:
    """The fact of a commit of all."""
    ranks = all_hosts.ranks.ranks
    named = {rank: tuple(f"h{each}" for each in ranks) for rank in ranks}
    return CommitFact(STEP, len(ranks), {rank: f"d{rank}" for rank in ranks}, named)


def planned(all_hosts: Hosts, lost: set[int], at: Mapping[int, str], *, markers=(), more=(), is_committed=True):
    """Plan with the hosts of some ranks lost."""
    live = [rank for rank in all_hosts.ranks.ranks if rank not in lost]
    held = (*map(all_hosts.copy, live), *map(all_hosts.parity, live), *more)
    commits = (commit_of(all_hosts),) if is_committed else ()
    inventory = Inventory(JOB, held, commits, tuple(markers))
    return plan(inventory, SPANS, world_size=len(all_hosts.ranks.ranks), rank_hosts=at)


def brought(all_hosts: Hosts, found: RecoveryPlan, gone: set[int], rank: int) -> list[bytes | None]:
    """Do what a plan says for a rank, with nothing but what live hosts have; None for a chunk that nothing brings."""
    chunks: list[bytes | None] = [None] * len(all_hosts.chunks[rank])
    for item in (each for each in found.transfers if each.rank == rank):
        numbers = range(item.first_chunk, item.first_chunk + item.chunks_count * item.stride, item.stride)
        for number in numbers:
            assert chunks[number] is None, "a chunk is brought twice"
            chunks[number] = all_hosts.chunks[rank][number]
            if item.tier == "parity":
                owner = int(str(item.source)[1:])
                chunks[number] = all_hosts.decode(owner, rank, number, all_hosts.lost(gone))
            elif item.tier != "durable":
                assert (item.source == item.target_host) is (item.tier == "local")
                assert item.source == f"h{rank}"
                assert rank not in gone
        assert sum(len(all_hosts.chunks[rank][number]) for number in numbers) == item.nbytes
    return chunks


@given(hosts(), st.data())
def test_any_one_host_of_a_set_may_be_lost(all_hosts: Hosts, data: st.DataObject) -> None:
    """Doing what the plan says brings every rank its bytes, on a new host or on one that has parity itself."""
    ranks = all_hosts.ranks.ranks
    gone = data.draw(st.sampled_from(ranks))
    target = data.draw(st.sampled_from(["new", *(f"h{rank}" for rank in ranks if rank != gone)]))
    at = {rank: target if rank == gone else f"h{rank}" for rank in ranks}
    found = planned(all_hosts, {gone}, at, is_committed=data.draw(st.booleans()))
    assert (found.step, found.verdict) == (STEP, "peer")
    for rank in ranks:
        assert brought(all_hosts, found, {gone}, rank) == all_hosts.chunks[rank]
    assert found.bytes_durable == 0
    assert found.bytes_peer == all_hosts.spec(gone).nbytes
    assert found.bytes_local + found.bytes_peer == sum(all_hosts.spec(rank).nbytes for rank in ranks)
    assert any(item.rank == gone for item in found.transfers)


def check_more_lost_than_parity_gives(all_hosts: Hosts, gone: set[int]) -> None:
    """What no row gives comes from durable storage, and only that; without it the step is refused by its ranks."""
    ranks, left = all_hosts.ranks.ranks, all_hosts.lost(gone)
    at = {rank: f"new{rank}" if rank in gone else f"h{rank}" for rank in ranks}
    found = planned(all_hosts, gone, at)
    lacking = {(r, chunk) for r, chunk in left.chunks if not all_hosts.is_decodable(r, chunk, left)}
    if lacking:
        assert found.step is None
        assert all(str(rank) in str(found.rejected[0]) for rank, _ in lacking), found.rejected
    else:
        assert found.step == STEP
    marker = DurableMarker(STEP, len(ranks), {rank: all_hosts.spec(rank) for rank in ranks})
    found = planned(all_hosts, gone, at, markers=[marker])
    assert found.step == STEP
    stored = {
        (item.rank, chunk)
        for item in found.transfers
        if item.tier == "durable"
        for chunk in range(item.first_chunk, item.first_chunk + item.chunks_count * item.stride, item.stride)
    }
    assert stored == lacking
    for rank in ranks:
        assert brought(all_hosts, found, gone, rank) == all_hosts.chunks[rank]


@given(hosts(), st.data())
def test_two_lost_hosts_of_a_set_are_named_unless_durable_storage_has_them(
    all_hosts: Hosts, data: st.DataObject
) -> None:
    """One parity gives one host of a set back (R37)."""
    check_more_lost_than_parity_gives(all_hosts, set(data.draw(st.permutations(all_hosts.ranks.ranks))[:2]))


def test_chunks_of_partial_copies_come_before_decoded_ones() -> None:
    """A lost rank's shard of which another host has some chunks: those are read, the others are decoded."""
    found = Hosts.of(ParitySet((0, 1, 2, 3)), [40, 40, 40, 40], seed=3)
    part = found.copy(1, {0, 4, 5}, host="h2")
    result = planned(found, {1}, {0: "h0", 1: "new", 2: "h2", 3: "h3"}, more=[part])
    by_tier: dict[str, set[int]] = {}
    for item in (each for each in result.transfers if each.rank == 1):
        numbers = range(item.first_chunk, item.first_chunk + item.chunks_count * item.stride, item.stride)
        by_tier.setdefault(item.tier, set()).update(numbers)
    assert by_tier == {"peer": {1, 2, 3, 6, 7, 8, 9}, "parity": {0, 4, 5}}


def test_runs_from_durable_storage_with_decoded_chunks_between_them_are_not_joined() -> None:
    """Durable storage has 0-2, 4-6 and 8-9 of a lost shard, and its row gives 3 and 7: each chunk is brought once."""
    found = Hosts.of(ParitySet((0, 1, 2, 3, 4)), [0, 0, 40, 24, 24], seed=1)
    check_more_lost_than_parity_gives(found, {2, 4})
    check_more_lost_than_parity_gives(found, {2, 3})


# -- two spare hosts ----------------------------------------------------------------------------------


@st.composite
def two_spare(draw: st.DrawFn, most: int = 12) -> Hosts:
    """Sets that survive any two losses, of unequal shards of up to nine chunks."""
    count = draw(st.integers(4, most))
    sizes = draw(st.lists(st.integers(0, 36), min_size=count, max_size=count))
    return Hosts.of(ParitySet(tuple(range(count)), spare=2), sizes, draw(st.integers(0, 99)))


def subsets(all_hosts: Hosts, count: int) -> list[set[int]]:
    """Return all sets of so many ranks."""
    return [set(each) for each in combinations(all_hosts.ranks.ranks, count)]


def given_by(all_hosts: Hosts, rank: int, left: Lost) -> dict[int, set[str]]:
    """Return by chunk the hosts that decode it, of what `decoded` says of all parity that is left; check each chunk."""
    ranks = all_hosts.ranks.ranks
    lost_chunks = {r: {chunk for each, chunk in left.chunks if each == r} for r in ranks}
    copies = {r: [all_hosts.copy(r, lost_chunks[r])] for r in ranks}
    parity = [all_hosts.parity(r, {row for each, row in left.rows if each == r}) for r in ranks]
    found: dict[int, set[str]] = {}
    for each in parity:
        ways = decoded(each, rank, copies, parity)
        for copy in ways:
            assert (copy.host, copy.spec, copy.shard.is_parity) == (each.host, all_hosts.spec(rank), False)
            for chunk in {*range(copy.spec.chunks_count)} - copy.missing:
                assert copy.host not in found.setdefault(chunk, set()), "two works for one chunk"
                found[chunk].add(copy.host)
                check_work(all_hosts, copy.decoding, each.shard.rank, rank, chunk, left)
        assert sorted(copy.decoding for copy in ways) == sorted({copy.decoding for copy in ways})
    return found


def check_work(all_hosts: Hosts, decoding: int, owner: int, rank: int, chunk: int, left: Lost) -> None:
    """The chunk is what the host decodes, and the kind of work is as told: 1 plain, 2 a second row, 3 both rows."""
    assert all_hosts.decode(owner, rank, chunk, left) == all_hosts.chunks[rank][chunk]
    place = next(each for each in places(all_hosts.ranks, rank, chunk) if each.owner == owner)
    gone = {other for other in all_hosts.in_row(place).items() if other in left.chunks} - {(rank, chunk)}
    assert decoding == (3 if gone else 1 + place.row % 2)


@settings(deadline=None, max_examples=25)
@given(two_spare())
def test_any_two_hosts_of_a_set_may_be_lost(all_hosts: Hosts) -> None:
    """Every chunk of both is decoded, from rows and chunks of the hosts that are left, to the very bytes (R37)."""
    for gone in subsets(all_hosts, 2):
        left = all_hosts.lost(gone)
        for rank in gone:
            found = given_by(all_hosts, rank, left)
            assert sorted(found) == [*range(len(all_hosts.chunks[rank]))]
            assert not {f"h{each}" for each in gone} & set().union(*found.values())


@settings(deadline=None, max_examples=15)
@given(two_spare(most=7))
def test_of_three_lost_hosts_only_what_uneven_shards_leave_is_decoded(all_hosts: Hosts) -> None:
    """With whole stripes of all three no chunk of these comes back; else exactly those that follow from the rest."""
    for gone in subsets(all_hosts, 3):
        left = all_hosts.lost(gone)
        for rank in gone:
            count = len(all_hosts.chunks[rank])
            expected = {chunk for chunk in range(count) if all_hosts.is_decodable(rank, chunk, left)}
            assert set(given_by(all_hosts, rank, left)) == expected
            whole = min(len(all_hosts.chunks[each]) for each in gone) // all_hosts.ranks.data * all_hosts.ranks.data
            assert not expected & {*range(whole)}


@given(two_spare(most=8), st.data())
def test_damage_of_chunks_and_rows_beside_lost_hosts(all_hosts: Hosts, data: st.DataObject) -> None:
    """A chunk is decoded exactly if as many rows of it are whole as chunks of its row are lost, of up to two (R37)."""
    ranks = all_hosts.ranks.ranks
    left = all_hosts.lost(data.draw(st.sets(st.sampled_from(ranks), max_size=2)))
    for found, held in ((left.chunks, all_hosts.chunks), (left.rows, all_hosts.rows)):
        pieces = [(rank, number) for rank in ranks for number in range(len(held[rank]))]
        found.update(data.draw(st.sets(st.sampled_from(pieces), max_size=8)) if pieces else set())
    rank = data.draw(st.sampled_from(ranks))
    expected = {c for c in range(len(all_hosts.chunks[rank])) if all_hosts.is_decodable(rank, c, left)}
    assert set(given_by(all_hosts, rank, left)) == expected


def test_a_second_row_of_other_bytes_is_not_used() -> None:
    """The next host's parity is of another set, or of other bytes of a rank in it: it is no second equation."""
    found = Hosts.of(ParitySet((0, 1, 2, 3), spare=2), [12] * 4, seed=1)
    plain, second = found.parity(0), found.parity(1)
    summands = tuple(replace(each, digest="x") if each.rank == 2 else each for each in second.spec.summands)
    strange = second._replace(spec=second.spec._replace(summands=summands))
    narrow = second._replace(spec=second.spec._replace(summands=second.spec.summands[:2]))
    assert {copy.decoding for copy in decoded(plain, 2, {}, [second])} == {1, 2, 3}
    for others in ([], [strange], [narrow], [found.parity(2)], [second._replace(missing=frozenset({1, 3}))]):
        assert 3 not in {copy.decoding for copy in decoded(plain, 2, {}, others)}


@settings(deadline=None, max_examples=25)
@given(two_spare(most=7), st.data())
def test_a_plan_brings_two_lost_hosts_back(all_hosts: Hosts, data: st.DataObject) -> None:
    """On new hosts or on others of the set, without durable storage, committed or not (R24, R37)."""
    ranks = all_hosts.ranks.ranks
    is_committed = data.draw(st.booleans())
    for gone in subsets(all_hosts, 2):
        left = [f"h{rank}" for rank in ranks if rank not in gone]
        at = {r: data.draw(st.sampled_from(["new", *left])) if r in gone else f"h{r}" for r in ranks}
        found = planned(all_hosts, gone, at, is_committed=is_committed)
        assert (found.step, found.verdict) == (STEP, "peer")
        for rank in ranks:
            assert brought(all_hosts, found, gone, rank) == all_hosts.chunks[rank]
        assert (found.bytes_durable, found.bytes_peer) == (0, sum(all_hosts.spec(rank).nbytes for rank in gone))


@settings(deadline=None)
@given(two_spare(most=6), st.data())
def test_three_lost_hosts_of_a_set_are_named_unless_durable_storage_has_them(
    all_hosts: Hosts, data: st.DataObject
) -> None:
    """Two rows of each chunk give two hosts of a set back (R37)."""
    check_more_lost_than_parity_gives(all_hosts, set(data.draw(st.permutations(all_hosts.ranks.ranks))[:3]))


def test_of_two_rows_of_a_chunk_the_plan_takes_the_one_of_less_work() -> None:
    """With one host lost, every chunk comes from its plain row: no factor, no second row."""
    found = Hosts.of(ParitySet((0, 1, 2, 3, 4, 5), spare=2), [36] * 6, seed=2)
    result = planned(found, {2}, {rank: f"h{rank}" if rank != 2 else "new" for rank in range(6)})
    at = {
        (item.source, chunk)
        for item in result.transfers
        if item.rank == 2
        for chunk in range(item.first_chunk, item.first_chunk + item.chunks_count * item.stride, item.stride)
    }
    plain = (places(found.ranks, 2, chunk)[0] for chunk in range(9))
    assert at == {(f"h{place.owner}", chunk) for chunk, place in enumerate(plain)}
