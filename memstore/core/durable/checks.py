"""Checks that durable storage has all of a step now; earlier results do not count. Pure (R19, R31).

asked --a host opens the step's marker and all its slices--> answered: all there, or what it lacks
  |--the host cannot read it, has another key, or died--> another host is asked --none is left--> answered: unreadable
  '--no answer for PATIENCE_S: another one as well--CHECK_DEADLINE_S--> answered: unreadable

The host whose last look found nothing wrong is asked first: one bad mount says nothing about the storage.

Now and then storage is looked at unasked, so that reports about it are not outdated:

unlisted --a host lists the markers--> listed --newest durable step not seen for LOOK_EVERY_S--> looked for
   ^                                     ^                                                           |
   '--not readable: again after AGAIN_S--'----------------- seen, or lacking: written again ---------'
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from memstore.core.cluster.effects import Effects
from memstore.core.cluster.job import Job
from memstore.core.cluster.state import ClusterState
from memstore.core.durable.paths import other_key, place_of
from memstore.core.durable.states import DurableStates
from memstore.core.wire.ids import WireStep
from memstore.core.wire.orders import ListMarkers
from memstore.core.wire.reports import MarkersListed
from recovery.inventory import StepId

CHECK_DEADLINE_S = 300.0  # every slice is looked at; if no host is done by then the storage counts as unreadable
PATIENCE_S = 30.0  # a host that hangs is not waited for alone
HOSTS_MAX = 4  # asked for one answer
LOOK_EVERY_S = 3600.0  # every slice is opened: a request each, of an object store
AGAIN_S = 60.0  # after a look that did not find everything

#: Called with why the storage could not be read, and what it lacks of the step; both "" if all is there.
Then = Callable[[str, str], None]


@dataclass(slots=True)
class Check:
    """A question, and which hosts were asked."""

    job: str
    step: StepId | None  # None: the markers are listed
    since_s: float
    then: Then
    asked_s: float = 0.0  # when the last of them was asked
    waits: dict[int, str] = field(default_factory=dict)  # call -> host that has not answered
    failed: dict[str, str] = field(default_factory=dict)  # host -> why it cannot say
    needs_key: bool = False  # one of them found all of it, under a key that it has not


class DurableChecks:
    """Questions under way, and the hosts whose last look found something wrong."""

    def __init__(self, state: ClusterState, out: Effects, states: DurableStates) -> None:
        self.state, self.out, self.states = state, out, states
        self.checks: list[Check] = []
        self.faults: dict[str, tuple[float, str]] = {}  # host -> when its last look found something wrong, and what

    def ask(self, job: Job, step: StepId | None, then: Then) -> bool:
        """Have a host look at a step, or list the markers; False, and `then` is never called, if none can be asked."""
        check = Check(job.name, step, self.state.now, then)
        if self._ask_next(job, check):
            self.checks.append(check)
        return bool(check.waits)

    def _ask_next(self, job: Job, check: Check) -> bool:
        """Ask one more host; False if there is none."""
        place = place_of(job.newest.config) if job.newest is not None else None
        asked = {*check.failed, *check.waits.values()}
        hosts = self.state.hosts
        able = [host for host in hosts.live_ids() if hosts.is_answering(host) and host not in asked]
        if place is None or not able or len(asked) >= HOSTS_MAX:
            return False
        host = min(able, key=lambda h: (self.faults.get(h, (-math.inf,))[0], h))
        call, check.asked_s = self.states.next_call(), self.state.now
        check.waits[call] = host
        step = WireStep.of(check.step) if check.step is not None else None
        self.out.send(host, ListMarkers(job=job.name, durable=place, call=call, check=step))
        return True

    def answered(self, host: str, report: MarkersListed, why: str) -> None:
        """Take a host's look, after its listing; `why` says what it could not read."""
        call = report.call
        check, job = self._waiting(call), self.state.jobs.get(report.job)
        if check is None or job is None:
            return
        lacks = ""
        if not why and check.step is not None and report.found is not None:
            marker, lacks = job.markers.get(check.step), report.found.lacks
            if marker is None:
                lacks = lacks or "durable storage does not have its marker any more"
            elif not lacks and marker.key not in ("", report.found.key):
                check.needs_key = True
                why = other_key(marker.key, report.found.key)
        if why:
            self._failed(check, call, why)
            return
        del check.waits[call]
        self.faults.pop(host, None)
        if lacks:
            self._suspect(host, check.job, lacks)
        self._end(check, "", lacks)

    def looking(self, job: Job, step: StepId) -> set[str]:
        """Return the hosts that were asked to look at a step and have not answered."""
        checks = [check for check in self.checks if (check.job, check.step) == (job.name, step)]
        return {host for check in checks for host in check.waits.values()}

    def _waiting(self, call: int) -> Check | None:
        return next((check for check in self.checks if call in check.waits), None)

    def _failed(self, check: Check, call: int, why: str) -> None:
        """Ask another host, if there is one, in place of a host that could not look."""
        host = check.waits.pop(call)
        check.failed[host] = why
        self._suspect(host, check.job, why)
        if not self._ask_next(self.state.jobs[check.job], check) and not check.waits:
            self._end(check, said(check.failed), "")

    def _suspect(self, host: str, name: str, why: str) -> None:
        """Ask others first from now on, and say why."""
        if self.faults.get(host, (0.0, ""))[1] != why:
            self.out.log(f"job {name!r}: durable storage as host {host} sees it: {why}", "warning")
        self.faults[host] = self.state.now, why

    def _end(self, check: Check, unread: str, lacks: str) -> None:
        """Mark the step as seen, or write it again from RAM if storage lost it or no holder has its key."""
        self.checks.remove(check)
        for host in check.waits.values():
            self._suspect(host, check.job, f"no answer for {self.state.now - check.since_s:.0f} s")
        job, step, state = self.state.jobs[check.job], check.step, self.states.of(check.job)
        if step is None:
            state.unread = unread or state.unread
        elif unread or lacks:
            why = f"step {step.step}: {unread or lacks}"
            self.states.not_there(job, step, why, is_read=not unread, needs_key=check.needs_key)
        else:
            state.seen_s[step], state.lacks = self.state.now, ""
        check.then(unread, lacks)

    def host_died(self, host: str) -> None:
        """Drop the looks of a dead host, even if its next life has begun."""
        for check in list(self.checks):
            for call in [call for call, asked in check.waits.items() if asked == host]:
                self._failed(check, call, "it died while it looked")
        self.faults.pop(host, None)

    def tick(self, now: float) -> None:
        """Check deadlines."""
        for check in list(self.checks):
            if now - check.since_s > CHECK_DEADLINE_S:
                late = dict.fromkeys(check.waits.values(), f"no answer within {CHECK_DEADLINE_S:g} s")
                self._end(check, said({**check.failed, **late}), "")
            elif now - check.asked_s > PATIENCE_S:
                self._ask_next(self.state.jobs[check.job], check)

    def forget(self, name: str) -> None:
        """Forget the checks of a removed job."""
        self.checks = [check for check in self.checks if check.job != name]


class DurableLooks:
    """Looks at the durable storage of all jobs, now and then."""

    def __init__(self, state: ClusterState, states: DurableStates, checks: DurableChecks) -> None:
        self.state, self.states, self.checks = state, states, checks

    def tick(self, now: float) -> None:
        """Begin the looks that are due; at most one of a job at a time."""
        for job in self.state.jobs.values():
            if job.newest is not None and job.newest.config.get("durable") and self._is_due(now, job):
                self._look(job)

    def _is_due(self, now: float, job: Job) -> bool:
        state, step = self.states.of(job.name), job.newest_durable
        is_stale = step is not None and now - state.seen_s.get(step, -math.inf) >= LOOK_EVERY_S
        return now >= state.look_s and (is_stale or self._is_open(job))

    def _is_open(self, job: Job) -> bool:
        """Return whether the last look has not found what should be there."""
        state = self.states.of(job.name)
        return not state.is_listed or bool(state.unread or state.lacks)

    def _look(self, job: Job) -> None:
        state = self.states.of(job.name)

        def looked(_unread: str, _lacks: str) -> None:
            state.look_s = self.state.now + (AGAIN_S if self._is_open(job) else 0.0)

        if self.checks.ask(job, job.newest_durable, looked):
            state.look_s = math.inf

    def unlisted(self, job: Job) -> str:
        """Say that durable storage may have more than is known; "" if its markers were listed."""
        if self.states.is_known(job):
            return ""
        why = self.states.of(job.name).unread
        return f"durable markers are not listed yet{f': {why}' if why else ''}"


def said(failed: Mapping[str, str]) -> str:
    """Return why hosts could not look, each reason once.

    >>> said({"h2": "not mounted", "h0": "not mounted", "h1": "it died while it looked"})
    'not mounted (h0, h2); it died while it looked (h1)'
    """
    hosts: dict[str, list[str]] = {}
    for host, why in sorted(failed.items()):
        hosts.setdefault(why, []).append(host)
    return "; ".join(f"{why} ({', '.join(names)})" for why, names in hosts.items())
