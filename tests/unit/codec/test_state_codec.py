"""A state packed into slots comes back equal, bit for bit, or is refused by path and type."""

from __future__ import annotations

import collections
import dataclasses
import enum
import math
import pickle
import random
import struct
import time
import warnings
from collections import Counter, deque
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memstore.core.format.layout import decode_layout, encode_layout
from memstore.core.format.object_tree import Tag
from memstore.errors import ConfigError, ManifestMismatch, ProtocolError, UnsupportedState
from memstore.shell.codec import encode
from memstore.shell.codec.decode import check_into, decode_state, matched
from memstore.shell.codec.encode import PlanMemory, StatePlan, copy_into, plan_state
from memstore.shell.codec.walk import NUMBERS_MIN, StateWalk
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


# -- state numbers ------------------------------------------------------------------------------------
# Long lists of numbers are one block each; counters and deques are plain data.


NAN = struct.unpack("<d", struct.pack("<Q", 0xFFF8000000000123))[0]
BASE = torch.arange(6.0)


def numbers_stored(state: object, chunk_bytes: int = 4096) -> tuple[bytes, list[memoryview], int]:
    return slots(plan_state(state), chunk_bytes)


def slots(plan: StatePlan, chunk_bytes: int = 4096) -> tuple[bytes, list[memoryview], int]:
    views = [memoryview(bytearray(chunk_bytes)) for _ in range(0, plan.nbytes, chunk_bytes)]
    copy_into(plan, views, chunk_bytes)
    return plan.layout, views, chunk_bytes


def numbers_bits(value: Any) -> Any:
    """Return a form in which equal means the same bits and types."""
    if isinstance(value, list | tuple | deque):
        return type(value), getattr(value, "maxlen", None), [numbers_bits(item) for item in value]
    return type(value), struct.pack("<d", value) if isinstance(value, float) else value


LONG: dict[str, Any] = {
    "floats": [0.5, -0.0, NAN, float("inf"), 5e-324] * 50,
    "integers": [0, -(1 << 63), (1 << 63) - 1, 7] * 50,
    "truths": [True, False, True] * 50,
    "tuple": tuple(range(200)),
    "tuple of floats": (NAN, 1.0) * 100,
    "tuple of truths": (True,) * 200,
    "deque": deque([0.25] * 200, maxlen=300),
    "short deque": deque(["a", 1], maxlen=None),
    "beyond 64 bits": [1 << 70] * 100,
    "unsigned": [1 << 63] * 100,
    "two kinds": [1, 0.5] * 100,
    "truths and integers": [True, 1] * 100,
    "in a set": {tuple(range(100))},
    "as a key": {tuple(range(100)): 1},
}


@pytest.mark.parametrize("name", LONG)
def test_sequences_of_numbers_come_back_bit_for_bit(name: str) -> None:
    """Of one kind as a block, else item by item."""
    got = decode_state(*numbers_stored({"x": LONG[name], "w": BASE}))["x"]
    assert numbers_bits(got) == numbers_bits(LONG[name])


@pytest.mark.parametrize("kind", [float, int, bool])
def test_a_block_costs_the_layout_nothing(kind: type) -> None:
    """So no length is refused in the middle of training: eight million were."""
    for make in (list, tuple, deque):
        plan = plan_state({"losses": make([kind(1)] * 300_000)})
        assert len(plan.layout) < 200
        assert plan.nbytes == 300_000 * (1 if kind is bool else 8)


def test_a_random_state_comes_back() -> None:
    """It is a tuple of 625 integers inside another one."""
    random.seed(5)
    into = {"rng": random.getstate(), "w": torch.zeros(6)}
    random.random()
    drawn = random.getstate()
    random.seed(6)
    decode_state(*numbers_stored({"rng": drawn, "w": BASE}), into=into)
    random.setstate(into["rng"])  # type: ignore[arg-type]
    assert random.getstate() == drawn


def test_a_block_goes_into_the_live_list() -> None:
    """The list stays the one that it was, whatever it held; a tuple is replaced in its entry."""
    losses, window, pair = [0.0, "x"], deque([1.0], maxlen=100), (0, 0)
    into = {"losses": losses, "window": window, "pair": pair, "none": None, "inner": (1, ())}
    many = [float(number) for number in range(200)]
    state = {
        "losses": many,
        "window": deque(many, maxlen=200),
        "pair": tuple(range(100)),
        "none": many,
        "inner": (2, tuple(many)),
    }
    decode_state(*numbers_stored(state), into=into)
    assert into["losses"] is losses
    assert losses == many
    assert into["window"] is window
    assert list(window) == many[100:]
    assert (into["pair"], into["none"], into["inner"]) == (tuple(range(100)), many, (2, tuple(many)))


def test_live_objects_in_a_list_stay_where_numbers_were_stored() -> None:
    """They are listed; a tensor is refused, as is a list that has more items than were stored."""
    live = {"w": torch.zeros(1)}
    into: dict[str, Any] = {"x": [0, live, 0]}
    state = numbers_stored({"x": list(range(100))})
    match = matched(decode_layout(state[0]), into)
    assert match is not None
    assert match.plain.not_filled == ["state['x'][1]"]
    decode_state(*state, into=into)
    assert into["x"] == [0, live, *range(2, 100)]
    with pytest.raises(ManifestMismatch, match=r"state\['x'\]\[1\] was stored as a plain object"):
        check_into(state[0], {"x": [0, torch.zeros(1)]})
    with pytest.raises(ManifestMismatch, match=r"state\['x'\] was stored with 100 items and has 101"):
        check_into(state[0], {"x": [0] * 101})
    match = matched(decode_layout(numbers_stored((tuple(range(100)), BASE))[0]), ((1,), torch.zeros(6)))
    assert match is not None
    assert match.plain.not_filled == ["state[0]"]


@pytest.mark.parametrize("live", [{}, {"milestones": Counter({9: 1})}])
def test_counters_come_back_as_counters(live: dict[str, Any]) -> None:
    """A missing key counts 0."""
    value = Counter({30: 1, 80: 2})
    into: Any = dict(live)
    decode_state(*numbers_stored({"milestones": value}), into=into)
    assert type(decode_state(*numbers_stored({"milestones": value}))["milestones"]) is Counter
    assert into["milestones"] == value
    assert into["milestones"]["absent"] == 0


def test_every_schedule_of_milestones_is_stored() -> None:
    """MultiStepLR keeps them in a Counter."""
    optimizers = [torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0) for _ in range(2)]
    one, other = (torch.optim.lr_scheduler.MultiStepLR(each, [1, 2]) for each in optimizers)
    optimizers[0].step()
    one.step()
    decode_state(*numbers_stored({"s": one}), into={"s": other})
    assert other.state_dict() == one.state_dict()


def test_tensors_in_a_deque_are_filled() -> None:
    """As in a list; a shorter one has no place for them."""
    state = numbers_stored({"d": deque([BASE, 3, BASE + 1])})
    into = {"d": deque([torch.zeros(6), 0, torch.zeros(6)])}
    first = into["d"][0]
    decode_state(*state, into=into)
    assert into["d"][0] is first
    assert (first.tolist(), into["d"][1]) == (BASE.tolist(), 3)
    with pytest.raises(ManifestMismatch, match=r"state\['d'\]\[2\] was stored with tensors"):
        check_into(state[0], {"d": deque([torch.zeros(6), 0])})


CHANGES: dict[str, tuple[Callable[[dict[str, Any]], object], int]] = {
    "other numbers": (lambda s: s["losses"].__setitem__(3, NAN), 0),
    "longer": (lambda s: s["losses"].append(0.5), 0),
    "both longer": (lambda s: s["losses"].append(0.5) or s["params"].append(7), 0),
    "plain value": (lambda s: s.update(step=9), 0),
    "another kind": (lambda s: s.update(losses=[int(each) for each in s["losses"]]), 1),
    "another type": (lambda s: s.update(losses=tuple(s["losses"])), 1),
    "one of another kind": (lambda s: s["losses"].append(1), 1),
    "beyond 64 bits": (lambda s: s["params"].append(1 << 63), 1),
    "short": (lambda s: s.update(losses=s["losses"][: NUMBERS_MIN - 1]), 1),
    "counted": (lambda s: s["count"].update(a=1), 0),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_known_state_takes_new_blocks_without_a_walk(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A history that grows, an optimizer's list of parameters: what is stored is what a walk would store."""
    state: dict[str, Any] = {
        "deep": {"more": [0.0] * 70},
        "losses": [0.5] * 100,
        "w": BASE,
        "step": 1,
        "params": list(range(80)),
        "count": Counter(a=1),
    }
    memory, walks = PlanMemory(), []
    for _ in range(3):
        memory.plan(state)
    change, wanted = CHANGES[name]
    change(state)
    monkeypatch.setattr(encode, "StateWalk", lambda *given: walks.append(given) or StateWalk(*given))
    plan = memory.plan(state)
    monkeypatch.undo()
    assert len(walks) == wanted
    assert slots(plan)[:2] == slots(plan_state(state))[:2]


def test_a_long_list_costs_a_small_multiple_of_pickle() -> None:
    """It was 160 times, at every put. The bound is far from both: this is no measurement."""
    state = {"losses": [number / 7 for number in range(300_000)], "w": BASE}
    memory = PlanMemory()

    def cost_s(work: Callable[[], object]) -> float:
        took = []
        for _ in range(5):
            began_s = time.thread_time()
            work()
            took.append(time.thread_time() - began_s)
        return min(took)

    assert cost_s(lambda: memory.plan(state)) < 30 * cost_s(lambda: pickle.dumps(state["losses"]))


@pytest.mark.parametrize("tag", [Tag.INT_LIST, Tag.FLOAT_TUPLE])
def test_a_block_that_ends_within_a_number_is_malformed(tag: Tag) -> None:
    """So is a deque of anything but one list."""
    for tree in ([int(tag), bytes(12)], [int(Tag.DEQUE), None, [1, 2]], [int(Tag.DEQUE), -1, [[1, None]]]):
        with pytest.raises(ProtocolError):
            decode_state(encode_layout(0, [], [], [], tree), [], 4096)


# -- state refusals -----------------------------------------------------------------------------------
# What a state may not hold is refused before any copy; what a layout may not claim, before any read.


def refused_stored(state: object, chunk_bytes: int = 256) -> tuple[bytes, list[memoryview]]:
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
    layout, views = refused_stored(Point(1, 2))
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
    layout, views = refused_stored(state)
    damaged = bytearray(layout)
    damaged[data.draw(st.integers(0, len(layout) - 1))] = data.draw(st.integers(0, 255))
    try:
        decode_state(bytes(damaged), views, 256)
    except (ProtocolError, UnsupportedState, ManifestMismatch):
        return
