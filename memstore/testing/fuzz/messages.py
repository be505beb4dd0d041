"""All declared messages, by the module that declares them, and a valid one of every type, for fuzzers and tests."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any, TypeVar, cast

import msgspec
from msgspec import inspect

from memstore.core.cluster.facts import ByRank
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

# -- message samples ----------------------------------------------------------------------------------
# Builds a valid message of every declared type, for the fuzzers to start from and for tests to send around.


S = TypeVar("S", bound=msgspec.Struct)
_PATTERNS = {
    r"^[0-9a-f]{32}\Z": "0123456789abcdef" * 2,
    r"^(?:[0-9a-f]{16})?\Z": "0123456789abcdef",
    r"^(?:[0-9a-f]{16}|-)?(?:,(?:[0-9a-f]{16}|-)?)*\Z": "0123456789abcdef,,-",
    r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z": "train-7",
}


def blank(kind: type[S]) -> S:
    """Return a message, part or row that says nothing: its texts are empty, its numbers 0."""
    found = sample(kind, is_full=False)
    values = ((name, getattr(found, name)) for name in found.__struct_fields__)
    nothing = {name: type(value)() for name, value in values if isinstance(value, str | int | float)}
    return cast(S, msgspec.structs.replace(found, **nothing))


def sample(kind: type[msgspec.Struct], *, is_full: bool) -> msgspec.Struct:
    """Return a message: with every field set and one item in each container, or with as little as it may have."""
    struct: msgspec.Struct = _value(inspect.type_info(kind), is_full)
    return struct


def _value(node: inspect.Type, is_full: bool) -> Any:
    """Return a value of a type."""
    match node:
        case inspect.StructType():
            fields = [field for field in node.fields if is_full or field.required]
            return node.cls(**{field.name: _value(field.type, is_full) for field in fields})
        case inspect.Metadata():
            return _value(node.type, is_full)
        case inspect.UnionType():
            first, *_, last = node.types
            return _value(first if is_full else last, is_full)
        case inspect.IntType():
            return node.ge if node.ge is not None else 7
        case inspect.StrType():
            return _PATTERNS[node.pattern] if node.pattern is not None else "text"
        case inspect.BytesType():
            return bytes(node.min_length or 0)
        case inspect.FloatType():
            return 1.5
        case inspect.BoolType():
            return is_full
        case inspect.NoneType():
            return None
        case inspect.LiteralType():
            return node.values[0 if is_full else -1]
        case inspect.VarTupleType():
            return (_value(node.item_type, is_full),) * max(int(is_full), node.min_length or 0)
        case inspect.TupleType():
            return tuple(_value(item, is_full) for item in node.item_types)
        case inspect.ListType():
            return [_value(node.item_type, is_full)] if is_full else []
        case inspect.CustomType():
            return ByRank.of(("text",), (("text",),)) if is_full else ByRank.of((), ())
        case inspect.DictType():
            return {_value(node.key_type, is_full): _value(node.value_type, is_full)} if is_full else {}
    raise TypeError(f"a message has a field of type {node}: what it may hold is not declared, or not known here")


# -- dialects -----------------------------------------------------------------------------------------
# All declared messages, by the module that declares them. Pure.
#
# The fuzzers and the tests of every message read this list.


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
    kinds = [each for each in vars(module).values() if isinstance(each, type) and each.__module__ == module.__name__]
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
