"""What follows from what: the page to read first. Pure.

FACTS: a decision has reached enough journals, or is of the past; these parts make it true, in this order (R16).
REACTIONS: when a part emits an event, the parts listed here run at once, in this order; then the emitter continues.
`machine.py` has what reaches the machine from outside: calls of ranks and people, reports of holders, time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from memstore.core.cluster import effects as e
from memstore.core.cluster import facts as f
from memstore.core.cluster.hosts import Change
from memstore.core.cluster.job import Job
from memstore.core.controller.parts import Parts
from memstore.core.controller.queries import Queries

# -- membership ---------------------------------------------------------------------------------------
# Arrivals and ends of hosts: lost copies no longer count, and placements are recomputed. Pure (R10, R13, R18, R28).


class Membership:
    """What follows from changes of hosts."""

    def __init__(self, parts: Parts, questions: Queries) -> None:
        self.state, self.out, self.parts, self.questions = parts.state, parts.out, parts, questions
        self._has_placed = False  # since the last tick

    def changed(self, changes: Sequence[Change]) -> None:
        """Take the new status of hosts: copies on dead ones no longer count, those on returned ones do again (R28)."""
        state, parts = self.state, self.parts
        for change in changes:
            level = "info" if change.status == "live" else "warning"
            self.out.log(f"host {change.host_id} is {change.status}: {change.why}", level)
            kind = "host_joined" if change.why.startswith("joined") else f"host_{change.status}"
            held = sum(_newest_held(job, change.host_id) for job in state.jobs.values())
            self.out.note(kind, host=change.host_id, why=change.why, shards=held)
            if change.status == "dead":
                self._died(change.host_id)
        moved = [change.host_id for change in changes if change.is_move]
        if moved:
            parts.view.news.update(moved)
            self.state.is_placement_stale = True
            for job in state.jobs.values():
                job.placement = None
            if not self._has_placed:
                self._place_all()
        elif any(change.status == "live" for change in changes) and not self.state.is_placement_stale:
            for job in parts.room.in_turn():
                self._answers_again(job)

    def tick(self, changes: Sequence[Change]) -> None:
        """Take the hosts that fell silent, and place what changed since the last tick."""
        self._has_placed = False
        self.changed(changes)
        if self.state.is_placement_stale:
            self._place_all()

    def _died(self, host: str) -> None:
        state, parts = self.state, self.parts
        parts.journal.log.forget(host)
        parts.sent_orders.forget_host(host)
        parts.repair.host_died(host)
        for job in state.jobs.values():
            parts.durable.host_died(job, host)
            job.drop_host(host)
        parts.durable_checks.host_died(host)
        parts.rounds.source_died(state.now, host)
        parts.reads.host_died(host)
        parts.followers.host_died(host)
        self.questions.host_died(host)

    def _place_all(self) -> None:
        self.state.is_placement_stale, self._has_placed = False, True
        self.parts.view.send_news()  # before any host is ordered to send something there
        for job in self.parts.room.in_turn():
            self.recompute_placement(job)

    def recompute_placement(self, job: Job) -> None:
        """Place a job's copies with the fewest moves, claim room, send new targets, then see which steps commit."""
        parts, attempt = self.parts, job.newest
        job.placement = None
        if parts.view.placement(job) is not None and attempt is not None:
            if attempt.needs or job.copies:
                parts.room.order(job, attempt, is_news_only=True)
            parts.view.send_targets(job, is_news_only=True)
        parts.repair.look_again(job)
        parts.repair.consider(self.state.now, job)
        parts.steps.evaluate_all(job)

    def recompute_all_placements(self) -> None:
        """Place every job's copies again, since other hosts may hold them now."""
        for job in list(self.state.jobs.values()):
            self.recompute_placement(job)

    def _answers_again(self, job: Job) -> None:
        """Go on with work that waited for a suspected host: its placement has not changed (R18, R28)."""
        self.parts.repair.look_again(job)
        self.parts.steps.evaluate_all(job)


def _newest_held(job: Job, host: str) -> int:
    """Return the shards that the host holds of the newest committed step with copies."""
    step = max((s for s in job.commits if s in job.copies), default=None)
    return 0 if step is None else len(job.on_host.get(host, {}).get(step, ()))


# -- reactions ----------------------------------------------------------------------------------------


Fact = Callable[[Any, bool], object]  # takes the fact, and whether it is of the past
Reaction = Callable[[Any], object]


def facts(p: Parts) -> Mapping[type[f.Fact], tuple[Fact, ...]]:
    """Return which parts make a fact true."""
    state = p.state
    return {
        f.AttemptOpened: (lambda fact, past: p.attempts.apply_opened(state.now, fact, is_replay=past),),
        f.SlotsReserved: (lambda fact, past: p.room.apply_claimed(fact, is_replay=past),),
        f.RestoreDecided: (lambda fact, past: p.rounds.apply_decided(state.now, fact, is_replay=past),),
        f.RestoreReleased: (lambda fact, past: p.rounds.apply_released(state.now, fact, is_replay=past),),
        f.JobBranched: (lambda fact, past: p.rounds.apply_released(state.now, fact, is_replay=past),),
        f.StepCommitted: (lambda fact, past: p.steps.apply_committed(state.now, fact, is_replay=past),),
        f.StepSkipped: (lambda fact, past: p.steps.apply_abandoned(fact, is_replay=past),),
        f.StepRetired: (lambda fact, past: p.retirement.apply(fact),),
        f.AttemptClosed: (lambda fact, past: p.attempts.apply_closed(fact),),
        f.StepPinned: (lambda fact, past: p.pins.apply_pinned(fact, is_replay=past),),
        f.StepUnpinned: (lambda fact, past: p.pins.apply_unpinned(fact, is_replay=past),),
        f.JobRemoved: (lambda fact, past: p.job_removal.apply(fact, is_replay=past),),
        f.HostsJoined: (lambda fact, past: state.hosts.joined.update(fact.labels),),
        f.HostDraining: (
            lambda fact, past: p.drains.apply(fact, is_replay=past),
            lambda fact, past: p.departures.apply(fact),
        ),
    }


def reactions(p: Parts, membership: Membership) -> Mapping[type[e.Happened], tuple[Reaction, ...]]:
    """Return which parts react to what happened."""
    state = p.state
    forgetting = (
        p.attempts,
        p.room,
        p.rounds,
        p.waiters,
        p.followers,
        p.orphans,
        p.job_removal,
        p.durable_checks,
        p.persists,
        p.durable,
        p.departures,
        p.precautions,
        p.view.shared_shards,
        p.last_copies,
        p.sent_orders,
    )
    return {
        e.CommitApplied: (
            lambda event: p.durable.consider(state.now, event.job),
            lambda event: p.followers.committed(event.job),
        ),
        e.PersistAsked: (lambda event: p.durable.consider(state.now, event.job),),
        e.DrainChanged: (lambda event: membership.recompute_all_placements(), p.precautions.drain_changed),
        e.AttemptBegun: (
            lambda event: p.rounds.abort(
                event.job, "FencedError", f"attempt {event.attempt} of job {event.job!r} was opened"
            ),
        ),
        e.AttemptUnfenced: (lambda event: p.rounds.attempt_open(state.now, event.job),),
        e.RankGone: (lambda event: p.rounds.rank_gone(event.job, event.member.rank),),
        e.JobForgotten: tuple(lambda event, part=part: part.forget(event.job) for part in forgetting),
    }
