"""The harness is tested: bugs planted in the real code are found, and nothing is found without them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from repository import ROOT

from memstore.testing.simulator.planted.catalogue import BUGS
from memstore.testing.simulator.run.campaign import play

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
