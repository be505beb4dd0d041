"""Which committed steps are gone, and which may still come back with a host: for `ls` and `plan`. Pure (R22, R24).

The journals remember commits whose copies were freed long ago, or were lost. A committed step of which no live host has
a byte and durable storage has no marker is gone, unless a host that its fact names has not come yet or died so lately
that it may be back with its memory (R3), or durable storage was not listed yet.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import groupby

from memstore.core.cluster.job import Job
from memstore.core.cluster.state import ClusterState
from memstore.core.durable.states import DurableStates
from memstore.core.wire.status_rows import GoneRow
from recovery.inventory import StepId
from recovery.lineage import Span, in_lineage

DURABLE_STORAGE = "durable storage"
AWAITED_MAX = 32  # hosts named


def without_bytes(state: ClusterState, states: DurableStates, job: Job) -> dict[StepId, list[str]]:
    """Return the committed steps that nothing here has a byte of, with what may still have one: [] if it is gone."""
    steps = [step for step in job.commits if step not in job.copies and step not in job.markers]
    storage = [] if not steps or states.is_known(job) else [DURABLE_STORAGE]
    return {step: [*storage, *_late_hosts(state, job, step)][:AWAITED_MAX] for step in steps}


def gone_steps(state: ClusterState, states: DurableStates, job: Job) -> frozenset[StepId]:
    """Return the committed steps of which no byte is left in any tier, nor can come back with a host."""
    return frozenset(step for step, awaited in without_bytes(state, states, job).items() if not awaited)


def _late_hosts(state: ClusterState, job: Job, step: StepId) -> list[str]:
    """Return the hosts that the fact names and that are neither here without the step nor known to be dead."""
    named = {host for hosts in job.commits[step].hosts for host in hosts}
    return sorted(host for host in named if state.hosts.may_bring_back(state.now, host))


def spans_of(
    steps: Iterable[StepId], gone: Collection[StepId], lineage: Iterable[Span], pins: dict[StepId, list[str]]
) -> list[GoneRow]:
    """Return one row for each run of steps that are gone, newest first.

    Args:
        steps: All steps of the job that are known; one that is not gone parts two runs.
        gone: Those that are gone.
        lineage: Parts a run where the lineage leaves its attempt.
        pins: The names that pin a step.
    """
    spans = tuple(lineage)
    rows = []
    ordered = sorted({*steps, *gone}, reverse=True)
    for (is_gone, attempt, is_in), run in groupby(ordered, lambda s: (s in gone, s.attempt, in_lineage(spans, s))):
        members = list(run)
        if is_gone:
            rows.append(
                GoneRow(
                    attempt=attempt, first=members[-1].step, last=members[0].step, count=len(members), state="gone",
                    in_lineage=is_in, pins=sorted(name for step in members for name in pins.get(step, ())),
                )
            )  # fmt: skip
    return rows
