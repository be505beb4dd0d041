"""What happened inside the controller, for parts that stand above the one that did it. Plain data.

A part calls those below it and emits an event for those above it. `controller/reactions.py` says what follows.
What people read is no event of these: it is noted (`effects.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

from memstore.core.cluster.job import AttemptMember, Job


@dataclass(frozen=True, slots=True)
class CommitApplied:
    """A step's commit has reached enough journals."""

    job: Job


@dataclass(frozen=True, slots=True)
class DrainChanged:
    """A host has notice of its end, or has it no more."""

    host: str


@dataclass(frozen=True, slots=True)
class PersistAsked:
    """A person or a script wants a step on durable storage now."""

    job: Job


@dataclass(frozen=True, slots=True)
class AttemptBegun:
    """An attempt's fact has reached enough journals: older attempts are over."""

    job: str
    attempt: int


@dataclass(frozen=True, slots=True)
class AttemptUnfenced:
    """Every live host refuses ranks of older attempts, and has sent its inventory."""

    job: str


@dataclass(frozen=True, slots=True)
class RankGone:
    """The process of a rank of the newest attempt has said bye, or is dead."""

    job: Job
    member: AttemptMember


@dataclass(frozen=True, slots=True)
class JobForgotten:
    """A job's removal has reached enough journals: nothing of it is known any more."""

    job: str


Happened = CommitApplied | DrainChanged | PersistAsked | AttemptBegun | AttemptUnfenced | RankGone | JobForgotten
