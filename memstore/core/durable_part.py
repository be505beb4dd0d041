"""Layout of a durable part: one shard's manifest and chunks in one file. Pure.

    offset 0                 header, HEADER_BYTES
    HEADER_BYTES             manifest, manifest_nbytes
    ... directly after       chunk 0, chunk 1, ...: all of chunk_bytes but the last

The header goes in last and carries its own digest, and the sizes in it must add up to the file's, so a part cut short
or altered in its frame is refused before anything is allocated. Chunk bytes are checked by the reader against the
manifest. Read `durable_marker.py` next.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import xxhash

from memstore.errors import IntegrityError

VERSION = 1
MANIFEST_LIMIT_BYTES = 256 << 20  # a million tensors with names of a hundred bytes fit twice
_MAGIC = b"MEMSPART"
_FIELDS = struct.Struct("<8sHxxIQQ16s")  # magic, version, manifest, chunk, payload bytes, manifest digest
_CHECK = struct.Struct("<Q")  # xxh3-64 over the fields
HEADER_BYTES = _FIELDS.size + _CHECK.size


@dataclass(frozen=True, slots=True)
class PartHeader:
    """Sizes of a part; `payload_nbytes` is the sum of its chunks."""

    manifest_nbytes: int
    chunk_bytes: int  # 0 only if there are no chunks
    payload_nbytes: int
    digest: str  # hex xxh3-128 of the manifest: the shard's digest (R14)

    def encode(self) -> bytes:
        """Return the HEADER_BYTES that start the file."""
        fields = _FIELDS.pack(
            _MAGIC, VERSION, self.manifest_nbytes, self.chunk_bytes, self.payload_nbytes, bytes.fromhex(self.digest)
        )
        return fields + _CHECK.pack(xxhash.xxh3_64_intdigest(fields))

    @property
    def chunks_count(self) -> int:
        """Number of chunks in the part."""
        return -(-self.payload_nbytes // self.chunk_bytes) if self.chunk_bytes else 0

    def chunk_range(self, index: int) -> tuple[int, int]:
        """Return (file offset, bytes) of chunk `index`; out of range is an IntegrityError."""
        if not 0 <= index < self.chunks_count:
            raise IntegrityError(f"chunk {index} was asked of a part that has {self.chunks_count} chunks")
        start = index * self.chunk_bytes
        return HEADER_BYTES + self.manifest_nbytes + start, min(self.chunk_bytes, self.payload_nbytes - start)


def decode_header(data: bytes, *, file_nbytes: int) -> PartHeader:
    """Return the header in the file's first bytes, checked against the file's size.

    Raises:
        IntegrityError: not a part, another version, damaged, or not as long as it says; the message has the numbers.
    """
    if len(data) < HEADER_BYTES:
        raise IntegrityError(f"cut short: {len(data)} bytes, a part's header alone has {HEADER_BYTES}")
    magic, version, manifest_nbytes, chunk_bytes, payload_nbytes, digest = _FIELDS.unpack_from(data)
    if magic != _MAGIC:
        raise IntegrityError(f"not a memstore part: it starts with {magic!r} instead of {_MAGIC!r}")
    if version != VERSION:
        raise IntegrityError(f"part format {version}, this memstore reads {VERSION}: read it with its writer's version")
    if _CHECK.unpack_from(data, _FIELDS.size)[0] != xxhash.xxh3_64_intdigest(data[: _FIELDS.size]):
        raise IntegrityError("the part's header does not match its own digest")
    expected = HEADER_BYTES + manifest_nbytes + payload_nbytes
    if file_nbytes != expected:
        raise IntegrityError(f"the part has {file_nbytes} bytes where its header says {expected}")
    if manifest_nbytes > MANIFEST_LIMIT_BYTES:
        raise IntegrityError(f"manifest of {manifest_nbytes} bytes, the limit is {MANIFEST_LIMIT_BYTES}")
    if payload_nbytes and not chunk_bytes:
        raise IntegrityError(f"{payload_nbytes} bytes in chunks of 0 bytes")
    return PartHeader(manifest_nbytes, chunk_bytes, payload_nbytes, digest.hex())
