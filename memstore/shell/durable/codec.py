"""What a slice's bytes look like in storage: as they are, or compressed, or encrypted, or both (R31).

Compression: the bytes of each element are taken apart (all first bytes, then all second bytes, ...), then zstd. Holders
do not decode layouts, so which element width pays, or none, is measured on a sample of every chunk; a chunk that does
not shrink by GAIN_MIN is stored as it is.

Encryption: AES-256-GCM. Every slice has a key of its own, HKDF-SHA256 (RFC 5869) of the key file under a random salt
of 16 bytes that stands in its header, and numbers its nonces: no nonce meets a key twice, however often a slice is
written. Every piece is bound to the slice's header, so that none can stand in another's place.

Digests (R14) are those of the plain bytes: they are taken before and checked after all of this.
"""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from memstore.core.durable.paths import other_key
from memstore.core.durable.slice_format import KEY_NAME_BYTES, SALT_BYTES, TAG_BYTES, SliceHeader, slice_range
from memstore.errors import ConfigError, IntegrityError
from recovery.inventory import ShardSpec, SliceRef

KEY_BYTES = 32
GAIN_MIN = 1.1  # below it the time to decompress costs more than the bytes
WIDTHS = (1, 2, 4, 8)  # bytes of an element
SAMPLE_BYTES, SAMPLE_PLACES = 32 << 10, 4
_LEVEL = 1  # of zstd: higher ones gain 1-2 % on weights and take several times as long


@dataclass(frozen=True)
class Codec:
    """The storage format of a job's slices. Reading needs the key alone: the header names the compression."""

    is_compressing: bool = False
    key: bytes | None = None

    @property
    def key_name(self) -> str:
        """Return the key's name for files and messages, "" without one."""
        return key_name(self.key).hex() if self.key is not None else ""

    def seal(
        self,
        spec: ShardSpec,
        number: int,
        manifest: bytes,
        chunks: Sequence[bytes],
        origins: tuple[SliceRef | None, ...] = (),
    ) -> list[bytes]:
        """Return the pieces of a slice's file: header, manifest, chunks; of one that an older slice has its patch."""
        refs = zip(chunks, origins or (None,) * len(chunks), strict=True)
        packed = [_compressed(chunk) if self.is_compressing and ref is None else None for chunk, ref in refs]
        bodies = [chunk if short is None else short for chunk, short in zip(chunks, packed, strict=True)]
        is_compressed = tuple(short is not None for short in packed)
        if self.key is None:
            sizes = tuple(map(len, bodies))
            header = SliceHeader(number, spec, len(manifest), sizes, is_compressed, origins=origins)
            return [header.encode(), manifest, *bodies]
        sizes = tuple(len(body) + TAG_BYTES if body else 0 for body in bodies)
        header = SliceHeader(
            number,
            spec,
            len(manifest) + TAG_BYTES if manifest else 0,
            sizes,
            is_compressed,
            key_name(self.key),
            secrets.token_bytes(SALT_BYTES),
            origins,
        )
        cipher, frame = self._cipher(header), header.frame()
        head = cipher.encrypt(_nonce(0), manifest, frame) if manifest else b""
        first = slice_range(spec, number).start
        bodies = [
            cipher.encrypt(_nonce(first + at + 1), body, frame) if body else b"" for at, body in enumerate(bodies)
        ]
        return [header.encode(), head, *bodies]

    def open_manifest(self, header: SliceHeader, stored: bytes) -> bytes:
        """Return the manifest; IntegrityError if it was altered, ConfigError without the right key."""
        return self._decrypted(header, 0, stored)

    def open_patch(self, header: SliceHeader, index: int, stored: bytes) -> bytes:
        """Return what makes an older slice's chunk this one; errors are those of `open_chunk`."""
        return self._decrypted(header, index + 1, stored)

    def open_chunk(self, header: SliceHeader, index: int, stored: bytes, view: memoryview) -> None:
        """Fill `view` with a chunk; IntegrityError if it was altered, ConfigError without the right key."""
        body = self._decrypted(header, index + 1, stored)
        _, _, is_compressed = header.chunk_place(index)
        view[:] = _decompressed(body, view.nbytes) if is_compressed else body

    def _decrypted(self, header: SliceHeader, number: int, stored: bytes) -> bytes:
        if not header.is_encrypted:
            return stored
        from cryptography.exceptions import InvalidTag

        try:
            return bytes(self._cipher(header).decrypt(_nonce(number), stored, header.frame()))
        except InvalidTag as exc:
            raise IntegrityError(f"piece {number} of slice {header.number} does not match its own seal") from exc

    def _cipher(self, header: SliceHeader) -> Any:
        """Return the cipher of one slice."""
        here = key_name(self.key) if self.key is not None else b""
        if self.key is None or here != header.key_name:
            raise ConfigError(other_key(header.key_name.hex(), here.hex()))
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        return AESGCM(_derived(self.key, header.salt, b"memstore slice"))


def key_name(key: bytes) -> bytes:
    """Return a key's name for headers and messages; it reveals nothing about the key."""
    return _derived(key, b"", b"memstore key name")[:KEY_NAME_BYTES]


def read_key(path: str) -> bytes:
    """Return the key in a file: 32 bytes, or 64 hex digits.

    Raises:
        ConfigError: not there, a link, not this user's alone (0600 or less), or not a key. Nothing of it is repeated.
    """
    what = f"durable_key_file={path!r}"
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as exc:
        raise ConfigError(f"{what} cannot be read on this host: {exc.strerror}; every host needs it there") from exc
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise ConfigError(
                f"{what} is not a plain file that only its owner can read (mode {stat.S_IMODE(found.st_mode):04o}): "
                f"chown it to the user of the holders and chmod 600 it"
            )
        data = os.read(fd, 4096)
    finally:
        os.close(fd)
    if len(data) != KEY_BYTES:
        try:
            data = bytes.fromhex(data.decode("ascii").strip())
        except ValueError:
            data = b""
    if len(data) != KEY_BYTES:
        raise ConfigError(f"{what} is no key: write {KEY_BYTES} random bytes, or {2 * KEY_BYTES} hex digits, into it")
    return data


def _derived(key: bytes, salt: bytes, info: bytes) -> bytes:
    try:
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF
    except ImportError as exc:
        raise ConfigError(
            "durable_key_file needs the package cryptography on every host: pip install cryptography"
        ) from exc
    return bytes(HKDF(SHA256(), KEY_BYTES, salt, info).derive(key))


def _nonce(number: int) -> bytes:
    return number.to_bytes(12, "big")


def _zstd() -> Any:
    try:
        import zstandard
    except ImportError as exc:
        raise ConfigError(
            "compressed durable steps need the package zstandard on every host: pip install zstandard"
        ) from exc
    return zstandard


def _compressed(chunk: bytes) -> bytes | None:
    """Return the chunk's element width and its compressed bytes; None where it does not pay."""
    compressor = _zstd().ZstdCompressor(level=_LEVEL)
    sample = _sample(chunk)
    sizes = {}
    for width in WIDTHS:  # each plane alone: in a whole chunk it is large enough to have zstd blocks of its own
        apart, each = _apart(sample, width), -(-len(sample) // width)
        planes = [apart[at : at + each] for at in range(0, len(apart), each)]
        sizes[width] = sum(len(compressor.compress(plane)) for plane in planes)
    best = min(sizes, key=sizes.__getitem__)
    if len(sample) < GAIN_MIN * sizes[best]:
        return None
    packed = bytes([best]) + compressor.compress(_apart(chunk, best))
    return packed if len(chunk) >= GAIN_MIN * len(packed) else None


def _decompressed(packed: bytes, nbytes: int) -> bytes:
    """Undo `_compressed`; IntegrityError for anything but a chunk of that size. Nothing larger is ever allocated."""
    zstd, width = _zstd(), packed[0] if packed else 0
    try:
        if width not in WIDTHS or zstd.frame_content_size(packed[1:]) != nbytes:
            raise IntegrityError(f"a compressed chunk says another size or element width than {nbytes} and {WIDTHS}")
        apart = zstd.ZstdDecompressor().decompress(packed[1:])
    except zstd.ZstdError as exc:
        raise IntegrityError(f"a compressed chunk cannot be read: {exc}") from exc
    whole = nbytes - nbytes % width
    planes = np.frombuffer(apart, np.uint8, whole).reshape(width, -1)
    return np.ascontiguousarray(planes.T).tobytes() + bytes(apart[whole:])


def _apart(chunk: bytes, width: int) -> bytes:
    """Return all first bytes of the elements, all second ones, ..., and the rest."""
    whole = len(chunk) - len(chunk) % width
    elements = np.frombuffer(chunk, np.uint8, whole).reshape(-1, width)
    return np.ascontiguousarray(elements.T).tobytes() + chunk[whole:]


def _sample(chunk: bytes) -> bytes:
    """Return some pieces of a chunk, each beginning with an element."""
    if len(chunk) <= SAMPLE_BYTES:
        return chunk
    each = SAMPLE_BYTES // SAMPLE_PLACES
    starts = [at * (len(chunk) - each) // (SAMPLE_PLACES - 1) // 8 * 8 for at in range(SAMPLE_PLACES)]
    return b"".join(chunk[start : start + each] for start in starts)
