"""Holder to controller: its inventory, heartbeats, results, and its ranks' calls. Pure.

In EVENT frames. A session begins with an Inventory, in pages if the journal is long (R16).
"""

from __future__ import annotations

from typing import Any

from memstore.core.wire.calls import Called
from memstore.core.wire.codec import Decoder, Message, Part, Row
from memstore.core.wire.ids import (
    Endpoints,
    Name,
    Positive,
    Unsigned,
    WireCopy,
    WireShard,
    WireSpec,
    WireStep,
    WireUse,
    WireUses,
)
from memstore.core.wire.orders import Lineage, TermNumber
from memstore.core.wire.replies import HostVerified
from memstore.core.wire.status_rows import HostStats

# -- the session --------------------------------------------------------------------------------------


class HostInventory(Message, frozen=True, tag="inventory"):
    """A host's first report to a controller: its identity, its inventory, its journal."""

    incarnation: Unsigned
    endpoints: Endpoints
    machine: str
    is_explicit: bool
    labels: dict[str, str]
    limit_bytes: Unsigned
    copies: tuple[WireCopy, ...]
    journal: tuple[bytes, ...]
    ranks: tuple[str, ...]
    """Nonces of the processes that live there."""
    up_s: float
    idle_s: float
    """How long no holder had run there before this one, if no rank has used it since."""
    has_more: bool = False
    """A page of a long journal: its records come before those of the next inventory."""


class Heartbeat(Message, frozen=True, tag="heartbeat"):
    """The holder lives; it echoes the controller's clock as it was sent last in this session (R17, R28)."""

    stats: HostStats
    trained: dict[str, WireStep]
    """The newest step that ranks here have trained, by job."""
    clock_s: float | None


class Outranked(Message, frozen=True, tag="outranked"):
    """The holder obeys a controller of a higher term."""

    term: Positive


class FactsWritten(Message, frozen=True, tag="facts_written"):
    """Every fact up to this one is in the journal (R16)."""

    seq: Unsigned


class RankArrived(Message, frozen=True, tag="rank_arrived"):
    """A process has connected that was not here."""

    nonce: str


class ProcessGone(Message, frozen=True, tag="rank_gone"):
    """The process of a rank has said bye, or is proved dead by its pid (R20)."""

    nonce: str
    has_left: bool = False
    """Its bye said that it lives, and left because another rank is lost."""


# -- copies -------------------------------------------------------------------------------------------


class PutTimes(Part, frozen=True):
    """What a rank and its holder measured of a put: for people, and for `put_every` (R33)."""

    stall_s: float
    age_s: float
    unchanged_since: Unsigned | None = None
    """The step before, if its chunks are the same."""


class Sealed(Message, frozen=True, tag="sealed"):
    """A copy as it is now, whole or with the chunks that it lacks."""

    copy: WireCopy
    put: PutTimes | None
    """None: it is no rank's own put of this host."""


class Freed(Message, frozen=True, tag="freed"):
    """Copies are not here any more, as ordered."""

    shards: tuple[WireShard, ...]
    number: TermNumber | None


class StepFreed(Message, frozen=True, tag="step_freed"):
    """Nothing of a step is here any more, as ordered."""

    job: Name
    step: WireStep
    number: TermNumber


class PushFailed(Message, frozen=True, tag="push_failed"):
    """A copy could not be made on another host."""

    shard: WireShard
    target: str
    why: str
    is_final: bool


class Fenced(Message, frozen=True, tag="fenced"):
    """Older processes are refused; the job's inventory here (R21)."""

    job: Name
    attempt: Unsigned
    copies: tuple[WireCopy, ...]


class Reserved(Message, frozen=True, tag="reserved"):
    """The room is claimed; or why it is not, with numbers (R10)."""

    job: Name
    attempt: Unsigned
    number: TermNumber
    """Of the order. A host obeys orders of room one after the other, so one of a higher number says more."""
    problem: str | None
    is_fault: bool = False
    """There may be room: the holder could not claim it."""


class CopiesVerified(Message, frozen=True, tag="copies_verified"):
    """What was found when everything was digested again; or why it could not be."""

    call: Positive
    found: HostVerified | None
    problem: str


# -- restores -----------------------------------------------------------------------------------------


class Brought(Message, frozen=True, tag="brought"):
    """A shard is in its reader's reach, and fits its `into=`; or which chunks sources lack, or what failed (R25)."""

    read: Positive
    problem: str | None
    bad: dict[str, tuple[Unsigned, ...]]
    """Source -> chunks that it says it lacks."""
    refusal: tuple[str, str] | None = None
    """Class and text of the error that the rank's get is to raise: its `into=` does not fit (R26)."""


# -- durable storage (R31) ----------------------------------------------------------------------------


class SliceWritten(Message, frozen=True, tag="slice_written"):
    """A slice is on durable storage, or why not."""

    job: Name
    step: WireStep
    rank: Unsigned
    number: Unsigned
    key: str | None
    """The name of the key that this host has; None: it did not get to look."""
    problem: str | None
    use: WireUse = WireUse("", ())


class MarkerWritten(Message, frozen=True, tag="marker_written"):
    """The marker of a step is on durable storage, or why not."""

    job: Name
    step: WireStep
    key: str
    problem: str | None
    is_trusted: bool = False
    """It says so."""


class StepRemoved(Message, frozen=True, tag="step_removed"):
    """A step was removed from durable storage, or why not; with `only_unmarked` one with a marker is still there."""

    job: Name
    step: WireStep
    only_unmarked: bool
    problem: str | None


class MarkerRow(Row, frozen=True):
    """A marker as it is on durable storage."""

    step: WireStep
    specs: dict[Unsigned, WireSpec]
    """By rank."""
    uses: WireUses
    key: str
    lineage: Lineage
    is_trusted: bool = False


class MarkersFound(Part, frozen=True):
    """What durable storage has of a job."""

    markers: tuple[MarkerRow, ...]
    key: str
    """The name of the key that this host has."""
    damaged: str
    """What is wrong with markers that are there and say nothing."""
    lacks: str
    """What is not there of the step that was to be checked."""


class MarkersListed(Message, frozen=True, tag="markers_listed"):
    """The markers of a job; or why they cannot be listed."""

    job: Name
    call: Positive
    found: MarkersFound | None
    problem: str


DurableReport = SliceWritten | MarkerWritten | StepRemoved
Report = (
    Sealed
    | Freed
    | StepFreed
    | PushFailed
    | Fenced
    | Reserved
    | CopiesVerified
    | Brought
    | DurableReport
    | MarkersListed
    | RankArrived
    | ProcessGone
    | FactsWritten
    | Called
)
HolderMessage = HostInventory | Heartbeat | Outranked | Report

decode_holder_message: Decoder[HolderMessage] = Decoder(HolderMessage)


# -- measured -----------------------------------------------------------------------------------------
# Reads what another process measured. Pure.


def seconds(value: Any) -> float:
    """Return a duration that another process measured, and 0 for what cannot be one."""
    return float(value) if isinstance(value, int | float) and 0 <= value < 1e9 else 0.0
