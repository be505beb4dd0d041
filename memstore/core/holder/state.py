"""The state that the procedures of one holder share. Nothing in it can block, and nothing in it knows a procedure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from memstore.core.holder.effects import Source
from memstore.core.holder.fences import JobFences
from memstore.core.wire.messages import Body
from recovery.inventory import ShardId


class Store(Protocol):
    """What a procedure asks of the holder's replica store without waiting."""

    def outgoing(self, shard: ShardId, digest: str) -> Source | None:
        """Pin a replica for a push; None if it is not here, or dropped."""


@dataclass(frozen=True)
class Limits:
    """Settings of the store that procedures go by, seconds."""

    suspect_after_s: float
    repair_after_s: float


@dataclass(eq=False)
class Replication:
    """A put whose copies are on their way: over once every target has sealed it."""

    shard: ShardId
    left: set[str]


@dataclass
class Pushes:
    """The copies that are on their way from here, and the targets that this host cannot reach."""

    under_way: dict[tuple[ShardId, str], list[Replication]] = field(default_factory=dict)
    silent_since_s: dict[str, float] = field(default_factory=dict)  # targets that the view has and that do not answer


@dataclass
class HolderState:
    """One holder, as its procedures know it."""

    host_id: str
    store: Store
    limits: Limits
    now: Callable[[], float]  # monotonic, seconds
    report: Callable[[str, Body], None]  # queues a report to the controller
    is_stopping: Callable[[], bool]
    fences: JobFences = field(default_factory=JobFences)
    pushes: Pushes = field(default_factory=Pushes)
