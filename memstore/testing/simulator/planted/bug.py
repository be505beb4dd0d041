"""A planted bug: a mistake that is put into the code for one run, which the checks must find.

A harness that finds nothing proves nothing until it has found what was hidden from it. Each bug is a patch that lasts
for one run of a written scenario. The same scenario without it must pass.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

from memstore.testing.simulator.run.campaign import Outcome, play
from memstore.testing.simulator.world.scenario import Fault, Scenario

Plant = Callable[[], AbstractContextManager[Any]]
SHORT_RUN_S = 12.0
# Steps are so far apart that only repair can give the newest one its copies back.
BETWEEN_STEPS: dict[str, Any] = {"step_s": 20.0, "duration_s": 40.0, "tries": 4}


@dataclass(frozen=True)
class PlantedBug:
    """One bug: what it does, the rule that it breaks, the rules that may find it, the scenario in which it shows."""

    name: str
    breaks: str
    caught_by: tuple[str, ...]
    what: str
    plant: Plant
    scenario: Scenario
    tries: int  # so many seeds of the same scenario; they differ in delays

    def hunt(self) -> tuple[Outcome, int]:
        """Play the scenario with the bug until a rule that may find it does; return the last outcome, and seeds."""
        outcome = Outcome(0)
        for seed in range(self.tries):
            with self.plant():
                outcome = play(replace(self.scenario, seed=seed))
            if outcome.rule in self.caught_by:
                return outcome, seed + 1
        return outcome, self.tries


def planted(
    name: str, breaks: str, caught_by: str, *faults: Fault, tries: int = 1, **cluster: Any
) -> Callable[[Plant], PlantedBug]:
    """Make a bug of a patch: its docstring says what it does, `cluster` are fields of the scenario."""

    def bug_of(plant: Plant) -> PlantedBug:
        scenario = Scenario(**{"seed": 0, "duration_s": SHORT_RUN_S, "faults": faults, **cluster})
        what = (plant.__doc__ or "").strip()
        return PlantedBug(name, breaks, tuple(caught_by.split()), what, plant, scenario, tries)

    return bug_of
