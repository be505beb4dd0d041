"""The whole store under seeded faults on virtual time: no rule breaks, and the harness itself can be trusted."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from repository import ROOT
from variants import later

from memstore.core.holder.ranks import ForwardedCall
from memstore.core.wire.calls import SkipStep
from memstore.shell.holder.pending_calls import Calls
from memstore.testing.faults.catalogue import Fault, played_by
from memstore.testing.part_records import parts_of
from memstore.testing.simulator.__main__ import main, parser
from memstore.testing.simulator.planted.catalogue import BUGS
from memstore.testing.simulator.run import campaign, faults, record
from memstore.testing.simulator.run.campaign import (
    RunOutcome,
    Simulation,
    Summary,
    failure_text,
    play,
    replay_command,
    run,
    shrink,
)
from memstore.testing.simulator.world.scenario import Scenario, draw

CORPUS = ROOT / "tests" / "simulator" / "corpus.jsonl"
SOON, SEEDS, CHUNK = 99, 300, 3  # seeds in `make test`, with `make test-long`, and of one test
SHRINK_S = 40.0  # a failing test still ends within its timeout


def complaint(scenarios: list[Scenario]) -> str:
    """Play scenarios; return the first failure, shrunk and with its replay command, and the seeds of the others."""
    failed = [(each, outcome) for each in scenarios if (outcome := play(each)).rule]
    others = ", ".join(str(outcome.seed) for _, outcome in failed[1:])
    return (
        ""
        if not failed
        else f"\n{failure_text(*failed[0], limit_s=SHRINK_S)}\nother seeds that failed: {others or '-'}"
    )


@pytest.mark.slow
@pytest.mark.parametrize("first", [*range(0, SOON, CHUNK), *later(*range(SOON, SEEDS, CHUNK))])
def test_no_rule_breaks(first: int) -> None:
    """Under the faults of every seed the invariants hold after every event, and the store is whole again afterwards."""
    found = complaint([draw(seed) for seed in range(first, first + CHUNK)])
    assert not found, found


@pytest.mark.slow
@pytest.mark.parametrize("row", record.read_corpus(CORPUS), ids=lambda row: f"{row.scenario.seed}-{row.rule}")
def test_a_scenario_that_failed_once_holds(row: record.CorpusRow) -> None:
    """No scenario of the corpus breaks a rule again."""
    found = complaint([row.scenario])
    assert not found, found


@pytest.mark.slow
@pytest.mark.parametrize("seed", [7, 21])
def test_a_seed_is_one_run(seed: int) -> None:
    """The same seed gives the same run, in one process and in others whose strings hash otherwise (I23)."""
    here = {play(draw(seed)).fingerprint for _ in range(2)}
    for hash_seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-m", "memstore.testing.simulator", "--seed", str(seed)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=120,
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            check=True,
        )
        here.update(re.findall(r"^fingerprint (\w+),", done.stdout, re.MULTILINE))
    assert len(here) == 1


def test_shrinking_finds_the_fault_that_matters() -> None:
    """Of six faults only the one that the bug needs is left, at its shortest, and the printed command replays it."""
    bug = BUGS["lease-freed-by-timeout"]
    noise = [
        Fault(at_s, kind) for at_s, kind in ((1.5, "slow-link"), (2.0, "flip-in-transit"), (2.2, "double-reports"))
    ]
    more = (*noise, *bug.scenario.faults, Fault(8.0, "kill-controller"), Fault(9.0, "kill-rank"))
    with bug.plant():
        shrunk, outcome = shrink(replace(bug.scenario, faults=more), "R8")
    assert [each.kind for each in shrunk.faults] == ["freeze-rank"]
    assert shrunk.faults[0].for_s < more[3].for_s
    assert outcome.rule == "R8"
    assert "freeze-rank" in outcome.page
    command = shlex.split(replay_command(shrunk))[3:]
    assert parser().parse_args(command).scenario == shrunk
    assert replay_command(draw(7)).endswith("--seed 7")


@pytest.mark.parametrize("seed", range(40))
def test_a_scenario_is_its_line(seed: int) -> None:
    """What a corpus stores is read back as the scenario that was drawn."""
    assert Scenario.from_json(draw(seed).to_json()) == draw(seed)


def test_every_kind_has_its_function() -> None:
    """The simulator plays what the catalogue gives it a weight for, no more; and its themes draw the rest."""
    assert {*faults.INJECT, *faults.ASKED} == played_by("simulator")
    drawn = {fault.kind for seed in range(400) for fault in draw(seed).faults}
    assert drawn == played_by("simulator")


def test_any_exception_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that dies of something else than a broken rule is no pass, and is counted."""
    monkeypatch.setattr(Simulation, "run", lambda self: 1 // 0)
    assert play(draw(1)).rule == "ZeroDivisionError"
    summary = run(0, 3, jobs=1)
    assert (summary.seeds, [row["seed"] for row in summary.violations]) == (3, [0, 1, 2])


def test_failures_are_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each seed that failed is appended to the corpus once."""
    file = tmp_path / "corpus.jsonl"
    command = ["--seeds", "1", "--first", "5", "--jobs", "1", "--record", "--corpus", str(file)]
    assert main(command) == 0
    assert not file.exists()
    bug = BUGS["fact-not-written"]
    with bug.plant():
        assert main(command) == 1
        assert main(command) == 1
    assert "replay: python -m memstore.testing.simulator --s" in capsys.readouterr().out
    assert [(row.scenario.seed, row.rule) for row in record.read_corpus(file)] == [(5, "R16")]


def test_a_corpus_line_that_is_none_is_refused(tmp_path: Path) -> None:
    """A line that cannot be read names its number."""
    file = tmp_path / "corpus.jsonl"
    file.write_text('{"rule": "R7"}\n')
    with pytest.raises(ValueError, match=r"corpus\.jsonl:1"):
        record.read_corpus(file)


def test_a_campaign_goes_on_where_it_was_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every seed of the range is played once, over several calls, and its record is that of one call."""
    played: list[int] = []

    def quick(scenario: Scenario) -> RunOutcome:
        played.append(scenario.seed)
        if scenario.seed == 15:
            return RunOutcome(15, "R7", "torn", virtual_s=36.0, commits=2, injected={"kill-rank": 1, "partition": 2})
        return RunOutcome(scenario.seed, virtual_s=36.0, commits=2, injected={"kill-rank": 1})

    monkeypatch.setattr(campaign, "play", quick)
    monkeypatch.setattr(record, "BATCH_SEEDS", 4)
    path = tmp_path / "record.json"
    assert main(["--first", "10", "--seeds", "3", "--jobs", "1", "--campaign", str(path)]) == 0
    monkeypatch.setattr("memstore.testing.simulator.__main__.failure_text", lambda scenario, outcome: "")
    main(["--first", "10", "--seeds", "10", "--jobs", "1", "--campaign", str(path)])
    main(["--first", "5", "--seeds", "10", "--jobs", "1", "--campaign", str(path)])
    main(["--first", "10", "--seeds", "10", "--jobs", "1", "--campaign", str(path)])
    assert played[:10] == list(range(10, 20))
    assert played[10:] == list(range(5, 10))
    first, second = parts_of(path)
    assert (first["first_seed"], first["last_seed"], first["seeds"]) == (10, 19, 10)
    assert (second["first_seed"], second["last_seed"]) == (5, 9)
    assert first["virtual_h"] == pytest.approx(0.1)
    assert (first["commits_acknowledged"], first["faults_injected"]) == (20, 12)
    assert first["faults"] == {"kill-rank": 10, "partition": 2}
    assert [row["seed"] for row in first["violations"]] == [15]


def test_another_commit_is_another_part(tmp_path: Path) -> None:
    """What was played on two commits is distinguished."""
    path = tmp_path / "record.json"
    record.add(path, Summary(seeds=2, first_seed=7), "abc")
    record.add(path, Summary(seeds=3, first_seed=9), "abc")
    record.add(path, Summary(seeds=1, first_seed=12), "def")
    assert [(part["commit"], part["first_seed"], part["last_seed"]) for part in parts_of(path)] == [
        ("abc", 7, 11),
        ("def", 12, 12),
    ]
    assert record.unplayed(parts_of(path), 0, 20) == (0, 7)
    assert record.unplayed(parts_of(path), 7, 20) == (13, 14)
    assert record.unplayed(parts_of(path), 8, 5) == (13, 0)


@pytest.mark.parametrize(("kind", "is_failed"), [("memory-full", False), ("remove-files", True)])
def test_a_put_that_fails_in_a_simulated_holder_says_why_as_a_real_one(
    kind: str, is_failed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For want of room or not: only the first lengthens the pause until all put again (R12)."""
    said: list[bool] = []
    real = Calls.ask

    def ask(self: Calls, call: ForwardedCall) -> None:
        if call.owner is None and isinstance(call.request, SkipStep):
            said.append(call.request.is_failed)
        real(self, call)

    monkeypatch.setattr(Calls, "ask", ask)
    faults = tuple(Fault(4.0 + n, kind, (1,), for_s=3.0) for n in range(4))
    outcome = play(Scenario(seed=0, step_s=0.15, duration_s=12.0, faults=faults))
    assert not outcome.rule, outcome.why
    assert is_failed in said


# -- simulator planted --------------------------------------------------------------------------------
# The harness is tested: bugs planted in the real code are found, and nothing is found without them.


README = ROOT / "memstore" / "testing" / "simulator" / "README.md"


@pytest.mark.slow
@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found(name: str) -> None:
    """The checker finds the bug, by a rule that it breaks, and the same run without it passes."""
    bug = BUGS[name]
    outcome, seeds = bug.hunt()
    assert outcome.rule in bug.caught_by, f"{bug.what} Found: {outcome.rule or 'nothing'} {outcome.why}"
    clean = play(replace(bug.scenario, seed=seeds - 1))
    assert not clean.rule, f"without the bug:\n{clean.page}\n{clean.why}"


def test_the_table_has_every_bug() -> None:
    """The page about the simulator lists what is planted, as `--planted` prints it."""
    page = README.read_text(encoding="utf-8")
    assert [name for name, bug in BUGS.items() if f"| {name} | {bug.what} | {bug.breaks} |" not in page] == []


def test_enough_bugs_are_planted() -> None:
    """At least 24, each with a name and a sentence of its own."""
    assert len(BUGS) >= 24
    assert len({bug.what for bug in BUGS.values()}) == len(BUGS)
