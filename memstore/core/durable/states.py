"""What is known of every job's durable storage and under way to it, for all that ask, look and write. Pure (R31)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from memstore.core.cluster.job import Job
from memstore.core.cluster.state import ClusterState
from memstore.core.wire.orders import DurablePlace
from recovery.inventory import DurableMarker, ShardSpec, SliceUse, StepId

Piece = tuple[int, int]  # rank, slice
MARKER: Piece = (-1, 0)
WRITES_AT_ONCE = 4  # slices of one storage that a host writes: each may be in its memory once more


@dataclass(slots=True)
class Write:
    """One step on its way to durable storage."""

    step: StepId
    since_s: float
    moved_s: float  # when a part of it was last reported as written
    place: DurablePlace
    waits: dict[Piece, str]  # piece that is not written yet -> host that writes it
    specs: dict[int, ShardSpec]
    phase: Literal["writing", "marking"] = "writing"
    key: str | None = None  # name of the key that all its slices are under; None: no host has written any
    other_keys: dict[str, str] = field(default_factory=dict)  # host that has another key -> its name
    failed: dict[Piece, set[str]] = field(default_factory=dict)  # hosts that could not write it
    reported: set[str] = field(default_factory=set)  # hosts that wrote something
    base: DurableMarker | None = None  # an older step: what is equal there is not written again
    bases_max: int = 0  # most older slices that one may read
    uses: dict[Piece, SliceUse] = field(default_factory=dict)  # how a written slice lies there
    is_trusted: bool = False  # its marker says so (R38)

    @property
    def marker(self) -> DurableMarker:
        """Return what the step's marker says, once all its slices are written."""
        uses: dict[int, list[SliceUse]] = {}
        for (rank, _), use in sorted(self.uses.items()):
            uses.setdefault(rank, []).append(use)
        named = {rank: tuple(mine) for rank, mine in uses.items() if any(use.tag for use in mine)}
        return DurableMarker(self.step, len(self.specs), dict(self.specs), self.key or "", named, self.is_trusted)

    def stuck(self) -> set[str]:
        """Return the hosts that wrote nothing while others wrote all their pieces: their storage hangs."""
        owing = set(self.waits.values())
        return owing - self.reported if self.reported - owing else set()


@dataclass(slots=True)
class DurableState:
    """Durable progress of one job."""

    writes: dict[StepId, Write] = field(default_factory=dict)  # under way
    last_started_s: float | None = None
    last_started_step: StepId | None = None
    failed_s: float = math.inf  # when the last write failed; inf if it did not
    abandoned_in_a_row: int = 0
    abandoned_count: int = 0
    failures_count: int = 0
    is_base_failed: bool = False  # the last write had a base and failed, perhaps because of it: the next one has none
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
    removals: dict[StepId, tuple[str, float]] = field(default_factory=dict)  # under way -> its host, and since when
    trust_told_s: dict[StepId, float] = field(default_factory=dict)  # when a marker was ordered to say who trusts it

    @property
    def active(self) -> Write | None:
        """The write of the newest step under way."""
        return self.writes[max(self.writes)] if self.writes else None

    @property
    def bases(self) -> set[StepId]:
        """Durable steps of which writes under way read."""
        return {write.base.step for write in self.writes.values() if write.base is not None}


class DurableStates:
    """The durable states of all jobs, and the numbers of questions to hosts about storage."""

    def __init__(self, state: ClusterState) -> None:
        self.state = state
        self.calls_count = 0
        self._states: dict[str, DurableState] = {}

    def of(self, job: str) -> DurableState:
        """Return the durable progress of a job, made on first use."""
        return self._states.setdefault(job, DurableState())

    def next_call(self) -> int:
        """Number a request to list markers, so that a late answer is not taken for another one's."""
        self.calls_count += 1
        return self.calls_count

    def is_known(self, job: Job) -> bool:
        """Return whether a get would find no other marker of the job than those that are known."""
        attempt = job.newest
        return attempt is None or attempt.config.get("durable") is None or self.of(job.name).is_listed

    def writers(self, job: Job, step: StepId, rank: int) -> list[str]:
        """Return the hosts that answer and hold all of a rank's shard."""
        hosts = job.copies.get(step, {}).get(rank, {})
        return sorted(h for h, c in hosts.items() if not c.missing and self.state.hosts.is_answering(h))

    def is_whole(self, job: Job, step: StepId) -> bool:
        """Return whether every shard of a committed step has a host that answers and holds all of it."""
        ranks, commit = job.copies.get(step, {}), job.commits.get(step)
        return commit is not None and len(ranks) == commit.world_size and all(self.writers(job, step, r) for r in ranks)

    def not_there(self, job: Job, step: StepId, why: str, *, is_read: bool, needs_key: bool) -> None:
        """Note that storage cannot be read, or lacks some of a step that was durable: RAM writes it again.

        So it does with a step under a key that no host has, if RAM has all of it: under the present key.
        """
        state = self.of(job.name)
        if is_read:
            state.lacks = why
        else:
            state.unread = why
        if is_read or (needs_key and self.is_whole(job, step)):
            job.markers.pop(step, None)
            state.seen_s.pop(step, None)
            state.last_started_s = state.last_started_step = None

    def take_back_again(self, name: str, step: StepId) -> None:
        """Have a torn step's marker removed once more: it has one after all."""
        state = self.of(name)
        state.taken_back.discard(step)
        state.ordered_back_s.pop(step, None)

    def forget(self, name: str) -> None:
        """Forget a job that was removed: another one of its name begins without history."""
        self._states.pop(name, None)
