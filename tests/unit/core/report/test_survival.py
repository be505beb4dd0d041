"""What may be lost now, counted from copies, and the problems that status makes of it (R1, R18)."""

from __future__ import annotations

from itertools import combinations
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from memstore.cli.timeline import AwaitedRun, run_text, timeline_rows
from memstore.core.report.cells import state_text
from memstore.core.report.problems import DEGRADED, NOTE, UNRECOVERABLE, problems, worst
from memstore.core.report.redundancy import held_for, survival
from memstore.core.report.status import RANKS_NAMED_MAX
from memstore.core.report.timeline import gone_steps, spans_of, steps_of
from memstore.core.wire.replies import StepList
from memstore.core.wire.status_rows import AttemptStatus, HostRow, HostStats, JobRow, ProblemRow, ShortRow, SurvivalRow
from memstore.testing.controller.world import ControllerWorld, trained
from memstore.testing.fuzz.messages import blank
from placement.topology import Host, Topology
from recovery.candidates import is_whole
from recovery.inventory import Copy, ShardId, ShardSpec, StepId
from recovery.lineage import Span

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


# -- short --------------------------------------------------------------------------------------------
# Status names the ranks that lack copies, where the rest lies and where repair goes, or why it does not (R18, R29).


def status(world: ControllerWorld) -> tuple[dict[str, Any], str]:
    """The job's part of the status answer, and the cause of its first problem about copies."""
    body = world.status()
    causes = [row["cause"] for row in body["problems"] if "copies" in row["cause"] and row["about"] == "train"]
    return body["jobs"][0], next(iter(causes), "")


def test_the_ranks_that_a_dead_host_leaves_short_are_named_with_their_targets() -> None:
    """First repair waits for the host, which may be back with its copies; then the copies go where it said."""
    world, _ = trained(4, 3)
    job, cause = status(world)
    assert (job["short"], job["short_shards"], cause) == ([], 0, "")
    world.kill_host("h1")
    world.run(1.0)
    job, cause = status(world)
    assert job["short_shards"] == job["missing_copies"] > 0
    assert sorted(rank for row in job["short"] for rank in row["ranks"]) == [
        rank for rank in range(3) if len(world.holders_of(_step(world), rank)) < 2
    ]
    for row in job["short"]:
        assert (row["attempt"], row["step"]) == (1, 1)
        assert all(row["hosts"] == world.holders_of(_step(world), rank) for rank in row["ranks"])
        assert len(row["targets"]) == 1
        assert "h1 died within 5 s and may be back" in row["why_not"]
    first = job["short"][0]
    assert f"rank 0 on h0 only, to be rebuilt on {first['targets'][0]} (h1 died within 5 s" in cause
    world.run(10.0)
    assert status(world)[0]["short"] == []
    assert all(
        set(row["targets"]) <= set(world.holders_of(_step(world), rank))
        for row in job["short"]
        for rank in row["ranks"]
    )


def test_a_refusal_and_a_missing_host_are_the_reason_why_nothing_is_rebuilt() -> None:
    """No third host: nothing may hold the copy. A host that refuses it is named with its reason."""
    world, _ = trained(2, 2)
    world.kill_host("h1")
    world.run(10.0)
    job, cause = status(world)
    [row] = job["short"]
    assert (row["ranks"], row["hosts"], row["targets"], row["why_not"]) == (
        [0, 1],
        ["h0"],
        [],
        "no other host may hold it",
    )
    assert "ranks 0, 1 on h0 only, not rebuilt: no other host may hold it" in cause
    world, _ = trained(4, 3)
    with patch.object(world.served.parts.repair, "consider", lambda now, job: None):
        world.kill_host("h1")
        world.run(10.0)
        for rank in range(3):
            for host in world.holders:
                world.job().refusals[ShardId("train", 1, 1, rank), host] = "no room"
        job, cause = status(world)
    assert [(row["ranks"], row["hosts"], row["targets"]) for row in job["short"]] == [
        ([0], ["h0"], []),
        ([1], ["h2"], []),
    ]
    assert [row["why_not"] for row in job["short"]] == ["h3: no room", "h0: no room"]
    assert "rank 0 on h0 only, not rebuilt: h3: no room" in cause


def test_the_list_of_ranks_is_bounded() -> None:
    """Of thousands of short ranks the first are named, so that a status stays small; the count is of all."""
    world, _ = trained(2, 2)
    world.kill_host("h1")
    world.run(10.0)
    rows = world.served.parts.status.short_rows(world.job(), dict.fromkeys(range(5000), 1))
    assert sum(len(row.ranks) for row in rows) == RANKS_NAMED_MAX


def _step(world: ControllerWorld) -> Any:
    return world.job().newest_committed


# -- gone ---------------------------------------------------------------------------------------------
# Committed steps of which no byte is left are one line, not a row each; late hosts are awaited (R22, R24).


LAST = 20


def restarted(*lost: str) -> ControllerWorld:
    """Two hosts and 20 committed steps, then everything is killed; hosts in `lost` come back without their memory."""
    world, _ = trained(2, 2, last=LAST)
    world.run(2.0)  # the step before is freed
    world.crash_controller(restart_after_s=None)
    for host in ("h0", "h1"):
        world.kill_host(host, keep_memory=host not in lost)
    return world


def shown(world: ControllerWorld) -> StepList:
    """The timeline of the job."""
    return steps_of(world.served.state, world.served.parts.durable_states, world.job())


def come_back(world: ControllerWorld, *hosts: str) -> None:
    """Start a controller and the hosts, and wait until it serves."""
    world.start_controller()
    for host in hosts:
        world.return_host(host)
    world.run(10.0)


def test_steps_that_retention_freed_are_one_row_after_a_restart() -> None:
    """The journals know every commit; the newest has its bytes, all others are gone."""
    world = restarted()
    come_back(world, "h0", "h1")
    body = shown(world)
    assert [(row.step, row.state, row.copies) for row in body.steps] == [(LAST, "committed", 2)]
    [span] = body.gone
    assert (span.first, span.last, span.count, span.state) == (1, LAST - 1, LAST - 1, "gone")
    assert run_text(span) == f"steps 1 to {LAST - 1} (attempt 1): gone, no copy in any tier"


def test_a_lost_arena_leaves_no_row_of_a_step_without_a_byte() -> None:
    """Both hosts are back, one with its journal and without the copies that matter: nothing is called committed."""
    world = restarted()
    world.holders["h0"].forget(*world.holders["h0"].held)
    world.holders["h1"].forget(*world.holders["h1"].held)
    come_back(world, "h0", "h1")
    body = shown(world)
    assert body.steps == []
    assert [(span.first, span.last) for span in body.gone] == [(1, LAST)]
    assert gone_steps(world.served.state, world.served.parts.durable_states, world.job()) == {
        StepId(1, n) for n in range(1, LAST + 1)
    }


def test_a_host_that_has_not_come_is_waited_for() -> None:
    """A step that only a late host may have is not gone: it says which host; once that is here it is."""
    world = restarted()
    world.holders["h0"].forget(*world.holders["h0"].held)
    come_back(world, "h0")
    body = shown(world)
    assert body.gone == []
    assert {(row.state, *row.waiting_for) for row in body.steps} == {("waiting", "h1")}
    [job] = world.served.parts.status.answer().jobs
    [(graph, line)] = [row for row in timeline_rows(job) if isinstance(row[1], AwaitedRun)]
    assert (graph, run_text(line)) == ("*", f"steps 1 to {LAST} (attempt 1): no copy here, waiting for h1")
    world.return_host("h1")
    world.run(10.0)
    body = shown(world)
    assert [row.step for row in body.steps] == [LAST]
    assert [(span.first, span.last) for span in body.gone] == [(1, LAST - 1)]


def test_a_host_that_died_just_now_may_be_back_with_its_memory() -> None:
    """Its steps are awaited until it is dead for good, as a get waits for it; then they are gone."""
    world, _ = trained(2, 2, last=2)
    for host in ("h0", "h1"):
        world.kill_host(host)
    assert [row.state for row in shown(world).steps] == ["waiting"]
    world.run(2 * world.served.state.rules.dead_after_s)
    assert (shown(world).steps, [span.last for span in shown(world).gone]) == ([], [2])


def test_durable_storage_that_was_not_listed_yet_may_have_them() -> None:
    """A new controller cannot list durable storage: no step is gone before it has."""
    world, _ = trained(2, 2, last=2, durable="/ck", durable_every=100)
    machine = world.served
    assert machine.parts.durable_states.is_known(world.job())
    for host in ("h0", "h1"):
        world.holders[host].forget(*world.holders[host].held)
    world.durable.problem = "not mounted"
    world.crash_controller()
    world.run(10.0)
    assert not world.served.parts.durable_states.is_known(world.job())
    rows = shown(world).steps
    assert [(row.step, row.state) for row in rows] == [(2, "waiting"), (1, "waiting")]
    assert all(row.waiting_for == ["durable storage"] for row in rows)


def test_runs_end_at_real_steps_attempts_and_the_lineage() -> None:
    """A run never spans what is there, another attempt or the end of the lineage; pins stay named."""
    known = {StepId(1, n) for n in (0, 10, 20, 30, 40)} | {StepId(2, 35)}
    gone = known - {StepId(1, 20)}
    rows = spans_of(known, gone, (Span(2, None), Span(1, 30)), {StepId(1, 10): ["best"]})
    assert [(row.attempt, row.first, row.last, row.count, row.in_lineage) for row in rows] == [
        (2, 35, 35, 1, True),
        (1, 40, 40, 1, False),
        (1, 30, 30, 1, True),
        (1, 0, 10, 2, True),
    ]
    assert [run_text(row) for row in rows[-1:]] == [
        "2 steps from 0 to 10 (attempt 1): gone, no copy in any tier, pinned best"
    ]
