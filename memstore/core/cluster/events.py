"""What happened inside the controller, for parts that stand above the one that did it. Plain data.

A part calls those below it and emits an event for those above it. `controller/reactions.py` says what follows.
"""

from __future__ import annotations

from dataclasses import dataclass

from memstore.core.cluster.job import Attempt, AttemptMember, Job
from memstore.core.cluster.reading import Round
from memstore.core.wire.replies import RestoreReport
from recovery.inventory import StepId


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
    is_news: bool  # False: it had closed its store, or is known to be dead
    has_left: bool  # it lives, and left because another rank is lost
    error: str = ""  # the exception that ended its training


@dataclass(frozen=True, slots=True)
class ReplicasDiffer:
    """Two ranks that name one shard put different bytes."""

    job: Job
    attempt: Attempt
    step: int
    ranks: tuple[int, int]
    names: tuple[str, ...]
    chunks_count: int


@dataclass(frozen=True, slots=True)
class ReplicasAgree:
    """Two ranks that differed put equal bytes again."""

    job: Job
    attempt: Attempt
    step: int
    ranks: tuple[int, int]


@dataclass(frozen=True, slots=True)
class RoundReleased:
    """A get() is over: every rank has the step."""

    round: Round
    step: StepId
    report: RestoreReport


@dataclass(frozen=True, slots=True)
class RoundFailed:
    """A get() ended with the same error on all ranks."""

    round: Round
    error: str
    message: str


@dataclass(frozen=True, slots=True)
class DurableWriteEnded:
    """A step is on durable storage, or its write ended without that."""

    job: str
    step: StepId
    outcome: str  # "": as asked; "failed" or "abandoned"
    since_s: float
    why: str = ""


@dataclass(frozen=True, slots=True)
class JobKept:
    """A closed job's RAM was not freed: durable storage lacks its newest step."""

    job: str
    step: StepId
    why: str


@dataclass(frozen=True, slots=True)
class JobForgotten:
    """A job's removal has reached enough journals: nothing of it is known any more."""

    job: str


Happened = (
    CommitApplied | DrainChanged | PersistAsked | AttemptBegun | AttemptUnfenced | RankGone | ReplicasDiffer
    | ReplicasAgree | RoundReleased | RoundFailed | DurableWriteEnded | JobKept | JobForgotten
)  # fmt: skip
