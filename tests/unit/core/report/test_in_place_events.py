"""What an operator sees of a recovery in place: who was replaced, why, where, and how long each phase took."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from cli_desk import Desk

from memstore.core.report.metrics import counted, status_gauges
from memstore.core.wire.calls import InPlace, RankLoss
from memstore.testing.controller.holder import DirectedRank
from memstore.testing.controller.trained import trained
from memstore.testing.controller.world import JOB, ControllerWorld

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
