"""Layout of a durable part: a shard's manifest and chunks, cut into slices of one file or object each (R31). Pure.

A slice is a run of whole chunks, and which chunks follows from the shard's spec alone: every writer of slice 3 of a
shard, now or in a retry, writes the same chunks under the same name. The name carries the shard's digest, so slices of
different bytes never meet. One file:

    offset 0         fields, then the older slices that it reads, then every chunk's stored size and which of these
                     has it (0: this file has), then xxh3-64 of all that
    ... after that   the manifest, in slice 0 only
    ... after that   chunks, as stored: plain, or compressed where the top bit of the size is set, or encrypted

A chunk that an older slice has takes no bytes here: it is read there. One that has both is that one, patched with what
is here (`increments.py`).

The sizes must add up to the file's, so a slice cut short or altered in its frame is refused before anything is
allocated. Chunk bytes are checked by the reader against the manifest. Read `markers.py` next.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from memstore.core.format.releases import reader_of
from memstore.errors import IntegrityError
from recovery.inventory import ShardSpec, SliceRef, StepId

VERSION = 3
MANIFEST_LIMIT_BYTES = 256 << 20  # a million tensors with names of a hundred bytes fit twice
SLICE_LIMIT_BYTES = 64 << 20  # a writer holds one in memory; large enough that a request's cost vanishes
SLICES_WANTED = 16  # of a smaller shard, so that several hosts can share it and a death costs little
SALT_BYTES, KEY_NAME_BYTES = 16, 8
TAG_BYTES = 16  # that encryption adds to every piece
BASES_LIMIT = 16  # older slices that one may read: a reader opens them all
_MAGIC = b"MEMSPART"
# magic, version, bases, slice, chunk bytes, payload bytes of the shard, chunks, manifest as stored, digest, key, salt
_FIELDS = struct.Struct(f"<8sHBxIIQII16s{KEY_NAME_BYTES}s{SALT_BYTES}s")
_BASE = struct.Struct("<QQ16s8s")  # attempt, step, shard's digest, tag
_SIZE = struct.Struct("<IB")
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


def header_nbytes(spec: ShardSpec, number: int, bases_count: int = BASES_LIMIT) -> int:
    """Return the size of a slice's header, at most or with so many bases."""
    return _FIELDS.size + _BASE.size * bases_count + _SIZE.size * len(slice_range(spec, number)) + _CHECK.size


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
    origins: tuple[SliceRef | None, ...] = ()  # of every chunk here: the slice that has it; empty: this one has all

    @property
    def bases(self) -> list[SliceRef]:
        """The older slices that it reads, in order."""
        return sorted({ref for ref in self.origins if ref is not None})

    @property
    def is_encrypted(self) -> bool:
        """Say whether manifest and chunks need a key."""
        return any(self.key_name)

    @property
    def nbytes(self) -> int:
        """Size of the header itself."""
        return header_nbytes(self.spec, self.number, len(self.bases))

    def encode(self) -> bytes:
        """Return the bytes that start the file."""
        fields, bases = self.frame(), self.bases
        fields += b"".join(_packed(ref) for ref in bases)
        origins = self.origins or (None,) * len(self.stored_nbytes)
        fields += b"".join(
            _SIZE.pack(nbytes | _COMPRESSED * packed, 0 if ref is None else 1 + bases.index(ref))
            for nbytes, packed, ref in zip(self.stored_nbytes, self.is_compressed, origins, strict=True)
        )
        return fields + _CHECK.pack(xxhash.xxh3_64_intdigest(fields))

    def frame(self) -> bytes:
        """Return the fields alone: what every encrypted piece of the slice is bound to."""
        return _FIELDS.pack(
            _MAGIC,
            VERSION,
            len(self.bases),
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

    def origin(self, index: int) -> SliceRef | None:
        """Return the older slice that has chunk `index` of the shard; None: this one has it."""
        return self.origins[index - slice_range(self.spec, self.number).start] if self.origins else None


def _packed(ref: SliceRef) -> bytes:
    return _BASE.pack(ref.step.attempt, ref.step.step, bytes.fromhex(ref.digest), bytes.fromhex(ref.tag or "0" * 16))


def slice_tag(origins: Sequence[SliceRef | None]) -> str:
    """Return what names a slice by what it reads of others; "" if it has all of its chunks."""
    rows = b"".join(_packed(ref) if ref is not None else b"\0" for ref in origins)
    return xxhash.xxh3_64_hexdigest(rows) if any(origins) else ""


def decode_header(data: bytes, spec: ShardSpec, number: int, *, file_nbytes: int) -> SliceHeader:
    """Return the header in the file's first bytes, checked against the shard's spec and the file's size.

    Raises:
        IntegrityError: not a slice, another version, damaged, of other bytes, or not as long as it says.
    """
    if len(data) < _FIELDS.size:
        raise IntegrityError(f"cut short: {len(data)} bytes, a slice's header has {header_nbytes(spec, number, 0)}")
    magic, version, bases_count, found, chunk_bytes, payload_nbytes, chunks_count, manifest_nbytes, *names = (
        _FIELDS.unpack_from(data)
    )
    digest, key_name, salt = names
    wanted = header_nbytes(spec, number, bases_count)
    if magic != _MAGIC:
        raise IntegrityError(f"not a memstore part: it starts with {magic!r} instead of {_MAGIC!r}")
    if version != VERSION:
        raise IntegrityError(f"part format {version}, this memstore reads {VERSION}: {reader_of('slice', version)}")
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
    origins, sizes = _chunks(data, bases_count, chunks_count)
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
    header = SliceHeader(number, spec, manifest_nbytes, stored, packed, key_name, salt, origins)
    for index in slice_range(spec, number):
        _, nbytes, is_compressed = header.chunk_place(index)
        if header.origin(index) is not None and not nbytes:
            continue
        plain, nbytes = spec.chunk_nbytes(index), nbytes - TAG_BYTES * header.is_encrypted
        is_short = is_compressed or header.origin(index) is not None
        if not 0 < nbytes < plain if is_short else nbytes != plain:
            raise IntegrityError(f"chunk {index} of {plain} bytes is said to take {nbytes}")
    return header


def _chunks(data: bytes, bases_count: int, chunks_count: int) -> tuple[tuple[SliceRef | None, ...], list[int]]:
    """Return every chunk's origin and size, as they stand in a header; IntegrityError for a base that is not there."""
    bases: list[SliceRef | None] = [None]
    for at in range(bases_count):
        attempt, step, digest, tag = _BASE.unpack_from(data, _FIELDS.size + _BASE.size * at)
        bases.append(SliceRef(StepId(attempt, step), digest.hex(), tag.hex() if any(tag) else ""))
    start = _FIELDS.size + _BASE.size * bases_count
    rows = [_SIZE.unpack_from(data, start + _SIZE.size * at) for at in range(chunks_count)]
    origins = tuple(bases[at] if at <= bases_count else None for _, at in rows)
    if sorted({ref for ref in origins if ref is not None}) != bases[1:]:
        raise IntegrityError(f"the chunks are said to lie in other slices than the {bases_count} that are named")
    return origins if bases_count else (), [size for size, _ in rows]
