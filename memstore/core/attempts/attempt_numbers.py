"""Which number the next attempt of a job gets: one that no other launch has, as far as can be told. Pure (R16, R20)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memstore.core.cluster.facts import AttemptOpened
from memstore.core.cluster.job import Attempt, Job
from recovery.inventory import StepId

if TYPE_CHECKING:
    from memstore.core.controller.machine import Catalog

LEFT_FREE = 1000  # numbers that launches may have which only absent hosts know of


def same_number(attempt: Attempt, step: StepId) -> str:
    """Say why an attempt cannot go on from this step, or "": another launch that had its number put it.

    That launch's hosts came after the number was given away. The next launch gets a higher one, and goes on from there.
    """
    if step.attempt < attempt.ordinal:
        return ""
    return (
        f"step {step.step} was put by another launch that had the number {attempt.ordinal} too: its hosts came after "
        "this launch had begun. Launch the job again: it gets another number, and goes on from that step"
    )


class Ordinals:
    """Numbers of attempts, for the catalog."""

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        self._opened: set[str] = set()  # jobs of which this controller has opened an attempt

    def next(self, name: str) -> int:
        """Return the number of the attempt that is opened now.

        Hosts that had the newest steps and that this controller has never seen may have gone on without those that are
        here. Two launches of one number would be taken for one, and their shards for one step: theirs are left free.
        """
        catalog, job = self.catalog, self.catalog.jobs.get(name)
        undone = [x.attempt for x in catalog.log.undone() if isinstance(x, AttemptOpened) and x.job == name]
        known = job.newest_ordinal if job is not None else 0
        ordinal = max([known, catalog.removed.get(name, 0), *undone]) + 1
        absent = self._absent(job) if job is not None and name not in self._opened else set()
        self._opened.add(name)
        if not absent:
            return ordinal
        hosts = ", ".join(sorted(absent)[:10])
        why = f"hosts {hosts} had its newest steps and have not come: they may know of launches"
        catalog.note(f"job {name!r}: attempt {ordinal + LEFT_FREE} follows {known}: {why}", "warning")
        return ordinal + LEFT_FREE

    def _absent(self, job: Job) -> set[str]:
        named = {host for fact in job.commits.values() for hosts in fact.hosts for host in hosts}
        if job.newest is not None:
            named |= {seat.host_id for seat in job.newest.seats.values()}
        return named - self.catalog.hosts.states.keys()
