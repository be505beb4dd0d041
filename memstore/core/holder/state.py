"""The state that the procedures of one holder share. Nothing in it can block, and nothing in it knows a procedure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from memstore.core.arena.replica_index import IncomingReplica, StoredReplica
from memstore.core.arena.slot_table import Owner
from memstore.core.holder.effects import Link, Source, Stop
from memstore.core.holder.fences import JobFences
from memstore.core.wire.messages import Body
from recovery.inventory import ShardId, StepId


class Store(Protocol):
    """The holder's replica store, as far as procedures call it without waiting (shell/arena/replica_store.py)."""

    def pin(self, shard: ShardId, digest: str) -> tuple[StoredReplica, int] | None:
        """Pin a replica; None if it is not here, or dropped."""

    def unpin(self, shelved: StoredReplica, pin: int) -> None:
        """Release a pin."""

    def finish(self, name: str, manifest_data: bytes) -> StoredReplica:
        """Store a draft whose chunks are all here; IntegrityError if it was aborted meanwhile."""

    def abort_draft(self, name: str, shard: ShardId, *, only: IncomingReplica | None = None) -> None:
        """Give back an incoming replica's slots, if there is one; with `only`, if it is still that one."""

    @property
    def chunk_bytes(self) -> int:
        """Return the size of a slot."""

    @property
    def arena_identity(self) -> str:
        """Return the identity of this arena, by which another one in its place is known."""

    def take_over(self, shard: ShardId, owner: Owner, slots: Sequence[int] | None) -> tuple[StoredReplica | None, bool]:
        """Take slots, if any, from the process that leases them; say whether it had them.

        Returns the shard too, if it is stored already.
        """

    def give_back(self, slots: Sequence[int]) -> None:
        """Free slots that were taken over and hold nothing that is to be stored."""

    def abort_older(self, job: str, attempt: int) -> None:
        """Give up the incoming replicas of a job's older attempts."""

    def mend_manifest(self, shelved: StoredReplica, data: bytes) -> None:
        """Write the manifest of a stored replica again."""


@dataclass(frozen=True)
class Limits:
    """The store's settings that procedures use, in seconds."""

    suspect_after_s: float
    dead_after_s: float


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


@dataclass(eq=False)
class Reading:
    """A read that fetches a shard, while other reads of the shard wait for it."""

    is_over: bool = False
    draft: IncomingReplica | None = None

    def left(self) -> int:
        """Return how many chunks have not come; -1 before that is known."""
        return len(self.draft.missing) if self.draft is not None else -1


@dataclass
class Stages:
    """The reads that are under way on this host."""

    reading: dict[tuple[ShardId, str], Reading] = field(default_factory=dict)  # shard and digest -> who fetches it
    newest: dict[tuple[str, int], int] = field(default_factory=dict)  # (job, rank) -> round ordered last


@dataclass(frozen=True)
class Excerpt:
    """The bytes that a reader of ranges may copy: slots of the wanted chunks, None for all others."""

    name: str  # of the draft
    draft: IncomingReplica
    manifest: bytes
    deadline_s: float


@dataclass
class Excerpts:
    """The partial reads that are ready or used, by the controller's number of the read."""

    known: dict[int, Excerpt] = field(default_factory=dict)
    is_tight: bool = False  # a read waits until others have given room back; no other one does so beside it


@dataclass(frozen=True)
class HandOver:
    """A put that a rank handed over completely, and the fence of its job at that moment."""

    link: Link
    body: Body
    fence: int

    @property
    def shard(self) -> ShardId:
        """Return the shard that it is to become."""
        return ShardId(self.link.job, int(self.body["attempt"]), int(self.body["step"]), self.link.rank)

    @property
    def key(self) -> tuple[str, int, Owner]:
        """Return the key by which a fence and a `bye` wait for it."""
        return self.link.job, int(self.body["attempt"]), self.link.owner


@dataclass
class Puts:
    """The hand-overs that are not finished."""

    pending: dict[tuple[str, int, Owner], int] = field(default_factory=dict)  # (job, attempt, process) -> hand-overs
    sealing: set[ShardId] = field(default_factory=set)


@dataclass
class HolderState:
    """The state of one holder, shared by its procedures."""

    host_id: str
    store: Store
    outgoing: Callable[[ShardId, str], Source | None]  # pins a replica for a push; None if it is not here
    limits: Limits
    now: Callable[[], float]  # monotonic, seconds
    report: Callable[[str, Body], None]  # queues a report to the controller
    sealed: Callable[
        [StoredReplica, Body | None], None
    ]  # reports a copy as it is now, with what was measured of its put
    is_stopping: Callable[[], bool]
    fences: JobFences = field(default_factory=JobFences)
    pushes: Pushes = field(default_factory=Pushes)
    stages: Stages = field(default_factory=Stages)
    excerpts: Excerpts = field(default_factory=Excerpts)
    puts: Puts = field(default_factory=Puts)
    stops: dict[tuple[str, StepId], Stop] = field(default_factory=dict)  # (job, step) -> what ends its durable writes
