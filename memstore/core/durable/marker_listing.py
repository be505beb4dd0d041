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
from memstore.core.wire.messages import Body, spec_from_wire
from recovery.inventory import DurableMarker, StepId
from recovery.lineage import AttemptFact

LISTINGS_MAX = 10_000  # asked and not answered; beyond that the oldest is forgotten, whose deadline is long over

#: Takes why durable storage could not be read; "" if the job's markers are known now.
Then = Callable[[str], None]


class DurableMarkers:
    """Requests to hosts for a job's markers, and their answers."""

    def __init__(self, state: ClusterState, out: Effects, states: DurableStates) -> None:
        self.state, self.out, self.states = state, out, states
        self._then: dict[int, Then] = {}

    def ask(self, host: str, name: str, durable: object, then: Then) -> int:
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
        self.out.send(host, "markers", {"job": name, "durable": durable, "call": call})
        return call

    def answered(self, host_id: str, body: Body) -> str:
        """Take a list of markers, and let its caller go on; return why there is none, or ""."""
        why = self.listed(host_id, body)
        then = self._then.pop(int(body["call"]), None)
        if then is not None:
            then(why)
        return why

    def listed(self, host_id: str, body: Body) -> str:
        """Take a host's list of a job's markers as the present content of durable storage. Return why not, or "".

        Where all are damaged it holds what no reader can use: that is no reason to start from nothing (R23).
        """
        name, call = str(body["job"]), int(body["call"])
        state = self.states.of(name)
        if not body["ok"]:
            state.unread = str(body["why"])
            return state.unread
        damaged = str(body["why"])  # of markers that are there and say nothing
        state.is_listed = not damaged
        if damaged and damaged != state.unread:
            self.out.log(f"job {name!r}: durable storage: {damaged}", "warning")
        problem, state.unread = state.unread, damaged
        if body["markers"]:
            self.state.jobs.setdefault(name, Job(name))
        job = self.state.jobs.get(name)
        if job is None:
            return damaged
        known = dict(job.markers)
        job.markers.clear()
        others = set[int]()
        for attempt, number, specs, key, *rest in body["markers"]:
            table = {int(rank): spec_from_wire(spec) for rank, spec in specs}
            step = StepId(int(attempt), int(number))
            if step in job.torn:  # its removal failed, or a late write came after it: once more
                self.states.take_back_again(name, step)
                continue
            if rest:
                parent, parent_step = rest[0].get("parent_attempt"), rest[0].get("parent_step")
                job.past[step.attempt] = AttemptFact(step.attempt, parent, parent_step, len(table))
                named = _moments(rest[0].get("attempts"))
                if _is_of_another_run(job, named):
                    others.add(step.attempt)
                    continue
                job.past_opened_s.update(named)
            job.markers[step] = DurableMarker(step, len(table), table, str(key))
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
        newest = max(job.markers.values(), key=lambda marker: marker.step, default=None)
        if newest is not None and newest.key not in ("", body["key"]):
            have = f"has key {body['key']}" if body["key"] else "has no durable_key_file"
            why = f"step {newest.step.step} needs key {newest.key}, and {host_id} {have}: give the file of that key"
            state.unread = why
            if why != problem:
                self.out.log(f"job {name!r}: durable {why}", "warning")
        return "" if body["markers"] else damaged


def _is_of_another_run(job: Job, named: Mapping[int, float]) -> bool:
    """Return whether a marker names an attempt that RAM knows with another opening time, so another one (R31).

    The moments only tell attempts apart: of two clocks either may be wrong. Such a run was forgotten: its
    RAM was lost, and the job of its name was started without `durable=`, or elsewhere.
    """
    known = {ordinal: attempt.opened_s for ordinal, attempt in job.attempts.items() if attempt.opened_s is not None}
    return any(known.get(ordinal, opened_s) != opened_s for ordinal, opened_s in named.items())


def _moments(named: object) -> dict[int, float]:
    """Return the opening times of attempts in a marker."""
    rows = [tuple(row) for row in named if isinstance(row, list | tuple)] if isinstance(named, list | tuple) else []
    return {row[0]: row[1] for row in rows if [type(value) for value in row] == [int, float]}
