"""Declared messages as bytes: msgpack with types, decoded within limits. Pure.

A body is one message: a map of its fields, with the name of its type under "k". What a peer sends is walked before
anything is built of it (`check_body`), then decoded as the types that may come here, and as nothing else. A short one
that encodes to the same bytes again needs no walk, which takes five times as long as both:

    bytes --too long, too many elements, a key twice, an extension, no msgpack--> ProtocolError
      '--of no type that may come, a field missing, unknown or of another type--> ProtocolError, which names the place
      '--> a frozen message

No type has a field of any content (`Any`), so the types bound the depth. Read `ids.py`, then a dialect:
`peer_messages.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeVar, get_args

import msgpack
import msgspec

from memstore.core.wire.frame import BODY_BYTES_MAX, BODY_ITEMS_MAX, Kind, pack_header
from memstore.errors import ProtocolError

PLAIN_BYTES = 4 << 10
"""Most bytes of a body that is decoded before it was walked: its elements take little memory whatever they are."""
ERROR_CHARS_MAX = 300
"""Most characters of a decoder's error: it may quote the peer."""

Scalar = None | bool | int | float | str
"""A plain value of a type that only the reader knows."""

if TYPE_CHECKING:
    Setting = Any  # each has a type of its own, which its reader knows
else:
    Setting = Scalar | tuple[Scalar, ...]
"""The value of a field of Config."""

T = TypeVar("T")
R = TypeVar("R")
_REPLIES: dict[type, Decoder[Any]] = {}


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="k"):
    """The base of all messages: the type of a frame's body."""


class Request(Message, Generic[R], frozen=True, kw_only=True):
    """A message that is answered with one of type R."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        (reply,) = get_args(cls.__orig_bases__[0])  # type: ignore[attr-defined]
        if not isinstance(reply, TypeVar):
            _REPLIES[cls] = Decoder(reply)


class Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The base of what messages contain by name: a map of its fields."""


class Row(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """The base of what messages contain many of: an array of its fields, in order."""


class Decoder(Generic[T]):
    """Decodes bodies of one type, or of one of several types that are distinguished by name.

    Each is made as a module is imported. msgspec notes in each type how it is decoded, in steps; a thread that decoded
    meanwhile would use half of such a note, and its process would end with SIGSEGV (msgspec 0.22).
    """

    def __init__(self, kind: Any, *, items_max: int = BODY_ITEMS_MAX, bytes_max: int = BODY_BYTES_MAX) -> None:
        """`kind` is T: a Message, or a union of some."""
        self._decoder = msgspec.msgpack.Decoder(kind)
        self._name = " | ".join(each.__name__ for each in get_args(kind) or (kind,))
        self._items_max, self._bytes_max = items_max, bytes_max
        self._plain_bytes = min(PLAIN_BYTES, items_max // 2, bytes_max)  # an empty array is a byte, and counts twice

    def __call__(self, data: bytes | bytearray | memoryview) -> T:
        """Decode a body to its message; ProtocolError names its fault."""
        try:
            if (plain := self._decode_plain(data)) is not None:
                return plain
            check_body(data, items_max=self._items_max, bytes_max=self._bytes_max)
            message: T = self._decoder.decode(data)
        except (ValueError, TypeError, msgspec.MsgspecError, msgpack.UnpackException, RecursionError) as error:
            why = str(error)[:ERROR_CHARS_MAX] or type(error).__name__
            raise ProtocolError(f"a body of {len(data):,} bytes is no {self._name[:200]}: {why}") from error
        return message

    def _decode_plain(self, data: bytes | bytearray | memoryview) -> T | None:
        """Return the message of a short body that is as `encode` writes it: no key comes twice there. Else None."""
        if len(data) > self._plain_bytes:
            return None
        try:
            message: T = self._decoder.decode(data)
            return message if _ENCODER.encode(message) == data else None
        except (ValueError, TypeError, msgspec.MsgspecError, RecursionError):
            return None  # the walk, or what decodes after it, says why


def decode_reply(request: Request[R], data: bytes | bytearray | memoryview) -> R:
    """Return the answer to `request` that a body is; ProtocolError if it is none."""
    reply: R = reply_decoder(type(request))(data)
    return reply


def reply_decoder(kind: type[Request[Any]]) -> Decoder[Any]:
    """Return what decodes the answers to a kind of request: the type in its `Request[...]`."""
    return _REPLIES[kind]


def tag_of(kind: type[Message] | Message) -> str:
    """Return the name of a type of messages, as it travels."""
    return str(kind.__struct_config__.tag)


def fields_of(message: Message | Part) -> dict[str, Any]:
    """Return the fields of a message, or of a part of one, as plain values: for JSON."""
    fields: dict[str, Any] = msgspec.to_builtins(message, builtin_types=(bytes,))
    fields.pop("k", None)
    return fields


def encode(message: Message) -> bytes:
    """Return a message as a body; ProtocolError if it cannot be encoded, or is longer than a body may be."""
    try:
        data = _ENCODER.encode(message)
    except (TypeError, ValueError, OverflowError, msgspec.MsgspecError) as error:
        raise ProtocolError(f"{type(message).__name__} cannot be encoded: {error}") from error
    if len(data) > BODY_BYTES_MAX:
        raise ProtocolError(
            f"{type(message).__name__} of {len(data):,} bytes exceeds the limit of {BODY_BYTES_MAX:,}; send it in pages"
        )
    return data


def encode_frame(kind: Kind, message: Message) -> bytes:
    """Return a whole frame without bulk, for one message that goes to many."""
    data = encode(message)
    return pack_header(kind, 0, data) + data


_ENCODER = msgspec.msgpack.Encoder()


class _Walk:
    """Looks at the containers of one body as they are read, and keeps none of them."""

    __slots__ = ("left", "limit")

    def __init__(self, limit: int) -> None:
        self.limit = self.left = limit

    def array(self, items: list[Any]) -> None:
        """Count an array."""
        self._count(len(items))

    def map(self, pairs: list[tuple[Any, Any]]) -> None:
        """Count a map and compare its keys: of two equal ones, the decoder would take the last in silence."""
        self._count(len(pairs))
        keys = {key for key, _ in pairs}
        if len(keys) < len(pairs):
            raise ValueError(f"a map of {len(pairs)} entries has {len(keys)} different keys")

    def _count(self, count: int) -> None:
        self.left -= count + 1
        if self.left < 0:
            raise ValueError(f"more than {self.limit:,} elements")


def check_body(data: bytes | bytearray | memoryview, *, items_max: int, bytes_max: int) -> None:
    """Walk a body before it is decoded; ValueError if it is beyond a limit, has a key twice, or is not msgpack.

    The elements of all containers count together: an object may take 60 times the memory of its encoded byte.
    """
    size = len(data)
    if size > bytes_max:
        raise ValueError(f"the limit is {bytes_max:,} bytes")
    walk = _Walk(items_max)
    # msgpack may allocate when it reads a length, so a length must not exceed the bytes there are.
    length_max = min(items_max, size)
    msgpack.unpackb(
        data,
        raw=False,
        strict_map_key=False,
        object_pairs_hook=walk.map,
        list_hook=walk.array,
        ext_hook=_refuse_extension,
        max_array_len=length_max,
        max_map_len=length_max,
        max_str_len=size,
        max_bin_len=size,
        max_ext_len=0,
    )


def _refuse_extension(code: int, data: bytes) -> None:
    raise ValueError(f"extension type {code} is not used by memstore")
