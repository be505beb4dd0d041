"""Rank, or tool, to controller: questions and requests, each answered once (`replies.py`) or refused. Pure.

They travel through the holder of the rank's host, which asks again if a controller dies.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Generic, TypeVar

from msgspec import Meta

from memstore.core.wire.codec import Decoder, Message, Part, Request, Row, Setting
from memstore.core.wire.ids import Name, Positive, Seconds, Unsigned
from memstore.core.wire.orders import ChunkRange
from memstore.core.wire.replies import (
    DrainNoted,
    Events,
    GetAgain,
    Joined,
    LastCopies,
    Noted,
    NothingStored,
    Persisted,
    PinNoted,
    Plan,
    Removed,
    RollCalled,
    ShardPlaced,
    Skipped,
    Status,
    StepAgreed,
    StepAwaited,
    StepLeased,
    StepList,
    VerifyResult,
)
from memstore.core.wire.status_rows import Cause

R = TypeVar("R")
GROUPS_MAX = 4  # kinds of groups that one rank names: each is one more level that all copies are placed by

# -- ranks --------------------------------------------------------------------------------------------


class RankLoss(Row, frozen=True):
    """A process of a rank that was lost, and replaced by another one."""

    rank: Unsigned
    generation: Unsigned
    """The first one that its replacement may take part in."""
    cause: Cause
    is_spare: bool
    """The replacement had waited as a spare."""
    silent_s: Seconds
    """For so long nothing came from it before it counted as lost; 0: its end was seen."""


class InPlace(Part, frozen=True):
    """What one rank knows of a recovery in place; its durations are by its own clock, one after the other."""

    generation: Positive
    losses: tuple[RankLoss, ...]
    """Those of the run, newest last; of its rank 0 alone."""
    detect_s: Seconds | None
    """From the exception that left the function until a loss was known; None: this process is new, as below."""
    abort_s: Seconds | None
    """Until all of the generation before was torn down."""
    replace_s: Seconds | None
    """Until all ranks had come, the replacements among them."""
    meet_s: Seconds
    """Until their process group was made."""
    build_s: Seconds
    """Until this call."""


class Join(Request[Joined], frozen=True, tag="join"):
    """Join a job as one rank of a launch; answered when all ranks of it are there (R20)."""

    job: Name
    rank: Unsigned
    world_size: Positive
    key: str | None
    """Of the launch; None: its launcher gives none."""
    launcher: str
    nonce: str
    pid: Unsigned
    config: dict[str, Setting]
    fresh: bool
    takeover: bool
    shard: Unsigned | None
    shards: Positive | None
    limit_s: float
    in_place: InPlace | None = None
    """The launch replaces ranks that were lost, and keeps the processes of the others; None: an ordinary one."""
    groups: Annotated[Mapping[Name, Unsigned], Meta(max_length=GROUPS_MAX)] = {}
    """By name: the number of the group that the rank is in, which may be lost as one (R18.8)."""


class RankRequest(Request[R], Generic[R], frozen=True, kw_only=True):
    """The base of the calls of a rank of an attempt."""

    job: Name
    attempt: Unsigned
    rank: Unsigned


class Rewind(RankRequest[Joined], frozen=True, kw_only=True, tag="rewind"):
    """Go on from an older step in a new attempt; answered when all have asked (R22)."""

    step: Unsigned
    of_attempt: Unsigned | None = None
    nonce: str
    key: str | None


class Get(RankRequest[NothingStored | StepAgreed | ShardPlaced], frozen=True, tag="get"):
    """Restore the newest whole step, or read one, also of another job; answered when all ranks have asked (R23)."""

    step: Unsigned | None
    timeout_s: float
    from_job: Name | None = None
    """Whose step is read; None: its own (R32)."""
    is_agreement: bool = False
    """The step alone is asked for, and no bytes."""
    then_loads: bool = False
    """Of an agreement: the ranks read bytes themselves, and say with ShardLoaded that they have."""
    is_trusted: bool = False
    """No other step than a trusted one is wanted (R38)."""

    @property
    def is_adopting(self) -> bool:
        """It goes on from what it returns; a step that is named, or another job's, is only read (R22)."""
        return self.step is None and self.from_job is None

    @property
    def source(self) -> str:
        """The job whose step is read."""
        return self.from_job or self.job


class ShardLoaded(RankRequest[Noted | GetAgain], frozen=True, tag="shard_loaded"):
    """Say that the rank's state has what its get() was given, or why not; answered once all ranks have (R23)."""

    round: Positive
    is_adopting: bool
    """The get() named no step and no other job."""
    problem: str | None
    """Why its state could not be loaded, once the bytes were handed out."""


class Withdraw(RankRequest[Noted], frozen=True, tag="withdraw"):
    """Take a get() back whose deadline has passed, unless it is decided."""

    timeout_s: float


class ReserveRoom(RankRequest[Noted], frozen=True, tag="reserve"):
    """Claim room for versions of so many slots; answered when all hosts have it (R10)."""

    slots: Positive


class SkipStep(RankRequest[Skipped], frozen=True, tag="skip"):
    """Give a step up, on all ranks alike (R12)."""

    step: Unsigned
    why: str
    is_failed: bool
    """It was not for want of room."""
    stall_s: float | None = None


class AnswerPutEarly(RankRequest[Noted], frozen=True, tag="answer_put_early"):
    """Say whether a step may be put ahead of its turn: this rank has not come to it, and waits there (R33)."""

    step: Unsigned
    is_possible: bool


class RetireStep(Request[Noted], frozen=True, tag="retire"):
    """Have no get return a step (R25)."""

    job: Name
    attempt: Unsigned
    step: Unsigned
    reason: str
    is_torn: bool = False


class ReportDiffering(Request[Noted], frozen=True, tag="report_differing"):
    """Name what two ranks that hold one shard put differently; no chunks: they are equal again (R34)."""

    job: Name
    attempt: Unsigned
    step: Unsigned
    ranks: tuple[Unsigned, Unsigned]
    chunks: Unsigned
    names: tuple[str, ...]


class ReportNonfinite(RankRequest[Noted], frozen=True, tag="report_nonfinite"):
    """Name what of a put has numbers that are not finite; no names: all are finite again (R39)."""

    step: Unsigned
    names: tuple[str, ...]


class CloseStore(RankRequest[Noted], frozen=True, tag="close"):
    """Leave the job."""

    error: str = ""
    """The exception that training ended by, in one line; "": it ended well (R20)."""


class AskRollCall(Request[RollCalled | Noted], frozen=True, tag="roll_call"):
    """Ask which ranks have come to a call that all make; Noted if none waits in it."""

    job: Name
    of: str
    """The tag of the call."""


class ReadStep(Request[ShardPlaced], frozen=True, kw_only=True, tag="read_step"):
    """Read one rank's shard, or some chunks of it, without a barrier (R27)."""

    job: Name
    step: Unsigned | None
    of_attempt: Unsigned | None = None
    rank: Unsigned
    chunks: tuple[ChunkRange, ...] | None = None
    """None: all of them; none: the manifest alone."""
    is_repair: bool = False
    """The reader found them damaged, or could not fetch them."""
    reader: str = ""
    """The nonce of the reading process."""


# -- people -------------------------------------------------------------------------------------------


class AskStatus(Request[Status], frozen=True, tag="status"):
    """Ask for hosts, jobs and problems."""


class AskSteps(Request[StepList], frozen=True, tag="steps"):
    """Ask for the steps of a job."""

    job: Name


class AskEvents(Request[Events], frozen=True, tag="events"):
    """Ask what happened after a number, to one job or to all."""

    since: Unsigned = 0
    job: Name | None = None


class NoteDrill(Request[Noted], frozen=True, tag="note_drill"):
    """Say how far a drill on the store is, for those who watch."""

    job: Name
    """The drill's own."""
    phase: str
    text: str


class AskPlan(Request[Plan], frozen=True, tag="plan"):
    """Ask what a get() would recover if these hosts were lost."""

    job: Name
    lose: tuple[str, ...] = ()


class AskLastCopies(Request[LastCopies], frozen=True, tag="last_copies"):
    """Ask what would be lost with the copies in RAM, of one job or of all."""

    job: Name | None = None


class VerifyStore(Request[VerifyResult], frozen=True, tag="verify"):
    """Have every host digest everything again, of one job or of all (R30)."""

    job: Name | None = None


class AwaitStep(Request[StepAwaited], frozen=True, tag="await_step"):
    """Wait for a committed step newer than the one that a reader has; None: for any (R36)."""

    job: Name
    than: Unsigned | None
    of_attempt: Unsigned | None
    """That put it, if the reader knows: any step of a later attempt is newer."""
    within_s: Seconds


class LeaseStep(Request[StepLeased], frozen=True, kw_only=True, tag="lease_step"):
    """Keep a committed step while a reader reads it; None: the newest (R36)."""

    job: Name
    step: Unsigned | None
    of_attempt: Unsigned | None = None
    lease: str
    """Its own name of the lease: the same when it asks again."""
    limit_s: Seconds


class EndLease(Request[Noted], frozen=True, tag="end_lease"):
    """Let go of a leased step."""

    job: Name
    lease: str


class PinStep(Request[PinNoted], frozen=True, tag="pin"):
    """Keep a committed step in RAM under a name (R19); the name TRUSTED only moves on, to a newer step (R38)."""

    job: Name
    name: str
    step: Unsigned | None
    of_attempt: Unsigned | None = None


class UnpinStep(Request[PinNoted], frozen=True, tag="unpin"):
    """Take a name back."""

    job: Name
    name: str


class PersistStep(Request[Persisted], frozen=True, tag="persist"):
    """Write a committed step to durable storage now; None: the newest."""

    job: Name
    step: Unsigned | None
    within_s: float


class RemoveJob(Request[Removed], frozen=True, tag="rm"):
    """Drop every copy of a job in RAM, and its facts."""

    job: Name
    force: bool = False


class DrainHost(Request[DrainNoted], frozen=True, tag="drain"):
    """Give notice that a host will go; None: take it back."""

    host: str
    within_s: float | None


RankCall = (
    Join
    | Rewind
    | Get
    | Withdraw
    | ReserveRoom
    | SkipStep
    | RetireStep
    | ReportDiffering
    | ReportNonfinite
    | CloseStore
    | ShardLoaded
    | AskRollCall
    | ReadStep
    | AskStatus
    | AskSteps
    | AskEvents
    | NoteDrill
    | AskPlan
    | AskLastCopies
    | VerifyStore
    | AwaitStep
    | LeaseStep
    | EndLease
    | PinStep
    | UnpinStep
    | PersistStep
    | RemoveJob
    | DrainHost
    | AnswerPutEarly
)


class Called(Message, frozen=True, tag="called"):
    """A call on its way: of a rank or tool, or of its holder, which passes it on to the controller."""

    id: Unsigned
    """The sender's own number of it: the answer has it too."""
    call: RankCall


decode_call: Decoder[RankCall] = Decoder(RankCall)
