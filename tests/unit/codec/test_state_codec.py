"""A state packed into slots comes back equal, bit for bit, or is refused by path and type."""

from __future__ import annotations

import collections
import dataclasses
import enum
import struct
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memstore.core.format.layout import decode_layout
from memstore.shell.codec.decode import decode_state
from memstore.shell.codec.encode import copy_into, plan_state
from memstore.shell.tensors.memory import DTYPES
from memstore.shell.tensors.subclasses import register


@register
class Color(enum.Enum):
    RED = "red"


@register
class Bits(enum.IntFlag):
    A = 1
    B = 2


@register
@dataclasses.dataclass(frozen=True)
class Point:
    x: Any
    y: Any = 0


@register
class Pair(NamedTuple):
    left: Any
    right: Any


def stored(state: object, chunk_bytes: int = 256) -> tuple[bytes, list[memoryview]]:
    """Pack into slots full of rubbish, the last one short."""
    plan = plan_state(state)
    sizes = (min(chunk_bytes, plan.nbytes - start) for start in range(0, plan.nbytes, chunk_bytes))
    views = [memoryview(bytearray(b"\xaa" * size)) for size in sizes]
    copy_into(plan, views, chunk_bytes)
    return plan.layout, views


def round_trip(state: object, chunk_bytes: int = 256, **options: Any) -> Any:
    layout, views = stored(state, chunk_bytes)
    return decode_state(layout, [view.toreadonly() for view in views], chunk_bytes, **options)


def stream(state: object) -> bytes:
    return b"".join(bytes(view) for view in stored(state)[1])


def bits(tensor: torch.Tensor) -> bytes:
    dense = tensor.detach().resolve_conj().resolve_neg()
    return bytes(dense.contiguous().untyped_storage().tolist()) if dense.numel() else b""


def raw(dtype: torch.dtype, count: int) -> torch.Tensor:
    """A tensor of every kind of bits, NaN payloads included."""
    data = torch.arange(count * dtype.itemsize, dtype=torch.int64).mul(37).add(129).to(torch.uint8)
    if dtype is torch.bool:
        data &= 1
    return torch.empty(0, dtype=dtype).set_(data.untyped_storage(), 0, (count,), (1,))


scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(1 << 300), 1 << 300)
    | st.floats(allow_nan=False)
    | st.complex_numbers(allow_nan=False)
    | st.text(st.characters(exclude_categories=()), max_size=8)
    | st.binary(max_size=300)
    | st.sampled_from([Color.RED, Bits.A | Bits.B, torch.float16, torch.Size([2]), torch.device("cpu"), torch.strided])
)
keys = (
    st.integers()
    | st.text(max_size=4)
    | st.tuples(st.integers(), st.booleans())
    | st.sampled_from([None, 1.5, Color.RED])
)
states = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(keys, inner, max_size=4)
        | st.sets(keys, max_size=3)
        | st.frozensets(keys, max_size=3)
        | st.dictionaries(keys, inner, max_size=2).map(collections.OrderedDict)
        | st.dictionaries(keys, inner, max_size=2).map(lambda items: collections.defaultdict(list, items))
        | st.builds(Pair, inner, inner)
        | st.builds(Point, inner, inner)
    ),
    max_leaves=12,
)


def typed(value: Any) -> Any:
    """Return a form that compares types and order, too."""
    kind = type(value)
    if isinstance(value, dict):
        return kind, [(typed(key), typed(item)) for key, item in value.items()]
    if isinstance(value, set | frozenset):
        return kind, value
    if isinstance(value, list | tuple):
        return kind, [typed(item) for item in value]
    if isinstance(value, Point):
        return kind, typed(value.x), typed(value.y)
    return kind, value if value == value else repr(value)


@given(states)
@settings(max_examples=150, deadline=None)
def test_plain_state_round_trip(state: Any) -> None:
    """Any nesting comes back with the same types, values and order."""
    assert typed(round_trip(state)) == typed(state)


@given(st.binary(min_size=8, max_size=8))
def test_float_is_bit_exact(data: bytes) -> None:
    """Python floats keep sign of zero and NaN payload."""
    value = struct.unpack("<d", data)[0]
    assert struct.pack("<d", round_trip({"lr": value})["lr"]) == struct.pack("<d", value)


@pytest.mark.parametrize("name", sorted(DTYPES))
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_every_dtype_is_bit_exact(name: str) -> None:
    """Dense, strided and 0-d tensors of every dtype keep every bit, also across slot borders."""
    base = raw(DTYPES[name], 90)
    sent = {
        "dense": base,
        "gaps": base[::3].clone()[::2] if name in ("float32", "int64") else base[1:9],
        "one": base[3],
    }
    strided = raw(DTYPES[name], 60)[::2]
    got = round_trip({**sent, "strided": strided}, 64)
    for key in sent:
        assert got[key].dtype is DTYPES[name]
        assert got[key].shape == sent[key].shape
    start = base.untyped_storage().tolist()
    assert got["dense"].untyped_storage().tolist() == start
    assert got["strided"].stride() == (1,)
    size = base.element_size()
    wanted = [strided.untyped_storage().tolist()[i * 2 * size : i * 2 * size + size] for i in range(30)]
    assert got["strided"].untyped_storage().tolist() == [byte for group in wanted for byte in group]


def test_dtype_table_is_torchs() -> None:
    """Every unquantized dtype of this torch can be stored."""
    all_dtypes = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    missing = {str(item) for item in all_dtypes - set(DTYPES.values())}
    assert missing <= {"torch.qint8", "torch.quint8", "torch.qint32", "torch.quint4x2", "torch.quint2x4"}


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(0, 3),
        torch.tensor(2.5),
        torch.arange(24.0).view(2, 3, 4).permute(2, 0, 1),
        torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.randn(3, 1).expand(3, 1000),
        torch.randn(10, 10)[2:5, ::3],
        torch.randn(4, dtype=torch.complex64).conj(),
        torch.randn(4, dtype=torch.complex64).conj().imag,
        torch.arange(10).unfold(0, 4, 1),
        torch.randn(3, 4)[:, None],
    ],
    ids=[
        "empty",
        "scalar",
        "permuted",
        "channels_last",
        "expanded",
        "strided",
        "conjugated",
        "imaginary",
        "unfolded",
        "new axis",
    ],
)
def test_views_come_back_equal(tensor: torch.Tensor) -> None:
    """Empty, permuted, expanded, sliced, conjugated and overlapping views keep value and shape."""
    got = round_trip([tensor])[0]
    assert got.shape == tensor.shape
    assert torch.equal(got, tensor)


def test_dense_order_of_dimensions_is_kept() -> None:
    """A channels-last tensor comes back channels-last; an expanded one still costs one element."""
    image = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    wide = torch.ones(1).expand(1 << 20)
    got = round_trip({"image": image, "wide": wide})
    assert got["image"].stride() == image.stride()
    assert got["wide"].stride() == (0,)
    assert plan_state(wide).nbytes == 4


def test_small_view_stores_its_own_bytes_only() -> None:
    """A slice of a large storage never drags the storage along, nor twice the same slice."""
    big = torch.randn(1 << 18)
    assert plan_state(big[5:10]).nbytes == 20
    assert plan_state(big[::4096]).nbytes == 64 * 4
    assert plan_state([big[::4096], big[::4096]]).nbytes == 64 * 4


def test_tied_tensors_come_back_tied() -> None:
    """Views that overlap share memory after the restore and are stored once."""
    weight = torch.randn(6, 5)
    state = {"emb": weight, "head": weight.t(), "row": weight[2], "same": weight, "alone": torch.ones(3)}
    assert plan_state(state).nbytes == 6 * 5 * 4 + 8 + 12
    got = round_trip(state)
    assert got["same"] is got["emb"]
    got["emb"].mul_(2)
    assert torch.equal(got["head"], 2 * weight.t())
    assert torch.equal(got["row"], 2 * weight[2])


def test_ties_across_dtypes_and_lazy_views() -> None:
    """A complex tensor, its conjugate and its real bytes stay one memory."""
    base = torch.randn(8, dtype=torch.complex64)
    got = round_trip([base, base.conj(), torch.view_as_real(base)[3:], torch.view_as_real(base).view(torch.uint8)])
    got[0].mul_(2)
    assert torch.equal(got[1], (2 * base).conj())
    assert torch.equal(got[2], torch.view_as_real(2 * base)[3:])
    odd = torch.arange(32, dtype=torch.uint8)
    both = round_trip([odd[1:], odd[8:16].view(torch.int64)])
    both[0].zero_()
    assert both[1].item() == 0


def test_parameter_comes_back_as_parameter() -> None:
    """Parameters keep their type and requires_grad; other tensors come back detached."""
    frozen = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    got = round_trip([torch.nn.Parameter(torch.ones(2)), frozen, torch.ones(2, requires_grad=True)])
    assert [type(item) for item in got] == [torch.nn.Parameter, torch.nn.Parameter, torch.Tensor]
    assert [item.requires_grad for item in got] == [True, False, False]


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6.0).reshape(2, 3),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.arange(6, dtype=">i4")[::-1],
        np.array(3.5),
        np.zeros((0, 2), "c16"),
        np.array(["ab", "é"]),
        np.array([b"a", b"bc"]),
        np.array(["2020-01-01"], "M8[D]"),
        np.zeros(3, [("a", "<i2"), ("b", ">f8", (2,))]),
        np.zeros(3, np.dtype([("a", "i1"), ("b", "f8")], align=True))["b"],
        np.array([True, False]),
        np.float16([1, np.nan]),
        np.zeros(3, "V0"),
    ],
    ids=lambda array: str(array.dtype),
)
def test_arrays_come_back_equal(array: np.ndarray) -> None:
    """Numpy arrays keep dtype, byte order, memory order, shape and bytes."""
    got = round_trip({"a": array})["a"]
    assert got.dtype == array.dtype
    assert got.shape == array.shape
    assert got.tobytes() == array.tobytes()
    assert got.flags.f_contiguous or not array.flags.f_contiguous


@pytest.mark.parametrize(
    "scalar",
    [np.float32(1.5), np.int64(-3), np.bool_(True), np.complex128(1j), np.str_("é"), np.datetime64("2020-01-01", "s")],
)
def test_numpy_scalars_keep_their_type(scalar: Any) -> None:
    """Numpy scalars do not turn into Python numbers, nor their dtypes into text."""
    got, dtype = round_trip([scalar, scalar.dtype])
    assert type(got) is type(scalar)
    assert got == scalar
    assert dtype == scalar.dtype


def test_metadata_and_default_factory_survive() -> None:
    """An OrderedDict keeps `_metadata`, a defaultdict its factory, a random state its tuple."""
    module = torch.nn.BatchNorm1d(3)
    default = collections.defaultdict(int, a=1)
    got = round_trip({"m": module, "d": default, "rng": np.random.RandomState(1).get_state()})
    assert got["m"]._metadata == module.state_dict()._metadata
    assert got["d"]["new"] == 0
    assert got["rng"][0] == "MT19937"


def test_long_text_and_bytes_go_to_the_stream() -> None:
    """Megabytes of text do not swell the layout that every holder keeps."""
    state = ["x" * 1_000_000, b"y" * 1_000_000, 1 << 80_000, bytearray(b"z" * 200), ""]
    layout, views = stored(state, 1 << 16)
    assert len(layout) < 200
    assert decode_state(layout, views, 1 << 16) == state


@pytest.mark.parametrize("chunk_bytes", [1, 7, 64, 4096])
def test_slot_borders_may_fall_anywhere(chunk_bytes: int) -> None:
    """The stream is the same however it is cut, and gathers across any border."""
    state = {"a": torch.randn(300), "b": torch.randn(20, 20)[:, ::3], "c": b"q" * 333, "n": np.arange(9)}
    layout, views = stored(state, chunk_bytes)
    assert b"".join(bytes(view) for view in views) == stream(state)
    got = decode_state(layout, views, chunk_bytes)
    assert torch.equal(got["a"], state["a"])
    assert torch.equal(got["b"], state["b"])
    assert got["c"] == state["c"]


def test_equal_states_give_equal_bytes() -> None:
    """Gaps are zeros, large tensors come first and aligned, and set order does not show."""

    def make(names: list[str]) -> dict[str, Any]:
        torch.manual_seed(0)
        items = {"s": torch.tensor(1.0), "odd": torch.ones(3, dtype=torch.uint8), "big": torch.randn(1 << 15)}
        return {**items, "big2": torch.randn(20_001), "names": set(names), "text": b"t" * 500}

    one, two = make(["a", "b", "c"]), make(["c", "b", "a"])
    assert plan_state(one).layout == plan_state(two).layout
    assert stream(one) == stream(two)
    extents = decode_layout(plan_state(one).layout).extents
    assert [size for _, size in extents] == [131072, 80004, 4, 3]
    assert [offset % 64 for offset, _ in extents[:2]] == [0, 0]
    assert stream(one)[131072 + 80004 :][:12] == bytes(12)


def test_large_copy_crosses_slots() -> None:
    """Pieces above the threshold of the parallel copy land where small ones do."""
    state = [torch.randn(1 << 19), torch.randn(1 << 18)]
    got = round_trip(state, 700_001)
    assert all(torch.equal(a, b) for a, b in zip(got, state, strict=True))


def test_alias_saves_the_copy_where_it_can() -> None:
    """With copy=False a tensor inside one writable slot looks into the slot; others are copied."""
    layout, views = stored([torch.ones(8), torch.ones(8, dtype=torch.float64)], 64)
    got = decode_state(layout, views, 64, copy=False)
    views[0][:] = bytes(64)
    assert got[0].sum() == 0
    got = decode_state(layout, [view.toreadonly() for view in views], 64, copy=False)
    got[0].add_(1)
    assert bytes(views[0]) == bytes(64)
