"""The nemesis itself: its checks catch planted wrong answers, its draws repeat, and a short round is clean."""

from __future__ import annotations

import json
import os
import random
import resource
import subprocess
import sys
from dataclasses import asdict
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from repository import ROOT

from memstore.core.wire.status_rows import AttemptStatus
from memstore.testing.faults.catalogue import Fault, played_by
from memstore.testing.fuzz.messages import blank
from memstore.testing.nemesis.checks import RestoreCheck, check_put, check_read, stall_bound_s
from memstore.testing.nemesis.faults import PLAYED, ProcessFaults
from memstore.testing.nemesis.ledger import Ledger, Story
from memstore.testing.nemesis.load_meter import LoadMeter
from memstore.testing.nemesis.observers import incomplete
from memstore.testing.nemesis.record import RecordPart, append, shortened
from memstore.testing.nemesis.schedule import COMPOSED, PARITY, draw
from memstore.testing.ranks.rank import PutRow
from memstore.testing.ranks.rank_process import RankFailed
from memstore.testing.ranks.states import compare, make_state, overwrite

RACKS = frozenset({"a", "b"})


def trained(*, replicas: int = 2, keep_steps: int = 1) -> Ledger:
    """Attempt 1 put steps 0 to 3, all committed with every copy, each a second after the other."""
    ledger = Ledger(replicas, keep_steps, RACKS)
    ledger.restored(1, None)
    for step in range(4):
        ledger.began_put(1, step, 0, float(step))
        ledger.committed((1, step), degraded=False)
    return ledger


def judged(ledger: Ledger, *got: dict[str, Any], failed: tuple[RankFailed, ...] = ()) -> list[str]:
    """What is broken when the ranks of attempt 2 get this."""
    story = Story()
    RestoreCheck(draw(1), ledger, story).judge(2, got, failed, 10.0, 11.0, ["h1", "h2"])
    return [violation.kind for violation in story.violations]


def reply(step: int | None, problem: str = "", attempt: int = 1) -> dict[str, Any]:
    """What one rank says of its get."""
    return {"step": step, "attempt": attempt, "problem": problem, "nbytes": 8}


# -- the oracle ---------------------------------------------------------------------------------


def test_one_wrong_byte_another_rank_step_or_attempt_is_seen() -> None:
    """The bytes follow from attempt, rank and step; any other's differ, and so does a single flipped bit."""
    wanted = make_state(7, "train", 2, 1, 40, 65_536)
    again = make_state(7, "train", 2, 1, 40, 65_536)
    equal, differences = compare(again, wanted)
    assert (equal > 65_536, differences) == (True, [])
    again["model"]["weights"].view(torch.uint8).view(-1)[12_345] ^= 1
    count, [first, tied] = compare(again, wanted)
    assert count == equal - 2  # the tied tensor has it too
    assert first.startswith("state['model']['weights']: 1 of 24,576 bytes differ from byte 12,345 on (not zeros)")
    assert "['head']" in tied
    for other in (("train", 1, 1, 40), ("train", 2, 0, 40), ("train", 2, 1, 39), ("other", 2, 1, 40)):
        assert "['weights']" in compare(make_state(7, *other, 65_536), wanted)[1][0]
    again["model"]["frozen"].zero_()
    assert any("(all of them 0)" in words for words in compare(again, wanted)[1])


def test_a_part_of_the_state_never_changes_and_all_else_is_overwritten_in_place() -> None:
    """As an optimizer does: the tensors stay where they are and have the bytes of the next step."""
    state, later = make_state(7, "train", 1, 0, 1, 4096), make_state(7, "train", 2, 0, 2, 4096)
    assert torch.equal(state["model"]["frozen"], later["model"]["frozen"])
    weights = state["model"]["weights"].data_ptr()
    overwrite(state, later)
    assert compare(state, later)[1] == []
    assert state["model"]["weights"].data_ptr() == weights


# -- the checks, fed wrong answers --------------------------------------------------------------


def test_a_right_restore_is_no_violation() -> None:
    """The newest commit, or a newer step that was put, on all ranks."""
    assert judged(trained(), reply(3), reply(3)) == []
    ledger = trained()
    ledger.began_put(1, 4, 0, 4.0)
    assert judged(ledger, reply(4), reply(4)) == []


def test_wrong_answers_are_caught() -> None:
    """A wrong byte, a lost step, a rank that got another step, no history, a step of another lineage."""
    assert judged(trained(), reply(3), reply(3, "1 of 8 bytes differ")) == ["wrong-bytes"]
    assert judged(trained(), reply(2), reply(2)) == ["lost-step"]
    assert judged(trained(), reply(3), reply(2)) == ["different-steps"]
    assert judged(trained(), reply(None), reply(None)) == ["lost-history"]
    assert judged(trained(), reply(9, attempt=7), reply(9, attempt=7)) == ["foreign-step"]
    assert judged(trained(), failed=(RankFailed("RecoveryError", "no whole step"),)) == ["lost-step"]
    assert judged(trained(), failed=(RankFailed("KeyError", "'x'"),)) == ["foreign-error"]


def test_a_step_of_an_abandoned_lineage_is_foreign() -> None:
    """After a restore of step 1 the former steps 2 and 3 are no longer what the job follows from."""
    ledger = trained()
    ledger.restored(2, (1, 1))
    ledger.began_put(2, 2, 0, 5.0)
    story = Story()
    RestoreCheck(draw(1), ledger, story).judge(3, [reply(3)], (), 10.0, 11.0, ["h1"])
    assert [violation.kind for violation in story.violations] == ["foreign-step"]


def test_losses_within_the_promise_excuse_nothing() -> None:
    """One of two racks lost: the step is demanded. Both lost, or one lost while the other is away: it is not."""
    ledger = trained()
    ledger.harmed("a", "lost", 5.0)
    ledger.harmed("a", "lost", 6.0)
    assert judged(ledger, reply(2), reply(2)) == ["lost-step"]
    ledger = trained()
    ledger.harmed("a", "lost", 5.0)
    ledger.harmed("b", "lost", 6.0)
    assert judged(ledger, reply(2), reply(2)) == []
    ledger = trained()
    ledger.harmed("a", "lost", 5.0)
    ledger.harmed("b", "away", 6.0).until_s = 9.0
    assert judged(ledger, reply(2), reply(2)) == []


def test_kills_alone_excuse_nothing_once_all_are_back() -> None:
    """Every holder was killed and is back with its memory: the newest commit is demanded."""
    ledger = trained()
    for domain in RACKS:
        ledger.harmed(domain, "away", 5.0).until_s = 9.0
    assert judged(ledger, reply(2), reply(2)) == ["lost-step"]
    assert judged(trained(), reply(None), reply(None)) == ["lost-history"]


def test_complete_copies_start_the_count_of_losses_again() -> None:
    """A rack lost, repaired, then the other one lost is within the promise; rot counts until everything is verified."""
    ledger = trained()
    ledger.harmed("a", "lost", 5.0)
    ledger.complete(1, 3, 6.0)
    ledger.harmed("b", "lost", 7.0)
    assert ledger.demanded(10.0, 11.0) == (1, 3)
    ledger = trained()
    ledger.harmed("a", "rot", 5.0)
    ledger.complete(1, 3, 6.0)
    ledger.harmed("b", "lost", 7.0)
    assert ledger.demanded(10.0, 11.0) is None
    ledger.verified(8.0)
    assert ledger.demanded(10.0, 11.0) == (1, 3)


def test_a_degraded_commit_is_promised_once_its_copies_are_complete() -> None:
    """A commit with fewer copies may go with one host, until repair has raised it."""
    ledger = trained()
    ledger.committed((1, 3), degraded=True)
    ledger.harmed("a", "lost", 5.0)
    assert ledger.demanded(10.0, 11.0) is None
    ledger.complete(1, 3, 6.0)
    assert ledger.demanded(10.0, 11.0) == (1, 3)


def test_what_was_durable_is_promised_when_all_memory_is_lost() -> None:
    """The newest durable step is demanded, and a history, unless storage did not work during the get."""
    ledger = trained()
    ledger.became_durable((1, 2))
    for domain in RACKS:
        ledger.harmed(domain, "lost", 5.0)
    assert ledger.demanded(10.0, 11.0) == (1, 2)
    ledger.lost_storage(9.0)
    assert ledger.demanded(10.0, 11.0) is None
    ledger.lost_storage(9.0, 9.5)
    assert ledger.demanded(10.0, 11.0) == (1, 2)
    assert judged(ledger, reply(None), reply(None)) == ["lost-history"]


class IdleMeter(LoadMeter):
    """A machine that is never late."""

    def late_s(self, from_s: float, to_s: float) -> float:
        return 0.0


def test_a_put_that_raised_or_stalled_is_caught() -> None:
    """Beyond the budget, its margin and what the machine overslept; a rank that was stopped is excused."""
    scenario = draw(1)
    budget_s = scenario.stall_budget_s
    put = PutRow(1, budget_s + 2.0, "", 0.0, budget_s + 2.0)

    def broken(paused: tuple[tuple[float, float], ...] = (), **changes: Any) -> list[str]:
        story = Story()
        check_put(scenario, story, IdleMeter(), paused, 0, {**asdict(put), **changes})
        return [violation.kind for violation in story.violations]

    assert broken() == ["stall"]
    assert broken(((0.0, 1.5),)) == []
    assert broken(stall_s=budget_s) == []
    assert broken(error="PeerTimeout: x") == ["put-raised"]
    assert broken(error="CapacityError: x", is_first=True) == ["first-put-raised"]
    assert stall_bound_s(1.0, 2.0, is_first=False) == 8.0


def test_wrong_bytes_of_a_reader_are_caught() -> None:
    """A refusal is none."""
    story = Story()
    check_read([{"rank": 0, "error": "RecoveryError: gone"}], story, "h1")
    assert not story.violations
    check_read([{"rank": 0, "step": 1, "attempt": 1, "problem": "x", "nbytes": 1}], story, "h1")
    assert [violation.kind for violation in story.violations] == ["wrong-bytes"]


def test_missing_copies_and_hosts_are_seen() -> None:
    """Copies are complete only if the store says so with all hosts live."""
    row = replace(blank(AttemptStatus), committed_step=3)
    assert incomplete(row, {"h1", "h2"}, {"h1", "h2"}) == ""
    assert "h2" in incomplete(row, {"h1"}, {"h1", "h2"})
    assert "1 copies missing" in incomplete(replace(row, missing_copies=1), {"h1"}, {"h1"})
    assert "nothing" in incomplete(None, {"h1"}, {"h1"})


# -- draws and records ----------------------------------------------------------------------------


def test_a_seed_draws_the_same_round_again() -> None:
    """Every shape and every kind of fault is drawn by some seed; a round follows from its seed alone."""
    rounds = [draw(seed) for seed in range(400)]
    assert rounds == [draw(seed) for seed in range(400)]
    assert {scenario.shape for scenario in rounds} == {"random", *COMPOSED}
    assert {fault.kind for scenario in rounds for fault in scenario.faults} == played_by("processes")
    assert {scenario.replicas for scenario in rounds} == {1, 2, 3}
    assert {scenario.world_size for scenario in rounds} == {2, 3, 4, 5, 6}
    assert all(len(set(scenario.domains().values())) >= scenario.replicas for scenario in rounds)


def test_some_rounds_have_parity() -> None:
    """Their hosts are each in a domain of its own, so that there are parity sets; a shape asks for it."""
    rounds = [draw(seed) for seed in range(400)]
    having = [scenario for scenario in rounds if scenario.parity]
    assert 400 > len(having) > 0
    assert {(scenario.parity, scenario.replicas) for scenario in having} == {*product((2, 3, 4), (2, 3))}
    for scenario in [*having, draw(1, shape=PARITY)]:
        assert len(set(scenario.domains().values())) == len(scenario.hosts) > scenario.replicas
        assert (scenario.job_fields["parity"], scenario.job_fields["replicas"]) == (scenario.parity, scenario.replicas)


def test_every_kind_has_its_function() -> None:
    """The nemesis plays what the catalogue gives it a weight for, on plain processes or on Ray, and no more."""
    assert PLAYED.keys() == played_by("processes") | played_by("ray")
    drawn = {fault.kind for seed in range(400) for fault in draw(seed, shape="ray").faults}
    assert drawn == played_by("ray")


def test_the_record_grows_by_every_part(tmp_path: Path) -> None:
    """Parts are appended, a part that goes on replaces its former state, and a broken promise leaves its story."""
    path, story = tmp_path / "record.json", Story()
    story.fault("kill-holder", "h1")
    story.violate("stall", "for long")
    first, second = RecordPart(1), RecordPart(2)
    first.body["date"], second.body["date"] = "1", "2"
    first.add(draw(1), Story(), 5.0, 0.1)
    append(path, first)
    first.add(draw(2), story, 7.0, 0.1)
    append(path, first)
    second.add(draw(3), Story(), 9.0, 0.1)
    total = append(path, second)
    assert (total["rounds"], total["clean_rounds"], total["violations"]) == (3, 2, 1)
    assert total["faults"] == {"kill-holder": 1}
    kept = json.loads(path.read_text())["parts"][0]["violations"][0]
    assert kept["broken"] == ["stall: for long"]
    assert any("VIOLATION stall" in line for line in kept["story"])


def test_a_long_story_keeps_its_beginning_and_what_is_around_the_violation() -> None:
    """Hundreds of lines are no story."""
    lines = [f"line {i}" for i in range(1000)]
    lines[700] = "VIOLATION x"
    kept = shortened(lines)
    assert kept[0] == "line 0"
    assert "VIOLATION x" in kept
    assert len(kept) <= 122


# -- rounds on real processes -----------------------------------------------------------------------


def play(tmp_path: Path, *options: str, timeout_s: float = 110.0) -> tuple[int, str, dict[str, Any]]:
    """Run the command; return its exit code, what it printed, and its record."""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "memstore.testing.nemesis",
            "--folder",
            os.path.relpath(tmp_path / "report", ROOT),
            "--out",
            str(tmp_path / "record.json"),
            *options,
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    return done.returncode, done.stdout + done.stderr, json.loads((tmp_path / "record.json").read_text())


@pytest.mark.slow
def test_a_short_round_is_clean(tmp_path: Path) -> None:
    """Holders, controller and ranks are killed and stopped for some seconds; every promise is kept."""
    code, text, record = play(tmp_path, "--round-seed", "12", "--shape", "kills", "--short")
    assert code == 0, text
    counts = record["total"]["counts"]
    assert counts["gets"] > 0
    assert counts["bytes_compared"] > 0
    assert counts["steps_committed"] > 0
    assert sum(record["total"]["faults"].values()) > 0


@pytest.mark.long
@pytest.mark.timeout(900)
def test_some_minutes_of_rounds_are_clean(tmp_path: Path) -> None:
    """Rounds of all shapes, new ones in every run: the seed is in the message of a failure."""
    seed = random.SystemRandom().getrandbits(32)
    code, text, _ = play(tmp_path, "--seed", str(seed), "--minutes", "3", timeout_s=800.0)
    assert code == 0, f"seed {seed}\n{text}"


def test_a_descriptor_table_that_is_full_already_is_not_filled_again() -> None:
    """Else the second of two such faults would give back the limit of the first: the process never recovers."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        faults = object.__new__(ProcessFaults)
        faults.story = SimpleNamespace(log=lambda line: None)  # type: ignore[assignment]
        faults.hosts = SimpleNamespace(  # type: ignore[assignment]
            controller=lambda: None, holder=lambda host: (process.pid,), mark_away=lambda host: None
        )
        faults.up = lambda fault: "a"  # type: ignore[method-assign]
        before = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
        first, second = (faults.fill_descriptors(random.Random(0), Fault(0.0, "fill-descriptors")) for _ in range(2))
        assert next(first) == "holder a"
        assert [*second] == []
        assert [*first] == []
        assert resource.prlimit(process.pid, resource.RLIMIT_NOFILE) == before
        process.kill()
