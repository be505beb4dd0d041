"""A fork of a job that was asked for and that no fact knows yet. Plain data (R32)."""

from __future__ import annotations

from dataclasses import dataclass, field

from memstore.core.cluster.job import Call, Job
from memstore.core.wire.calls import ForkJob
from recovery.inventory import StepId


@dataclass(slots=True)
class PendingFork:
    """The new job as it will be, and how far its hosts are."""

    calls: list[Call[ForkJob]]
    nonce: str
    job: Job  # as it will be; not among the state's jobs yet
    origin: str
    step: StepId  # of the origin
    since_s: float
    number: int = 0  # of the order to look
    is_listing: bool = False  # durable storage is asked whether it has a job of the new name
    claimed: set[str] = field(default_factory=set)
    waits: set[str] = field(default_factory=set)
    found: dict[int, dict[str, str]] = field(default_factory=dict)  # rank -> host with all chunks -> digest there
    is_recorded: bool = False
