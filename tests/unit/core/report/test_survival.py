"""What may be lost now, counted from copies, and the problems that status makes of it (R1, R18)."""

from __future__ import annotations

from itertools import combinations
from math import comb
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from memstore.cli.status import state_text
from memstore.core.report.problems import DEGRADED, NOTE, UNRECOVERABLE, problems, worst
from memstore.core.report.redundancy import COUNTED_SETS_MAX, Odds, held_for, survival, survival_odds
from memstore.core.wire.status_rows import AttemptStatus, HostRow, HostStats, JobRow, ProblemRow, ShortRow, SurvivalRow
from memstore.testing.fuzz.messages import blank
from placement.topology import Host, Topology
from recovery.candidates import is_whole
from recovery.inventory import Copy, ShardId, ShardSpec

CHUNKS = 3
SPEC = ShardSpec("d" * 32, CHUNKS * 4096, 4096, CHUNKS, 2)


def copy(rank: int, host: str, missing: frozenset[int] = frozenset()) -> Copy:
    """One copy of one rank's shard."""
    return Copy(ShardId("j", 1, 5, rank), SPEC, host, missing)


def topology(*rows: tuple[str, str], machine: str = "", is_explicit: bool = True) -> Topology:
    """Hosts from (id, rack); an empty rack is no label."""
    hosts = (Host(h, {"rack": rack} if rack else {}, machine or h, is_explicit) for h, rack in rows)
    return Topology.of(hosts)


def tolerated(shards: list[list[Copy]], hosts: Topology) -> dict[str, int]:
    """Level -> how many may be lost."""
    return {row.level: row.tolerated for row in survival(shards, hosts)}


def test_copies_in_two_racks_survive_a_rack_and_a_host() -> None:
    """Every shard has a copy in each of two racks: any one rack and any one host may go."""
    hosts = topology(("a", "r1"), ("b", "r2"))
    assert tolerated([[copy(0, "a"), copy(0, "b")], [copy(1, "a"), copy(1, "b")]], hosts) == {"rack": 1, "host": 1}


def test_copies_in_one_rack_survive_only_a_host() -> None:
    """Both copies of one shard lie in one rack: that rack is fatal, and named, while any host may go."""
    hosts = topology(("a", "r1"), ("b", "r1"), ("c", "r2"))
    rows = survival([[copy(0, "a"), copy(0, "b")], [copy(1, "a"), copy(1, "c")]], hosts)
    assert [(row.level, row.tolerated, row.fatal) for row in rows] == [("rack", 0, ["rack r1"]), ("host", 1, [])]


def test_the_weakest_shard_decides() -> None:
    """Three copies of one shard do not help another that has one; the host of that one is fatal."""
    hosts = topology(("a", ""), ("b", ""), ("c", ""))
    rows = survival([[copy(0, "a"), copy(0, "b"), copy(0, "c")], [copy(1, "b")]], hosts)
    assert [(row.level, row.tolerated, row.fatal) for row in rows] == [("host", 0, ["b"])]


def test_a_shard_without_a_copy_or_on_a_dead_host_is_lost() -> None:
    """No copy at all, or only on a host that is not there any more, is -1 and no loss is called fatal."""
    for shards in ([[copy(0, "a")], []], [[copy(0, "a")], [copy(1, "dead")]]):
        rows = survival(shards, topology(("a", "")))
        assert [(row.tolerated, row.fatal) for row in rows] == [(-1, [])]


def test_hosts_of_one_machine_die_together_unless_they_are_explicit() -> None:
    """Two hosts on one machine count as one, and are named as that machine; explicit host labels part them (R1)."""
    shards = [[copy(0, "a"), copy(0, "b")]]
    (row,) = survival(shards, topology(("a", ""), ("b", ""), machine="m", is_explicit=False))
    assert (row.tolerated, row.fatal) == (0, ["the machine of a, b"])
    assert tolerated(shards, topology(("a", ""), ("b", ""), machine="m")) == {"host": 1}


def test_hosts_without_the_label_share_one_domain() -> None:
    """At a level that some hosts have a label for, those without share one domain (R18)."""
    hosts = topology(("a", ""), ("b", ""), ("c", "r1"))
    assert tolerated([[copy(0, "a"), copy(0, "b")]], hosts) == {"rack": 0, "host": 1}


def test_damaged_copies_count_for_the_chunks_they_have() -> None:
    """Two copies that lack different chunks are whole together, and then each of them is fatal."""
    hosts = topology(("a", ""), ("b", ""))
    (row,) = survival([[copy(0, "a", frozenset({0})), copy(0, "b", frozenset({1}))]], hosts)
    assert (row.tolerated, row.fatal) == (0, ["a", "b"])
    assert tolerated([[copy(0, "a", frozenset({0})), copy(0, "b", frozenset({0}))]], hosts) == {"host": -1}


copies_of_a_rank = st.dictionaries(st.sampled_from("abcd"), st.frozensets(st.integers(0, CHUNKS - 1)), max_size=4)


@given(st.lists(copies_of_a_rank, min_size=1, max_size=3), st.tuples(*[st.sampled_from(["", "r1", "r2"])] * 4))
def test_survival_agrees_with_losing_every_set_of_domains(
    ranks: list[dict[str, frozenset[int]]], racks: tuple[str, ...]
) -> None:
    """Against brute force with the planner's own rule: k domains may go exactly if every set of k leaves all whole."""
    hosts = topology(*zip("abcd", racks, strict=True))
    shards = [[copy(rank, h, missing) for h, missing in row.items()] for rank, row in enumerate(ranks)]
    for row in survival(shards, hosts):
        domain = {h: host.domain(row.level) for h, host in hosts.hosts.items()}
        names = sorted(set(domain.values()))

        def holds(lost: tuple[str, ...], domain: dict[str, str] = domain) -> bool:
            return all(is_whole(SPEC, [c for c in copies if domain[c.host] not in lost]) for copies in shards)

        safe = [all(holds(lost) for lost in combinations(names, k)) for k in range(len(names) + 1)]
        assert row.tolerated == sum(safe) - 1
        if row.tolerated == 0:
            assert len(row.fatal) == sum(not holds((name,)) for name in names)


def test_odds_are_counted_over_the_hosts_that_are_there() -> None:
    """Only the pair of hosts that holds everything is fatal; a loss of more hosts than exist has no odds."""
    shards = [["a", "b"], ["b", "a"]]
    assert survival_odds(shards, ["a", "b", "c"], 1) == Odds(1.0, True)
    assert survival_odds(shards, ["a", "b", "c"], 2) == Odds(pytest.approx(2 / 3), True)
    assert survival_odds(shards, ["a", "b", "c"], 4) is None


def test_a_shard_that_is_nowhere_has_no_chance() -> None:
    """A shard without a whole copy is lost, however many hosts there are and however few are lost."""
    assert survival_odds([["a"], []], ["a", "b"], 1) == Odds(0.0, True)
    many = [f"h{i}" for i in range(1000)]
    odds = survival_odds([["h0"], []], many, 3)
    assert odds is not None
    assert odds.chance == 0.0


@given(
    st.lists(st.sets(st.sampled_from("abcdefgh"), min_size=1, max_size=3), min_size=1, max_size=8),
    st.integers(min_value=1, max_value=5),
)
def test_the_bound_of_a_large_cluster_never_promises_too_much(shards: list[set[str]], lost_count: int) -> None:
    """Where the sets are too many to count the answer is at most the counted one, and equal where it says so."""
    counted = survival_odds(shards, "abcdefgh", lost_count)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("memstore.core.report.redundancy.COUNTED_SETS_MAX", 0)
        bounded = survival_odds(shards, "abcdefgh", lost_count)
    assert counted is not None
    assert bounded is not None
    assert bounded.chance <= counted.chance + 1e-12
    if bounded.is_exact:
        assert bounded.chance == pytest.approx(counted.chance)


def test_a_large_cluster_has_its_rows() -> None:
    """With 1,000 hosts in pairs, two lost at once are counted exactly and three are bounded, close to what they are."""
    hosts = [f"h{i}" for i in range(1000)]
    shards = [[f"h{i}", f"h{i ^ 1}"] for i in range(1000)]
    assert comb(1000, 2) > COUNTED_SETS_MAX
    assert survival_odds(shards, hosts, 1) == Odds(1.0, True)
    assert survival_odds(shards, hosts, 2) == Odds(pytest.approx(1 - 500 / comb(1000, 2)), True)
    assert survival_odds(shards, hosts, 3) == Odds(pytest.approx(1 - 500 * 998 / comb(1000, 3)), False)


def test_a_host_holds_its_own_first() -> None:
    """Whose shards lie on a host: its own first, then others by name."""
    ranks = {0: {"b": 1, "a": 1}, 1: {"b": 1, "c": 1}}
    assert held_for({0: "a", 1: "b"}, ranks, ["a", "b", "c"]) == {"a": ["a"], "b": ["b", "a"], "c": ["b"]}


# -- problems ---------------------------------------------------------------------------------


def survival_row(tolerated: int, *fatal: str) -> SurvivalRow:
    """How many hosts may be lost."""
    return SurvivalRow(level="host", tolerated=tolerated, fatal=list(fatal))


def job_row(name: str = "j", **changes: Any) -> JobRow:
    """A healthy job as the status answer has it."""
    healthy = {
        "phase": "open",
        "world_size": 2,
        "ranks_alive": 2,
        "rank_hosts": {"0": "a", "1": "b"},
        "committed_step": 5,
        "committed_s": 1.0,
        "copies": 2,
        "replicas": 2,
        "survives": [survival_row(1)],
        "targets": {"a": ["b"], "b": ["a"]},
        "level_asked": "rack",
        "durable": "/ck",
        "durable_step": 4,
        "durable_s": 3.0,
        "durable_seen_s": 3.0,
    }
    newest = replace(blank(AttemptStatus), **{**healthy, **changes})
    return replace(blank(JobRow), job=name, attempt=1, newest=newest)


def host_row(name: str, **changes: Any) -> HostRow:
    """A live host as the status answer has it."""
    counts = {"limit_bytes": 1 << 30, **changes.pop("stats", {})}
    stats = replace(blank(HostStats), **counts)
    healthy = {"host": name, "status": "live", "status_s": 9.0, "up_s": 9.0, "stats": stats}
    return replace(blank(HostRow), **{**healthy, **changes})


def found(*jobs: JobRow, hosts: tuple[HostRow, ...] = ()) -> list[ProblemRow]:
    """The problems of a store."""
    return problems(list(hosts), [], list(jobs))


def test_an_arena_over_its_limit_is_a_problem_with_a_remedy() -> None:
    """Reserved or claimed beyond the limit: said in the problems and in the host's state, not shown as ok."""
    stats = {"reserved_bytes": 45 << 20, "claimed_bytes": 45 << 20, "limit_bytes": 30 << 20}
    for change in ({}, {"reserved_bytes": 0}, {"claimed_bytes": 0}):
        host = host_row("a", stats={**stats, **change})
        [row] = found(hosts=(host,))
        assert (row.about, row.severity) == ("a", DEGRADED)
        assert "over the limit of 30.0 MiB" in row.cause
        assert "memstore rm" in row.remedy
        assert state_text(host) == "over its limit !"
    assert found(hosts=(host_row("a", stats={**stats, "limit_bytes": 45 << 20}),)) == []


def test_slots_of_reads_that_were_given_up_are_named() -> None:
    """They are out of use, and are no copies: without a word the arena would seem to have shrunk."""


def test_a_healthy_store_has_no_problem() -> None:
    """Nothing to say about a job with all its copies and a durable step."""
    assert found(job_row(), hosts=(host_row("a"), host_row("b"))) == []
    assert worst([]) is None


@pytest.mark.parametrize(
    ("changes", "severity", "cause"),
    [
        ({"copies": 1}, DEGRADED, "1 of 2 copies"),
        ({"copies": 1, "refusals": ["b: no room"]}, DEGRADED, "b: no room"),
        (
            {
                "copies": 1,
                "short_shards": 5000,
                "short": [
                    replace(blank(ShortRow), ranks=list(range(64)), hosts=["a"], targets=["c"]),
                    replace(blank(ShortRow), ranks=[70], why_not="no copy is left"),
                ],
            },
            DEGRADED,
            "1 of 2 copies: ranks 0, 1, 2, 3, 4, 5, 6, 7, 8, 9 and 54 more on a only, to be rebuilt on c; "
            "rank 70 on no host whole, not rebuilt: no copy is left; 4,935 more ranks",
        ),
        ({"degraded": "copies are spread over hosts, not racks"}, DEGRADED, "not racks"),
        ({"survives": [survival_row(-1)]}, DEGRADED, "not whole in RAM"),
        ({"durable_problem": "permission denied"}, DEGRADED, "permission denied"),
        ({"durable_unseen": "step 4: rank-0.0 is gone"}, DEGRADED, "durable /ck: step 4: rank-0.0 is gone"),
        ({"durable": None}, NOTE, "losing 2 hosts at once can lose"),
        ({"durable": None, "survives": [survival_row(0, "b")]}, NOTE, "losing b now loses the run"),
        ({"skipped": 3, "skipped_s": 2.0}, NOTE, "3 steps skipped"),
    ],
)
def test_each_problem_of_a_job_has_a_cause_and_a_remedy(changes: dict[str, Any], severity: str, cause: str) -> None:
    """One thing wrong gives one row that says what, how bad, and what to do."""
    (row,) = found(job_row(**changes))
    assert (row.severity, row.about) == (severity, "j")
    assert cause in row.cause
    assert row.remedy


def test_a_host_without_room_beside_its_arena_is_reported_with_the_reason() -> None:
    """Nothing new is stored there and no fact is written, so it is more than a note."""
    short = host_row("a", stats={"short_of_room": "no room for 103 more bytes in journal /dev/shm/x"})
    (row,) = found(job_row(), hosts=(short, host_row("b", stats={"short_of_room": ""})))
    assert (row.severity, row.about) == (DEGRADED, "a")
    assert "no room for 103 more bytes" in row.cause
    assert row.remedy


def test_a_holder_far_behind_its_ranks_for_a_core_is_reported_with_the_remedy() -> None:
    """Every promise holds: it is a note."""
    [row] = found(job_row(), hosts=(host_row("a", stats={"behind_ranks": "nice 15, a rank (process 7) nice 0"}),))
    assert (row.severity, row.about) == (NOTE, "a")
    assert "nice 15, a rank (process 7) nice 0" in row.cause
    assert "RAY_worker_niceness=0" in row.remedy


@pytest.mark.parametrize(("used", "is_short"), [(972, False), (973, True), (1024, True), (1030, True)])
@pytest.mark.parametrize(("hard", "at_once"), [(1024, ""), (4096, "4096"), (1 << 20, "65536")])
def test_a_holder_short_of_descriptors_is_reported_with_numbers_and_remedies(
    used: int, is_short: bool, hard: int, at_once: str
) -> None:
    """Before it is full, for then it accepts no process; a holder that tells nothing of them is none."""
    stats = {"descriptors": used, "descriptors_limit": 1024, "descriptors_hard": hard, "pid": 77}
    rows = found(job_row(), hosts=(host_row("a", stats=stats), host_row("b")))
    assert len(rows) == is_short
    for row in rows:
        assert (row.severity, row.about) == (DEGRADED, "a")
        assert f"{used} of 1024 file descriptors" in row.cause
        assert (f"`prlimit --nofile={at_once}: --pid 77`" in row.remedy) == bool(at_once)
        assert all(way in row.remedy for way in ("ulimit -n 65536", "LimitNOFILE=65536", "--ulimit nofile=65536"))


def test_a_step_lost_from_ram_without_durable_is_unrecoverable_and_comes_first() -> None:
    """The worst problem is listed first, and decides."""
    rows = found(
        job_row("fine", skipped=1, skipped_s=2.0), job_row(survives=[survival_row(-1)], durable=None, durable_step=None)
    )
    assert [row.severity for row in rows] == [UNRECOVERABLE, NOTE]
    assert worst(rows) == UNRECOVERABLE


def test_a_dead_host_degrades_only_a_store_whose_ranks_were_there() -> None:
    """A machine that died and was replaced is worth a line, not an alarm for ever; a suspect one always is."""
    dead = host_row("a", status="dead", why="silent for 6 s")
    assert found(job_row(), hosts=(dead,))[0].severity == DEGRADED
    assert found(job_row(rank_hosts={"0": "b", "1": "c"}), hosts=(dead,))[0].severity == NOTE
    assert found(job_row(phase="closed", closed_s=1.0), hosts=(dead,))[0].severity == NOTE
    assert found(hosts=(host_row("x", status="suspect", why="no heartbeat for 2 s"),))[0].severity == DEGRADED
