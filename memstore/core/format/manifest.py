"""What is in a shard: the layout of its state and the digest of every chunk (R14).

Pure. A manifest is encoded deterministically; the digest of those bytes is the shard's digest, the
name that seals, facts and transfers use. Chunk sizes are not written down: they follow from
`nbytes` and `chunk_bytes`, so a manifest whose sizes contradict each other cannot be expressed.

Wire form, one msgpack array: [format, job, attempt, step, rank, world_size, nbytes, chunk_bytes,
layout, all chunk digests joined].
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import msgspec
import xxhash

from memstore.config import check_name
from memstore.core.format.releases import reader_of
from memstore.errors import ConfigError, ManifestMismatch, ProtocolError
from recovery.inventory import ShardId, ShardSpec, Summand

FORMAT = 1
PARITY_FORMAT = 3  # its chunks are rows, and its layout has the manifests of the shards that they are the sum of
DIGEST_BYTES = 16  # xxh3-128
CHUNK_BYTES_MAX = 1 << 30
LAYOUT_BYTES_MAX = 64 << 20  # plain objects live in the layout: 64 MiB is some 10 million numbers
MANIFEST_BYTES_MAX = 2 * LAYOUT_BYTES_MAX  # a layout and the digests of a 16 TiB shard in 4 MiB chunks
_INT_LIMIT = 1 << 62
_SUMMANDS = msgspec.msgpack.Decoder(tuple[Annotated[int, msgspec.Meta(ge=1, le=2)], list[tuple[int, bytes]]])
_ROW = msgspec.msgpack.Decoder(tuple[int, str, int, int, int, int, int, int, bytes, bytes])


@dataclass(frozen=True, slots=True)
class Chunk:
    """At most `chunk_bytes` of a shard, named by its content digest (16 bytes)."""

    digest: bytes
    nbytes: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """One shard: its layout (see `layout.py`) and its chunks in stream order."""

    shard: ShardId
    world_size: int
    layout: bytes
    nbytes: int
    chunk_bytes: int
    chunks: tuple[Chunk, ...]
    format: int = FORMAT


def chunk_digest(view: bytes | bytearray | memoryview) -> bytes:
    """Return the 16-byte xxh3-128 of a chunk. It finds faults, not forgers (R14)."""
    return xxhash.xxh3_128_digest(view)


def split_digests(joined: bytes | bytearray) -> list[bytes]:
    """Return the digests of chunks that stand joined, one by one."""
    return [bytes(joined[at : at + DIGEST_BYTES]) for at in range(0, len(joined), DIGEST_BYTES)]


def chunk_hasher() -> xxhash.xxh3_128:
    """Return what gives `chunk_digest` of a chunk that comes in pieces: update(view), then digest()."""
    return xxhash.xxh3_128()


def shard_digest(data: bytes) -> str:
    """Return the shard's digest: hex xxh3-128 of its encoded manifest (R14)."""
    return xxhash.xxh3_128_hexdigest(data)


def chunk_sizes(nbytes: int, chunk_bytes: int) -> list[int]:
    """Return the size of every chunk of a stream: all `chunk_bytes` but the last."""
    return [min(chunk_bytes, nbytes - start) for start in range(0, nbytes, chunk_bytes)]


def spec_of(manifest: Manifest, digest: str) -> ShardSpec:
    """Return what planners need to know of a shard; `digest` is `shard_digest` of its manifest."""
    spare, rows = _summand_rows(manifest.layout) if manifest.shard.is_parity else (0, [])
    summands = tuple(Summand(rank, shard_digest(data), decode_manifest(data).nbytes) for rank, data in rows)
    count = len(manifest.chunks)
    return ShardSpec(digest, manifest.nbytes, manifest.chunk_bytes, count, manifest.world_size, summands, spare)


def encode_summands(manifests: Mapping[int, bytes], spare: int) -> bytes:
    """Return the layout of parity: how many rows a chunk is in, and by rank the manifests of the shards added up."""
    return msgspec.msgpack.encode((spare, sorted(manifests.items())))


def summand_manifest(parity: Manifest, rank: int) -> bytes | None:
    """Return the manifest of a rank's shard that is added into this parity; None if none is."""
    return dict(_summand_rows(parity.layout)[1]).get(rank)


def _summand_rows(layout: bytes) -> tuple[int, list[tuple[int, bytes]]]:
    try:
        return _SUMMANDS.decode(layout)
    except (ValueError, msgspec.MsgspecError) as error:
        raise ManifestMismatch(f"the layout of parity names no shards: {error}") from None


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the manifest's bytes; equal manifests give equal bytes.

    Raises:
        ManifestMismatch: the manifest contradicts itself or passes a limit, so that no reader could decode it.
    """
    _check(manifest)
    is_count_right = len(manifest.chunks) == -(-manifest.nbytes // manifest.chunk_bytes)
    sizes = chunk_sizes(manifest.nbytes, manifest.chunk_bytes) if is_count_right else []
    if not is_count_right or [chunk.nbytes for chunk in manifest.chunks] != sizes:
        raise ManifestMismatch(
            f"manifest of {manifest.shard}: {len(manifest.chunks)} chunks of "
            f"{sum(chunk.nbytes for chunk in manifest.chunks)} bytes do not cut {manifest.nbytes} bytes into chunks of "
            f"{manifest.chunk_bytes}; every chunk but the last must be full"
        )
    shard = manifest.shard
    row = (manifest.format, shard.job, shard.attempt, shard.step, shard.rank, manifest.world_size, manifest.nbytes)
    data = msgspec.msgpack.encode(
        (*row, manifest.chunk_bytes, manifest.layout, b"".join(chunk.digest for chunk in manifest.chunks))
    )
    if len(data) > MANIFEST_BYTES_MAX:
        raise ManifestMismatch(
            f"manifest of {shard} takes {len(data)} bytes, the limit is {MANIFEST_BYTES_MAX}; use larger chunks"
        )
    return data


def decode_manifest(data: bytes | bytearray | memoryview) -> Manifest:
    """Return the manifest in `data`, which may come from anywhere.

    Raises:
        ProtocolError: `data` is not a manifest, or passes a limit.
        ManifestMismatch: it is one, of another format or with numbers that contradict each other.
    """
    if len(data) > MANIFEST_BYTES_MAX:
        raise ProtocolError(f"a manifest of {len(data)} bytes is over the limit of {MANIFEST_BYTES_MAX}")
    try:
        row = _ROW.decode(data)
    except (ValueError, msgspec.MsgspecError) as error:
        raise ProtocolError(f"{len(data)} bytes are not a manifest: {error}") from None
    form, job, attempt, step, rank, world_size, nbytes, chunk_bytes, layout, digests = row
    if not (0 <= nbytes < _INT_LIMIT and 0 < chunk_bytes <= CHUNK_BYTES_MAX):
        raise ManifestMismatch(f"manifest has nbytes={nbytes}, chunk_bytes={chunk_bytes} (at most {CHUNK_BYTES_MAX})")
    count = -(-nbytes // chunk_bytes)
    if len(digests) != count * DIGEST_BYTES:
        raise ManifestMismatch(
            f"manifest of {nbytes} bytes in chunks of {chunk_bytes} needs {count} digests and has "
            f"{len(digests) / DIGEST_BYTES:g}"
        )
    pieces = split_digests(digests)
    chunks = tuple(Chunk(digest, size) for digest, size in zip(pieces, chunk_sizes(nbytes, chunk_bytes), strict=True))
    shard = ShardId(job, attempt, step, rank, form == PARITY_FORMAT)
    manifest = Manifest(shard, world_size, layout, nbytes, chunk_bytes, chunks, format=form)
    _check(manifest)
    return manifest


def _check(manifest: Manifest) -> None:
    """Raise ManifestMismatch unless every field is in range and every digest has the right length."""
    shard = manifest.shard
    if manifest.format != (PARITY_FORMAT if shard.is_parity else FORMAT):
        raise ManifestMismatch(
            f"manifest has format {manifest.format}; this memstore reads formats {FORMAT} and {PARITY_FORMAT}: "
            f"{reader_of('manifest', manifest.format)}"
        )
    try:
        check_name("job", shard.job)
    except ConfigError as error:
        raise ManifestMismatch(f"manifest: {error}") from None
    if not (0 <= shard.attempt < _INT_LIMIT and 0 <= shard.step < _INT_LIMIT):
        raise ManifestMismatch(f"manifest has attempt {shard.attempt} and step {shard.step}; both are 0 or more")
    if not 0 <= shard.rank < manifest.world_size < _INT_LIMIT:
        raise ManifestMismatch(f"manifest has rank {shard.rank} in a world of {manifest.world_size}")
    if not (0 <= manifest.nbytes < _INT_LIMIT and 0 < manifest.chunk_bytes <= CHUNK_BYTES_MAX):
        raise ManifestMismatch(f"manifest has nbytes={manifest.nbytes}, chunk_bytes={manifest.chunk_bytes}")
    if len(manifest.layout) > LAYOUT_BYTES_MAX:
        raise ManifestMismatch(f"manifest has a layout of {len(manifest.layout)} bytes over {LAYOUT_BYTES_MAX}")
    if any(len(chunk.digest) != DIGEST_BYTES for chunk in manifest.chunks):
        raise ManifestMismatch(f"manifest of {shard} has a chunk digest that is not {DIGEST_BYTES} bytes long")


def manifest_name(shard: ShardId, digest: str) -> str:
    """Return the name under which a holder keeps a shard's manifest: a file name for every job's name.

    Copies of one shard with different digests are different shards and get different names (R14).
    """
    key = repr((shard.job, shard.attempt, shard.step, shard.rank, digest))
    return hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=20).hexdigest()
