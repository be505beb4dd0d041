"""What follows from what: the page to read first. Pure.

FACTS: a decision has reached enough journals, or is of the past; these parts make it true, in this order (R16).
REACTIONS: when a part emits an event, the parts listed here run at once, in this order; then the emitter continues.
`inputs.py` has what reaches the machine from outside: calls of ranks and people, reports of holders, time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from memstore.core.cluster import events as e
from memstore.core.cluster import facts as f
from memstore.core.controller.membership import Membership
from memstore.core.controller.parts import Parts

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
        f.JobBranched: (lambda fact, past: p.rounds.apply_branched(state.now, fact, is_replay=past),),
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
        e.DrainChanged: (lambda event: membership.recompute_all_placements(),),
        e.AttemptBegun: (
            lambda event: p.rounds.abort(
                event.job, "FencedError", f"attempt {event.attempt} of job {event.job!r} was opened"
            ),
        ),
        e.AttemptUnfenced: (lambda event: p.rounds.attempt_open(state.now, event.job),),
        e.RankGone: (lambda event: p.rounds.rank_gone(event.job, event.member.rank),),
        e.JobForgotten: tuple(lambda event, part=part: part.forget(event.job) for part in forgetting),
    }
