"""Hosts came and went: what they held no longer counts, and copies are placed anew. Pure (R10, R13, R18, R28).

    a host comes or goes --first since the last tick--> placed at once
                         --one more before the next----> stale: placed with that tick, together with all others

To place the copies of thousands of hosts takes as long for one host's change as for that of a rack, which comes host
by host. While the placement of a job is stale nothing of it is committed: the hosts that it asks for are not known yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from memstore.core.cluster.hosts import Change
from memstore.core.cluster.job import Job

if TYPE_CHECKING:
    from memstore.core.controller.machine import Catalog


class Placing:
    """What follows from changes of hosts, for the catalog."""

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        self.is_stale = False  # hosts changed, and the jobs are placed anew with the next tick
        self._has_placed = False  # since the last tick

    def changed(self, changes: Sequence[Change]) -> None:
        """Hosts changed their status: what they held no longer counts, or counts again (R28)."""
        catalog = self.catalog
        for change in changes:
            level = "info" if change.status == "live" else "warning"
            catalog.note(f"host {change.host_id} is {change.status}: {change.why}", level)
            catalog.observer.host_changed(change)
            if change.status == "dead":
                self._died(change.host_id)
        moved = [change.host_id for change in changes if change.is_move]
        if moved:
            catalog.view.news.update(moved)
            self.is_stale = True
            for job in catalog.jobs.values():
                job.placement = None
            if not self._has_placed:
                self._place_all()
        elif any(change.status == "live" for change in changes) and not self.is_stale:
            for job in catalog.room.in_turn():
                self._answers_again(job)

    def tick(self, changes: Sequence[Change]) -> None:
        """Time has made hosts silent; whatever changed since the last tick is placed now."""
        self._has_placed = False
        self.changed(changes)
        if self.is_stale:
            self._place_all()

    def _died(self, host: str) -> None:
        catalog = self.catalog
        catalog.log.forget(host)
        catalog.told.forget_host(host)
        catalog.repair.host_died(host)
        for job in catalog.jobs.values():
            catalog.durable.host_died(job, host)
            job.drop_host(host)
        catalog.durable_checks.host_died(host)
        catalog.rounds.source_died(catalog.now, host)
        catalog.queries.host_died(host)

    def _place_all(self) -> None:
        self.is_stale, self._has_placed = False, True
        self.catalog.view.send_news()  # before anybody is told to send something there
        for job in self.catalog.room.in_turn():
            self.place_anew(job)

    def place_anew(self, job: Job) -> None:
        """Place with the fewest moves, claim room there, tell whom it concerns, then see what commits."""
        catalog, attempt = self.catalog, job.newest
        job.placement = None
        if catalog.view.placement(job) is not None and attempt is not None:
            if attempt.needs or job.copies:
                catalog.room.order(job, attempt, is_news_only=True)
            catalog.view.send_targets(job, is_news_only=True)
        catalog.repair.look_again(job)
        catalog.repair.consider(catalog.now, job)
        catalog.steps.evaluate_all(job)

    def _answers_again(self, job: Job) -> None:
        """A host that was suspected was heard of: placement is what it was, what waited for it may go on (R18, R28)."""
        self.catalog.repair.look_again(job)
        self.catalog.steps.evaluate_all(job)
