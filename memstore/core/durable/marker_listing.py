"""What durable storage holds of a job, as a host listed it: its markers, and those that are left alone (R31). Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from memstore.core.cluster import text
from memstore.core.cluster.job import Job
from memstore.core.wire.messages import Body, spec_from_wire
from recovery.inventory import DurableMarker, StepId
from recovery.lineage import AttemptFact

if TYPE_CHECKING:
    from memstore.core.controller.machine import Catalog


class DurableMarkers:
    """Takes lists of markers, for the catalog."""

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog

    def listed(self, host_id: str, body: Body) -> str:
        """A host listed the markers of a job: they are what durable storage holds now. Return why not, or "".

        Where all are damaged it holds what nobody can read: that is no reason to start from nothing (R23).
        """
        name, call = str(body["job"]), int(body["call"])
        state = self.catalog.durable.state(name)
        if not body["ok"]:
            state.unread = str(body["why"])
            return state.unread
        damaged = str(body["why"])  # of markers that are there and say nothing
        state.is_listed = not damaged
        if damaged and damaged != state.unread:
            self.catalog.note(f"job {name!r}: durable storage: {damaged}", "warning")
        problem, state.unread = state.unread, damaged
        if body["markers"]:
            self.catalog.jobs.setdefault(name, Job(name))
        job = self.catalog.jobs.get(name)
        if job is None:
            return damaged
        known = dict(job.markers)
        job.markers.clear()
        others = set[int]()
        for attempt, number, specs, key, *rest in body["markers"]:
            table = {int(rank): spec_from_wire(spec) for rank, spec in specs}
            step = StepId(int(attempt), int(number))
            if step in job.torn:  # its removal failed, or a late write came after it: once more
                self.catalog.durable.take_back_again(name, step)
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
            self.catalog.note(
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
                self.catalog.note(f"job {name!r}: durable {why}", "warning")
        return "" if body["markers"] else damaged


def _is_of_another_run(job: Job, named: Mapping[int, float]) -> bool:
    """Tell whether a marker names an attempt that RAM knows by another moment: the same number, not the same one (R31).

    The moments only tell attempts apart: of two clocks nobody knows which one was right. Such a run was forgotten: its
    RAM was lost, and the job of its name was started without `durable=`, or elsewhere.
    """
    known = {ordinal: attempt.opened_s for ordinal, attempt in job.attempts.items() if attempt.opened_s is not None}
    return any(known.get(ordinal, opened_s) != opened_s for ordinal, opened_s in named.items())


def _moments(named: object) -> dict[int, float]:
    """Return what a marker says of when attempts were opened."""
    rows = [tuple(row) for row in named if isinstance(row, list | tuple)] if isinstance(named, list | tuple) else []
    return {row[0]: row[1] for row in rows if [type(value) for value in row] == [int, float]}
