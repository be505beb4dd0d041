"""What `memstore status`, `ls` and `plan` are sent of hosts, jobs, attempts and steps: rows of replies. Pure.

A field that is named `..._s` is in seconds; an age is as of the answer. `report/` makes the rows.
"""

from __future__ import annotations

from typing import Literal

from memstore.core.wire.codec import Part, Row, Scalar, Setting
from memstore.core.wire.ids import Name, Unsigned

# -- steps and attempts -------------------------------------------------------------------------------


class PinRow(Part, frozen=True):
    """The step that a pin keeps."""

    attempt: Unsigned
    step: Unsigned


class OriginRow(Part, frozen=True):
    """The step of another job with which a job, or an attempt, begins."""

    job: Name
    attempt: Unsigned
    step: Unsigned


StepState = Literal["retired", "degraded", "committed", "durable", "waiting", "abandoned", "superseded", "open"]


class StepRow(Part, frozen=True):
    """One step that is somewhere, or may come back."""

    attempt: Unsigned
    step: Unsigned
    state: StepState
    waiting_for: list[str]
    committed: bool
    degraded: str
    durable: bool
    durable_key: str
    in_lineage: bool
    retired: str
    pins: list[str]
    copies: Unsigned
    shards: Unsigned
    world_size: Unsigned | None
    nbytes: Unsigned
    hosts: list[str]
    age_s: float | None


class GoneRow(Part, frozen=True):
    """A run of committed steps of which no byte is left."""

    attempt: Unsigned
    first: Unsigned
    last: Unsigned
    count: Unsigned
    state: Literal["gone"]
    in_lineage: bool
    pins: list[str]


class AttemptRow(Part, frozen=True):
    """One attempt of a job."""

    attempt: Unsigned
    parent: Unsigned | None
    parent_step: Unsigned | None
    phase: str
    world_size: Unsigned
    is_fresh: bool
    origin: OriginRow | None
    abandoned: list[Unsigned]
    age_s: float | None
    in_lineage: bool


# -- hosts --------------------------------------------------------------------------------------------


class HostStats(Part, frozen=True):
    """What a holder counts and says of itself with every heartbeat."""

    used_bytes: Unsigned
    reserved_bytes: Unsigned
    claimed_bytes: Unsigned
    limit_bytes: Unsigned
    shards: Unsigned
    leased_slots: Unsigned
    digest_errors: Unsigned
    broken_frames: Unsigned
    scrub: Unsigned
    received_bytes: Unsigned
    limit_why: str
    limit_warning: str
    files_lost: str
    files_lost_now: bool
    files_problem: str
    descriptors: Unsigned
    descriptors_limit: Unsigned
    descriptors_hard: Unsigned
    pid: Unsigned
    spilled_bytes: Unsigned
    short_of_room: str
    behind_ranks: str
    verified_bytes: Unsigned
    """What `verify` has digested again so far."""
    corrected_errors: Unsigned = 0
    """Of the memory, as the kernel counts them; so are the next two (R41)."""
    uncorrected_errors: Unsigned = 0
    link_errors: Unsigned = 0


class ShortStep(Part, frozen=True):
    """A step of which a leaving host has what too few others have."""

    job: Name
    step: Unsigned
    shards: Unsigned
    copies: Unsigned
    replicas: Unsigned
    may_come: bool
    durable_problem: str
    in_parity: bool
    """They are short of the parity that the host keeps of them, for which there is no other place."""


class DurableStep(Part, frozen=True):
    """A step of which a leaving host has what durable storage has as well."""

    job: Name
    step: Unsigned
    copies: Unsigned


class HostRow(Part, frozen=True):
    """One host of the store."""

    host: str
    labels: dict[str, str]
    address: str
    status: str
    why: str
    status_s: float
    silent_s: float
    stats: HostStats | None
    machine: str
    is_explicit: bool
    holds: list[str]
    keeps_parity_of: list[str]
    """The hosts whose ranks' newest committed shards are in rows of parity there."""
    drains_s: float | None
    drain_left: Unsigned
    drain_may_come: bool
    drain_short: list[ShortStep]
    drain_durable: list[DurableStep]
    is_on_probation: bool
    up_s: float
    pushes: Unsigned


# -- jobs ---------------------------------------------------------------------------------------------


class LaunchRow(Part, frozen=True):
    """A launch, or a rewind, whose ranks are not all in yet."""

    job: Name
    phase: Literal["gathering", "listing", "opening", "fencing"]
    since_s: float
    awaited: str
    ranks: Unsigned
    world_size: Unsigned
    missing: list[Unsigned]
    is_rewind: bool
    left_s: float | None


class SurvivalRow(Part, frozen=True):
    """How many failure domains of a level may be lost now."""

    level: str
    tolerated: int
    fatal: list[str]


class OddsRow(Row, frozen=True):
    """The chance that RAM keeps every shard when so many hosts are lost at once; at least that unless `is_exact`."""

    lost: Unsigned
    chance: float
    is_exact: bool


class ShortRow(Part, frozen=True):
    """Ranks of the newest committed step that lack copies for one reason."""

    attempt: Unsigned
    step: Unsigned
    ranks: list[Unsigned]
    hosts: list[str]
    targets: list[str]
    why_not: str


Cause = Literal["ended", "frozen", "silent", "unwatched", "absent", "ray"]
"""Why a rank is lost: its process ended or was frozen, its host is silent, its watchdog is gone, or Ray says so."""


class ReplacedRow(Part, frozen=True):
    """A lost rank, and who took its place."""

    rank: Unsigned
    host: str
    """Where it was lost; "": not known any more."""
    to_host: str
    cause: Cause
    is_spare: bool
    """The process that took its place had waited as a spare."""


class DifferingRow(Part, frozen=True):
    """Two ranks that name one shard and put different bytes."""

    ranks: list[Unsigned]
    step: Unsigned
    names: list[str]
    since_s: float


class NonfiniteRow(Part, frozen=True):
    """A rank whose puts have numbers that are not finite, since a step."""

    rank: Unsigned
    step: Unsigned
    names: list[str]


class RankPlace(Part, frozen=True):
    """A rank that puts no more, and where to look for it."""

    rank: Unsigned
    host: str
    pid: Unsigned
    """0: a former controller knew it."""
    step: int
    """The newest that it put; -1: none."""
    since_s: float | None
    """Since it put that, or since it ended; None: a former controller knew it."""
    has_closed: bool


class RankGroup(Part, frozen=True):
    """Ranks in the same state: how many, and the first of them."""

    count: Unsigned
    first: list[RankPlace]


class TrainingStatus(Part, frozen=True):
    """Whether an attempt trains, by what its ranks put and by the controller's monotonic clock."""

    ended: RankGroup
    """Their processes ended, and they had not closed the store."""
    unseen: RankGroup
    """The holder of their host does not answer, or does not know them: they may live."""
    late: RankGroup
    """They put nothing while others put newer steps, for longer than ranks of a launch may be apart."""
    example: RankPlace | None
    """A rank to look at where none stands out."""
    quiet_s: float
    """Since some rank was at a newer step."""
    quiet_limit_s: float
    interval_s: float | None
    """Usually between newer steps."""
    uncommitted_s: float | None
    """Since the newest commit, or the first put; None: nothing that was put waits for one."""
    uncommitted_limit_s: float
    puts_differ: bool
    """Step after step is given up since ranks put different ones."""
    stopped_s: float
    """For how long training has not gone on; 0: it does."""


class AttemptStatus(Part, frozen=True):
    """The newest attempt of a job, and its newest steps."""

    phase: str
    ended_by: str
    """The exception by which its first rank left, and that rank; "": none has."""
    closed_s: float | None
    """Since it was closed; None: it was not, or an exception ended it."""
    training: TrainingStatus | None
    """None: no rank of it is to train any more."""
    generation: Unsigned
    replaced: list[ReplacedRow]
    recovery_s: dict[str, float]
    world_size: Unsigned
    ranks_alive: Unsigned
    shards: Unsigned
    writers: list[Unsigned]
    replicas_differ: list[DifferingRow]
    nonfinite: list[NonfiniteRow]
    rank_hosts: dict[str, str]
    training_step: int
    committed_step: Unsigned | None
    committed_attempt: Unsigned | None
    committed_s: float | None
    degraded: str
    retired: str
    is_torn: bool
    copies: Unsigned
    missing_copies: Unsigned
    short_shards: Unsigned
    short: list[ShortRow]
    short_s: float | None
    replicas: Unsigned
    parity: Unsigned
    set_sizes: list[Unsigned]
    """Of the newest committed step's parity sets, each once, ascending; 0: some ranks have copies."""
    keep_steps: Unsigned
    in_flight: Unsigned
    in_flight_lack: str
    survives: list[SurvivalRow]
    odds: list[OddsRow]
    refusals: list[str]
    parent: Unsigned | None
    parent_step: Unsigned | None
    level: str | None
    level_asked: str
    is_level_finer: bool
    targets: dict[str, list[str]]
    warnings: list[str]
    unmet: list[str]
    durable: str | None
    durable_step: Unsigned | None
    durable_seen_s: float | None
    durable_unseen: str
    durable_problem: str
    durable_abandoned: Unsigned
    durable_s: float | None
    resume_step: Unsigned
    is_restoring: bool
    skipped: Unsigned
    skipped_s: float | None
    """Since a step was given up that no later commit has made up for; None: there is none."""
    skip_why: str
    is_skip_for_room: bool


class GoodputRow(Part, frozen=True):
    """What became of a job's time since the controller has an account of it, as far as ranks said what they trained."""

    since_s: float
    is_whole: bool
    """Nothing of the job was before that."""
    total_s: float
    """But for the time in which it was closed."""
    kept_s: float
    """In steps that stay."""
    lost_steps: Unsigned
    """Trained, and taken by failures: at least so many."""
    lost_s: float
    taken_back_steps: Unsigned
    """Trained, and gone back behind since a person wanted it."""
    taken_back_s: float
    down_s: dict[str, float]
    """By phase."""
    outages: Unsigned


class JobRow(Part, frozen=True):
    """One job, with its steps as `memstore ls` draws them."""

    job: Name
    attempt: Unsigned | None
    steps: list[StepRow]
    gone: list[GoneRow]
    attempts: list[AttemptRow]
    pins: dict[str, PinRow]
    origin: OriginRow | None
    newest: AttemptStatus | None
    """None: there are copies, and no attempt is known."""
    goodput: GoodputRow | None = None
    """None: no step of it is known to be trained."""


class ProblemRow(Part, frozen=True):
    """What a person should know, with a remedy."""

    kind: str
    """Its name in the table of problems, for scripts."""
    severity: Literal["unrecoverable", "stopped", "degraded", "note"]
    about: str
    cause: str
    since_s: float | None
    remedy: str


# -- events -------------------------------------------------------------------------------------------

EventValue = Scalar | list[Scalar | dict[str, Scalar]] | dict[str, Scalar]


class EventRow(Part, frozen=True):
    """One thing that happened to the store."""

    seq: Unsigned
    event: str
    wall_s: float
    job: str
    attempt: Unsigned | None
    step: int | None
    """-1 if no step of the rank was sealed."""
    rank: Unsigned | None
    host: str
    fields: dict[str, EventValue]
    """What only its kind has."""


# -- dry runs -----------------------------------------------------------------------------------------


class TransferRow(Row, frozen=True):
    """Bytes that a get() would bring from somewhere, of a rank's shard or to the host that decodes it."""

    rank: Unsigned
    tier: str
    source: str | None
    target_host: str
    nbytes: Unsigned


class RejectedStep(Row, frozen=True):
    """A step that a get() would not, or did not, choose."""

    attempt: Unsigned
    step: Unsigned
    reason: str


class BytesByTier(Part, frozen=True):
    """Bytes, by where they come from."""

    local: Unsigned
    peer: Unsigned
    durable: Unsigned


JobDefaults = dict[str, Setting]
