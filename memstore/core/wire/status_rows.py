"""What `memstore status`, `ls` and `plan` are sent of hosts, jobs, attempts and steps: rows of replies. Pure.

A field that is named `..._s` is in seconds; an age is as of the answer. `report/` makes the rows.
"""

from __future__ import annotations

from typing import Literal

from memstore.core.wire.codec import Part, Row, Scalar, Setting
from memstore.core.wire.ids import Name, Ordinal

# -- steps and attempts -------------------------------------------------------------------------------


class PinRow(Part, frozen=True):
    """The step that a pin keeps."""

    attempt: Ordinal
    step: Ordinal


class OriginRow(Part, frozen=True):
    """The step with which a fork began."""

    job: Name
    attempt: Ordinal
    step: Ordinal


StepState = Literal["retired", "degraded", "committed", "durable", "waiting", "abandoned", "superseded", "open"]


class StepRow(Part, frozen=True):
    """One step that is somewhere, or may come back."""

    attempt: Ordinal
    step: Ordinal
    state: StepState
    waiting_for: list[str]
    committed: bool
    degraded: str
    durable: bool
    durable_key: str
    in_lineage: bool
    retired: str
    pins: list[str]
    forks: list[str]
    copies: Ordinal
    shards: Ordinal
    world_size: Ordinal | None
    nbytes: Ordinal
    shard_nbytes_max: Ordinal
    hosts: list[str]
    age_s: float | None


class GoneRow(Part, frozen=True):
    """A run of committed steps of which no byte is left."""

    attempt: Ordinal
    first: Ordinal
    last: Ordinal
    count: Ordinal
    state: Literal["gone"]
    in_lineage: bool
    pins: list[str]


class AttemptRow(Part, frozen=True):
    """One attempt of a job."""

    attempt: Ordinal
    parent: Ordinal | None
    parent_step: Ordinal | None
    phase: str
    world_size: Ordinal
    is_fresh: bool
    is_fork: bool
    abandoned: list[Ordinal]
    age_s: float | None
    in_lineage: bool


# -- hosts --------------------------------------------------------------------------------------------


class HostStats(Part, frozen=True):
    """What a holder counts and says of itself with every heartbeat."""

    used_bytes: Ordinal
    reserved_bytes: Ordinal
    claimed_bytes: Ordinal
    limit_bytes: Ordinal
    shards: Ordinal
    leased_slots: Ordinal
    digest_errors: Ordinal
    broken_frames: Ordinal
    scrub: Ordinal
    received_bytes: Ordinal
    limit_why: str
    limit_warning: str
    files_lost: str
    files_lost_now: bool
    files_problem: str
    descriptors: Ordinal
    descriptors_limit: Ordinal
    descriptors_hard: Ordinal
    pid: Ordinal
    spilled_bytes: Ordinal
    short_of_idle: str
    short_of_room: str


class ShortStep(Part, frozen=True):
    """A step of which a leaving host has what too few others have."""

    job: Name
    step: Ordinal
    shards: Ordinal
    copies: Ordinal
    replicas: Ordinal
    may_come: bool
    durable_problem: str


class DurableStep(Part, frozen=True):
    """A step of which a leaving host has what durable storage has as well."""

    job: Name
    step: Ordinal
    copies: Ordinal


class HostRow(Part, frozen=True):
    """One host of the store."""

    host: str
    labels: dict[str, str]
    address: str
    status: str
    why: str
    status_s: float
    heard_s: float
    stats: HostStats | None
    machine: str
    is_explicit: bool
    holds: list[str]
    drains_s: float | None
    drain_left: Ordinal
    drain_may_come: bool
    drain_short: list[ShortStep]
    drain_durable: list[DurableStep]
    is_on_probation: bool
    up_s: float
    pushes: Ordinal


# -- jobs ---------------------------------------------------------------------------------------------


class LaunchRow(Part, frozen=True):
    """A launch, or a rewind, whose ranks are not all in yet."""

    job: Name
    phase: Literal["gathering", "listing", "opening", "fencing"]
    since_s: float
    awaited: str
    ranks: Ordinal
    world_size: Ordinal
    missing: list[Ordinal]
    is_rewind: bool
    left_s: float | None


class SurvivalRow(Part, frozen=True):
    """How many failure domains of a level may be lost now."""

    level: str
    tolerated: int
    fatal: list[str]


class ShortRow(Part, frozen=True):
    """Ranks of the newest committed step that lack copies for one reason."""

    attempt: Ordinal
    step: Ordinal
    ranks: list[Ordinal]
    hosts: list[str]
    targets: list[str]
    why_not: str


class DifferingRow(Part, frozen=True):
    """Two ranks that name one shard and put different bytes."""

    ranks: list[Ordinal]
    step: Ordinal
    names: list[str]
    since_s: float


class AttemptStatus(Part, frozen=True):
    """The newest attempt of a job, and its newest steps."""

    phase: str
    world_size: Ordinal
    ranks_alive: Ordinal
    shards: Ordinal
    copiers: list[Ordinal]
    twins_differ: list[DifferingRow]
    rank_hosts: dict[str, str]
    training_step: int
    committed_step: Ordinal | None
    committed_attempt: Ordinal | None
    committed_s: float | None
    degraded: str
    retired: str
    is_torn: bool
    copies: Ordinal
    missing_copies: Ordinal
    short_shards: Ordinal
    short: list[ShortRow]
    short_s: float | None
    replicas: Ordinal
    keep_steps: Ordinal
    survives: list[SurvivalRow]
    refusals: list[str]
    parent: Ordinal | None
    parent_step: Ordinal | None
    level: str | None
    level_asked: str
    is_level_finer: bool
    targets: dict[str, list[str]]
    warnings: list[str]
    unmet: list[str]
    durable: str | None
    durable_step: Ordinal | None
    durable_seen_s: float | None
    durable_unseen: str
    durable_problem: str
    durable_keys: str
    durable_abandoned: Ordinal
    durable_s: float | None
    resume_step: Ordinal
    is_restoring: bool
    skipped: Ordinal
    skip_why: str
    is_skip_for_room: bool


class JobRow(Part, frozen=True):
    """One job, with its steps as `memstore ls` draws them."""

    job: Name
    attempt: Ordinal | None
    steps: list[StepRow]
    gone: list[GoneRow]
    attempts: list[AttemptRow]
    pins: dict[str, PinRow]
    origin: OriginRow | None
    newest: AttemptStatus | None
    """None: there are copies, and no attempt is known."""


class ProblemRow(Part, frozen=True):
    """What a person should know, with a remedy."""

    severity: Literal["unrecoverable", "degraded", "note"]
    about: str
    cause: str
    since_s: float | None
    remedy: str


# -- events -------------------------------------------------------------------------------------------

EventValue = Scalar | list[Scalar | dict[str, Scalar]] | dict[str, Scalar]


class EventRow(Part, frozen=True):
    """One thing that happened to the store."""

    seq: Ordinal
    event: str
    wall_s: float
    job: str
    attempt: Ordinal | None
    step: Ordinal | None
    rank: Ordinal | None
    host: str
    fields: dict[str, EventValue]
    """What only its kind has."""


# -- dry runs -----------------------------------------------------------------------------------------


class TransferRow(Row, frozen=True):
    """Bytes of a rank's shard that a get() would bring from somewhere."""

    rank: Ordinal
    tier: str
    source: str | None
    target_host: str
    nbytes: Ordinal


class RejectedStep(Row, frozen=True):
    """A step that a get() would not, or did not, choose."""

    attempt: Ordinal
    step: Ordinal
    reason: str


class OddsRow(Row, frozen=True):
    """The chance that every shard keeps a copy when so many hosts are lost at once."""

    lost: Ordinal
    chance: float
    is_exact: bool


class BytesByTier(Part, frozen=True):
    """Bytes, by where they come from."""

    local: Ordinal
    peer: Ordinal
    durable: Ordinal


JobDefaults = dict[str, Setting]
