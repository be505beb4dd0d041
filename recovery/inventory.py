"""What survived: verified copies, commit facts and durable markers as plain values.

Pure. Imports nothing but the standard library. Read `lineage.py`, then `planner.py`. What every seal makes and looks up
is a tuple: made in half the time of a dataclass, and found in a tenth.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


class ShardId(NamedTuple):
    """The bytes one rank gets back for one step; or the parity that the rank's host keeps for other ranks' (R37)."""

    job: str
    attempt: int
    step: int
    rank: int
    is_parity: bool = False


class StepId(NamedTuple):
    """One step of one attempt; ordered by (attempt, step), never by the step alone (R22)."""

    attempt: int
    step: int


@dataclass(frozen=True, slots=True, order=True)
class Summand:
    """A shard that is added into another rank's parity."""

    rank: int
    digest: str
    nbytes: int


class ShardSpec(NamedTuple):
    """What a shard is: its digest names the bytes (R14)."""

    digest: str  # hex xxh3-128 of the manifest
    nbytes: int
    chunk_bytes: int  # every chunk has this size but the last
    chunks_count: int
    world_size: int
    summands: tuple[Summand, ...] = ()  # of parity: the shards in it, by rank
    spare: int = 0  # of parity: rows that each chunk is added into

    def chunk_nbytes(self, index: int) -> int:
        """Return the size of chunk `index` in bytes."""
        return min(self.chunk_bytes, self.nbytes - index * self.chunk_bytes)


class Copy(NamedTuple):
    """One replica on one host. `missing` lists chunk indices that failed their digest or are absent."""

    shard: ShardId
    spec: ShardSpec
    host: str
    missing: frozenset[int] = frozenset()
    #: The host has parity of the shard, and decodes the chunks when they are asked for: 1 from one row, 2 with factors,
    #: 3 from two rows on two hosts. 0: they are there.
    decoding: int = 0


@dataclass(frozen=True, slots=True)
class CommitFact:
    """The controller's journalled fact that a step was committed (R16, R18)."""

    step: StepId
    world_size: int
    digests: Mapping[int, str]  # rank -> shard digest, as far as a journal that is here has it
    hosts: Mapping[int, tuple[str, ...]]  # rank -> hosts that had a copy, likewise
    is_degraded: bool = False
    named: frozenset[str] = frozenset()  # hosts that may have had copies, beside those


@dataclass(frozen=True, slots=True, order=True)
class SliceRef:
    """A slice of a rank's part of a durable step, whose rank and number the context says (R31)."""

    step: StepId
    digest: str  # of the shard
    tag: str = ""  # names what it reads of other slices; "": it is whole


@dataclass(frozen=True, slots=True)
class SliceUse:
    """How a slice of a durable step lies there, and the slices of older steps that a reader of it opens as well."""

    tag: str = ""
    bases: tuple[SliceRef, ...] = ()


@dataclass(frozen=True, slots=True)
class DurableMarker:
    """A complete step on durable storage; the marker was written last (R31)."""

    step: StepId
    world_size: int
    specs: Mapping[int, ShardSpec]  # rank -> shard
    key: str = ""  # name of the key that all its slices are under; "" if they are not encrypted
    uses: Mapping[int, tuple[SliceUse, ...]] = field(default_factory=dict)  # rank -> slices; left out: all are whole
    is_trusted: bool = False  # an evaluation found it good (R38)

    def use(self, rank: int, number: int) -> SliceUse:
        """Return how a slice of a rank's part lies there."""
        return self.uses[rank][number] if rank in self.uses else SliceUse()


@dataclass(frozen=True, slots=True)
class Inventory:
    """A frozen snapshot of one job: what every answering host holds, plus facts and markers."""

    job: str
    copies: tuple[Copy, ...] = ()
    commits: tuple[CommitFact, ...] = ()
    markers: tuple[DurableMarker, ...] = ()
    retired: Mapping[StepId, str] = field(default_factory=dict)  # step -> reason it may not be offered (R25)
    abandoned: frozenset[StepId] = frozenset()  # skipped on some rank: never a candidate (R12)
    gone: frozenset[StepId] = frozenset()  # committed, and for certain no byte is left in any tier
    silent_hosts: frozenset[str] = frozenset()  # known hosts that have not answered and are not known dead (R24)
