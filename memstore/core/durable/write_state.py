"""What is under way to durable storage, and how a job's durable writes went. Pure (R31)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from memstore.core.wire.orders import DurablePlace
from recovery.inventory import ShardSpec, StepId

Piece = tuple[int, int]  # rank, slice
MARKER: Piece = (-1, 0)


@dataclass(slots=True)
class Write:
    """One step on its way to durable storage."""

    step: StepId
    since_s: float
    place: DurablePlace
    waits: dict[Piece, str]  # piece that is not written yet -> host that writes it
    specs: dict[int, ShardSpec]
    phase: Literal["writing", "marking"] = "writing"
    key: str | None = None  # name of the key that all its slices are under; None: no host has written any
    other_keys: dict[str, str] = field(default_factory=dict)  # host that has another key -> its name
    failed: dict[Piece, set[str]] = field(default_factory=dict)  # hosts that could not write it
    reported: set[str] = field(default_factory=set)  # hosts that wrote something

    def stuck(self) -> set[str]:
        """Return the hosts that wrote nothing while others wrote all their pieces: their storage hangs."""
        owing = set(self.waits.values())
        return owing - self.reported if self.reported - owing else set()


@dataclass(slots=True)
class DurableState:
    """Durable progress of one job."""

    active: Write | None = None
    last_started_s: float | None = None
    last_started_step: StepId | None = None
    failed_s: float = math.inf  # when the last write failed; inf if it did not
    abandoned_in_a_row: int = 0
    abandoned_count: int = 0
    failures_count: int = 0
    problem: str = ""
    is_listed: bool = False  # its markers were listed since this controller began, and none was damaged
    unread: str = ""  # why the storage could not be read when it was last asked
    lacks: str = ""  # the part that the last look found missing
    seen_s: dict[StepId, float] = field(default_factory=dict)  # when marker and slices were last known to be there
    look_s: float = -math.inf  # no look before
    # step whose marker was written or removed -> the newest list that was asked for before: it may not show that
    changed: dict[StepId, int] = field(default_factory=dict)
    left_alone: set[int] = field(default_factory=set)  # attempts that another run of this name wrote: a warning said so
    key: str | None = None  # of the last write; None: there was none, or hosts have another one
    last_done_s: float | None = None
    write_s: float | None = None  # duration of the last write
    stuck: set[str] = field(default_factory=set)  # hosts that the next write does without, where others can
    taken_back: set[StepId] = field(default_factory=set)  # torn steps that a host has removed
    ordered_back_s: dict[StepId, float] = field(default_factory=dict)  # torn steps whose removal was ordered, and when
