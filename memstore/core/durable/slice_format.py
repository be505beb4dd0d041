"""Layout of a durable part: a shard's manifest and chunks, cut into slices of one file or object each (R31). Pure.

A slice is a run of whole chunks, and which chunks follows from the shard's spec alone: every writer of slice 3 of a
shard, now or in a retry, writes the same chunks under the same name. The name carries the shard's digest, so slices of
different bytes never meet. One file:

    offset 0         fields, then the stored size of every chunk, then xxh3-64 of both
    ... after that   the manifest, in slice 0 only
    ... after that   chunks, as stored: plain, or compressed where the top bit of the size is set, or encrypted

The sizes must add up to the file's, so a slice cut short or altered in its frame is refused before anything is
allocated. Chunk bytes are checked by the reader against the manifest. Read `markers.py` next.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import xxhash

from memstore.errors import IntegrityError
from recovery.inventory import ShardSpec

VERSION = 2
MANIFEST_LIMIT_BYTES = 256 << 20  # a million tensors with names of a hundred bytes fit twice
SLICE_LIMIT_BYTES = 64 << 20  # a writer holds one in memory; large enough that a request's cost vanishes
SLICES_WANTED = 16  # of a smaller shard, so that several hosts can share it and a death costs little
SALT_BYTES, KEY_NAME_BYTES = 16, 8
TAG_BYTES = 16  # that encryption adds to every piece
_MAGIC = b"MEMSPART"
# magic, version, slice, chunk bytes, payload bytes of the shard, chunks here, manifest as stored, digest, key, salt
_FIELDS = struct.Struct(f"<8sHxxIIQII16s{KEY_NAME_BYTES}s{SALT_BYTES}s")
_SIZE = struct.Struct("<I")
_CHECK = struct.Struct("<Q")
_COMPRESSED = 1 << 31


def slice_chunks(spec: ShardSpec) -> int:
    """Return how many chunks a slice of this shard has; the last one may have fewer."""
    if not spec.chunks_count:
        return 1
    most = max(1, SLICE_LIMIT_BYTES // spec.chunk_bytes)
    return min(most, max(2, -(-spec.chunks_count // SLICES_WANTED)))


def slices_count(spec: ShardSpec) -> int:
    """Return the number of slices: at least one, which has the manifest."""
    return max(1, -(-spec.chunks_count // slice_chunks(spec)))


def slice_range(spec: ShardSpec, number: int) -> range:
    """Return the chunks of slice `number`."""
    each = slice_chunks(spec)
    return range(number * each, min((number + 1) * each, spec.chunks_count))


def slice_nbytes(spec: ShardSpec, number: int) -> int:
    """Return the payload bytes of a slice."""
    return sum(spec.chunk_nbytes(index) for index in slice_range(spec, number))


def header_nbytes(spec: ShardSpec, number: int) -> int:
    """Return the size of a slice's header, which follows from its spec."""
    return _FIELDS.size + _SIZE.size * len(slice_range(spec, number)) + _CHECK.size


@dataclass(frozen=True, slots=True)
class SliceHeader:
    """What a slice's file says of itself. `key_name` and `salt` are zero bytes unless it is encrypted."""

    number: int
    spec: ShardSpec
    manifest_nbytes: int  # as stored; 0 but in slice 0
    stored_nbytes: tuple[int, ...]  # of every chunk here
    is_compressed: tuple[bool, ...]
    key_name: bytes = bytes(KEY_NAME_BYTES)
    salt: bytes = bytes(SALT_BYTES)

    @property
    def is_encrypted(self) -> bool:
        """Say whether manifest and chunks need a key."""
        return any(self.key_name)

    @property
    def nbytes(self) -> int:
        """Size of the header itself."""
        return header_nbytes(self.spec, self.number)

    def encode(self) -> bytes:
        """Return the bytes that start the file."""
        fields = self.frame()
        fields += b"".join(
            _SIZE.pack(nbytes | _COMPRESSED * packed)
            for nbytes, packed in zip(self.stored_nbytes, self.is_compressed, strict=True)
        )
        return fields + _CHECK.pack(xxhash.xxh3_64_intdigest(fields))

    def frame(self) -> bytes:
        """Return the fields alone: what every encrypted piece of the slice is bound to."""
        return _FIELDS.pack(
            _MAGIC,
            VERSION,
            self.number,
            self.spec.chunk_bytes,
            self.spec.nbytes,
            len(self.stored_nbytes),
            self.manifest_nbytes,
            bytes.fromhex(self.spec.digest),
            self.key_name,
            self.salt,
        )

    def chunk_place(self, index: int) -> tuple[int, int, bool]:
        """Return (file offset, stored bytes, is compressed) of chunk `index` of the shard."""
        here = slice_range(self.spec, self.number)
        if index not in here:
            raise IntegrityError(f"chunk {index} was asked of a slice that has chunks {here.start} to {here.stop - 1}")
        at = index - here.start
        offset = self.nbytes + self.manifest_nbytes + sum(self.stored_nbytes[:at])
        return offset, self.stored_nbytes[at], self.is_compressed[at]


def decode_header(data: bytes, spec: ShardSpec, number: int, *, file_nbytes: int) -> SliceHeader:
    """Return the header in the file's first bytes, checked against the shard's spec and the file's size.

    Raises:
        IntegrityError: not a slice, another version, damaged, of other bytes, or not as long as it says.
    """
    wanted = header_nbytes(spec, number)
    if len(data) < _FIELDS.size:
        raise IntegrityError(f"cut short: {len(data)} bytes, a slice's header has {wanted}")
    magic, version, found, chunk_bytes, payload_nbytes, chunks_count, manifest_nbytes, digest, key_name, salt = (
        _FIELDS.unpack_from(data)
    )
    if magic != _MAGIC:
        raise IntegrityError(f"not a memstore part: it starts with {magic!r} instead of {_MAGIC!r}")
    if version != VERSION:
        raise IntegrityError(f"part format {version}, this memstore reads {VERSION}: read it with its writer's version")
    if len(data) < wanted:
        raise IntegrityError(f"cut short: {len(data)} bytes, the slice's header has {wanted}")
    if _CHECK.unpack_from(data, wanted - _CHECK.size)[0] != xxhash.xxh3_64_intdigest(data[: wanted - _CHECK.size]):
        raise IntegrityError("the slice's header does not match its own digest")
    is_ours = (found, digest.hex(), payload_nbytes) == (number, spec.digest, spec.nbytes)
    if not is_ours or (chunk_bytes, chunks_count) != (spec.chunk_bytes, len(slice_range(spec, number))):
        raise IntegrityError(
            f"holds {chunks_count} chunks of {chunk_bytes} bytes, slice {found} of {payload_nbytes} bytes of shard "
            f"{digest.hex()}; asked was slice {number} of {spec.nbytes} bytes of {spec.digest}"
        )
    sizes = [_SIZE.unpack_from(data, _FIELDS.size + _SIZE.size * at)[0] for at in range(chunks_count)]
    stored, packed = tuple(size & ~_COMPRESSED for size in sizes), tuple(bool(size & _COMPRESSED) for size in sizes)
    if file_nbytes != wanted + manifest_nbytes + sum(stored):
        raise IntegrityError(
            f"the slice has {file_nbytes} bytes where its header says {wanted + manifest_nbytes + sum(stored)}"
        )
    if manifest_nbytes > MANIFEST_LIMIT_BYTES or bool(manifest_nbytes) != (number == 0):
        raise IntegrityError(
            f"manifest of {manifest_nbytes} bytes in slice {number}: slice 0 has it, "
            f"the limit is {MANIFEST_LIMIT_BYTES}"
        )
    header = SliceHeader(number, spec, manifest_nbytes, stored, packed, key_name, salt)
    for index in slice_range(spec, number):
        _, nbytes, is_compressed = header.chunk_place(index)
        plain, nbytes = spec.chunk_nbytes(index), nbytes - TAG_BYTES * header.is_encrypted
        if not 0 < nbytes < plain if is_compressed else nbytes != plain:
            raise IntegrityError(f"chunk {index} of {plain} bytes is said to take {nbytes}")
    return header
