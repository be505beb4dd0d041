"""Controller to rank: one reply for each call (`calls.py`). Pure.

The holder passes them on (`orders.py`, `rank_messages.py`). Those that name bytes on the rank's host, ShardStaged and
ChunksStaged, reach the rank with their place there, as ShardPlaced.
"""

from __future__ import annotations

from typing import Any

from memstore.core.wire.codec import Decoder, Message, Part, Request, Row, decode_reply, tag_of
from memstore.core.wire.ids import Digest, Name, Ordinal, WireShard
from memstore.core.wire.status_rows import (
    AttemptRow,
    BytesByTier,
    EventRow,
    GoneRow,
    HostRow,
    JobDefaults,
    JobRow,
    LaunchRow,
    OddsRow,
    OriginRow,
    PinRow,
    ProblemRow,
    RejectedStep,
    StepRow,
    TransferRow,
)

# -- of ranks -----------------------------------------------------------------------------------------


class Noted(Message, frozen=True, tag="noted"):
    """The controller has noted it."""


class SharedShardPlace(Row, frozen=True):
    """Which shard a rank holds as others do, and which ranks copy it (R34)."""

    shard: Ordinal
    shards: Ordinal
    copiers: tuple[Ordinal, ...]
    roster: tuple[tuple[Ordinal, ...], ...]
    """The copiers of every shard; for rank 0 alone, which keeps the list for readers."""


class Joined(Message, frozen=True, tag="joined"):
    """A process's place in the attempt (R20)."""

    attempt: Ordinal
    world_size: Ordinal
    rank: Ordinal
    order: tuple[Ordinal, ...]
    """By rank: the launcher's number; empty: the same."""
    restored_step: Ordinal | None
    resume_step: Ordinal
    put_every: str | int
    shared_shard: SharedShardPlace | None


class PutInterval(Message, frozen=True, tag="put_interval"):
    """How many steps lie between two puts from now on (R33)."""

    steps: Ordinal


class Skipped(Message, frozen=True, tag="skipped"):
    """The step is given up: all ranks put again from `resume` on (R12)."""

    resume: Ordinal


class RollCalled(Message, frozen=True, tag="roll_called"):
    """The ranks that have made a collective call, and the awaited ones."""

    come: str
    awaited: str
    is_complete: bool


class NoRollCall(Message, frozen=True, tag="no_roll_call"):
    """No rank waits for such a call."""


# -- of reads (R23-R27) -------------------------------------------------------------------------------


class PhaseSeconds(Part, frozen=True):
    """How long the phases of a restore took."""

    gather: float
    transfer: float


class RestoreReport(Part, frozen=True):
    """What a get() of all ranks came to; the same for all."""

    round: Ordinal
    verdict: str
    why: str
    ranks_moved: tuple[Ordinal, ...]
    moved_bytes: Ordinal
    bytes: BytesByTier
    rejected: tuple[RejectedStep, ...]
    steps_lost: Ordinal
    seconds: PhaseSeconds
    notes: tuple[str, ...]


class NothingStored(Message, frozen=True, tag="nothing_stored"):
    """The job has no history that this attempt may have."""


class StepAgreed(Message, frozen=True, tag="step_agreed"):
    """All ranks go on from this step; its bytes were not asked for."""

    step: Ordinal
    attempt: Ordinal
    report: RestoreReport | None
    """None: the attempt had agreed before."""


class ShardStaged(Message, frozen=True, tag="shard_staged"):
    """A shard is whole on the rank's host."""

    step: Ordinal
    attempt: Ordinal
    verdict: str
    why: str
    shard: WireShard
    digest: Digest
    report: RestoreReport | None
    """None: a read of one rank's shard."""


class ChunksStaged(Message, frozen=True, tag="chunks_staged"):
    """Some chunks of a shard are on the rank's host."""

    step: Ordinal
    attempt: Ordinal
    verdict: str
    why: str
    read: Ordinal
    """The number under which the holder has them."""


class ShardPlaced(Message, frozen=True, tag="shard_placed"):
    """Where the bytes of a shard, or of some of its chunks, lie on this host: pinned until the rank unpins them."""

    step: Ordinal
    attempt: Ordinal
    verdict: str
    why: str
    report: RestoreReport | None
    manifest: bytes
    slots: tuple[Ordinal | None, ...]
    """By chunk; None: it is not here."""
    pin: Ordinal


# -- of people ----------------------------------------------------------------------------------------


class Status(Message, frozen=True, tag="status"):
    """What the store is, host by host and job by job."""

    term: Ordinal
    serving_s: float
    hosts: list[HostRow]
    job_defaults: JobDefaults
    failure_domains: list[str]
    launches: list[LaunchRow]
    jobs: list[JobRow]
    problems: list[ProblemRow]


class Steps(Message, frozen=True, tag="steps"):
    """The steps and attempts of a job, newest first."""

    attempt: Ordinal | None
    steps: list[StepRow]
    gone: list[GoneRow]
    attempts: list[AttemptRow]
    pins: dict[str, PinRow]
    origin: OriginRow | None


class Events(Message, frozen=True, tag="events"):
    """A page of what happened."""

    events: list[EventRow]
    next: Ordinal
    has_more: bool
    is_gap: bool
    unwritten: Ordinal
    wall_s: float


class Plan(Message, frozen=True, tag="plan"):
    """What a get() would recover."""

    job: Name
    lost_hosts: list[str]
    verdict: str
    why: str
    step: Ordinal | None
    attempt: Ordinal | None
    committed_step: Ordinal | None
    steps_lost: Ordinal | None
    ranks_moved: list[Ordinal]
    world_size: Ordinal
    step_world_size: Ordinal | None
    moved_bytes: Ordinal
    bytes: BytesByTier
    transfers: list[TransferRow]
    rejected: list[RejectedStep]
    gone: list[GoneRow]
    unlisted: str
    odds: list[OddsRow]


class HostVerified(Part, frozen=True):
    """What a host found when it digested everything again."""

    shards: Ordinal
    chunks: Ordinal
    damaged: Ordinal
    damaged_manifests: Ordinal


class VerifyResult(Message, frozen=True, tag="verify_result"):
    """What every host found, and which did not answer."""

    found: dict[str, HostVerified]
    failed: dict[str, str]
    silent: list[str]


class LastCopies(Message, frozen=True, tag="last_copies"):
    """What would be lost for good with the copies in RAM, in words, by job."""

    lost: dict[str, list[str]]


class PinNoted(Message, frozen=True, tag="pin_noted"):
    """A step has a name, or has lost it."""

    job: Name
    name: str
    attempt: Ordinal
    step: Ordinal


class Persisted(Message, frozen=True, tag="persisted"):
    """Whether a step is on durable storage, and what it waits for if not."""

    job: Name
    attempt: Ordinal
    step: Ordinal
    is_durable: bool
    problem: str


class Forked(Message, frozen=True, tag="forked"):
    """A fork is whole in RAM."""

    job: Name
    attempt: Ordinal
    step: Ordinal
    from_job: Name
    from_attempt: Ordinal
    shards: Ordinal
    nbytes: Ordinal
    copies: Ordinal


class LostPin(Row, frozen=True):
    """A pin that went with its job."""

    name: str
    attempt: Ordinal
    step: Ordinal


class Removed(Message, frozen=True, tag="removed"):
    """A job is gone, with so many shards."""

    job: Name
    pins: list[LostPin]
    shards: Ordinal = 0


class DrainNoted(Message, frozen=True, tag="drain_noted"):
    """A host will be gone at this moment (wall clock); None: it stays."""

    host: str
    until_s: float | None


class CopyDropped(Message, frozen=True, tag="copy_dropped"):
    """A copy was dropped on purpose; the shard is left on these hosts."""

    host: str
    left_on: list[str]
    nbytes: Ordinal


PassedReply = (
    Noted
    | Joined
    | PutInterval
    | Skipped
    | RollCalled
    | NoRollCall
    | NothingStored
    | StepAgreed
    | Status
    | Steps
    | Events
    | Plan
    | VerifyResult
    | LastCopies
    | PinNoted
    | Persisted
    | Forked
    | Removed
    | DrainNoted
    | CopyDropped
)
ControllerReply = PassedReply | ShardStaged | ChunksStaged

Reply = ControllerReply | ShardPlaced

READS = frozenset({"get", "read_step", "read_ranges"})
"""Tags of the requests whose reply gets the place of the bytes from the holder."""

decode_staged: Decoder[NothingStored | StepAgreed | ShardStaged | ChunksStaged] = Decoder(
    NothingStored | StepAgreed | ShardStaged | ChunksStaged
)
decode_placed: Decoder[ShardPlaced] = Decoder(ShardPlaced)


def decode_passed(request: Request[Any], data: bytes) -> Any:
    """Return the controller's reply to a request of a rank, as the holder gets it; ProtocolError if it is none."""
    return decode_staged(data) if tag_of(request) in READS else decode_reply(request, data)
