"""What `memstore events` is made of.

The controller's own account of puts, commits, restores and anything that went wrong.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from cli_store import Desk

from memstore.core.report.event_kinds import event_fields
from memstore.core.report.metrics import counted, status_gauges
from memstore.core.report.recorder import KEPT, PAGE, EventRecorder, RecentEvents
from memstore.core.wire.calls import AskEvents, InPlace, RankLoss
from memstore.core.wire.codec import encode
from memstore.core.wire.ids import WireCopy
from memstore.core.wire.messages import HostBeat, Received
from memstore.core.wire.replies import Events, decode_passed
from memstore.core.wire.reports import PutTimes, Sealed
from memstore.testing.controller.holder import DirectedRank, host_stats
from memstore.testing.controller.world import JOB, ControllerWorld, trained
from recovery.inventory import StepId


def events_of_kind(world: ControllerWorld, *kinds: str) -> list[dict[str, Any]]:
    """Events of these kinds as `memstore events --json` gives them, oldest first; all of them travel."""
    found = world.served.parts.recorder.recent_events.since(0)
    page = Events(events=found, next=0, has_more=False, is_gap=False, unwritten=0, wall_s=0.0)
    rows = [event_fields(row) for row in decode_passed(AskEvents(), encode(page)).events]
    return [row for row in rows if row["event"] in kinds]


def test_a_mistake_in_telling_undoes_nothing() -> None:
    """Recording never breaks a decision."""
    calls = [method for name, method in vars(EventRecorder).items() if not name.startswith("_")]
    assert [method.__name__ for method in calls if not hasattr(method, "__wrapped__")] == []
    world, _ = trained(2)
    machine = world.served
    machine.out.note("no such kind", job=JOB)
    assert "no such kind" in machine.parts.recorder.problem
    assert "nothing else is affected" in machine.out.actions[-1].text


def test_a_step_leaves_one_put_and_one_commit_with_the_slowest_rank_and_the_seconds() -> None:
    """All ranks' puts are one line, with the slowest; the commit says where the copies are and how long it took."""
    world, ranks = trained(3, last=0)
    for rank in ranks:
        rank.stall_s = 0.1 * (rank.rank + 1)
    began_s = world.now
    assert world.put_all(ranks, 7)
    put, commit = events_of_kind(world, "put", "commit")
    assert (put["step"], put["ranks"], put["rank"], put["host"]) == (7, 3, 2, ranks[2].host_id)
    assert put["stall_s"] == {"max": 0.3, "median": 0.2}
    assert put["nbytes"] == commit["nbytes"] == 3 * 256
    assert (commit["job"], commit["attempt"], commit["copies"], commit["degraded"]) == (JOB, 1, 2, "")
    assert commit["hosts"] == ["h0", "h1", "h2"]
    # The put began its stall before the seal was reported, which no put of the world takes time for.
    assert commit["seconds"]["committed"] == commit["seconds"]["redundant"]
    assert 0.3 <= commit["seconds"]["committed"] <= world.now - began_s + 0.3


def test_a_rank_that_dies_before_its_first_put_is_reported() -> None:
    """It has no newest step: the event says -1, and `memstore events` that none was sealed."""
    world, ranks = trained(2, last=0)
    world.kill_rank(ranks[1])
    world.run(1.0)
    [dead] = events_of_kind(world, "rank_dead")
    assert (dead["step"], dead["rank"]) == (-1, 1)


def test_a_rank_that_left_because_another_is_lost_is_not_called_dead() -> None:
    """Its process lives and goes on in place: alerts on deaths would come from every rank of the job."""
    world, ranks = trained(2, last=0)
    world.kill_rank(ranks[1])
    world.run(0.1)
    world.kill_rank(ranks[0], has_left=True)
    world.run(1.0)
    gone = events_of_kind(world, "rank_dead", "rank_left")
    assert [(event["event"], event["rank"]) for event in gone] == [("rank_dead", 1), ("rank_left", 0)]


def test_a_skip_is_reported_with_who_and_why_once_all_gave_the_step_up() -> None:
    """The rank's word comes with the fact; the rank that had put the step leaves nothing behind (R12)."""
    world, ranks = trained(2)
    world.put(ranks[0], 2)
    world.run(0.2)
    world.call(ranks[1], "skip", step=2, why="no room within 5 s", stall_s=5.0)
    world.run(2.0)
    [skip] = events_of_kind(world, "skip")
    assert (skip["step"], skip["rank"], skip["host"], skip["why"]) == (2, 1, ranks[1].host_id, "no room within 5 s")
    assert (skip["stall_s"], skip["resume"]) == (5.0, 3)
    assert not world.served.parts.recorder.puts


def test_an_older_step_that_a_newer_commit_overtook_is_reported() -> None:
    """Superseded is an end of its own: no rank skipped it, it was only late."""
    world, ranks = trained(2, keep_steps=2)
    world.work_s = (3.0, 3.0)
    for rank in ranks:
        world.put(rank, 2)
    world.run(0.5)
    world.work_s = (0.1, 0.1)
    assert world.put_all(ranks, 3)
    [row] = events_of_kind(world, "superseded")
    assert (row["step"], row["why"]) == (2, "step 3 was committed first")


def test_a_lost_host_is_reported_from_its_death_to_the_last_copy_rebuilt() -> None:
    """Death, shortage, repair and its end come in order, with counts that fit together (R28, R29)."""
    world, _ = trained(4, world_size=3)
    dead = world.ranks[JOB, 0].host_id
    world.kill_host(dead)
    assert world.run_until(lambda: bool(events_of_kind(world, "whole")), 60.0)
    rows = events_of_kind(world, "host_dead", "degraded", "repair", "repaired", "whole")
    order = [row["event"] for row in rows]
    assert order[:2] == ["host_dead", "degraded"]
    assert set(order[-2:]) == {"repaired", "whole"}
    death, short = rows[0], rows[1]
    assert (death["host"], death["why"], death["shards"]) == (dead, "connection reset", 2)
    assert (short["missing"], short["shards"]) == (2, 2)
    repairs = [row for row in rows if row["event"] == "repaired"]
    assert sum(row["shards"] for row in repairs) == 2
    assert sum(row["nbytes"] for row in repairs) == 2 * 256
    assert repairs[-1]["missing"] == 0
    whole = next(row for row in rows if row["event"] == "whole")
    assert whole["seconds"]["degraded"] >= world.rules.dead_after_s - 1.5  # R28: repair waits for a return


def test_a_degraded_commit_is_repaired_and_the_time_to_redundant_counts_from_the_put() -> None:
    """The commit names what it lacks, and that it became whole is reported with the seconds since the put (R18)."""
    world, ranks = trained(2, last=0)
    world.reserve(ranks)
    world.holders["h1"].refuses_copies = "its arena is full"
    assert world.put_all(ranks, 1)
    [commit] = events_of_kind(world, "commit")
    assert "arena is full" in commit["degraded"]
    assert "redundant" not in commit["seconds"]
    world.run(3.0)
    world.holders["h1"].refuses_copies = ""
    assert world.run_until(lambda: bool(events_of_kind(world, "redundant")), 60.0)
    [repaired] = events_of_kind(world, "redundant")
    assert repaired["copies"] == 2
    assert repaired["seconds"]["redundant"] > 3.0


def test_a_restore_is_reported_with_its_verdict_bytes_phases_and_what_was_not_used() -> None:
    """One line for the round of all ranks: the step, the tiers, the steps lost and why nothing newer (R23, R24)."""
    world, ranks = trained(4, world_size=3, last=2)
    world.put(ranks[0], 3)
    world.run(1.0)
    world.kill_host(ranks[2].host_id)
    world.get(world.launch(3))
    [row] = events_of_kind(world, "restore")[-1:]
    assert (row["step"], row["of_attempt"], row["attempt"], row["ranks"]) == (2, 1, 2, 3)
    assert (row["verdict"], row["bytes"]) == ("peer", {"local": 2 * 256, "peer": 256, "durable": 0})
    assert row["steps_lost"] == 1
    assert row["not_used"][0].startswith("step 3 (attempt 1): ")
    assert set(row["seconds"]) == {"gather", "transfer"}


def test_a_restore_of_nothing_is_reported_as_that() -> None:
    """A new job's get is a restore like any other, with the verdict that there is nothing."""
    world, _ = trained(2)
    [row] = events_of_kind(world, "restore")
    assert (row["verdict"], row["job"], "step" in row) == ("none", JOB, False)


def test_a_get_whose_step_cannot_be_staged_is_reported_with_the_reason() -> None:
    """The same error that every rank gets."""
    world, _ = trained(2, last=1)
    world.holders["h0"].staging_fails = "no room to stage"
    answers = world.get(world.launch(2))
    assert "error" in answers[0]
    [row] = events_of_kind(world, "restore_failed")
    assert (row["error"], row["phase"]) == ("RecoveryError", "staging")
    assert "no room to stage" in row["why"]


def test_durable_writes_are_sent_with_their_seconds_or_with_what_went_wrong() -> None:
    """Written, failed and abandoned are three events (R31)."""
    world, ranks = trained(2, durable="/durable", durable_every=1)
    world.run(3.0)
    assert [row["step"] for row in events_of_kind(world, "durable")] == [1]
    assert events_of_kind(world, "durable")[0]["seconds"]["write"] > 0
    world.durable.problem = "no space left"
    assert world.put_all(ranks, 2)
    world.run(2.0)
    assert {row["why"] for row in events_of_kind(world, "durable_failed")} == {"no space left"}


def test_suspicion_return_drain_and_a_new_controller_are_sent() -> None:
    """What a person on call asks first: which host, since when, who decides now (R17, R28, R29)."""
    world, ranks = trained(3)
    world.silence("h2")
    assert world.run_until(lambda: bool(events_of_kind(world, "host_suspect")), 10.0)
    world.thaw("h2")
    assert world.run_until(lambda: bool(events_of_kind(world, "host_live")), 10.0)
    world.call(ranks[0], "drain", host="h1", within_s=60.0)
    world.run(1.0)
    [drain] = events_of_kind(world, "drain")
    assert (drain["host"], round(drain["due_s"])) == ("h1", 60)
    world.call(ranks[0], "drain", host="h1", within_s=None)
    world.run(1.0)
    assert events_of_kind(world, "drain_over")[0]["host"] == "h1"
    before = world.served.parts.recorder.recent_events.last_seq
    world.crash_controller()
    world.run(6.0)
    [term] = events_of_kind(world, "term")
    assert (term["term"], term["hosts"], term["jobs"]) == (2, ["h0", "h1", "h2"], 1)
    assert term["seq"] > before
    # replayed facts are the past, reported by the controller before (R16)
    assert not events_of_kind(world, "commit", "attempt")


def test_pins_are_sent() -> None:
    """A person's own doings are part of the account: which step, under which name (R19)."""
    world, ranks = trained(3, last=2)
    world.call(ranks[0], "pin", step=2, name="best")
    world.run(2.0)
    world.call(ranks[0], "unpin", name="best")
    world.run(2.0)
    pinned, unpinned = events_of_kind(world, "pinned", "unpinned")
    assert (pinned["job"], pinned["step"], pinned["name"]) == (JOB, 2, "best")
    assert unpinned["name"] == "best"


def test_an_attempt_that_is_written_again_is_no_second_attempt() -> None:
    """A rank that comes back before its first put changes the members of the attempt, nothing more (R20)."""
    world = ControllerWorld(2)
    ranks = world.launch(2)
    world.kill_rank(ranks[1])
    world.run(0.5)
    again = world.join(1, 2, ranks[1].key)
    assert world.run_until(lambda: bool(again.answers.get("join")), 20.0), again.errors
    assert [row["attempt"] for row in events_of_kind(world, "attempt")] == [1]
    assert [row["attempt"] for row in events_of_kind(world, "members")] == [1]


def test_a_seal_that_is_reported_again_after_its_commit_is_no_step_of_its_own() -> None:
    """A link that broke sends a submission again: its step was committed, and is not superseded by the next (R12)."""
    world, ranks = trained(2, last=2)
    shard = next(s for s in world.holders["h0"].held if s.rank == 0 and s.step == 2)
    copy = WireCopy.of(world.holders["h0"].held[shard])
    world._handle(Received("h0", Sealed(copy=copy, put=PutTimes(stall_s=0.1, age_s=0.2))))
    assert world.put_all(ranks, 3)
    assert not events_of_kind(world, "superseded")
    assert [row["step"] for row in events_of_kind(world, "put")] == [1, 2, 3]


def test_scrub_findings_of_a_heartbeat_are_reported_once() -> None:
    """The count in a heartbeat is since the holder's start: only what is new is news, in its first beat too (R30)."""
    world, _ = trained(2)
    beat = lambda count: world._handle(HostBeat("h0", host_stats(scrub=count)))  # noqa: E731
    for count in (2, 2, 3):
        beat(count)
    assert [(row["host"], row["found"]) for row in events_of_kind(world, "scrub")] == [("h0", 2), ("h0", 1)]
    world.crash_controller()
    world.run(5.0)
    for count in (3, 4):  # its predecessor has reported three
        beat(count)
    assert [row["found"] for row in events_of_kind(world, "scrub")] == [1]
    world.kill_host("h0")
    world.return_host("h0")
    world.run(5.0)
    beat(6)  # the first beat that has a count
    world.kill_host("h0")
    world.add_host("h0")  # another machine of that name, which counts its lives from 1 again
    world.run(5.0)
    beat(2)
    assert [row["found"] for row in events_of_kind(world, "scrub")] == [1, 6, 2]


@pytest.mark.parametrize(("stall_s", "age_s"), [(float("nan"), float("nan")), (-1.0, 1e300), (0.0, float("-inf"))])
def test_nonsense_from_a_rank_is_counted_as_nothing(stall_s: float, age_s: float) -> None:
    """What a rank measured decides nothing and breaks nothing."""
    world, ranks = trained(2)
    [copy] = [c for s, c in world.holders["h0"].held.items() if s.rank == 0 and c.host == "h0"]
    world._handle(Received("h0", Sealed(copy=WireCopy.of(copy), put=PutTimes(stall_s=stall_s, age_s=age_s))))
    putting = world.served.parts.recorder.puts.get((JOB, StepId(1, 1)))
    assert putting is None or putting.stalls_s == {0: 0.0}
    assert world.put_all(ranks, 2)


def test_the_memory_is_bounded_and_a_flood_of_commits_pushes_no_death_out() -> None:
    """Routine and rare events have rooms of their own; a page of what is gone says so."""
    recent_events = RecentEvents(3)
    recent_events.add("host_dead", 0.0, host="h1")
    for step in range(3 * KEPT):
        recent_events.add("commit", float(step), job="a" if step % 2 else "b", step=step)
    first, *rest = recent_events.since(0)
    assert (first.event, len(rest)) == ("host_dead", KEPT)
    page = recent_events.page(0, "a", 0.0)
    assert page.has_more
    assert len(page.events) == PAGE
    assert {row.job or "a" for row in page.events} == {"a"}
    read = [*page.events]
    while page.has_more:
        page = recent_events.page(page.next, "a", 0.0)
        read += page.events
    assert [row.seq for row in read] == sorted({row.seq for row in read})
    assert len(read) == 1 + KEPT // 2
    assert (page.next, page.is_gap) == (recent_events.last_seq, False)
    assert recent_events.page(first.seq, None, 0.0).is_gap
    assert RecentEvents(4).page(recent_events.last_seq, None, 0.0).is_gap  # the one who knew the rest is gone


def test_steps_of_which_no_copy_is_left_count_as_lost() -> None:
    """A rank put two steps more, and its host went with the only copies: what it put is known all the same."""
    world, ranks = trained(3, world_size=2, last=2, keep_steps=3)
    gone = ranks[1].host_id
    for holder in world.holders.values():
        holder.refuses_copies = "no peer is reached"
    for step in (3, 4):
        world.put(ranks[1], step)
    world.run(1.0)
    world.kill_host(gone)
    world.run(5.0)
    for holder in world.holders.values():
        holder.refuses_copies = ""
    world.get(world.launch(2))
    [row] = events_of_kind(world, "restore")[-1:]
    assert (row["step"], row["steps_lost"]) == (2, 2)


def test_a_job_has_no_events_of_before_it_began() -> None:
    """Those of hosts and controllers come with a job's own from its first one on; of all jobs all are there."""
    world, _ = trained(2)
    world.kill_host("h1")
    world.run(1.0)
    world.return_host("h1")
    world.run(5.0)
    late = world.launch(2, job="late")
    world.get(late)
    world.kill_host("h1")
    world.run(1.0)
    kinds = [row["event"] for row in world.events("late")]
    assert (kinds[0], kinds.count("host_dead")) == ("attempt", 1)
    assert [row["event"] for row in world.events()].count("host_dead") == 2


# -- in place -----------------------------------------------------------------------------------------
# What an operator sees of a recovery in place: who was replaced, why, where, and how long each phase took.


PHASES = ["detect", "abort", "replace", "meet", "rebuild", "get", "first_step"]
LOSS = RankLoss(2, 1, "frozen", True, 3.0)


def entered(generation: int = 1, *losses: RankLoss, is_new: bool = False, **measured: Any) -> InPlace:
    """Return what a rank says of a generation that it enters."""
    stayed = dict.fromkeys(("detect_s", "abort_s", "replace_s")) if is_new else {}
    before = {"detect_s": 0.5, "abort_s": 0.1, "replace_s": 2.0, **stayed}
    return InPlace(generation=generation, losses=losses, **{**before, "meet_s": 0.2, "build_s": 0.3, **measured})


def enter(world: ControllerWorld, key: str, *ranks: InPlace) -> list[DirectedRank]:
    """Let the ranks of a generation join, each half a second after the one before; rank 2 is on h1 now."""
    joined = []
    for rank, in_place in enumerate(ranks):
        joined.append(world.join(rank, len(ranks), f"in-place:{key}", host=("h0", "h1", "h1")[rank], in_place=in_place))
        world.run(0.5)
    world.run(1.0)
    return joined


def lost(world: ControllerWorld, ranks: list[DirectedRank]) -> None:
    """End rank 2, whose host is h2; the others leave their stores as they are."""
    world.kill_rank(ranks[2])
    world.run(1.0)


def events_of(world: ControllerWorld, *kinds: str) -> list[dict[str, Any]]:
    return [event for event in world.events() if event["event"] in kinds]


def test_the_events_name_who_was_replaced_and_the_seconds_of_each_phase() -> None:
    """The phases are those of the rank that joined last; a new process has none before the meeting."""
    world, ranks = trained(3)
    lost(world, ranks)
    slow = entered(abort_s=0.7, replace_s=1.4)
    ranks = enter(world, "run:1", entered(1, LOSS), slow, entered(is_new=True, build_s=0.9))
    [replaced] = events_of(world, "replaced")
    row = {"rank": 2, "host": "h2", "to_host": "h1", "cause": "frozen", "is_spare": True}
    assert (replaced["attempt"], replaced["generation"]) == (2, 1)
    assert replaced["replaced"] == [row]
    began_s = world.now
    world.get(ranks)
    assert world.put_all(ranks, 2)
    assert world.put_all(ranks, 3)
    [recovered] = events_of(world, "recovered")
    assert (recovered["step"], recovered["rank"], recovered["host"], recovered["generation"]) == (2, 2, "h1", 1)
    took_s = recovered["seconds"]
    assert list(took_s) == PHASES
    # The silence of the lost rank is longer than the wait of any other one for word of it.
    assert (took_s["detect"], took_s["abort"], took_s["replace"], took_s["meet"]) == (3.0, 0.7, 1.4, 0.2)
    on_its_way_s = 0.01  # between a rank and the controller
    assert 0.9 + 1.5 - on_its_way_s <= took_s["rebuild"] <= 0.9 + 1.7
    assert 0.0 < took_s["get"] + took_s["first_step"] <= world.now - began_s


def test_a_rank_that_stayed_and_joins_last_is_the_one_whose_phases_count() -> None:
    """The others waited for it, not for the replacement."""
    world, ranks = trained(3)
    lost(world, ranks)
    loss = RankLoss(1, 1, "ray", False, 0.0)
    enter(world, "run:1", entered(1, loss), entered(is_new=True), entered(abort_s=0.4, detect_s=0.6))
    recovery = world.job().attempts[2].recovery
    assert recovery is not None
    assert (recovery.rank, recovery.seconds["detect"], recovery.seconds["abort"]) == (2, 0.6, 0.4)


def test_a_generation_that_broke_before_its_ranks_connected_is_not_forgotten() -> None:
    """Its replacement is named with that of the next one; a rank that was lost twice is named once."""
    world, ranks = trained(3)
    lost(world, ranks)
    again = RankLoss(2, 2, "ended", False, 0.0), RankLoss(1, 2, "silent", False, 5.0)
    enter(world, "run:2", entered(2, LOSS, *again), entered(2, is_new=True), entered(2, is_new=True))
    [replaced] = events_of(world, "replaced")
    assert [(row["rank"], row["cause"], row["is_spare"]) for row in replaced["replaced"]] == [
        (1, "silent", False),
        (2, "frozen", False),
    ]
    later = RankLoss(0, 3, "ended", False, 0.0)
    enter(world, "run:3", entered(3, LOSS, *again, later, is_new=True), entered(3), entered(3))
    assert [row["rank"] for row in events_of(world, "replaced")[-1]["replaced"]] == [0]


def test_a_run_that_is_started_again_counts_from_the_start() -> None:
    """Its generations have the numbers of those of the run before."""
    world, ranks = trained(3)
    lost(world, ranks)
    enter(world, "run:1", entered(1, LOSS), entered(), entered(is_new=True))
    enter(world, "another:1", entered(1, RankLoss(0, 1, "ended", False, 0.0), is_new=True), entered(), entered())
    assert [[row["rank"] for row in event["replaced"]] for event in events_of(world, "replaced")] == [[2], [0]]


def test_a_new_controller_knows_the_generation_and_not_what_it_has_not_seen() -> None:
    """The number is journalled, with which the next one is compared; who was replaced is history, and in the log."""
    world, ranks = trained(3)
    lost(world, ranks)
    enter(world, "run:1", entered(1, LOSS), entered(), entered(is_new=True))
    world.crash_controller()
    world.run(5.0)
    [job] = world.status()["jobs"]
    assert (job["generation"], job["replaced"], job["recovery_s"]) == (1, [], {})
    assert world.job().attempts[2].is_in_place
    enter(world, "run:2", entered(2, LOSS, RankLoss(1, 2, "ended", False, 0.0)), entered(2, is_new=True), entered(2))
    assert [row["rank"] for row in events_of(world, "replaced")[-1]["replaced"]] == [1]


def test_an_ordinary_launch_is_no_generation() -> None:
    """It has no such events."""
    world, _ = trained(2)
    world.launch(2)
    assert world.status()["jobs"][0]["generation"] == 0
    assert events_of(world, "replaced", "recovered") == []


def test_a_rank_counts_once_and_the_phases_of_a_recovery_add_up_in_the_metrics() -> None:
    """By cause, and by phase: no series for a rank."""
    world, ranks = trained(3)
    lost(world, ranks)
    ranks = enter(world, "run:1", entered(1, LOSS), entered(), entered(is_new=True))
    world.get(ranks)
    assert world.put_all(ranks, 2)
    gauges = {(s.name, s.tags): s.value for s in status_gauges(world.served.parts.status.answer(), 0)}
    assert gauges["memstore_job_generation", (JOB,)] == 1
    samples = [s for event in world.served.parts.recorder.recent_events.since(0) for s in counted(event)]
    assert [s.tags for s in samples if s.name == "memstore_replaced_ranks_total"] == [(JOB, "frozen")]
    by_phase = {s.tags[1]: s.value for s in samples if s.name == "memstore_recovery_phase_seconds_total"}
    assert list(by_phase) == PHASES
    [total] = [s.value for s in samples if s.name == "memstore_recovery_seconds"]
    assert total == pytest.approx(sum(by_phase.values()))


def test_status_and_events_say_it_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first commit the phases that have ended, then how long all of it took."""
    world, ranks = trained(3)
    lost(world, ranks)
    ranks = enter(world, "run:1", entered(1, LOSS), entered(), entered(is_new=True))
    desk = Desk(monkeypatch, world, ranks[0])
    who = "generation 1: rank 2 of h2 was replaced on h1 by a spare (its process was frozen)"
    assert f"{JOB}: {who}\n  nothing committed since: detect 3.00 s, abort 0.10 s" in desk.run("status").stdout
    world.get(ranks)
    assert world.put_all(ranks, 2)
    back = r"back after \d+\.\d\d s: detect 3\.00 s, .*, first step \d\.\d\d s"
    assert re.search(f"{re.escape(who)}\n  {back}", desk.run("status").stdout)
    screen = desk.run("events", JOB).stdout
    assert who in screen
    assert re.search(f"generation 1: {back}; the last was rank 2 on h1", screen)
    [job] = json.loads(desk.run("status", "--json").stdout)["jobs"]
    rows = [json.loads(line) for line in desk.run("events", JOB, "--json").stdout.splitlines()]
    [replaced] = [row for row in rows if row["event"] == "replaced"]
    [recovered] = [row for row in rows if row["event"] == "recovered"]
    assert (job["generation"], job["replaced"]) == (1, replaced["replaced"])
    assert job["recovery_s"] == pytest.approx(recovered["seconds"], abs=1e-5)
