"""Holds: the steps that may not be dropped now, and the parts that hold them. Pure (R7, R19, R22).

Every part that reads, writes or is about to go on from a step registers a source: a function from a job to the steps it
needs at this moment. Retention, repair and removal ask here. Nothing is stored, so no hold can be forgotten.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from memstore.core.cluster.job import Job
from recovery.inventory import StepId

HoldSource = Callable[[Job], Iterable[StepId]]


class Holds:
    """The sources of all holds, by purpose."""

    def __init__(self) -> None:
        self._in_use: dict[str, HoldSource] = {}
        self._planned: dict[str, HoldSource] = {}

    def add(self, what: str, source: HoldSource, *, is_in_use: bool) -> None:
        """Register a source.

        Args:
            what: Its name in messages, such as "a restore".
            source: Returns the steps of a job that it needs now.
            is_in_use: The bytes are being read or written now. Else the step is named by a decision, such as a pin.
        """
        (self._in_use if is_in_use else self._planned)[what] = source

    def in_use(self, job: Job) -> set[StepId]:
        """Return the steps of a job whose bytes are being read or written now."""
        return {step for source in self._in_use.values() for step in source(job)}

    def steps(self, job: Job) -> set[StepId]:
        """Return all steps of a job that may not be dropped now."""
        return self.in_use(job) | {step for source in self._planned.values() for step in source(job)}
