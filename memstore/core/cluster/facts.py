"""Facts: what cannot be read off the bytes, journalled beside every arena (R16). Pure.

How a fact lies in a journal and on the wire: `records.py`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import product

import msgspec
import xxhash

from memstore.core.wire.codec import Setting

TRIES_MAX = 256  # of values that could be the unknown ones


class ByRank:
    """One text a rank, of which a record names only the digest over all; each host keeps those that concern it (R16).

    So a fact costs every journal the same, however many ranks there are. The controller that decides knows all values,
    a later one those that hosts show it: `learn`, or `complete` with values found elsewhere that have the root.
    One digest over the list, and no tree: nobody asks for a proof of a part.
    """

    __slots__ = ("_ranks_on", "count", "keepers", "root", "values")

    def __init__(self, count: int, root: bytes) -> None:
        """Begin with nothing known but how many values there are, and their root digest."""
        self.count, self.root = count, root
        self.values: dict[int, str] = {}  # by rank, as far as they are known
        self.keepers: dict[int, tuple[str, ...]] = {}  # by rank: hosts that keep the value, as far as they are known
        self._ranks_on: dict[str, list[int]] | None = None  # the same by host, once it is asked for

    @classmethod
    def of(cls, values: Sequence[str], keepers: Iterable[Sequence[str]]) -> ByRank:
        """Return a column of which all is known.

        Args:
            values: By rank.
            keepers: By rank: the hosts that are to keep its value.
        """
        made = cls(len(values), root_of(values))
        made.values = dict(enumerate(values))
        made.keepers = {rank: tuple(hosts) for rank, hosts in enumerate(keepers)}
        return made

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, rank: int) -> str:
        """Return a rank's value; "", which is none, while it is unknown."""
        return self.values.get(rank, "")

    def __iter__(self) -> Iterator[str]:
        return (self.values.get(rank, "") for rank in range(self.count))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ByRank) and (self.count, self.root) == (other.count, other.root)

    def __hash__(self) -> int:
        return hash((self.count, self.root))

    def __repr__(self) -> str:
        return f"ByRank({len(self.values)} of {self.count} known, root {self.root.hex()})"

    @property
    def is_known(self) -> bool:
        """Return whether all values are known."""
        return len(self.values) == self.count

    def is_possible(self, rank: int, value: str) -> bool:
        """Return whether a rank may have this value: it has it, or its value is unknown."""
        return self.values.get(rank, value) == value

    def part(self, host: str) -> dict[int, str]:
        """Return the values that a host is to keep, by rank."""
        if self._ranks_on is None:
            together, self._ranks_on = dict[tuple[str, ...], list[int]](), {}
            for rank in sorted(self.keepers):
                together.setdefault(self.keepers[rank], []).append(rank)
            for hosts, ranks in together.items():
                for each in hosts:
                    self._ranks_on[each] = sorted([*self._ranks_on.get(each, ()), *ranks])
        return {rank: self.values[rank] for rank in self._ranks_on.get(host, ())}

    def learn(self, host: str, values: Mapping[int, str]) -> None:
        """Take the values that a host keeps."""
        for rank, value in values.items():
            kept = self.keepers.get(rank, ())
            if rank < self.count and host not in kept:
                self.values.setdefault(rank, value)
                self.keepers[rank], self._ranks_on = (*kept, host), None

    def merge(self, other: ByRank) -> None:
        """Take what another reading of the same fact has learnt."""
        for rank, hosts in other.keepers.items():
            for host in hosts:
                self.learn(host, {rank: other.values[rank]})

    def complete(self, options: Mapping[int, Collection[str]]) -> bool:
        """Take unknown values from options, by rank, if some choice of them has the root; return whether all are known.

        Copies that were made after the fact was written are on hosts that do not keep its values.
        """
        unknown = [rank for rank in range(self.count) if rank not in self.values]
        if not unknown:
            return True
        choices = [sorted(options.get(rank, ())) for rank in unknown]
        if not 0 < math.prod(map(len, choices)) <= TRIES_MAX:
            return False
        values = list(self)
        for chosen in product(*choices):
            for rank, value in zip(unknown, chosen, strict=True):
                values[rank] = value
            if root_of(values) == self.root:
                self.values.update(zip(unknown, chosen, strict=True))
                return True
        return False


def kept_by(values: Sequence[str], hosts: Iterable[str]) -> ByRank:
    """Return a column of which each rank's own host keeps the value; `hosts` by rank."""
    return ByRank.of(values, ((host,) for host in hosts))


def root_of(values: Iterable[str]) -> bytes:
    """Return the digest over one text a rank, in rank order."""
    return xxhash.xxh3_128_digest("\n".join(values).encode())


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
    nonces: ByRank  # each rank's own host keeps it
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
    digests: ByRank  # each host that had a copy, or the shard in its parity, keeps it
    level: str
    is_degraded: bool
    reason: str
    wall_s: float
    put_from: int = 0  # from this step on `put_steps` lie between two puts: the last word so far (R33)
    put_steps: int = 1
    others: tuple[str, ...] = ()  # hosts with copies that are none of its attempt's: those stand in the attempt's fact


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


#: By the kind of fact: its field that says something of each rank, which only some hosts keep.
COLUMNS = {"StepCommitted": "digests", "AttemptOpened": "nonces"}


def column_of(fact: FactBase) -> ByRank | None:
    """Return what a fact says of each rank and only some hosts keep, if it has such."""
    name = COLUMNS.get(type(fact).__name__)
    column: ByRank | None = getattr(fact, name) if name is not None else None
    return column


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
