"""Steps with known bytes on a durable tier, for the tests of every implementation of the port (R31)."""

from __future__ import annotations

import os
import random
from pathlib import Path

import xxhash

from memstore.core.ports import DurableTier
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


def lineage_of(attempt: int) -> dict[str, int | None]:
    """Return the lineage of an attempt without a parent."""
    return {"attempt": attempt, "parent_attempt": None, "parent_step": None}


def write_part(tier: DurableTier, shard: ShardId, nbytes: int = 3 * CHUNK + 7) -> None:
    """Write one part of known bytes."""
    if not tier.write_part(shard, manifest_of(shard), chunks_of(payload_of(shard, nbytes)), should_stop=never):
        raise AssertionError(f"{shard} was abandoned though nobody asked")


def write_step(tier: DurableTier, step: int, *, ranks: int = 2, nbytes: int = 3 * CHUNK + 7) -> DurableMarker:
    """Write a step of attempt 1 with its marker."""
    specs = {}
    for rank in range(ranks):
        write_part(tier, shard_of(step, rank), nbytes)
        specs[rank] = spec_of(shard_of(step, rank), nbytes, ranks)
    marker = DurableMarker(StepId(1, step), ranks, specs)
    tier.write_marker(JOB, marker, lineage_of(1))
    return marker


def read_payload(tier: DurableTier, shard: ShardId, spec: ShardSpec) -> bytes:
    """Return all chunks of a part, in order."""
    out = bytearray(spec.nbytes)
    for index in range(spec.chunks_count):
        start = index * spec.chunk_bytes
        tier.read_chunk_into(shard, index, memoryview(out)[start : start + spec.chunk_nbytes(index)])
    return bytes(out)


def files_under(root: str) -> set[str]:
    """Return every file below a folder, by its path from there."""
    return {str((Path(folder) / name).relative_to(root)) for folder, _, names in os.walk(root) for name in names}
