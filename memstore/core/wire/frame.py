"""What travels on a connection: a fixed 32-byte header, a small msgpack body, then raw bulk bytes. Pure.

    offset  0  magic       4s   b"MSTO"
            4  version     u8
            5  kind        u8   one of Kind
            6  flags       u16  0; others are refused, so that they can get a meaning later
            8  request_id  u64
           16  body_bytes  u32  msgpack, at most BODY_BYTES_MAX
           20  bulk_bytes  u64  raw bytes after the body, at most BULK_BYTES_MAX
           28  crc         u32  crc32 over header bytes 0..28 and the body

Little endian. The crc finds faults in what steers us (R14 digests the bulk, nothing else would notice a flipped step
number); it is no defence against a forger. Every limit is checked against the header before anything is allocated.
"""

from __future__ import annotations

import struct
import zlib
from enum import IntEnum
from typing import NamedTuple, NoReturn

from memstore import errors

MAGIC = b"MSTO"
VERSION = 19

BODY_BYTES_MAX = 16 << 20
"""One call, reply or event: an inventory of 100,000 shards fits; anything longer is sent in pages."""
BODY_BYTES_MAX_UNAUTHENTICATED = 4 << 10
"""A handshake is under 1 KiB; a stranger gets no more of our memory than this."""
BULK_BYTES_MAX = 64 << 20
"""Raw bytes of one frame: the largest chunk_bytes allowed."""
BODY_ITEMS_MAX = 1 << 20
"""Elements of all arrays and maps of one body together: Python objects cost up to 60 times their encoded byte."""
BODY_ITEMS_MAX_UNAUTHENTICATED = 64

_LAYOUT = struct.Struct("<4sBBHQIQ")
_CRC = struct.Struct("<I")
HEADER_BYTES = _LAYOUT.size + _CRC.size
_U64_MAX = (1 << 64) - 1


class Kind(IntEnum):
    """What a frame is; unknown kinds are refused."""

    HELLO = 1
    AUTH1 = 2
    AUTH2 = 3
    AUTH3 = 4
    CALL = 10
    REPLY = 11
    ERROR = 12
    EVENT = 13
    CHUNK = 20
    BYE = 30


UNAUTHENTICATED_KINDS = frozenset({Kind.HELLO, Kind.AUTH1, Kind.AUTH2, Kind.AUTH3, Kind.ERROR, Kind.BYE})
_KINDS = {int(kind): kind for kind in Kind}


class Header(NamedTuple):
    """One unpacked header; the lengths are within their limits, the crc is not yet compared."""

    kind: Kind
    request_id: int
    body_bytes: int
    bulk_bytes: int
    crc: int


def pack_header(kind: Kind, request_id: int = 0, body: bytes = b"", bulk_bytes: int = 0) -> bytes:
    """Return the HEADER_BYTES that precede `body`; raises ProtocolError if no peer would accept them."""
    if not 0 <= request_id <= _U64_MAX:
        _refuse(f"request id {request_id} does not fit 64 unsigned bits")
    _check_lengths(len(body), bulk_bytes, authenticated=True)
    head = _LAYOUT.pack(MAGIC, VERSION, kind, 0, request_id, len(body), bulk_bytes)
    return head + _CRC.pack(zlib.crc32(body, zlib.crc32(head)))


def unpack_header(data: bytes | bytearray | memoryview, *, authenticated: bool = True) -> Header:
    """Check HEADER_BYTES from a peer and return them; raises ProtocolError naming the field and its limit.

    Before authentication only handshake kinds, 4 KiB bodies and no bulk are accepted.
    """
    if len(data) != HEADER_BYTES:
        _refuse(f"a frame header has {HEADER_BYTES} bytes, not {len(data)}")
    magic, version, number, flags, request_id, body_bytes, bulk_bytes = _LAYOUT.unpack_from(data)
    if magic != MAGIC:
        _refuse(f"a frame starts with {magic!r} instead of {MAGIC!r}: the peer is not memstore, or bytes were lost")
    if version != VERSION:
        _refuse(
            f"the peer speaks wire version {version}, this process {VERSION}: install one memstore everywhere, and "
            "start again what began before"
        )
    if flags:
        _refuse(f"frame flags {flags:#x} are unknown to wire version {VERSION}")
    kind = _KINDS.get(number)
    if kind is None:
        _refuse(f"frame kind {number} is unknown to wire version {VERSION}")
    if not authenticated and kind not in UNAUTHENTICATED_KINDS:
        _refuse(f"a {kind.name} frame came before the handshake was finished")
    _check_lengths(body_bytes, bulk_bytes, authenticated=authenticated)
    return Header(kind, request_id, body_bytes, bulk_bytes, _CRC.unpack_from(data, _LAYOUT.size)[0])


def check_crc(header_data: bytes | bytearray | memoryview, body: bytes | bytearray | memoryview) -> None:
    """Raise ProtocolError unless header and body are what the sender packed."""
    actual = zlib.crc32(body, zlib.crc32(memoryview(header_data)[: _LAYOUT.size]))
    (expected,) = _CRC.unpack_from(header_data, _LAYOUT.size)
    if actual != expected:
        _refuse(f"a frame of {len(body)} body bytes has crc {actual:#010x}, its header says {expected:#010x}")


def _refuse(message: str) -> NoReturn:
    raise errors.ProtocolError(message)


def _check_lengths(body_bytes: int, bulk_bytes: int, *, authenticated: bool) -> None:
    body_max = BODY_BYTES_MAX if authenticated else BODY_BYTES_MAX_UNAUTHENTICATED
    bulk_max = BULK_BYTES_MAX if authenticated else 0
    if body_bytes > body_max:
        _refuse(f"a frame announces a body of {body_bytes:,} bytes, the limit is {body_max:,}")
    if bulk_bytes > bulk_max:
        _refuse(f"a frame announces {bulk_bytes:,} bulk bytes, the limit is {bulk_max:,}")
