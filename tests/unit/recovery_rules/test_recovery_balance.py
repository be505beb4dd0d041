"""No source sends more than its share, proved against exhaustive search."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recovery import Copy, Inventory, ShardId, ShardSpec, Span, plan
from recovery.balance import share


def least_maximum(demands) -> int:
    """Return the least possible heaviest load: by Hall, the densest set of hosts decides."""
    names = sorted({host for hosts, _ in demands for host in hosts})
    worst = 0
    for size in range(1, len(names) + 1):
        for chosen in combinations(names, size):
            confined = sum(count for hosts, count in demands if set(hosts) <= set(chosen))
            worst = max(worst, -(-confined // size))
    return worst


def every_load(demands):
    """Yield every reachable tuple of loads, sorted from the heaviest."""
    names = sorted({host for hosts, _ in demands for host in hosts})
    states = {tuple(0 for _ in names)}
    for hosts, count in demands:
        for _ in range(count):
            states = {
                tuple(load + (names[i] == host) for i, load in enumerate(state)) for state in states for host in hosts
            }
    return {tuple(sorted(state, reverse=True)) for state in states}


def loads_of(shares) -> dict[str, int]:
    loads: dict[str, int] = {}
    for sent in shares:
        for host, count in sent.items():
            assert count >= 0
            loads[host] = loads.get(host, 0) + count
    return loads


hosts = st.sets(st.sampled_from("abcdef"), min_size=1, max_size=4).map(lambda found: tuple(sorted(found)))


@settings(max_examples=400, deadline=None)
@given(st.lists(st.tuples(hosts, st.integers(0, 40)), max_size=8))
def test_the_heaviest_load_is_the_least_possible(demands) -> None:
    """Every demand is met by its own hosts, and the maximum equals the optimum, not merely comes near it."""
    shares = share(demands)
    for (names, count), sent in zip(demands, shares, strict=True):
        assert sum(sent.values()) == count
        assert set(sent) <= set(names)
    assert max(loads_of(shares).values(), default=0) == least_maximum(demands)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(hosts, st.integers(0, 3)), max_size=3))
def test_all_loads_are_as_even_as_any_choice_allows(demands) -> None:
    """Against all choices: the loads, heaviest first, are lexicographically least."""
    names = {host for found, _ in demands for host in found}
    loads = loads_of(share(demands))
    assert tuple(sorted((loads.get(name, 0) for name in names), reverse=True)) == min(every_load(demands))


def test_pouring_alone_would_not_be_optimal() -> None:
    """A case that needs a path of two submissions: the early demands must make way for a later one."""
    demands = [(("a", "b"), 6), (("b", "c"), 6), (("c", "d"), 6), (("a", "e"), 1), (("a", "b"), 9)]
    assert max(loads_of(share(demands)).values()) == least_maximum(demands)


def test_chunks_without_a_holder_are_refused() -> None:
    """A demand that no host can meet is a mistake of the caller; an empty one is not."""
    with pytest.raises(ValueError, match="no host"):
        share([((), 1)])
    assert share([((), 0)]) == [{}]


def test_one_shard_is_fetched_from_all_its_holders_at_once() -> None:
    """A lost host's shards come from both holders, each shard in part from either, loads equal."""
    spec = {rank: ShardSpec(f"d{rank}", 1000, 10, 100, 2) for rank in (0, 1)}
    copies = tuple(Copy(ShardId("job", 1, 1, rank), spec[rank], host) for rank in (0, 1) for host in ("x", "y"))
    found = plan(Inventory("job", copies), (Span(1, None),), world_size=2, rank_hosts={0: "new", 1: "new"})
    sent = [(t.rank, t.source, t.first_chunk, t.chunks_count) for t in found.transfers]
    assert sent == [(0, "x", 0, 50), (0, "y", 50, 50), (1, "x", 0, 50), (1, "y", 50, 50)]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(hosts, st.integers(1, 9), st.sets(st.integers(0, 8))), min_size=1, max_size=5))
def test_a_plan_sends_as_evenly_as_possible(rows) -> None:
    """The plan's own runs reach the optimum over all chunks that a peer has to send."""
    copies, demands = [], []
    for rank, (names, chunks, missing_chunks) in enumerate(rows):
        spec = ShardSpec(f"d{rank}", chunks * 10, 10, chunks, len(rows))
        for position, name in enumerate(names):
            missing = frozenset(missing_chunks) if position else frozenset()
            copies.append(Copy(ShardId("job", 1, 1, rank), spec, name, missing))
        demands += [(names[:1] if chunk in missing_chunks else names, 1) for chunk in range(chunks)]
    targets = dict.fromkeys(range(len(rows)), "new")
    found = plan(Inventory("job", tuple(copies)), (Span(1, None),), world_size=len(rows), rank_hosts=targets)
    loads: dict[str, int] = {}
    for item in found.transfers:
        loads[item.source] = loads.get(item.source, 0) + item.chunks_count
    assert sum(loads.values()) == len(demands)
    assert max(loads.values()) == least_maximum(demands)
