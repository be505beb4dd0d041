"""Which process becomes which rank, so that the fewest bytes move: against every permutation of small worlds (R27)."""

from __future__ import annotations

from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recovery import CommitFact, Copy, DurableMarker, Inventory, ShardId, ShardSpec, Span, StepId, mesh_order, plan
from recovery.mesh_order import NOWHERE, assign

JOB, SPANS, CHUNK = "job", (Span(1, None),), 10


def spec(rank: int, chunks: int, world_size: int) -> ShardSpec:
    return ShardSpec(f"d{rank}", chunks * CHUNK, CHUNK, chunks, world_size)


def committed(chunks: list[int], copies: list[Copy], step: int = 7) -> Inventory:
    """One committed step; a durable marker makes it whole in spite of lacking copies."""
    size = len(chunks)
    specs = {rank: spec(rank, count, size) for rank, count in enumerate(chunks)}
    digests = {rank: found.digest for rank, found in specs.items()}
    fact = CommitFact(StepId(1, step), size, digests, dict.fromkeys(specs, ()))
    return Inventory(JOB, tuple(copies), (fact,), (DurableMarker(StepId(1, step), size, specs),))


def moved_by_hand(inventory: Inventory, hosts: list[str], order: tuple[int, ...]) -> int:
    """What the planner itself fetches from elsewhere when rank r runs where process order[r] is."""
    members = {rank: hosts[process] for rank, process in enumerate(order)}
    found = plan(inventory, SPANS, world_size=len(order), rank_hosts=members)
    return found.bytes_peer + found.bytes_durable


@st.composite
def worlds(draw: st.DrawFn) -> tuple[Inventory, list[str]]:
    size = draw(st.integers(1, 5))
    names = ["a", "b", "c"][: draw(st.integers(1, 3))]
    hosts = [draw(st.sampled_from(names)) for _ in range(size)]
    chunks = [draw(st.integers(0, 3)) for _ in range(size)]
    copies = []
    for rank, count in enumerate(chunks):
        for host in draw(st.sets(st.sampled_from([*names, "gone"]), max_size=2)):
            missing = draw(st.sets(st.integers(0, max(0, count - 1)), max_size=count))
            copies.append(Copy(ShardId(JOB, 1, 7, rank), spec(rank, count, size), host, frozenset(missing)))
    return committed(chunks, copies), hosts


@given(worlds())
def test_no_order_moves_fewer_bytes(world: tuple[Inventory, list[str]]) -> None:
    """Against all permutations, by the planner's own count; of the best ones none leaves more processes in place."""
    inventory, hosts = world
    found = mesh_order(inventory, SPANS, process_hosts=dict(enumerate(hosts)))
    identity = tuple(range(len(hosts)))
    moved = {order: moved_by_hand(inventory, hosts, order) for order in permutations(identity)}
    assert sorted(found.order) == list(identity)
    assert found.moved_bytes == moved[found.order] == min(moved.values())
    assert found.moved_bytes_before == moved[identity]
    kept = {order: sum(a == b for a, b in enumerate(order)) for order in moved}
    assert kept[found.order] == max(kept[order] for order, nbytes in moved.items() if nbytes == found.moved_bytes)


@given(st.lists(st.dictionaries(st.integers(0, 3), st.integers(1, 9), max_size=4), max_size=6), st.data())
def test_an_assignment_gains_the_most_possible(gains: list[dict[int, int]], data: st.DataObject) -> None:
    """Against trying every place for every unit."""
    room = [data.draw(st.integers(0, 3)) for _ in range(4)]
    found = assign(gains, room)

    def best(unit: int, left: tuple[int, ...]) -> int:
        if unit == len(gains):
            return 0
        take = [
            gain + best(unit + 1, (*left[:place], left[place] - 1, *left[place + 1 :]))
            for place, gain in gains[unit].items()
            if left[place]
        ]
        return max([best(unit + 1, left), *take])

    assert sum(gains[unit][place] for unit, place in enumerate(found) if place != NOWHERE) == best(0, tuple(room))
    assert all(found.count(place) <= count for place, count in enumerate(room))


def ring(hosts: list[str], ranks_per_host: int) -> list[Copy]:
    """Every host's shards on itself and on the next one."""
    size = len(hosts) * ranks_per_host
    return [
        Copy(ShardId(JOB, 1, 7, rank), spec(rank, 1, size), hosts[(rank // ranks_per_host + k) % len(hosts)])
        for rank in range(size)
        for k in (0, 1)
    ]


def test_the_identity_wins_a_tie() -> None:
    """Two hosts that hold everything: whichever process sits where, nothing moves, so no rank is renumbered."""
    copies = [Copy(ShardId(JOB, 1, 7, rank), spec(rank, 1, 4), host) for rank in range(4) for host in "ab"]
    found = mesh_order(committed([1] * 4, copies), SPANS, process_hosts=dict(enumerate("abba")))
    assert (found.order, found.moved_bytes) == ((0, 1, 2, 3), 0)


def test_hosts_in_another_order_cost_nothing() -> None:
    """Ranks handed out by another order of hosts: all would move, with the order none does."""
    hosts = ["h0", "h1", "h2", "h3"]
    inventory = committed([1] * 8, ring(hosts, 2))
    shifted = {process: hosts[(process // 2 + 2) % 4] for process in range(8)}
    found = mesh_order(inventory, SPANS, process_hosts=shifted)
    assert (found.moved_bytes_before, found.moved_bytes) == (80, 0)
    assert found.step == StepId(1, 7)


@pytest.mark.parametrize("together", [1, 2])
def test_groups_that_share_a_host_stay_together(together: int) -> None:
    """With together=2 no pair of neighbours is split, even if that moves more bytes."""
    size = 4
    copies = [Copy(ShardId(JOB, 1, 7, rank), spec(rank, 1, size), "ab"[rank % 2]) for rank in range(size)]
    hosts = dict(enumerate("aabb"))
    found = mesh_order(committed([1] * size, copies), SPANS, process_hosts=hosts, together=together)
    pairs = [{hosts[process] for process in found.order[n : n + 2]} for n in (0, 2)]
    assert found.moved_bytes == (0 if together == 1 else 20)
    assert all(len(pair) == 1 for pair in pairs) == (together == 2)


def test_a_group_larger_than_what_a_host_runs_is_refused() -> None:
    """together=2 on a host with one rank names the host and both numbers."""
    with pytest.raises(ValueError, match="together=2: host b runs 1 ranks"):
        mesh_order(committed([1] * 3, []), SPANS, process_hosts={0: "a", 1: "a", 2: "b"}, together=2)
    with pytest.raises(ValueError, match="together=0"):
        mesh_order(committed([1], []), SPANS, process_hosts={0: "a"}, together=0)


def test_nothing_to_restore_moves_no_process() -> None:
    """A new job, a step of another world size, or hosts that are awaited: the launcher's ranks stand."""
    none_there = mesh_order(Inventory(JOB), SPANS, process_hosts={0: "a", 1: "b"})
    assert (none_there.order, none_there.step) == ((0, 1), None)
    larger = mesh_order(committed([1] * 3, []), SPANS, process_hosts={0: "a", 1: "b"})
    assert (larger.order, larger.step) == ((0, 1), None)
    fact = CommitFact(StepId(1, 7), 1, {0: "d0"}, {0: ("late",)})
    late = Inventory(JOB, (), (fact,), silent_hosts=frozenset({"late"}))
    assert mesh_order(late, SPANS, process_hosts={0: "a"}).wait_for == {"late"}


def test_a_large_world_is_ordered_at_once() -> None:
    """8,192 ranks on 1,024 hosts, every rank handed out again: exact, and far from every permutation."""
    hosts = [f"h{n:04}" for n in range(1024)]
    inventory = committed([1] * 8192, ring(hosts, 8))
    scattered = {process: hosts[process * 5 % 1024] for process in range(8192)}
    found = mesh_order(inventory, SPANS, process_hosts=scattered)
    assert found.moved_bytes_before > 80_000
    assert found.moved_bytes == 0
