"""What durable storage holds of a job, as a host listed it: its markers, and those that are left alone. Pure (R31).

asked --a host lists--> taken into the job --> the caller goes on, with why it could not be read, or ""
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from memstore.core.cluster import text
from memstore.core.cluster.effects import Effects
from memstore.core.cluster.job import Job
from memstore.core.cluster.state import ClusterState
from memstore.core.durable.states import DurableStates
from memstore.core.wire.orders import DurablePlace, ListMarkers
from memstore.core.wire.reports import MarkersListed
from recovery.inventory import DurableMarker
from recovery.lineage import AttemptFact

LISTINGS_MAX = 10_000  # asked and not answered; beyond that the oldest is forgotten, whose deadline is long over

#: Takes why durable storage could not be read; "" if the job's markers are known now.
Then = Callable[[str], None]


class DurableMarkers:
    """Requests to hosts for a job's markers, and their answers."""

    def __init__(self, state: ClusterState, out: Effects, states: DurableStates) -> None:
        self.state, self.out, self.states = state, out, states
        self._then: dict[int, Then] = {}

    def ask(self, host: str, name: str, durable: DurablePlace, then: Then) -> int:
        """Have a host list the markers of a job; return the number of the question.

        Args:
            host: Asked.
            name: Of the job; it need not be known yet.
            durable: The storage, as `place_of` returns it.
            then: Called once the host has answered; never, if the host dies before. The caller keeps the deadline.
        """
        call = self.states.next_call()
        self._then[call] = then
        if len(self._then) > LISTINGS_MAX:
            del self._then[next(iter(self._then))]
        self.out.send(host, ListMarkers(job=name, durable=durable, call=call))
        return call

    def answered(self, report: MarkersListed) -> str:
        """Take a list of markers, and let its caller go on; return why there is none, or ""."""
        why = self.listed(report)
        then = self._then.pop(report.call, None)
        if then is not None:
            then(why)
        return why

    def listed(self, report: MarkersListed) -> str:
        """Take a host's list of a job's markers as the present content of durable storage. Return why not, or "".

        Where all are damaged it holds what no reader can use: that is no reason to start from nothing (R23).
        """
        name, call = report.job, report.call
        state = self.states.of(name)
        found = report.found
        if found is None:
            state.unread = report.problem
            return state.unread
        damaged = found.damaged
        state.is_listed = not damaged
        if damaged and damaged != state.unread:
            self.out.log(f"job {name!r}: durable storage: {damaged}", "warning")
        state.unread = damaged
        if found.markers:
            self.state.jobs.setdefault(name, Job(name))
        job = self.state.jobs.get(name)
        if job is None:
            return damaged
        known = dict(job.markers)
        job.markers.clear()
        others = set[int]()
        for row in found.markers:
            table = {rank: spec.spec for rank, spec in row.specs.items()}
            step, lineage = row.step.id, row.lineage
            if step in job.torn:  # its removal failed, or a late write came after it: once more
                self.states.take_back_again(name, step)
                continue
            past = AttemptFact(step.attempt, lineage.parent_attempt, lineage.parent_step, len(table))
            job.past[step.attempt] = past
            named = dict(lineage.attempts)
            if _is_of_another_run(job, named):
                others.add(step.attempt)
                continue
            job.past_opened_s.update(named)
            job.markers[step] = DurableMarker(step, len(table), table, row.key)
        for step in [step for step, count in state.changed.items() if count >= call]:
            job.markers.pop(step, None)  # written or removed after the question: the list may not show it
            if step in known:
                job.markers[step] = known[step]
        state.seen_s = {step: seen_s for step, seen_s in state.seen_s.items() if step in job.markers}
        state.changed = {s: count for s, count in state.changed.items() if s in job.markers or count >= call}
        if others - state.left_alone:
            self.out.log(
                f"job {name!r}: durable storage has attempts {text.listed(sorted(others))} of another, older run "
                "of this name: they are left alone and are not restored",
                "warning",
            )
        state.left_alone = others
        return "" if found.markers else damaged


def _is_of_another_run(job: Job, named: Mapping[int, float]) -> bool:
    """Return whether a marker names an attempt that RAM knows with another opening time, so another one (R31).

    The moments only tell attempts apart: of two clocks either may be wrong. Such a run was forgotten: its
    RAM was lost, and the job of its name was started without `durable=`, or elsewhere.
    """
    known = {
        attempt_number: attempt.opened_s
        for attempt_number, attempt in job.attempts.items()
        if attempt.opened_s is not None
    }
    return any(known.get(attempt_number, opened_s) != opened_s for attempt_number, opened_s in named.items())
