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
from collections.abc import Mapping
from enum import IntEnum
from typing import Any, NamedTuple, NoReturn

import msgpack

from memstore import errors

MAGIC = b"MSTO"
VERSION = 4

BODY_BYTES_MAX = 16 << 20
"""One call, reply or event: an inventory of 100,000 shards fits; anything longer is sent in pages."""
BODY_BYTES_MAX_UNAUTHENTICATED = 4 << 10
"""A handshake is under 1 KiB; a stranger gets no more of our memory than this."""
BULK_BYTES_MAX = 64 << 20
"""Raw bytes of one frame: the largest chunk_bytes allowed."""
BODY_ITEMS_MAX = 1 << 20
"""Elements of all arrays and maps of one body together: Python objects cost up to 60 times their encoded byte."""
BODY_ITEMS_MAX_UNAUTHENTICATED = 64
BODY_DEPTH_MAX = 16
"""Containers inside containers; our own messages need 5."""

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
        _refuse(f"the peer speaks wire version {version}, this process {VERSION}: install one memstore everywhere")
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


def pack_body(body: Mapping[str, Any]) -> bytes:
    """Encode a body; raises ProtocolError if it cannot be encoded or exceeds BODY_BYTES_MAX."""
    if not all(type(key) is str for key in body):
        _refuse("the top-level keys of a body are strings")
    try:
        data: bytes = msgpack.packb(body, use_bin_type=True)
    except (TypeError, ValueError, OverflowError) as error:
        raise errors.ProtocolError(f"a body cannot be encoded: {error}") from error
    if len(data) > BODY_BYTES_MAX:
        _refuse(f"a body of {len(data):,} bytes exceeds the limit of {BODY_BYTES_MAX:,}; send it in pages")
    return data


def unpack_body(data: bytes | bytearray | memoryview, *, authenticated: bool = True) -> dict[str, Any]:
    """Decode a peer's body; raises ProtocolError for anything but a bounded dict with string keys.

    Inner maps may have str, int or bytes keys. Extension types (timestamps too) are refused. Arrays come as lists.
    """
    bytes_max = BODY_BYTES_MAX if authenticated else BODY_BYTES_MAX_UNAUTHENTICATED
    items_max = BODY_ITEMS_MAX if authenticated else BODY_ITEMS_MAX_UNAUTHENTICATED
    size = len(data)
    if size > bytes_max:
        _refuse(f"a body of {size:,} bytes exceeds the limit of {bytes_max:,}")
    count = _ItemCount(items_max)
    # msgpack allocates (older ones all of it) when it reads a length, so a length must not exceed the bytes there are.
    length_max = min(items_max, size)
    try:
        body = msgpack.unpackb(
            data,
            raw=False,
            use_list=True,
            strict_map_key=False,
            object_hook=count,
            list_hook=count,
            ext_hook=_no_extension,
            max_array_len=length_max,
            max_map_len=length_max,
            max_str_len=size,
            max_bin_len=size,
            max_ext_len=0,
        )
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError) as error:
        raise errors.ProtocolError(f"a body of {size:,} bytes is not valid: {error}") from error
    if type(body) is not dict or not all(type(key) is str for key in body):
        _refuse(f"a body is a map with string keys, not a {type(body).__name__}")
    _check_shape(body)
    return body


class _ItemCount:
    """A msgpack hook that bounds the elements of all containers of one body together."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.left = limit

    def __call__(self, container: Any) -> Any:
        self.left -= len(container) + 1
        if self.left < 0:
            raise ValueError(f"more than {self.limit:,} elements")
        return container


def _refuse(message: str) -> NoReturn:
    raise errors.ProtocolError(message)


def _check_lengths(body_bytes: int, bulk_bytes: int, *, authenticated: bool) -> None:
    body_max = BODY_BYTES_MAX if authenticated else BODY_BYTES_MAX_UNAUTHENTICATED
    bulk_max = BULK_BYTES_MAX if authenticated else 0
    if body_bytes > body_max:
        _refuse(f"a frame announces a body of {body_bytes:,} bytes, the limit is {body_max:,}")
    if bulk_bytes > bulk_max:
        _refuse(f"a frame announces {bulk_bytes:,} bulk bytes, the limit is {bulk_max:,}")


def _no_extension(code: int, data: bytes) -> NoReturn:
    raise ValueError(f"extension type {code} is not used by memstore")


def _check_shape(body: dict[str, Any]) -> None:
    """Bound the depth and the types of map keys, level by level, so that no reader recurses into a peer's tower."""
    level: list[Any] = [body]
    for _ in range(BODY_DEPTH_MAX):
        inner: list[Any] = []
        for container in level:
            if type(container) is dict:
                if not {*map(type, container)} <= {str, int, bytes}:
                    _refuse("a body has a map key that is not a string, an integer or bytes")
                inner += [value for value in container.values() if type(value) in (dict, list)]
            else:
                inner += [value for value in container if type(value) in (dict, list)]
        if not inner:
            return
        level = inner
    _refuse(f"a body is nested deeper than {BODY_DEPTH_MAX} levels")
