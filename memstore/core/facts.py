"""Facts: what cannot be read off the bytes, journalled beside every arena (R16). Pure.

A fact is a frozen dataclass; on the wire and in a journal it is a small dict with its type, its
sequence number and the term of the controller that recorded it. Unknown types are refused: a
journal of a newer format must not be half understood.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from memstore.errors import ProtocolError


@dataclass(frozen=True, slots=True)
class HostJoined:
    """A host was seen for the first time, with its labels (R16)."""

    host_id: str
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class HostDraining:
    """A host will be taken away at this moment (wall clock), or not any more (None)."""

    host_id: str
    until_s: float | None


@dataclass(frozen=True, slots=True)
class AttemptOpened:
    """All ranks of one launch arrived; the next ordinal begins (R20)."""

    job: str
    attempt: int
    world_size: int
    parent: int | None
    key: str | None
    is_fresh: bool
    level_asked: str  # coarsest spread level this job ever had (R18)
    config: Mapping[str, Any]  # the job fields of Config
    nonces: tuple[str, ...]  # by rank
    hosts: tuple[str, ...]  # by rank
    launcher: str
    wall_s: float
    order: tuple[int, ...] = ()  # by rank: what the launcher calls it; empty: the same (R27)
    shard_of: tuple[int, ...] = ()  # by rank: the shard whose state it holds, as others do; empty: all have their own
    copiers: tuple[int, ...] = ()  # ranks that copy what their shard's ranks share (R34)


@dataclass(frozen=True, slots=True)
class RestoreDecided:
    """One get round's answer for all ranks: the step adopted, or None for nothing stored (R23)."""

    job: str
    attempt: int
    round: int
    from_attempt: int | None
    step: int | None
    wall_s: float


@dataclass(frozen=True, slots=True)
class StepCommitted:
    """Every shard of the step is sealed on as many hosts as the rule asks (R18)."""

    job: str
    attempt: int
    step: int
    world_size: int
    digests: tuple[str, ...]  # by rank
    hosts: tuple[tuple[str, ...], ...]  # by rank: who had a copy
    level: str
    is_degraded: bool
    reason: str
    wall_s: float


@dataclass(frozen=True, slots=True)
class StepRetired:
    """A step that may not be offered again, with the evidence, or may be after all: the last word counts (R25)."""

    job: str
    attempt: int
    step: int
    reason: str  # "": every host was told to check its digests
    is_torn: bool = False  # its bytes are of no one moment, though they match their digests: nothing lifts that


@dataclass(frozen=True, slots=True)
class StepAbandoned:
    """A step that some rank skipped: it will never be committed (R12)."""

    job: str
    attempt: int
    step: int
    resume: int = 0  # all ranks put again from here: what lies between is abandoned with it


@dataclass(frozen=True, slots=True)
class RoomClaimed:
    """Every host has room for the attempt: its ranks may put (R10)."""

    job: str
    attempt: int
    needs: tuple[int, ...]  # slots of one version, by rank


@dataclass(frozen=True, slots=True)
class CadenceSet:
    """All ranks of an attempt go by this distance between puts from some steps after `step` on (R33)."""

    job: str
    attempt: int
    step: int
    steps: int


@dataclass(frozen=True, slots=True)
class RestoreReleased:
    """Every rank's shard is staged and checked: whoever was not told yet gets the same step (R23)."""

    job: str
    attempt: int


@dataclass(frozen=True, slots=True)
class AttemptClosed:
    """Every rank closed its store: the job is idle and its key is spent."""

    job: str
    attempt: int


@dataclass(frozen=True, slots=True)
class StepPinned:
    """A person named a committed step: it stays in RAM, in room of its own, until the name is taken back (R19)."""

    job: str
    name: str
    attempt: int
    step: int
    needs: tuple[int, ...]  # slots, by rank
    wall_s: float


@dataclass(frozen=True, slots=True)
class StepUnpinned:
    """The name was taken back: retention decides about the step again."""

    job: str
    name: str


@dataclass(frozen=True, slots=True)
class JobForked:
    """A job begins with a committed step of another one, over the same chunks (R32)."""

    job: str
    attempt: int  # what stands for an attempt of it: closed, and the parent of the first one that connects
    step: int
    world_size: int
    from_job: str
    from_attempt: int
    digests: tuple[str, ...]  # by rank: of its own manifests
    hosts: tuple[tuple[str, ...], ...]  # by rank: who has the chunks
    seats: tuple[str, ...]  # by rank: the host that counts as its own
    needs: tuple[int, ...]  # slots, by rank
    level: str
    level_asked: str  # coarsest spread level that the origin ever had (R18)
    is_degraded: bool
    reason: str
    config: Mapping[str, Any]
    nonce: str  # of the call, which may be asked again
    wall_s: float


@dataclass(frozen=True, slots=True)
class JobRemoved:
    """The job was removed by name: nothing of it is history any more."""

    job: str
    attempt: int = 0  # the last one: a job of this name goes on counting, so that no id comes twice


Fact = (
    HostJoined
    | HostDraining
    | AttemptOpened
    | RoomClaimed
    | CadenceSet
    | RestoreDecided
    | RestoreReleased
    | StepCommitted
    | StepRetired
    | StepAbandoned
    | AttemptClosed
    | StepPinned
    | StepUnpinned
    | JobForked
    | JobRemoved
)
_TYPES: dict[str, type[Any]] = {
    cls.__name__: cls
    for cls in (
        HostJoined,
        HostDraining,
        AttemptOpened,
        RoomClaimed,
        CadenceSet,
        RestoreDecided,
        RestoreReleased,
        StepCommitted,
        StepRetired,
        StepAbandoned,
        AttemptClosed,
        StepPinned,
        StepUnpinned,
        JobForked,
        JobRemoved,
    )
}


@dataclass(frozen=True, slots=True)
class Entry:
    """A fact with its place in the journal: ordered by (term, seq)."""

    term: int
    seq: int
    fact: Fact


def entry_to_wire(entry: Entry) -> dict[str, Any]:
    """Return a journal entry as plain values."""
    values = {f.name: getattr(entry.fact, f.name) for f in fields(entry.fact)}
    return {"type": type(entry.fact).__name__, "term": entry.term, "seq": entry.seq, "value": values}


def entry_from_wire(value: Any) -> Entry:
    """Return the entry that `entry_to_wire` wrote; ProtocolError if it is not one."""
    try:
        cls = _TYPES[value["type"]]
        raw = {name: _tuples(item) for name, item in value["value"].items()}
        return Entry(int(value["term"]), int(value["seq"]), cls(**raw))
    except (KeyError, TypeError, ValueError) as exc:
        raise ProtocolError(f"not a journal fact this version understands: {exc!r}") from exc


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value
