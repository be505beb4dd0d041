"""A planted bug: a mistake that is put into the code for one run, which the checks must find.

A harness that finds nothing proves nothing until it has found what was hidden from it. Each bug is a patch that lasts
for one run of a written scenario. The same scenario without it must pass.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch

from memstore.testing.faults.catalogue import Fault
from memstore.testing.simulator.run.campaign import RunOutcome, play
from memstore.testing.simulator.world.scenario import Scenario

Plant = Callable[[], AbstractContextManager[Any]]
SHORT_RUN_S = 12.0
# Steps are so far apart that only repair can give the newest one its copies back.
BETWEEN_STEPS: dict[str, Any] = {"step_s": 20.0, "duration_s": 40.0}
# Seeds of one scenario differ in delays. Most bugs show in every third at least, one in every thirteenth.
SEEDS_MAX = 120


@dataclass(frozen=True)
class PlantedBug:
    """One bug: what it does, the rule that it breaks, the rules that may find it, the scenario in which it shows."""

    name: str
    breaks: str
    caught_by: tuple[str, ...]
    what: str
    plant: Plant
    scenario: Scenario

    def hunt(self) -> tuple[RunOutcome, int]:
        """Play the scenario with the bug until a rule that may find it does; return the last outcome, and seeds."""
        outcome = RunOutcome(0)
        for seed in range(SEEDS_MAX):
            with self.plant():
                outcome = play(replace(self.scenario, seed=seed))
            if outcome.rule in self.caught_by:
                return outcome, seed + 1
        return outcome, SEEDS_MAX


async def nothing(*_: Any) -> None:
    """Take the place of a procedure that is left out."""


def planted(
    name: str, breaks: str, caught_by: str, *faults: Fault, at: tuple[Any, str] | None = None, **cluster: Any
) -> Callable[[Callable[..., Any]], PlantedBug]:
    """Make a bug of a function: its docstring says what the bug does, `cluster` are fields of the scenario.

    With `at`, an owner and the name of its attribute, the function takes that attribute's place, and gets the real one
    as its first argument. Without it, the function returns a context manager that makes several patches.
    """

    def bug_of(function: Callable[..., Any]) -> PlantedBug:
        what, plant = (function.__doc__ or "").strip(), function
        if at is not None:
            plant = partial(_put_before, *at, function)
        return _bug(name, breaks, caught_by, what, plant, faults, cluster)

    return bug_of


def row(
    name: str, breaks: str, caught_by: str, at: tuple[Any, str], value: Any, what: str, *faults: Fault, **cluster: Any
) -> PlantedBug:
    """Make a bug that sets the attribute `at`, of an owner by its name, to a value."""
    return _bug(name, breaks, caught_by, what, lambda: patch.object(*at, value), faults, cluster)


def _put_before(owner: Any, name: str, function: Callable[..., Any]) -> AbstractContextManager[Any]:
    real = getattr(owner, name)
    return patch.object(owner, name, lambda *args, **named: function(real, *args, **named))


def _bug(
    name: str, breaks: str, caught_by: str, what: str, plant: Plant, faults: tuple[Fault, ...], cluster: dict[str, Any]
) -> PlantedBug:
    scenario = Scenario(**{"seed": 0, "duration_s": SHORT_RUN_S, "faults": faults, **cluster})
    return PlantedBug(name, breaks, tuple(caught_by.split()), what, plant, scenario)
