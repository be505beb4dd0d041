"""Facts: what cannot be read off the bytes, journalled beside every arena (R16). Pure.

How a fact lies in a journal and on the wire: `records.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from memstore.core.wire.codec import Setting


class FactBase(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True, tag_field="fact"):
    """The base of all facts; in a record the name of its class tells which one it is."""


class HostsJoined(FactBase, frozen=True):
    """Hosts were seen for the first time, with their labels (R16)."""

    labels: Mapping[str, Mapping[str, str]]  # by host


class HostDraining(FactBase, frozen=True):
    """A host will be taken away at this moment (wall clock, which only names the notice), or not any more (None)."""

    host_id: str
    until_s: float | None
    within_s: float  # from when it was recorded


class AttemptOpened(FactBase, frozen=True):
    """All ranks of one launch arrived; the next attempt begins (R20)."""

    job: str
    attempt: int
    world_size: int
    parent: int | None
    key: str | None
    is_fresh: bool
    level_asked: str  # coarsest spread level this job ever had (R18)
    config: Mapping[str, Setting]  # the job fields of Config
    nonces: tuple[str, ...]  # by rank
    hosts: tuple[str, ...]  # by rank
    launcher: str
    wall_s: float
    shard_of: tuple[int, ...] = ()  # by rank: the shard whose state it holds, as others do; empty: all have their own
    writers: tuple[int, ...] = ()  # ranks that copy what their shard's ranks share (R34)
    generation: int = 0  # of recovery in place: its launch kept the processes that were left (R20)
    groups: Mapping[str, tuple[tuple[int, int], ...]] = {}  # by name and rank: group, ranks in a row in it (R18.8)


class RestoreDecided(FactBase, frozen=True):
    """One get round's answer for all ranks: the step adopted, or None for nothing stored (R23)."""

    job: str
    attempt: int
    round: int
    from_attempt: int | None
    step: int | None
    wall_s: float


class StepCommitted(FactBase, frozen=True):
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
    put_from: int = 0  # from this step on `put_steps` lie between two puts: the last word so far (R33)
    put_steps: int = 1


class StepRetired(FactBase, frozen=True):
    """A step that may not be offered again, with the evidence, or may be after all: the last such fact counts (R25)."""

    job: str
    attempt: int
    step: int
    reason: str  # "": every host was ordered to check its digests
    is_torn: bool = False  # its bytes mix two moments, though they match their digests: retired for good


class StepSkipped(FactBase, frozen=True):
    """A step that some rank skipped: it will never be committed (R12)."""

    job: str
    attempt: int
    step: int
    resume: int = 0  # all ranks put again from here: steps between are abandoned with it


class SlotsReserved(FactBase, frozen=True):
    """Every host has room for the attempt: its ranks may put (R10)."""

    job: str
    attempt: int
    needs: tuple[int, ...]  # slots of one version, by rank
    in_flight: int  # versions of uncommitted steps
    parity_sets: tuple[tuple[int, ...], ...] = ()  # of ranks whose shards are added into one another's parity (R37)


class RestoreReleased(FactBase, frozen=True):
    """Every rank's shard is staged and checked: a rank that was not answered yet gets the same step (R23)."""

    job: str
    attempt: int


class AttemptClosed(FactBase, frozen=True):
    """Every rank closed its store: the job is idle and its key is spent."""

    job: str
    attempt: int
    ended_by: str = ""  # "ValueError on rank 0: ...": the exception that ended it; "": it ended well


class StepPinned(FactBase, frozen=True):
    """A person named a committed step: it stays in RAM, in room of its own, until the name is taken back (R19)."""

    job: str
    name: str
    attempt: int
    step: int
    needs: tuple[int, ...]  # slots, by rank
    wall_s: float


class StepUnpinned(FactBase, frozen=True):
    """The name was taken back: retention decides about the step again."""

    job: str
    name: str


class JobBranched(FactBase, frozen=True):
    """All ranks of an attempt without a step of its own have loaded one of another job: there it begins (R32)."""

    job: str
    attempt: int
    from_job: str
    from_attempt: int
    step: int


class JobRemoved(FactBase, frozen=True):
    """The job was removed, by name or by a rule: nothing of it is history any more."""

    job: str
    attempt: int = 0  # the last one: a job of this name goes on counting, so that no id comes twice
    is_forgotten: bool = False  # it had steps, and nobody used it: removed without a command (R5)


Fact = (
    HostsJoined
    | HostDraining
    | AttemptOpened
    | SlotsReserved
    | RestoreDecided
    | RestoreReleased
    | StepCommitted
    | StepRetired
    | StepSkipped
    | AttemptClosed
    | StepPinned
    | StepUnpinned
    | JobBranched
    | JobRemoved
)
