"""Errors of the other side: their class, message and plain context cross, and nothing that a peer could abuse (I20)."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memstore import errors
from memstore.core.wire import codec
from memstore.core.wire.error_message import ErrorMessage, decode_error

ERROR_CLASSES = [value for value in vars(errors).values() if getattr(value, "__module__", "") == errors.__name__]
values: st.SearchStrategy[Any] = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text(max_size=20)


def sent(error: BaseException) -> errors.MemstoreError:
    """What the other side raises for an error."""
    return decode_error(codec.encode(ErrorMessage.of(error))).rebuilt()


@pytest.mark.parametrize("kind", ERROR_CLASSES)
def test_every_error_crosses_the_wire_as_its_class(kind: type[errors.MemstoreError]) -> None:
    """Class, message and simple context survive; objects in the context do not."""
    back = sent(kind("three words here", operation="call", waited_s=1.5, ranks=(1, 2), secret=object()))
    assert type(back) is kind
    assert str(back) == "three words here"
    assert vars(back) == {"operation": "call", "waited_s": 1.5, "ranks": [1, 2]}


def test_an_error_that_is_not_ours_crosses_as_internal_error() -> None:
    """A bug at the peer names its type and text, and text that is not valid Unicode (a path) does not stop it."""
    back = sent(OSError("no file \udcff"))
    assert type(back) is errors.InternalError
    assert str(back) == "OSError: no file ?"


@given(st.text(max_size=20), st.text(max_size=20), st.dictionaries(st.text(max_size=8), values | st.lists(values)))
def test_any_error_message_gives_a_memstore_error(error: str, message: str, context: dict[str, Any]) -> None:
    """A peer cannot choose a class outside the tree or set private attributes."""
    body = {"k": "error", "error": error, "message": message, "context": context}
    rebuilt = decode_error(msgpack.packb(body)).rebuilt()
    assert isinstance(rebuilt, errors.MemstoreError)
    assert not any(name.startswith("_") for name in vars(rebuilt))


def test_an_unknown_error_name_and_private_context_are_harmless() -> None:
    """`SystemExit` or `__class__` from a peer are just words."""
    context: Any = {"__class__": "x", "__notes__": "y", "host": "a"}
    rebuilt = ErrorMessage(error="SystemExit", message="m", context=context).rebuilt()
    assert type(rebuilt) is errors.MemstoreError
    assert vars(rebuilt) == {"host": "a"}


@pytest.mark.parametrize("context", [5, {"a": {"b": 1}}, {"a": [[1]]}, {1: 2}, {"a": b""}])
def test_a_context_that_is_not_plain_is_no_error_message(context: Any) -> None:
    """Values and flat lists by name, and nothing deeper."""
    with pytest.raises(errors.ProtocolError, match="context"):
        decode_error(msgpack.packb({"k": "error", "error": "MemstoreError", "message": "", "context": context}))
