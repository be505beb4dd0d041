"""The timeline of a job, as `memstore ls` draws it: attempts and their parents, steps and what keeps them. Pure.

The journals remember commits whose copies were freed long ago, or were lost. A committed step of which no live host has
a byte and durable storage has no marker is gone, unless a host that its fact names has not come yet or died so lately
that it may be back with its memory (R3), or durable storage was not listed yet (R22, R24).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from itertools import groupby

from memstore.core.cluster.facts import JobBranched
from memstore.core.cluster.job import Attempt, Job
from memstore.core.cluster.state import ClusterState
from memstore.core.durable.states import DurableStates
from memstore.core.wire.replies import StepList
from memstore.core.wire.status_rows import AttemptRow, GoneRow, OriginRow, PinRow, StepRow, StepState
from recovery.inventory import Copy, DurableMarker, StepId
from recovery.lineage import Span, in_lineage

ATTEMPTS_SHOWN_MAX = 100  # the newest
ABANDONED_SHOWN_MAX = 20  # of an attempt, the newest
DURABLE_STORAGE = "durable storage"
AWAITED_MAX = 32  # hosts named


def steps_of(state: ClusterState, states: DurableStates, job: Job) -> StepList:
    """Return the known steps and attempts of a job, newest first."""
    awaited = without_bytes(state, states, job)
    gone = {step for step, hosts in awaited.items() if not hosts}
    return StepList(
        attempt=job.newest.attempt_number if job.newest is not None else None,
        steps=step_rows(state, job, awaited),
        gone=gone_rows(job, gone),
        attempts=attempt_rows(state, job),
        pins={name: PinRow(attempt=pin.attempt, step=pin.step) for name, pin in sorted(job.pins.items())},
        origin=_origin_row(job.origin),
    )


def attempt_rows(state: ClusterState, job: Job) -> list[AttemptRow]:
    """Return every attempt that a fact or a durable marker names, newest first."""
    spans = _spans(job)
    lineage = {span.attempt for span in spans}
    rows = [_attempt_row(state, job, attempt, lineage) for attempt in job.attempts.values()]
    rows += [
        AttemptRow(
            attempt=past.attempt,
            parent=past.parent,
            parent_step=past.parent_step,
            phase="past",
            world_size=past.world_size,
            is_fresh=past.parent is None,
            origin=None,
            abandoned=[],
            age_s=None,
            in_lineage=attempt_number in lineage,
        )
        for attempt_number, past in job.past.items()
        if attempt_number not in job.attempts
    ]
    return sorted(rows, key=lambda row: -row.attempt)[:ATTEMPTS_SHOWN_MAX]


def _attempt_row(state: ClusterState, job: Job, attempt: Attempt, lineage: Collection[int]) -> AttemptRow:
    abandoned = [n for n, phase in attempt.steps.items() if phase == "abandoned"]
    return AttemptRow(
        attempt=attempt.attempt_number,
        parent=attempt.parent,
        parent_step=attempt.parent_step,
        phase=attempt.phase,
        world_size=attempt.world_size,
        is_fresh=attempt.is_fresh,
        origin=_origin_row(attempt.origin),
        abandoned=sorted(abandoned, reverse=True)[:ABANDONED_SHOWN_MAX],
        age_s=state.age_s(attempt.opened_s) if attempt.opened_s is not None else None,
        in_lineage=attempt.attempt_number in lineage,
    )


def _origin_row(fact: JobBranched | None) -> OriginRow | None:
    return OriginRow(job=fact.from_job, attempt=fact.from_attempt, step=fact.step) if fact is not None else None


def gone_rows(job: Job, gone: Collection[StepId]) -> list[GoneRow]:
    """Return one row for each run of steps that are gone, newest first."""
    names: dict[StepId, list[str]] = {}
    for name, pin in job.pins.items():
        names.setdefault(StepId(pin.attempt, pin.step), []).append(name)
    return spans_of({*job.commits, *job.markers, *job.copies}, gone, _spans(job), names)


def _spans(job: Job) -> tuple[Span, ...]:
    """Return the lineage of the newest attempt."""
    return job.spans(job.newest.attempt_number) if job.newest is not None else ()


def step_rows(state: ClusterState, job: Job, awaited: Mapping[StepId, list[str]]) -> list[StepRow]:
    """Return every step with a copy, a durable marker, or a commit that a late host may bring back, newest first.

    Args:
        state: Of the store.
        job: Of the steps.
        awaited: As `without_bytes` returns it.
    """
    spans = _spans(job)
    rows = []
    for step in sorted({*job.commits, *job.markers, *job.copies}, reverse=True):
        if awaited.get(step) == []:
            continue  # it is gone
        commit = job.commits.get(step)
        ranks = job.copies.get(step, {})
        marker = job.markers.get(step)
        rows.append(
            StepRow(
                attempt=step.attempt,
                step=step.step,
                state=step_state(job, step),
                waiting_for=list(awaited.get(step, ())),
                committed=commit is not None,
                degraded=commit.reason if commit is not None and commit.is_degraded else "",
                durable=marker is not None,
                durable_key=marker.key if marker is not None else "",
                in_lineage=in_lineage(spans, step),
                retired=job.retired.get(step, ""),
                pins=job.names_of(step),
                copies=fewest_copies(state, job, step) if commit is not None else 0,
                shards=len(ranks),
                world_size=getattr(commit or marker, "world_size", None),
                nbytes=_nbytes(ranks, marker),
                hosts=sorted({host for hosts in ranks.values() for host in hosts}),
                age_s=state.age_s(commit.wall_s) if commit is not None else None,
            )
        )
    return rows


def _nbytes(ranks: Mapping[int, Mapping[str, Copy]], marker: DurableMarker | None) -> int:
    """Return the bytes of a step's shards, each counted once: of those in RAM, else as its marker has them."""
    if not ranks and marker is not None:
        return sum(spec.nbytes for spec in marker.specs.values())
    return sum(next(iter(copies.values())).spec.nbytes for copies in ranks.values() if copies)


def step_state(job: Job, step: StepId) -> StepState:
    """Return a step's state; "durable": in no host's RAM, "waiting": committed, but no byte is here.

    Others: "retired", "degraded", "committed", "abandoned", "superseded" or "open".
    """
    if step in job.retired:
        return "retired"
    commit = job.commits.get(step)
    if commit is not None and step in job.copies:
        return "degraded" if commit.is_degraded else "committed"
    if step in job.markers:
        return "durable"
    if commit is not None:
        return "waiting"
    attempt = job.attempts.get(step.attempt)
    phase = attempt.steps.get(step.step) if attempt is not None else None
    return phase if phase == "abandoned" or phase == "superseded" else "open"


def fewest_copies(state: ClusterState, job: Job, step: StepId) -> int:
    """Return the number of host-level domains of the shard with the fewest; equal places are looked at once."""
    commit, ranks, sets = job.commits[step], job.copies.get(step, {}), job.parity_sets(step)
    if len(ranks) < commit.world_size:
        return 0
    places = {
        (frozenset(h for h, c in hosts.items() if not c.missing), job.parity_copies(step, rank) if rank in sets else 0)
        for rank, hosts in ranks.items()
    }
    return min(len(state.hosts.domains(hosts)) + in_parity for hosts, in_parity in places)


# -- steps that are gone ------------------------------------------------------------------------------


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
    return sorted(host for host in job.committed_on(step) if state.hosts.may_bring_back(state.now, host))


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
                    attempt=attempt,
                    first=members[-1].step,
                    last=members[0].step,
                    count=len(members),
                    state="gone",
                    in_lineage=is_in,
                    pins=sorted(name for step in members for name in pins.get(step, ())),
                )
            )
    return rows
