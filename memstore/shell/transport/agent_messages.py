"""What a holder and its agent processes tell each other, one message in each packet of a socket pair."""

from __future__ import annotations

import msgspec

PACKET_BYTES_MAX = 192 << 10


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The agent is there; with what others need to read from its arena."""

    metadata: bytes


class Read(msgspec.Struct, frozen=True, tag="read"):
    """Read pieces: each their offset, the offset here, and the bytes."""

    number: int
    metadata: bytes
    pieces: tuple[tuple[int, int, int], ...]


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """A read has come whole, or `why` says that it will not; unless it has not `begun`, it may still write then."""

    number: int
    why: str = ""
    has_begun: bool = True


class ArenaMetadata(msgspec.Struct, frozen=True, array_like=True):
    """What is sent to other holders: where the agent has the arena, how long it is, and NIXL's own bytes."""

    address: int
    nbytes: int
    agent: bytes


decode_message: msgspec.msgpack.Decoder[Ready | Read | Ended] = msgspec.msgpack.Decoder(Ready | Read | Ended)
decode_metadata: msgspec.msgpack.Decoder[ArenaMetadata] = msgspec.msgpack.Decoder(ArenaMetadata)
encode = msgspec.msgpack.encode
