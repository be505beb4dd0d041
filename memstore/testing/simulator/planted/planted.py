"""Bugs put in on purpose: each breaks one rule in the real code, and a written scenario in which the checker finds it.

A harness that finds nothing proves nothing until it has found what was hidden from it. Each bug is a patch that lasts
for one run; the same scenario without it must pass. The bugs are in planted_decisions.py (catalog, planner, placement),
planted_bytes.py (vault, shelf, slot table, peer server), planted_files.py (files that go), planted_history.py (pins,
forks) and planted_steps.py (steps that the simulation mirrors).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

from memstore.testing.simulator.checks.campaign import Outcome, play
from memstore.testing.simulator.checks.scenario import Fault, Scenario

Plant = Callable[[], AbstractContextManager[Any]]
PLANTED: dict[str, Planted] = {}
SHORT_RUN_S = 12.0
BETWEEN_STEPS: dict[str, Any] = {
    "step_s": 20.0,
    "duration_s": 40.0,
    "tries": 4,
}  # so long that only repair can mend the newest


@dataclass(frozen=True)
class Planted:
    """One bug: the rule it breaks, what it does, who may find it (`caught_by`), and where it shows."""

    name: str
    breaks: str
    caught_by: tuple[str, ...]
    what: str
    plant: Plant
    scenario: Scenario
    tries: int  # so many seeds of the same scenario: they differ in delays

    def hunt(self) -> tuple[Outcome, int]:
        """Play the scenario with the bug until a rule that it breaks finds it; return the last outcome, and seeds."""
        outcome = Outcome(0)
        for seed in range(self.tries):
            with self.plant():
                outcome = play(replace(self.scenario, seed=seed))
            if outcome.rule in self.caught_by:
                return outcome, seed + 1
        return outcome, self.tries


def planted(
    name: str, breaks: str, caught_by: str, *faults: Fault, tries: int = 1, **cluster: Any
) -> Callable[[Plant], Plant]:
    """Register a bug: its docstring says what it does, `cluster` are fields of the scenario."""

    def add(plant: Plant) -> Plant:
        scenario = Scenario(**{"seed": 0, "duration_s": SHORT_RUN_S, "faults": faults, **cluster})
        what = (plant.__doc__ or "").strip()
        PLANTED[name] = Planted(name, breaks, tuple(caught_by.split()), what, plant, scenario, tries)
        return plant

    return add


def table() -> str:
    """Return every bug with the rule it breaks and the rule that found it, as a table for the documentation."""
    rows = ["| name | planted bug | breaks | found by | faults it needs |", "|---|---|---|---|---|"]
    for bug in load().values():
        outcome, _ = bug.hunt()
        kinds = ", ".join(dict.fromkeys(fault.kind for fault in bug.scenario.faults)) or "none"
        rows.append(f"| {bug.name} | {bug.what} | {bug.breaks} | {outcome.rule or 'nothing'} | {kinds} |")
    return "\n".join(rows)


def load() -> dict[str, Planted]:
    """Return all bugs by name."""
    from memstore.testing.simulator.planted import (
        planted_bytes,
        planted_decisions,
        planted_files,
        planted_history,
        planted_natural,
        planted_steps,
    )

    del planted_bytes, planted_decisions, planted_files, planted_history, planted_natural, planted_steps
    return PLANTED
