"""Controller to rank: one reply for each call (`calls.py`). Pure.

The holder passes them on (`orders.py`, `rank_messages.py`). The one that names bytes, ShardReady, reaches the rank with
their places, as ShardPlaced.
"""

from __future__ import annotations

from typing import Any

from memstore.core.wire.codec import Decoder, Message, Part, Request, Row, decode_reply, fields_of, tag_of
from memstore.core.wire.ids import Endpoints, Name, Unsigned
from memstore.core.wire.orders import ChunkRange
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

    shard: Unsigned
    shards: Unsigned
    writers: tuple[Unsigned, ...]
    writers_by_shard: tuple[tuple[Unsigned, ...], ...]
    """The writers of every shard; for rank 0 alone, which keeps the list for readers."""


class Joined(Message, frozen=True, tag="joined"):
    """A process's place in the attempt (R20)."""

    attempt: Unsigned
    world_size: Unsigned
    rank: Unsigned
    restored_step: Unsigned | None
    resume_step: Unsigned
    put_every: str | int
    shared_shard: SharedShardPlace | None


class Skipped(Message, frozen=True, tag="skipped"):
    """The step is given up: all ranks put again from `resume` on (R12)."""

    resume: Unsigned


class RollCalled(Message, frozen=True, tag="roll_called"):
    """The ranks that have made a collective call, and the awaited ones."""

    come: str
    awaited: str
    is_complete: bool


# -- of reads (R23-R27) -------------------------------------------------------------------------------


class PhaseSeconds(Part, frozen=True):
    """How long the phases of a restore took."""

    gather: float
    transfer: float


class RestoreReport(Part, frozen=True):
    """What a get() of all ranks came to; the same for all."""

    round: Unsigned
    verdict: str
    why: str
    ranks_moved: tuple[Unsigned, ...]
    moved_bytes: Unsigned
    bytes: BytesByTier
    rejected: tuple[RejectedStep, ...]
    steps_lost: Unsigned
    seconds: PhaseSeconds
    notes: tuple[str, ...]


class NothingStored(Message, frozen=True, tag="nothing_stored"):
    """The job has no history that this attempt may have."""

    lost: str = ""
    """What earlier attempts put of which nothing was committed; "": nothing."""


class StepAgreed(Message, frozen=True, tag="step_agreed"):
    """All ranks go on from this step; its bytes were not asked for."""

    step: Unsigned
    attempt: Unsigned
    report: RestoreReport | None
    """None: the attempt had agreed before."""


class GetAgain(Message, frozen=True, tag="get_again"):
    """This controller knows nothing of the get() that a rank has loaded: every rank of it asks once more (R23)."""


class ShardReady(Message, frozen=True, tag="shard_ready"):
    """What is read of a shard is in the reach of its reader; its holder names the places in a ShardPlaced."""

    step: Unsigned
    attempt: Unsigned
    verdict: str
    why: str
    report: RestoreReport | None
    """None: a read of one rank's shard."""
    read: Unsigned
    """The number under which the holder has it."""


class ChunksElsewhere(Row, frozen=True):
    """Chunks that the rank fetches itself from another host's holder."""

    host: str
    endpoints: Endpoints
    chunks: tuple[ChunkRange, ...]


class ShardPlaced(Message, frozen=True, tag="shard_placed"):
    """Where the bytes of a shard, or of some of its chunks, lie; those here are pinned until the rank unpins them."""

    step: Unsigned
    attempt: Unsigned
    verdict: str
    why: str
    report: RestoreReport | None
    manifest: bytes
    slots: tuple[Unsigned | None, ...]
    """By chunk; None: it is not here."""
    elsewhere: tuple[ChunksElsewhere, ...]
    pin: Unsigned


class StepAwaited(Message, frozen=True, tag="step_awaited"):
    """The newest committed step; None: no newer one was committed in time."""

    step: Unsigned | None
    attempt: Unsigned | None


class StepLeased(Message, frozen=True, tag="step_leased"):
    """A step is leased; its reader gives the pin back at the end (R36)."""

    step: Unsigned
    attempt: Unsigned
    why_not_kept: str
    """Why retention drops it all the same when newer ones are committed; "": it does not."""
    pin: Unsigned = 0
    """Given by the holder of the reader's host."""


# -- of people ----------------------------------------------------------------------------------------


class Status(Message, frozen=True, tag="status"):
    """What the store is, host by host and job by job."""

    term: Unsigned
    serving_s: float
    hosts: list[HostRow]
    job_defaults: JobDefaults
    gcs_storage: str
    """Where Ray's head keeps its tables: "memory", "rocksdb" or "redis"; "" if that is not known."""
    failure_domains: list[str]
    launches: list[LaunchRow]
    jobs: list[JobRow]
    problems: list[ProblemRow]


class StepList(Message, frozen=True, tag="steps"):
    """The steps and attempts of a job, newest first."""

    attempt: Unsigned | None
    steps: list[StepRow]
    gone: list[GoneRow]
    attempts: list[AttemptRow]
    pins: dict[str, PinRow]
    origin: OriginRow | None


class Events(Message, frozen=True, tag="events"):
    """A page of what happened."""

    events: list[EventRow]
    next: Unsigned
    has_more: bool
    is_gap: bool
    unwritten: Unsigned
    wall_s: float


class Plan(Message, frozen=True, tag="plan"):
    """What a get() would recover."""

    job: Name
    lost_hosts: list[str]
    verdict: str
    why: str
    step: Unsigned | None
    attempt: Unsigned | None
    committed_step: Unsigned | None
    steps_lost: Unsigned | None
    ranks_moved: list[Unsigned]
    world_size: Unsigned
    step_world_size: Unsigned | None
    moved_bytes: Unsigned
    starts_on: dict[str, list[Unsigned]]
    """By host: the ranks of lost hosts that are taken to start there."""
    bytes: BytesByTier
    transfers: list[TransferRow]
    rejected: list[RejectedStep]
    gone: list[GoneRow]
    unlisted: str
    odds: list[OddsRow]


class HostVerified(Part, frozen=True):
    """What a host found when it digested everything again."""

    shards: Unsigned
    chunks: Unsigned
    damaged: Unsigned
    damaged_manifests: Unsigned


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
    attempt: Unsigned
    step: Unsigned


class Persisted(Message, frozen=True, tag="persisted"):
    """Whether a step is on durable storage, and what it waits for if not."""

    job: Name
    attempt: Unsigned
    step: Unsigned
    is_durable: bool
    problem: str


class Removed(Message, frozen=True, tag="removed"):
    """A job is gone, with so many shards."""

    job: Name
    pins: dict[str, PinRow]
    """That went with it, by name."""
    shards: Unsigned = 0


class DrainNoted(Message, frozen=True, tag="drain_noted"):
    """A host will be gone at this moment (wall clock); None: it stays."""

    host: str
    until_s: float | None


Reply = Message
"""Any of these: a call's class says which may answer it."""

READS = frozenset({"get", "read_step"})
"""Tags of the requests whose reply gets the place of the bytes from the holder."""

decode_ready: Decoder[NothingStored | StepAgreed | ShardReady] = Decoder(NothingStored | StepAgreed | ShardReady)
decode_pinned: Decoder[ShardPlaced | StepLeased] = Decoder(ShardPlaced | StepLeased)
"""Replies that come with a pin."""


def decode_passed(request: Request[Any], data: bytes) -> Any:
    """Return the controller's reply to a request of a rank, as the holder gets it; ProtocolError if it is none."""
    return decode_ready(data) if tag_of(request) in READS else decode_reply(request, data)


# -- json rows ----------------------------------------------------------------------------------------
# What `memstore status --json` and `ls --json` print of the answers. Pure.


def status_fields(status: Status) -> dict[str, Any]:
    """Return plain values of a status."""
    rows = {"hosts": [host_fields(row) for row in status.hosts], "jobs": [job_fields(row) for row in status.jobs]}
    return {**fields_of(status), **rows}


def host_fields(row: HostRow) -> dict[str, Any]:
    """Return plain values of a host; {} for the numbers of one whose heartbeat has not come yet."""
    fields = fields_of(row)
    return fields if row.stats is not None else {**fields, "stats": {}}


def job_fields(row: JobRow) -> dict[str, Any]:
    """Return plain values of a job, those of its newest attempt among them; none of those if it has no attempt."""
    fields = fields_of(row)
    return {**fields, **(fields.pop("newest") or {})}
