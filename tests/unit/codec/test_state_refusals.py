"""What a state may not hold is refused before any copy; what a layout may not claim, before any read."""

from __future__ import annotations

import collections
import dataclasses
import enum
import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memstore.core.format.layout import decode_layout, encode_layout
from memstore.errors import ConfigError, ManifestMismatch, ProtocolError, UnsupportedState
from memstore.shell.codec.decode import decode_state
from memstore.shell.codec.encode import copy_into, plan_state
from memstore.shell.tensors.subclasses import register


@register
class Color(enum.Enum):
    RED = "red"


@register
@dataclasses.dataclass(frozen=True)
class Point:
    x: Any
    y: Any = 0


def stored(state: object, chunk_bytes: int = 256) -> tuple[bytes, list[memoryview]]:
    plan = plan_state(state)
    views = [memoryview(bytearray(chunk_bytes)) for _ in range(0, plan.nbytes, chunk_bytes)]
    copy_into(plan, views, chunk_bytes)
    return plan.layout, views


class Plain:
    pass


class Sub(torch.Tensor):
    pass


class Text(str):
    __slots__ = ()


def loop() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


def quantized() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)


def freed() -> torch.Tensor:
    value = torch.ones(8)[2:]
    value.untyped_storage().resize_(0)
    return value


@pytest.mark.parametrize(
    "value",
    [
        Plain(),
        Plain,
        len,
        Text("a"),
        Sub(torch.ones(2)),
        torch.ones(2, device="meta"),
        torch.eye(2).to_sparse(),
        quantized(),
        np.array([object()]),
        np.ma.masked_array([1]),
        collections.defaultdict(lambda: 1),
        {torch.ones(1)},
        {"x" * 5000: 1},
        loop(),
        freed(),
        torch.nn.UninitializedParameter(),
        enum.Enum("Other", "A").A,
        dataclasses.make_dataclass("Other", ["a"])(1),
        collections.namedtuple("Other", "a")(1),
    ],
    ids=lambda value: type(value).__name__,
)
def test_unsupported_object_is_refused_by_path_and_type(value: object) -> None:
    """What would need pickle is refused at planning, naming where it stands and what it is."""
    with pytest.raises(UnsupportedState, match=r"^state\['model'\]\[1\]") as caught:
        plan_state({"model": [torch.ones(2), value]})
    assert "Nothing was copied" in str(caught.value)
    if type(value) is Plain:
        assert caught.value.type_name.endswith(".Plain")


@pytest.mark.parametrize("value", [type("LossScaler", (), {})(), enum.Enum("ZeroStageEnum", "weights").weights])
def test_what_belongs_to_a_framework_is_refused_with_its_own_remedy(value: Any) -> None:
    """A user cannot give DeepSpeed's classes another form."""
    type(value).__module__ = "deepspeed.runtime.zero.config"
    with pytest.raises(UnsupportedState, match=r"\['opt'\] is a deepspeed\..*'s own.*under DeepSpeed in docs/"):
        plan_state({"opt": value})


def test_nesting_and_layout_have_limits() -> None:
    """A tower of lists and millions of numbers of two kinds are refused with the way out."""
    tower: Any = []
    for _ in range(300):
        tower = [tower]
    with pytest.raises(UnsupportedState, match="nested deeper than 100"):
        plan_state(tower)
    with pytest.raises(UnsupportedState, match="as tensors or numpy arrays"):
        plan_state([1 << 60, 0.5] * 4_000_000)


def test_a_shape_of_many_large_numbers_is_refused_by_its_length() -> None:
    """Their product would take days, and no signal would end it."""
    row = [0, 0, "float32", [(1 << 62) - 1] * 1_000_000, None, 0, None]
    with pytest.raises(ProtocolError, match="1000000 dimensions"):
        decode_layout(encode_layout(4, [(0, 4)], [row], [], [20, 0]))


def test_unregistered_class_is_not_built() -> None:
    """Stored bytes never make this process import or call a class it did not register."""
    layout, views = stored(Point(1, 2))
    with pytest.raises(UnsupportedState, match="register"):
        decode_state(layout.replace(b":Point", b":Pxint"), views, 256)
    with pytest.raises(ConfigError, match="only enums"):
        register(Plain)


def test_slots_must_hold_the_stream() -> None:
    """Too few, too short or read-only views are refused before a byte moves."""
    plan = plan_state(torch.ones(100))
    with pytest.raises(ValueError, match="do not hold"):
        copy_into(plan, [memoryview(bytearray(256))], 256)
    with pytest.raises(ValueError, match="slot 1"):
        copy_into(plan, [memoryview(bytearray(256)), memoryview(bytearray(8))], 256)
    with pytest.raises(ValueError, match="read-only"):
        copy_into(plan, [memoryview(bytes(512))], 512)
    with pytest.raises(ProtocolError, match="do not fit"):
        decode_state(plan.layout, [], 256)


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_damaged_layout_never_escapes(data: st.DataObject) -> None:
    """A flipped byte gives some state or an error of the tree, never a crash or a foreign error."""
    state = {"t": torch.arange(6.0).view(2, 3).t(), "a": np.zeros(2, [("x", "<f8")]), "c": Color.RED, "p": Point(1, 1j)}
    state |= {
        "o": collections.OrderedDict(a=torch.float32),
        "n": 1 << 90,
        "s": np.float32(math.nan),
        "f": {1, (2, "b")},
    }
    layout, views = stored(state)
    damaged = bytearray(layout)
    damaged[data.draw(st.integers(0, len(layout) - 1))] = data.draw(st.integers(0, 255))
    try:
        decode_state(bytes(damaged), views, 256)
    except (ProtocolError, UnsupportedState, ManifestMismatch):
        return
