"""All declared messages, by the module that declares them. Pure.

The fuzzers and the tests of every message read this list.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import msgspec

from memstore.core.wire import (
    calls,
    codec,
    error_message,
    handshake,
    ids,
    orders,
    peer_messages,
    rank_messages,
    replies,
    reports,
    status_rows,
)

MODULES: tuple[ModuleType, ...] = (
    ids,
    handshake,
    error_message,
    rank_messages,
    calls,
    replies,
    status_rows,
    orders,
    reports,
    peer_messages,
)
_BASES = (codec.Message, codec.Request, codec.Part, codec.Row)


def declared(module: ModuleType) -> Iterator[type[msgspec.Struct]]:
    """Yield the messages, parts and rows of a module, in the order in which they are declared; no base of others."""
    kinds = [each for each in vars(module).values() if inspect.isclass(each) and each.__module__ == module.__name__]
    for kind in kinds:
        if issubclass(kind, _BASES) and not any(kind in other.__mro__[1:] for other in kinds):
            yield kind


def decoders() -> dict[str, codec.Decoder[Any]]:
    """Return what decodes the bodies of each direction, and of the replies to each request, by name."""
    found: dict[str, codec.Decoder[Any]] = {"calls in messages": codec.Decoder(calls.RankCall)}
    for module in MODULES:
        for name, each in vars(module).items():
            if isinstance(each, codec.Decoder):
                found[f"{module.__name__.rpartition('.')[2]}.{name}"] = each
        for kind in declared(module):
            if issubclass(kind, codec.Request):
                found[f"reply to {kind.__name__}"] = codec.reply_decoder(kind)
    return found
