"""Ids and numbers as they travel: shards, specs and copies as rows of checked values. Pure.

Ids of other processes are checked here alone: a job becomes a folder name, numbers go into manifests and files. `of`
makes a row from the store's own value; `id`, `spec` or `on` returns that value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta

from memstore.core.wire.codec import Row
from recovery.inventory import Copy, ShardId, ShardSpec, SliceRef, SliceUse, StepId, Summand

UNSIGNED_LIMIT = 1 << 62
"""Every attempt, step, rank, size and count is below this, as in manifests."""

Unsigned = Annotated[int, Meta(ge=0, lt=UNSIGNED_LIMIT, description="a whole number from 0")]
Positive = Annotated[int, Meta(ge=1, lt=UNSIGNED_LIMIT, description="a whole number from 1")]
Seconds = Annotated[float, Meta(ge=0, lt=1e9, description="a time that another process measured")]
Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z", description="a name, as check_name allows")]
Digest = Annotated[str, Meta(pattern=r"^[0-9a-f]{32}\Z", description="xxh3-128 of a manifest, in hex")]
Tag = Annotated[str, Meta(pattern=r"^(?:[0-9a-f]{16})?\Z", description="a slice's tag; empty: it is whole")]
Tags = Annotated[
    str, Meta(pattern=r"^(?:[0-9a-f]{16}|-)?(?:,(?:[0-9a-f]{16}|-)?)*\Z", description="tags of slices, in order")
]
Spare = Annotated[int, Meta(ge=0, le=2, description="rows of parity that a chunk is added into; 0: none")]
ChunkDigest = Annotated[bytes, Meta(min_length=16, max_length=16, description="xxh3-128 of a chunk")]


class WireStep(Row, frozen=True):
    """A step of an attempt."""

    attempt: Unsigned
    step: Unsigned

    @classmethod
    def of(cls, step: StepId) -> WireStep:
        """Return the row of a step id."""
        return cls(step.attempt, step.step)

    @property
    def id(self) -> StepId:
        """Return the step id."""
        return StepId(self.attempt, self.step)


class Endpoint(Row, frozen=True):
    """An address and a port on which a holder listens."""

    address: str
    port: Annotated[int, Meta(ge=0, le=65_535)]

    def __str__(self) -> str:
        return f"{self.address}:{self.port}"


Endpoints = Annotated[
    tuple[Endpoint, ...], Meta(min_length=1, description="where a holder listens; the first carries its sessions, too")
]


class WireShard(Row, frozen=True):
    """A rank's shard of a step, or the parity that the rank's host keeps."""

    job: Name
    attempt: Unsigned
    step: Unsigned
    rank: Unsigned
    is_parity: bool = False

    @classmethod
    def of(cls, shard: ShardId) -> WireShard:
        """Return the row of a shard id."""
        return cls(shard.job, shard.attempt, shard.step, shard.rank, shard.is_parity)

    @property
    def id(self) -> ShardId:
        """Return the shard id."""
        return ShardId(self.job, self.attempt, self.step, self.rank, self.is_parity)


class WireSummand(Row, frozen=True):
    """A shard that is added into parity."""

    rank: Unsigned
    digest: Digest
    nbytes: Unsigned


class WireSpec(Row, frozen=True):
    """What a shard is: its manifest's digest and its sizes."""

    digest: Digest
    nbytes: Unsigned
    chunk_bytes: Unsigned
    chunks_count: Unsigned
    world_size: Unsigned
    summands: tuple[WireSummand, ...] = ()
    spare: Spare = 0

    @classmethod
    def of(cls, spec: ShardSpec) -> WireSpec:
        """Return the row of a spec."""
        summands = tuple(WireSummand(each.rank, each.digest, each.nbytes) for each in spec.summands)
        sizes = (spec.nbytes, spec.chunk_bytes, spec.chunks_count, spec.world_size)
        return cls(spec.digest, *sizes, summands, spec.spare)

    @property
    def spec(self) -> ShardSpec:
        """Return the spec."""
        summands = tuple(Summand(each.rank, each.digest, each.nbytes) for each in self.summands)
        sizes = (self.nbytes, self.chunk_bytes, self.chunks_count, self.world_size)
        return ShardSpec(self.digest, *sizes, summands, self.spare)


class WireCopy(Row, frozen=True):
    """A copy of a shard on the host that says so, with the indices of the chunks that it lacks."""

    shard: WireShard
    spec: WireSpec
    missing: tuple[Unsigned, ...]

    @classmethod
    def of(cls, copy: Copy) -> WireCopy:
        """Return the row of a copy, without its host."""
        return cls(WireShard.of(copy.shard), WireSpec.of(copy.spec), tuple(sorted(copy.missing)))

    def on(self, host_id: str) -> Copy:
        """Return the copy as one on that host."""
        return Copy(self.shard.id, self.spec.spec, host_id, frozenset(self.missing))


class WireBase(Row, frozen=True):
    """A rank's shard of an older durable step, some slices of which the same rank's slices of a newer one read."""

    attempt: Unsigned
    step: Unsigned
    digest: Digest
    tags: Tags
    """Of the one that each slice reads; "-": none."""


class WireUse(Row, frozen=True):
    """How slices of a rank lie in durable storage, in their order, and which older ones they read."""

    tags: Tags
    bases: tuple[WireBase, ...]

    @classmethod
    def of(cls, uses: Sequence[SliceUse]) -> WireUse:
        """Return the row of the uses of some slices."""
        older = [{(ref.step, ref.digest): ref.tag for ref in use.bases} for use in uses]
        bases = [
            WireBase(step.attempt, step.step, digest, ",".join(tags.get((step, digest), "-") for tags in older))
            for step, digest in sorted(set().union(*older))
        ]
        return cls(",".join(use.tag for use in uses), tuple(bases))

    @property
    def uses(self) -> tuple[SliceUse, ...]:
        """Return the uses of the slices, in their order."""
        tags = self.tags.split(",")
        read: list[list[SliceRef]] = [[] for _ in tags]
        for base in self.bases:
            for refs, tag in zip(read, base.tags.split(","), strict=False):
                if tag != "-":
                    refs.append(SliceRef(StepId(base.attempt, base.step), base.digest, tag))
        return tuple(SliceUse(tag, tuple(refs)) for tag, refs in zip(tags, read, strict=True))


WireUses = dict[Unsigned, WireUse]
"""By rank; the slices of one that is left out are all whole."""
