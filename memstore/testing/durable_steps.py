"""Steps with known bytes on a durable tier, for the tests of every implementation of its port (R31)."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

import xxhash

from memstore.core.durable.paths import slice_name
from memstore.core.durable.slice_format import slice_range, slices_count
from memstore.core.wire.orders import Lineage
from memstore.shell.durable.tier import PartsTier
from recovery.inventory import DurableMarker, ShardId, ShardSpec, StepId

JOB = "llama3-8b"
CHUNK = 4096


def never() -> bool:
    """Answer `should_stop`: go on."""
    return False


def shard_of(step: int, rank: int = 0, attempt: int = 1) -> ShardId:
    """Return a shard of the test job."""
    return ShardId(JOB, attempt, step, rank)


def payload_of(shard: ShardId, nbytes: int) -> bytes:
    """Return the shard's bytes, the same in every run."""
    return random.Random(repr(shard)).randbytes(nbytes)


def manifest_of(shard: ShardId) -> bytes:
    """Return the shard's manifest: any bytes will do."""
    return b"manifest of " + repr(shard).encode()


def chunks_of(payload: bytes) -> list[memoryview]:
    """Cut a payload into chunks of CHUNK bytes."""
    return [memoryview(payload)[at : at + CHUNK] for at in range(0, len(payload), CHUNK)]


def spec_of(shard: ShardId, nbytes: int, world_size: int) -> ShardSpec:
    """Return what a marker says of the shard."""
    digest = xxhash.xxh3_128_hexdigest(manifest_of(shard))
    return ShardSpec(digest, nbytes, CHUNK, -(-nbytes // CHUNK), world_size)


def lineage_of(attempt: int) -> Lineage:
    """Return the lineage of an attempt without a parent."""
    return Lineage(attempt=attempt, parent_attempt=None, parent_step=None)


def write_slice(
    tier: PartsTier,
    shard: ShardId,
    number: int,
    nbytes: int = 3 * CHUNK + 7,
    *,
    should_stop: Callable[[], bool] = never,
) -> int | None:
    """Write one slice of a part of known bytes."""
    spec, chunks = spec_of(shard, nbytes, 1), chunks_of(payload_of(shard, nbytes))
    mine = [chunks[index] for index in slice_range(spec, number)]
    return tier.write_slice(shard, spec, number, manifest_of(shard), mine, should_stop=should_stop)


def write_part(tier: PartsTier, shard: ShardId, nbytes: int = 3 * CHUNK + 7) -> None:
    """Write all slices of a part of known bytes."""
    for number in range(slices_count(spec_of(shard, nbytes, 1))):
        if write_slice(tier, shard, number, nbytes) is None:
            raise AssertionError(f"slice {number} of {shard} was abandoned without a request")


def names_of(shard: ShardId, nbytes: int = 3 * CHUNK + 7) -> list[str]:
    """Return the names of the slices of a part of known bytes."""
    spec = spec_of(shard, nbytes, 1)
    return [slice_name(shard.rank, number, spec.digest) for number in range(slices_count(spec))]


def write_step(tier: PartsTier, step: int, *, ranks: int = 2, nbytes: int = 3 * CHUNK + 7) -> DurableMarker:
    """Write a step of attempt 1 with its marker."""
    specs = {}
    for rank in range(ranks):
        write_part(tier, shard_of(step, rank), nbytes)
        specs[rank] = spec_of(shard_of(step, rank), nbytes, ranks)
    marker = DurableMarker(StepId(1, step), ranks, specs, tier.key)
    tier.write_marker(JOB, marker, lineage_of(1))
    return marker


def markers_of(tier: PartsTier, job: str) -> tuple[list[DurableMarker], list[str]]:
    """Return the markers of a job, oldest first, and the faults of the others."""
    records, problems = tier.marker_records(job)
    return [record.marker for record in records], problems


def read_payload(tier: PartsTier, shard: ShardId, spec: ShardSpec) -> bytes:
    """Return all chunks of a part, in order."""
    out = bytearray(spec.nbytes)
    for index in range(spec.chunks_count):
        start = index * spec.chunk_bytes
        tier.read_chunk_into(shard, spec, index, memoryview(out)[start : start + spec.chunk_nbytes(index)])
    return bytes(out)


def files_under(root: str) -> set[str]:
    """Return every file below a folder, by its path from there."""
    return {str((Path(folder) / name).relative_to(root)) for folder, _, names in os.walk(root) for name in names}
