"""A get() of all ranks, and a read of one shard, while they are under way. Plain data (R23, R27)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from memstore.core.cluster.job import Call, RankCalls
from memstore.core.wire.calls import Get, ReadStep, ShardLoaded
from memstore.core.wire.replies import RestoreReport
from recovery.inventory import ShardId, StepId
from recovery.planner import RecoveryPlan

Phase = Literal["gathering", "listing", "waiting", "deciding", "staging", "loading", "releasing"]


@dataclass(slots=True)
class Round:
    """One get() of one attempt."""

    job: str
    attempt: int
    number: int
    only_step: int | None
    from_job: str | None  # whose step is read; None: its own (R32)
    since_s: float
    calls: RankCalls[Get] = field(default_factory=RankCalls)
    phase: Phase = "gathering"
    phase_since_s: float = 0.0
    plan: RecoveryPlan | None = None
    is_decided: bool = False  # the decision is a fact, or nothing is adopted
    reads: dict[int, int] = field(default_factory=dict)  # number of an order to bring a shard -> rank of the step
    staged: dict[int, int] = field(default_factory=dict)  # rank of the step -> number of the order that was carried out
    failed_steps: dict[StepId, str] = field(default_factory=dict)
    planned_s: float = 0.0
    notes: list[str] = field(default_factory=list)
    markers_call: int = 0
    withdrawn: set[int] = field(default_factory=set)  # ranks that asked and could not wait
    ran_out_on: str = ""  # the awaited host, if all ranks had asked when the first of them withdrew
    is_agreement: bool = False  # all ranks ask for the step and for no bytes: it may have another world size (R27)
    is_trusted: bool = False  # all ranks ask for a trusted step (R38)
    then_loads: bool = False  # of an agreement: the ranks read bytes on their own and say when they have them
    report: RestoreReport | None = None  # since the bytes were handed out
    loads: RankCalls[ShardLoaded] = field(default_factory=RankCalls)  # of ranks that have loaded theirs
    # rank of the step -> the host that brings its shard together
    staging_hosts: dict[int, str] = field(default_factory=dict)
    unread: str = ""  # why durable storage could not be listed: then nothing is certain to be missing

    def enter(self, now: float, phase: Phase) -> None:
        """Begin a phase: its deadline counts from now."""
        self.phase, self.phase_since_s = phase, now

    @property
    def is_adopting(self) -> bool:
        """A get without a step adopts what it returns; get(step=S) and get(from_job=J) only read (R22, R32)."""
        return self.only_step is None and self.from_job is None

    @property
    def source(self) -> str:
        """The job whose step is read."""
        return self.from_job or self.job

    @property
    def lease(self) -> str:
        """The name of its lease of another job's step (R36)."""
        return f"get of {self.job}, attempt {self.attempt}"

    @property
    def is_loading(self) -> bool:
        """True once the ranks were sent their bytes: a failure leaves some of their states half written."""
        return self.phase == "loading" or len(self.loads) > 0

    @property
    def waiting(self) -> RankCalls[Get] | RankCalls[ShardLoaded]:
        """The calls of the ranks that wait for an answer now."""
        return self.loads if self.is_loading else self.calls

    @property
    def is_due(self) -> bool:
        """True from the moment when all ranks have asked."""
        return self.phase != "gathering"


@dataclass(frozen=True, slots=True)
class Read:
    """One shard that is brought to the host of a reader."""

    call: Call[Get] | Call[ReadStep]
    shard: ShardId
    verdict: str  # which tier its bytes come from
    why: str
    report: RestoreReport | None = None  # of the get() whose answer was lost on its way
