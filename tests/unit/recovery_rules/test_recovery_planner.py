"""Which step the planner chooses, and what it says about those it does not (R22 to R27)."""

from __future__ import annotations

import random
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recovery import (
    AttemptFact,
    CommitFact,
    Copy,
    DurableMarker,
    Inventory,
    ShardId,
    ShardSpec,
    Span,
    StepId,
    in_lineage,
    lineage,
    lose,
    plan,
    relaunch,
    what_if,
)
from recovery.balance import share

JOB = "job"
SPANS = (Span(1, None),)
HOSTS = {0: "a", 1: "b"}


def spec(digest: str, *, chunks: int = 4, world_size: int = 2) -> ShardSpec:
    return ShardSpec(digest, max(0, chunks * 10 - 5), 10, chunks, world_size)


def copy(step: int, rank: int, host: str, digest: str = "", *, attempt: int = 1, missing=(), **kw) -> Copy:
    shard = ShardId(JOB, attempt, step, rank)
    return Copy(shard, spec(digest or f"d{step}-{rank}", **kw), host, frozenset(missing))


def whole_step(step: int, attempt: int = 1) -> list[Copy]:
    return [copy(step, rank, host, attempt=attempt) for rank, host in HOSTS.items()]


def commit(step: int, hosts=None, *, attempt: int = 1, digests=None, world_size: int = 2) -> CommitFact:
    named = hosts or {0: ("a",), 1: ("b",)}
    return CommitFact(StepId(attempt, step), world_size, digests or {r: f"d{step}-{r}" for r in named}, named)


def marker(step: int, *, world_size: int = 2, prefix: str = "d") -> DurableMarker:
    specs = {rank: spec(f"{prefix}{step}-{rank}", world_size=world_size) for rank in range(world_size)}
    return DurableMarker(StepId(1, step), world_size, specs)


def restore(copies=(), commits=(), markers=(), *, spans=SPANS, world_size=2, hosts=None, plan_args=None, **inventory):
    found = Inventory(JOB, tuple(copies), tuple(commits), tuple(markers), **inventory)
    return plan(found, spans, world_size=world_size, rank_hosts=hosts or HOSTS, **(plan_args or {}))


def test_an_unknown_job_has_no_history() -> None:
    """No copy, fact or marker: nothing stored, and other jobs' copies do not count (R23)."""
    stray = Copy(ShardId("other", 1, 3, 0), spec("x"), "a")
    found = restore([stray])
    assert (found.verdict, found.has_history, found.step) == ("none", False, None)
    assert "no history" in found.why


@pytest.mark.parametrize(
    "known",
    [
        {"copies": [copy(3, 0, "a")]},
        {"commits": [commit(3)]},
        {"retired": {StepId(1, 3): "digest failed"}},
        {"abandoned": frozenset({StepId(1, 3)})},
        {"copies": [copy(3, 0, "a", attempt=9)]},
    ],
)
def test_any_trace_of_the_job_is_history(known) -> None:
    """A job with history and nothing whole differs from a new job (R23)."""
    found = restore(**known)
    assert (found.verdict, found.has_history, found.step) == ("none", True, None)
    assert "there is history" in found.why


def test_newest_whole_step_wins_and_newer_ones_are_explained() -> None:
    """Every newer candidate is listed newest first with its reason (R24)."""
    copies = [*whole_step(5), *whole_step(6), copy(7, 0, "a"), *whole_step(8), *whole_step(9)]
    found = restore(
        copies,
        [commit(5), commit(6)],
        retired={StepId(1, 9): "crashed three times"},
        abandoned=frozenset({StepId(1, 8)}),
        plan_args={"not_steps": {StepId(1, 6)}},
    )
    assert found.step == StepId(1, 5)
    assert [rejected.step.step for rejected in found.rejected] == [9, 8, 7, 6]
    reasons = [rejected.reason for rejected in found.rejected]
    assert "crashed three times" in reasons[0]
    assert "abandoned" in reasons[1]
    assert "never committed" in reasons[2]
    assert "staging" in reasons[3]
    assert found.rejected[2].ranks == (1,)
    assert found.digests == {0: "d5-0", 1: "d5-1"}
    assert found.verdict == "local"


def test_an_uncommitted_whole_step_is_newer_than_the_last_commit() -> None:
    """A step may be whole before its commit was recorded, and then it is restored (R24)."""
    found = restore([*whole_step(5), *whole_step(6)], [commit(5)])
    assert found.step == StepId(1, 6)
    assert "uncommitted" in found.why


def test_newest_goes_by_attempt_then_step_within_the_lineage() -> None:
    """Step 100 of a fenced branch loses to step 60 of the lineage, and never shows (R22)."""
    copies = [*whole_step(60, 2), *whole_step(100, 1), *whole_step(50, 1)]
    found = restore(copies, spans=(Span(2, None), Span(1, 50)))
    assert (found.step, found.rejected) == (StepId(2, 60), ())
    without = restore(copies[2:], spans=(Span(2, None), Span(1, 50)))
    assert without.step == StepId(1, 50)
    only = restore(copies, spans=(Span(2, None), Span(1, 50)), plan_args={"only_step": StepId(1, 100)})
    assert only.verdict == "none"
    assert "lineage" in only.rejected[0].reason


def test_only_step_looks_at_that_step_alone() -> None:
    """get(step=S) never falls back to another step (R22)."""
    copies = [*whole_step(5), copy(6, 0, "a")]
    assert restore(copies, plan_args={"only_step": StepId(1, 5)}).step == StepId(1, 5)
    for missing in (6, 7):
        found = restore(copies, plan_args={"only_step": StepId(1, missing)})
        assert (found.step, [r.step for r in found.rejected]) == (None, [StepId(1, missing)])


def test_partial_copies_unite_across_hosts_and_durable_fills_the_rest() -> None:
    """A shard of which no host has all is put together from several, durable only for what RAM lacks (R24)."""
    copies = [copy(5, 0, "a", missing={1, 2}), copy(5, 0, "c", missing={0, 2}), copy(5, 1, "b")]
    assert restore(copies, [commit(5)]).step is None
    found = restore(copies, [commit(5)], [marker(5)])
    rank0 = [(t.tier, t.source, t.first_chunk, t.chunks_count, t.nbytes) for t in found.transfers if t.rank == 0]
    assert rank0 == [
        ("local", "a", 0, 1, 10),
        ("peer", "c", 1, 1, 10),
        ("durable", None, 2, 1, 10),
        ("local", "a", 3, 1, 5),
    ]
    assert found.verdict == "mixed"
    assert (found.bytes_local, found.bytes_peer, found.bytes_durable) == (50, 10, 10)
    united = restore([copy(5, 0, "a", missing={1}), copy(5, 0, "c", missing={0, 9}), copy(5, 1, "b")], [commit(5)])
    assert united.verdict == "peer"
    assert united.ranks_moved == ()


def test_a_chunk_that_no_copy_has_makes_the_step_fall_back() -> None:
    """The reason counts the chunks that are nowhere and names the hosts of the commit fact (R23)."""
    copies = [*whole_step(4), copy(5, 0, "a", missing={1, 2}), copy(5, 0, "c", missing={2}), copy(5, 1, "b")]
    found = restore(copies, [commit(4), commit(5, {0: ("a", "c"), 1: ("b", "d")})])
    assert found.step == StepId(1, 4)
    assert "0: 1 of 4 chunks" in found.rejected[0].reason
    assert found.rejected[0].hosts == ("a", "c")


def test_the_reason_lists_ten_ranks_and_counts_all() -> None:
    """A reason stays readable at any scale; the count tells the rest."""
    hosts = {rank: f"h{rank:02}" for rank in range(40)}
    fact = commit(5, {rank: (host,) for rank, host in hosts.items()}, world_size=40)
    found = restore([], [fact], world_size=40, hosts=hosts)
    rejected = found.rejected[0]
    assert (rejected.ranks, rejected.ranks_count, len(rejected.hosts)) == (tuple(range(10)), 40, 40)
    assert "40 of 40" in rejected.reason
    assert "30 more" in rejected.reason


def test_copies_with_other_digests_than_the_commit_do_not_count() -> None:
    """The commit fact names the bytes; a whole copy of other bytes is another shard (R14)."""
    copies = [copy(5, 0, "a", "evil"), copy(5, 0, "c"), copy(5, 1, "b")]
    found = restore(copies, [commit(5)])
    assert found.digests[0] == "d5-0"
    assert (found.ranks_moved, found.moved_bytes) == ((0,), 35)
    assert restore([copies[0], copies[2]], [commit(5)]).step is None
    assert restore([copies[0], copies[2]], [commit(5)], [marker(5, prefix="x")]).step is None
    assert restore([copies[0], copies[2]], [commit(5)], [marker(5)]).digests[0] == "d5-0"


def test_two_whole_digests_without_a_commit_are_ambiguous() -> None:
    """Never a guess: two whole shards of one rank and no fact to choose by are refused (R24)."""
    pair = [copy(5, 0, "a", "x"), copy(5, 0, "c", "y"), copy(5, 1, "b")]
    found = restore([*whole_step(4), *pair])
    assert found.step == StepId(1, 4)
    assert "ambiguous" in found.rejected[0].reason
    one_torn = [pair[0], pair[1]._replace(missing=frozenset({0})), pair[2]]
    assert restore(one_torn).digests[0] == "x"
    assert restore(pair, markers=[DurableMarker(StepId(1, 5), 2, {0: spec("y"), 1: spec("d5-1")})]).digests[0] == "y"


def test_contradicting_facts_are_ambiguous() -> None:
    """Two commit facts, markers or layouts of one step that differ are never chosen between."""
    facts = [commit(5), commit(5, digests={0: "other", 1: "d5-1"})]
    assert "two commit facts" in restore(whole_step(5), facts).rejected[0].reason
    assert restore(whole_step(5), [commit(5), commit(5)]).step == StepId(1, 5)
    assert "ambiguous" in restore([], [], [marker(5), marker(5, prefix="x")]).rejected[0].reason
    layouts = [copy(5, 0, "a"), copy(5, 0, "c", chunks=3), copy(5, 1, "b")]
    assert "ambiguous" in restore(layouts, [commit(5)]).rejected[0].reason
    both = [*whole_step(5), copy(5, 0, "c", "solo", world_size=1)]
    assert "world sizes" in restore(both).rejected[0].reason
    assert restore([copy(5, 0, "c", "solo", world_size=3), *whole_step(5)]).world_size == 2


def test_a_broken_newest_commit_waits_for_its_silent_hosts() -> None:
    """Nothing older than the newest commit is chosen while a host it names may still answer (R24)."""
    copies = [*whole_step(4), copy(5, 0, "a")]
    facts = [commit(4), commit(5, {0: ("a", "c"), 1: ("b", "d")})]
    found = restore(copies, facts, silent_hosts=frozenset({"d", "z"}))
    assert (found.verdict, found.step, found.wait_for) == ("wait", None, {"d"})
    assert found.has_history
    assert restore(copies, facts, silent_hosts=frozenset({"z"})).step == StepId(1, 4)
    whole = [*copies, copy(5, 1, "b")]
    assert restore(whole, facts, silent_hosts=frozenset({"d"})).step == StepId(1, 5)
    assert restore(copies, facts, [marker(5)], silent_hosts=frozenset({"d"})).step == StepId(1, 5)


def test_waiting_needs_a_commit_that_may_be_offered() -> None:
    """Uncommitted, retired and once failed steps are not waited for; older commits are, as the newest is."""
    copies = [*whole_step(3), copy(4, 0, "a"), copy(5, 0, "a")]
    silent = {"silent_hosts": frozenset({"b"})}
    assert restore(copies, [commit(3)], **silent).step == StepId(1, 3)
    assert restore(copies, [commit(3), commit(5)], retired={StepId(1, 5): "bad"}, **silent).step == StepId(1, 3)
    failed = {"not_steps": (StepId(1, 5),)}
    assert restore(copies, [commit(3), commit(5)], plan_args=failed, **silent).step == StepId(1, 3)
    lost = commit(5, {0: ("x",), 1: ("y",)})
    found = restore(copies, [commit(3), commit(4), lost], **silent)
    assert (found.verdict, [r.step.step for r in found.rejected]) == ("wait", [5, 4])


def test_nothing_whole_anywhere_lists_everything() -> None:
    """A job with history and no whole step yields every step, newest first (R23)."""
    found = restore([copy(5, 0, "a"), copy(6, 1, "b")], [commit(5)])
    assert (found.verdict, [r.step.step for r in found.rejected]) == ("none", [6, 5])
    assert "but none of 2 steps can be restored; the newest, attempt 1 step 6: never committed" in found.why


def test_steps_that_are_gone_are_counted_apart() -> None:
    """They are not judged one by one: the reason is of those that can exist, and history stays history."""
    commits = [commit(n) for n in range(1, 21)]
    gone = frozenset(StepId(1, n) for n in range(1, 20))
    found = restore(commits=commits, gone=gone)
    assert (found.verdict, [r.step.step for r in found.rejected], len(found.gone)) == ("none", [20], 19)
    assert "but attempt 1 step 20 cannot be restored: not whole: no tier has all bytes of rank" in found.why
    assert "19 more committed before are gone" in found.why
    found = restore(commits=commits, gone=gone | {StepId(1, 20)})
    assert (found.verdict, found.has_history, found.rejected, len(found.gone)) == ("none", True, (), 20)
    assert found.why == "no byte is left of the 20 steps that were committed; the newest was attempt 1 step 20"
    found = restore(whole_step(5), commits, gone=gone - {StepId(1, 5)} | {StepId(1, 20)})
    assert (found.step, found.gone[0], len(found.gone), found.rejected) == (StepId(1, 5), StepId(1, 20), 15, ())


def test_another_world_size_is_chosen_for_the_caller_to_refuse() -> None:
    """The newest step is not skipped for its world size; the plan carries it and stages nothing (R27)."""
    copies = [*whole_step(4), *(copy(5, rank, "a", world_size=3) for rank in range(3))]
    found = restore(copies, [commit(4)])
    assert (found.step, found.world_size, found.transfers) == (StepId(1, 5), 3, ())
    assert found.verdict == "peer"
    assert sorted(found.digests) == [0, 1, 2]
    assert "3 ranks" in found.why


def test_a_rank_that_moved_is_served_from_where_its_copy_lies() -> None:
    """Ownership moves, copies stay: both ranks swapped hosts and fetch from each other (R27)."""
    found = restore(whole_step(5), [commit(5)], hosts={0: "b", 1: "a"})
    assert (found.ranks_moved, found.moved_bytes) == ((0, 1), 70)
    assert [(t.source, t.target_host) for t in found.transfers] == [("a", "b"), ("b", "a")]
    assert found.verdict == "peer"


def test_a_shard_without_chunks_is_still_listed_once() -> None:
    """An empty shard has a manifest that must come from some tier."""
    copies = [copy(5, 0, "a", chunks=0), copy(5, 1, "c", chunks=0)]
    found = restore(copies, [commit(5)])
    assert [(t.tier, t.source, t.chunks_count, t.nbytes) for t in found.transfers] == [
        ("local", "a", 0, 0),
        ("peer", "c", 0, 0),
    ]
    empty = DurableMarker(StepId(1, 5), 1, {0: spec("e", chunks=0, world_size=1)})
    only = restore(markers=[empty], world_size=1)
    assert [(t.tier, t.source) for t in only.transfers] == [("durable", None)]


def test_a_rank_without_a_host_is_refused() -> None:
    """The caller says where every rank is; forgetting one is its mistake, named."""
    with pytest.raises(ValueError, match=r"lacks 1 of 2 ranks, first \[1\]"):
        restore(whole_step(5), hosts={0: "a"})


@st.composite
def worlds(draw):
    """Draw an inventory of three steps with randomly missing chunks, facts, markers and digests."""
    copies, commits, markers = [], [], []
    for step in (1, 2, 3):
        for rank in (0, 1):
            for host in "abcd":
                if draw(st.booleans()):
                    missing_chunks = draw(st.sets(st.integers(0, 3), max_size=3))
                    digest = draw(st.sampled_from(["", "", "", "odd"]))
                    copies.append(copy(step, rank, host, digest, missing=missing_chunks))
        if draw(st.booleans()):
            commits.append(commit(step))
        if draw(st.integers(0, 3)) == 0:
            markers.append(marker(step))
    return copies, commits, markers


def oracle_whole(step: int, copies, commits, markers) -> bool:
    """Say from the rules alone, chunk by chunk, whether the step may be restored."""
    stored = any(m.step.step == step for m in markers)
    has_truth = stored or any(c.step.step == step for c in commits)
    for rank in (0, 1):
        true = f"d{step}-{rank}"
        digests = {true} if has_truth else {true, "odd"}
        whole = [
            digest
            for digest in digests
            if (stored and digest == true)
            or all(
                any(
                    (c.shard.step, c.shard.rank, c.spec.digest) == (step, rank, digest) and chunk not in c.missing
                    for c in copies
                )
                for chunk in range(4)
            )
        ]
        if len(whole) != 1:
            return False
    return True


@settings(max_examples=300, deadline=None)
@given(worlds(), st.integers(0, 2**32))
def test_random_inventories_agree_with_the_oracle_in_any_order(world, seed: int) -> None:
    """The newest step that is whole chunk by chunk wins, for any order in which copies are listed."""
    copies, commits, markers = world
    found = restore(copies, commits, markers)
    whole = [step for step in (3, 2, 1) if oracle_whole(step, copies, commits, markers)]
    assert (found.step.step if found.step else None) == (whole[0] if whole else None)
    shuffled = list(copies)
    random.Random(seed).shuffle(shuffled)
    assert restore(shuffled, commits, markers) == found
    if found.step is None:
        return
    for rank in (0, 1):
        runs = [t for t in found.transfers if t.rank == rank]
        assert sum(t.chunks_count for t in runs) == 4
        position = 0
        for run in runs:
            assert run.first_chunk == position
            position += run.chunks_count
            for chunk in range(run.first_chunk, position):
                having = {
                    c.host
                    for c in copies
                    if (c.shard.step, c.shard.rank) == (found.step.step, rank)
                    and c.spec.digest == found.digests[rank]
                    and chunk not in c.missing
                }
                tier = "local" if HOSTS[rank] in having else "peer" if having else "durable"
                assert run.tier == tier
                assert run.source in (having or {None})


# -- test recovery lineage ----------------------------------------------------------------------------
# What belongs to a run's past (R22).


def facts(*rows: tuple[int, int | None, int | None]) -> dict[int, AttemptFact]:
    return {attempt: AttemptFact(attempt, parent, step, 2) for attempt, parent, step in rows}


def test_bounds_accumulate_along_the_chain() -> None:
    """What a rewind hid stays hidden in every older attempt."""
    table = facts((1, None, None), (2, 1, 100), (3, 2, 50), (4, 3, None))
    assert lineage(table, 4) == (Span(4, None), Span(3, None), Span(2, 50), Span(1, 50))
    assert lineage(table, 2) == (Span(2, None), Span(1, 100))


def test_a_fresh_attempt_has_no_past() -> None:
    """connect(fresh=True) opens an attempt without parent."""
    assert lineage(facts((1, None, None), (2, None, None)), 2) == (Span(2, None),)


def test_a_branch_is_outside_the_lineage() -> None:
    """An attempt that a rewind went around contributes nothing."""
    spans = lineage(facts((1, None, None), (2, 1, 90), (3, 1, 40)), 3)
    assert in_lineage(spans, StepId(1, 40))
    assert in_lineage(spans, StepId(3, 7))
    assert not in_lineage(spans, StepId(1, 41))
    assert not in_lineage(spans, StepId(2, 10))


def test_a_parent_without_a_fact_ends_the_chain_with_its_own_steps() -> None:
    """A lost fact of an old attempt does not take the attempts after it away."""
    assert lineage(facts((5, 4, 30)), 5) == (Span(5, None), Span(4, 30))


def test_contradictions_are_refused() -> None:
    """An unknown newest attempt, and parents that are not older, are the caller's mistakes."""
    with pytest.raises(ValueError, match="attempt 2 has no fact"):
        lineage(facts((1, None, None)), 2)
    with pytest.raises(ValueError, match="older"):
        lineage(facts((1, 2, 5), (2, 1, 5)), 2)


@given(st.lists(st.tuples(st.integers(0, 5), st.none() | st.integers(0, 9)), min_size=1, max_size=6), st.data())
def test_lineage_matches_a_walk_per_step(rows, data) -> None:
    """A step is in the lineage if and only if every bound on the way down to its attempt admits it."""
    table = {}
    for attempt, (parent, bound) in enumerate(rows):
        table[attempt] = AttemptFact(attempt, parent if parent < attempt else None, bound, 2)
    newest = len(rows) - 1
    step = StepId(data.draw(st.integers(0, newest)), data.draw(st.integers(0, 9)))
    expected, at = False, newest
    while True:
        if at == step.attempt:
            expected = True
            break
        fact = table[at]
        if fact.parent is None or (fact.parent_step is not None and step.step > fact.parent_step):
            break
        at = fact.parent
    assert in_lineage(lineage(table, newest), step) == expected


# -- test recovery balance ----------------------------------------------------------------------------
# No source sends more than its share, proved against exhaustive search.


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


# -- recovery oracle ----------------------------------------------------------------------------------
# The planner against brute force: every set of lost hosts of small clusters, with real placements (R24).


CHUNKS = 5


def shard(rank: int, step: int, world_size: int) -> ShardSpec:
    """Return a shard of five chunks, the last of them short."""
    return ShardSpec(f"{step}-{rank}", CHUNKS * 10 - 3, 10, CHUNKS, world_size)


def holders(kind: str, hosts_count: int, replicas: int) -> list[tuple[int, ...]]:
    """Return for each host the hosts that hold its shards: Gemini's ring, or groups with the remainder as a ring."""
    if kind == "ring":
        return [tuple((host + k) % hosts_count for k in range(replicas)) for host in range(hosts_count)]
    full = max(0, hosts_count // replicas - 1) * replicas  # the last group and the remainder form one ring
    table = []
    for host in range(hosts_count):
        if host < full:
            start = host - host % replicas
            table.append(tuple([host] + [start + k for k in range(replicas) if start + k != host]))
        else:
            size = hosts_count - full
            table.append(tuple(full + (host - full + k) % size for k in range(replicas)))
    return table


def cluster(kind: str, hosts_count: int, replicas: int, *, steps: tuple[int, ...], ranks_per_host: int = 1):
    """Return the inventory of a job whose steps are all committed, and its ranks' hosts."""
    world_size = hosts_count * ranks_per_host
    rank_hosts = {rank: f"h{rank // ranks_per_host}" for rank in range(world_size)}
    table = holders(kind, hosts_count, replicas)
    copies, commits = [], []
    for step in steps:
        by_rank = {rank: tuple(f"h{host}" for host in table[rank // ranks_per_host]) for rank in range(world_size)}
        specs = {rank: shard(rank, step, world_size) for rank in range(world_size)}
        copies += [Copy(ShardId(JOB, 1, step, rank), specs[rank], host) for rank in by_rank for host in by_rank[rank]]
        digests = {rank: spec.digest for rank, spec in specs.items()}
        commits.append(CommitFact(StepId(1, step), world_size, digests, by_rank))
    return Inventory(JOB, tuple(copies), tuple(commits)), rank_hosts


def check_bytes(found, inventory: Inventory, lost: set[str]) -> None:
    """Every chunk of every rank arrives once, from a live host that has it, with local first and durable last."""
    live = [c for c in inventory.copies if c.host not in lost and (c.shard.attempt, c.shard.step) == _pair(found.step)]
    arrived: dict[tuple[int, int], int] = {}
    for item in found.transfers:
        for chunk in range(item.first_chunk, item.first_chunk + item.chunks_count):
            arrived[item.rank, chunk] = arrived.get((item.rank, chunk), 0) + 1
            having = {c.host for c in live if c.shard.rank == item.rank and chunk not in c.missing}
            if item.tier == "durable":
                assert item.source is None
                assert not having
            else:
                assert item.source in having
                assert (item.tier == "local") == (item.source == item.target_host)
                assert (item.target_host in having) == (item.tier == "local")
    expected = {(rank, chunk) for rank, spec in found.specs.items() for chunk in range(spec.chunks_count)}
    assert set(arrived) == expected
    assert set(arrived.values()) <= {1}
    total = sum(spec.nbytes for spec in found.specs.values())
    assert found.bytes_local + found.bytes_peer + found.bytes_durable == total
    assert sum(item.nbytes for item in found.transfers) == total


def _pair(step: StepId) -> tuple[int, int]:
    return step.attempt, step.step


@pytest.mark.parametrize("kind", ["ring", "group"])
@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_every_subset_of_lost_hosts_matches_the_oracle(kind: str, replicas: int) -> None:
    """A step is recovered if and only if no shard lost all its holders, for every subset of up to eight hosts."""
    refused = recovered = 0
    for hosts_count in range(replicas, 9):
        table = holders(kind, hosts_count, replicas)
        assert all(len(set(row)) == replicas for row in table)
        inventory, rank_hosts = cluster(kind, hosts_count, replicas, steps=(7,))
        for count in range(hosts_count + 1):
            for chosen in combinations(range(hosts_count), count):
                lost = {f"h{host}" for host in chosen}
                found = what_if(inventory, SPANS, lost, world_size=hosts_count, rank_hosts=rank_hosts)
                oracle = all(set(row) - set(chosen) for row in table)
                assert (found.step == StepId(1, 7)) == oracle, (hosts_count, chosen, found.why)
                if oracle:
                    recovered += 1
                    after = relaunch(rank_hosts, lost)
                    at_own_host = all(after[rank] in {f"h{host}" for host in row} for rank, row in enumerate(table))
                    assert found.verdict == ("local" if at_own_host else "peer")
                    check_bytes(found, inventory, lost)
                else:
                    refused += 1
                    dead = [rank for rank, row in enumerate(table) if set(row) <= set(chosen)]
                    assert found.verdict == "none"
                    assert found.has_history
                    assert found.rejected[0].ranks == tuple(dead)[:10]
                    assert found.rejected[0].ranks_count == len(dead)
                    assert set(found.rejected[0].hosts) == {f"h{host}" for rank in dead for host in table[rank]}
                if count < replicas:
                    assert oracle, "fewer losses than replicas are always survived"
    assert recovered
    assert refused


@pytest.mark.parametrize("replicas", [2, 3])
def test_two_ranks_per_host_and_durable_bytes_for_what_ram_lacks(replicas: int) -> None:
    """With a marker every loss is survived; durable bytes are exactly those of shards that lost all holders."""
    hosts_count, ranks_per_host = 5, 2
    world_size = hosts_count * ranks_per_host
    inventory, rank_hosts = cluster("ring", hosts_count, replicas, steps=(7,), ranks_per_host=ranks_per_host)
    specs = {rank: shard(rank, 7, world_size) for rank in range(world_size)}
    inventory = Inventory(JOB, inventory.copies, inventory.commits, (DurableMarker(StepId(1, 7), world_size, specs),))
    table = holders("ring", hosts_count, replicas)
    seen = set()
    for count in range(hosts_count + 1):
        for chosen in combinations(range(hosts_count), count):
            lost = {f"h{host}" for host in chosen}
            found = what_if(inventory, SPANS, lost, world_size=world_size, rank_hosts=rank_hosts)
            gone = [rank for rank in range(world_size) if set(table[rank // ranks_per_host]) <= set(chosen)]
            assert found.step == StepId(1, 7)
            assert found.bytes_durable == sum(specs[rank].nbytes for rank in gone)
            check_bytes(found, inventory, lost)
            after = relaunch(rank_hosts, lost)
            at_own_host = all(
                after[r] in {f"h{host}" for host in table[r // ranks_per_host]} for r in range(world_size)
            )
            expected = "durable" if len(gone) == world_size else "mixed" if gone else "local" if at_own_host else "peer"
            assert found.verdict == expected
            seen.add(expected)
    assert seen == {"local", "peer", "mixed", "durable"}


def test_the_older_step_is_chosen_exactly_when_only_it_is_whole() -> None:
    """With two steps of unequal spread the newest whole one wins for every subset, and the newer is explained."""
    hosts_count = 6
    newer, rank_hosts = cluster("ring", hosts_count, 2, steps=(8,))
    older, _ = cluster("ring", hosts_count, 3, steps=(7,))
    inventory = Inventory(JOB, older.copies + newer.copies, older.commits + newer.commits)
    fell_back = 0
    for count in range(hosts_count + 1):
        for chosen in combinations(range(hosts_count), count):
            lost = {f"h{host}" for host in chosen}
            found = what_if(inventory, SPANS, lost, world_size=hosts_count, rank_hosts=rank_hosts)
            whole = [
                step
                for step, replicas in ((8, 2), (7, 3))
                if all(set(row) - set(chosen) for row in holders("ring", hosts_count, replicas))
            ]
            assert (found.step.step if found.step else None) == (whole[0] if whole else None)
            if whole == [7]:
                fell_back += 1
                assert [rejected.step for rejected in found.rejected] == [StepId(1, 8)]
            if whole:
                check_bytes(found, inventory, lost)
    assert fell_back


# -- recovery dry runs --------------------------------------------------------------------------------
# Dry runs, metrics, and the planner at scale.


def ring(hosts_count: int, ranks_per_host: int, chunks: int = 4) -> tuple[Inventory, dict[int, str]]:
    """Return a committed step with two copies, on each host and its successor."""
    world_size = hosts_count * ranks_per_host
    names = [f"h{host:06}" for host in range(hosts_count)]
    specs = [ShardSpec(f"d{rank}", chunks * 10, 10, chunks, world_size) for rank in range(world_size)]
    pairs = [(names[host], names[(host + 1) % hosts_count]) for host in range(hosts_count)]
    copies = tuple(
        Copy(ShardId("job", 1, 5, rank), specs[rank], name)
        for rank in range(world_size)
        for name in pairs[rank // ranks_per_host]
    )
    digests = {rank: spec.digest for rank, spec in enumerate(specs)}
    fact = CommitFact(StepId(1, 5), world_size, digests, {r: pairs[r // ranks_per_host] for r in digests})
    return Inventory("job", copies, (fact,)), {rank: names[rank // ranks_per_host] for rank in digests}


def test_lost_hosts_lose_their_copies_and_are_not_waited_for() -> None:
    """A lost host is known dead: its copies go, facts stay, and the plan does not wait (R24)."""
    inventory, _ = ring(3, 1)
    inventory = Inventory("job", inventory.copies, inventory.commits, silent_hosts=frozenset({"h000001", "z"}))
    after = lose(inventory, ["h000001"])
    assert {copy.host for copy in after.copies} == {"h000000", "h000002"}
    assert (after.commits, after.silent_hosts) == (inventory.commits, {"z"})


def test_ranks_of_lost_hosts_go_to_the_least_loaded_survivors() -> None:
    """Relaunch keeps the others in place and evens the counts out."""
    hosts = {0: "a", 1: "a", 2: "b", 3: "b", 4: "c", 5: "d", 6: "d"}
    assert relaunch(hosts, ["b"]) == {0: "a", 1: "a", 2: "c", 3: "a", 4: "c", 5: "d", 6: "d"}
    assert relaunch(hosts, "abcd") == hosts


def test_what_if_follows_a_given_mapping() -> None:
    """A caller that knows where ranks will run says so, and the plan sends there."""
    inventory, hosts = ring(3, 1)
    found = what_if(inventory, (Span(1, None),), ["h000000"], world_size=3, rank_hosts=hosts, relaunched={0: "spare"})
    assert [(t.rank, t.source, t.target_host) for t in found.transfers if t.tier == "peer"] == [(0, "h000001", "spare")]
    default = what_if(inventory, (Span(1, None),), ["h000000"], world_size=3, rank_hosts=hosts)
    assert default.verdict == "local", "rank 0 restarts on the host that holds its copy"


def test_sixteen_thousand_hosts_are_planned_for() -> None:
    """131,072 ranks on 16,384 hosts with 64 apart lost: one object per unmoved rank, chunks never enumerated."""
    inventory, hosts = ring(16_384, 8, chunks=10_000)
    lost = [f"h{host:06}" for host in range(0, 16_384, 256)]
    found = what_if(inventory, (Span(1, None),), lost, world_size=131_072, rank_hosts=hosts)
    assert found.step == StepId(1, 5)
    assert len(found.transfers) == 131_072
    assert found.bytes_peer + found.bytes_local == 131_072 * 100_000
