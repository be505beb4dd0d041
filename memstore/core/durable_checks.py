"""Questions whether durable storage has all of a step now: what was so once says nothing. Pure (R19, R31).

asked --a host opens the step's marker and all its slices--> answered: all there, not readable, or what it lacks
  '--the host died, or CHECK_DEADLINE_S passed--> answered: not readable
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from memstore.core.durable_place import place_of
from memstore.core.job import Job
from recovery.inventory import StepId

if TYPE_CHECKING:
    from memstore.core.catalog import Catalog

CHECK_DEADLINE_S = 300.0  # every slice is looked at; a host that is not done by then is taken for unable

#: Takes why the storage could not be read, and what it lacks of the step; both "" if all is there.
Then = Callable[[str, str], None]


@dataclass(frozen=True, slots=True)
class Check:
    """A question put to a host."""

    job: str
    step: StepId | None  # None: the markers are listed
    host: str
    asked_s: float
    then: Then


class DurableChecks:
    """Asks and remembers who wants to know, for the catalog."""

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        self.asked: dict[int, Check] = {}

    def ask(self, job: Job, step: StepId | None, then: Then) -> bool:
        """Have a host look at a step, or list the markers; False, and `then` is never called, if none can be asked."""
        hosts = [host for host in self.catalog.hosts.live_ids() if self.catalog.hosts.is_answering(host)]
        place = place_of(job.newest.config) if job.newest is not None else None
        if place is None or not hosts:
            return False
        call = self.catalog.durable.next_call()
        self.asked[call] = Check(job.name, step, hosts[0], self.catalog.now, then)
        body = {"job": job.name, "durable": place, "call": call}
        body["check"] = [step.attempt, step.step] if step is not None else None
        self.catalog.tell(hosts[0], "markers", body)
        return True

    def answered(self, name: str, call: int, unread: str, lacks: str = "") -> None:
        """A host looked: the step is seen now, or is written again from RAM if storage lost it."""
        check, job = self.asked.get(call), self.catalog.jobs.get(name)
        if check is None or check.job != name:
            return
        del self.asked[call]
        if job is None:
            return
        step, state = check.step, self.catalog.durable.state(name)
        if step is None:
            state.unread = unread or state.unread
            check.then(unread, "")
            return
        if not unread and not lacks and step not in job.markers:
            lacks = "durable storage does not have its marker any more"
        if unread or lacks:
            why = f"step {step.step}: {unread or lacks}"
            self.catalog.durable.not_there(job, step, why, is_read=not unread)
        else:
            state.seen_s[step], state.lacks = self.catalog.now, ""
        check.then(unread, lacks)

    def host_died(self, host: str) -> None:
        """Its looks died with it, though its next life may have begun."""
        for call, check in list(self.asked.items()):
            if check.host == host:
                self.answered(check.job, call, f"host {host} died while it looked")

    def tick(self, now: float) -> None:
        """Deadlines."""
        for call, check in list(self.asked.items()):
            if now - check.asked_s > CHECK_DEADLINE_S:
                self.answered(check.job, call, f"durable storage was not checked within {CHECK_DEADLINE_S:g} s")

    def forget(self, name: str) -> None:
        """The job was removed: nothing of it is checked any more."""
        self.asked = {call: check for call, check in self.asked.items() if check.job != name}
