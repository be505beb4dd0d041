"""The declared messages of all dialects: each comes back as it was sent, is bounded, and says what it is."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import msgspec
import pytest
from msgspec import inspect

from memstore.core.wire import codec
from memstore.errors import ProtocolError
from memstore.testing.fuzz import dialects
from memstore.testing.fuzz.message_samples import sample

KINDS = [kind for module in dialects.MODULES for kind in dialects.declared(module)]
MESSAGES: list[type[codec.Message]] = [kind for kind in KINDS if issubclass(kind, codec.Message)]
DECODERS = dialects.decoders()


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("is_full", [True, False])
def test_every_message_is_read_by_a_process_and_comes_back_equal(kind: type[codec.Message], is_full: bool) -> None:
    """With all fields set, and with as few as it may have."""
    message = sample(kind, is_full=is_full)
    assert isinstance(message, kind)
    readers = 0
    for decode in DECODERS.values():
        try:
            found = decode(codec.encode(message))
        except ProtocolError:
            continue
        assert found == message
        assert type(found) is kind
        readers += 1
    assert readers


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_message_says_what_it_is(kind: type[msgspec.Struct]) -> None:
    """In one sentence."""
    first = (kind.__doc__ or "").splitlines()[0]
    assert first.endswith((".", ":"))
    assert not kind.__struct_config__.weakref
    assert kind.__struct_config__.frozen
    assert kind.__struct_config__.forbid_unknown_fields


def depth(node: Any) -> int:
    """Return how many containers a value of a type may have inside each other; TypeError if that is unknown."""
    match node:
        case inspect.StructType():
            return 1 + max((depth(field.type) for field in node.fields), default=0)
        case inspect.Metadata():
            return depth(node.type)
        case inspect.UnionType():
            return max(map(depth, node.types))
        case inspect.VarTupleType() | inspect.ListType():
            return 1 + depth(node.item_type)
        case inspect.TupleType():
            return 1 + max(map(depth, node.item_types))
        case inspect.DictType():
            return 1 + max(depth(node.key_type), depth(node.value_type))
        case inspect.IntType() | inspect.StrType() | inspect.BytesType() | inspect.FloatType():
            return 0
        case inspect.BoolType() | inspect.NoneType() | inspect.LiteralType():
            return 0
    raise TypeError(f"{node} may hold anything")


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
def test_no_field_may_hold_anything(kind: type[codec.Message]) -> None:
    """Every type is known to its depth: that is what bounds a body's."""
    assert depth(inspect.type_info(kind)) <= 16


@pytest.mark.parametrize("module", dialects.MODULES, ids=lambda module: module.__name__.rpartition(".")[2])
def test_no_two_messages_of_a_module_have_one_tag(module: ModuleType) -> None:
    """A tag names one message, in any direction it goes."""
    tags = [kind.__struct_config__.tag for kind in dialects.declared(module) if issubclass(kind, codec.Message)]
    assert len(set(tags)) == len(tags)
    assert all(isinstance(tag, str) and tag == tag.lower() for tag in tags)


def test_no_two_types_have_one_name() -> None:
    """One word, one meaning: also where the modules differ."""
    names = [kind.__name__ for kind in KINDS]
    assert sorted(set(names)) == sorted(names)
    assert len(DECODERS) >= len({kind for kind in MESSAGES if issubclass(kind, codec.Request)})
