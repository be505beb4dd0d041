"""Restoring into live objects: filled in place, refused whole if anything differs (R26)."""

from __future__ import annotations

import collections
import dataclasses
from collections import deque
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torchmetrics
from overlap_case import WAIT_S, one_host, one_rank

import memstore
from memstore.core.format.layout import decode_layout
from memstore.errors import ManifestMismatch
from memstore.shell.codec.decode import check_into, decode_state, matched
from memstore.shell.codec.encode import copy_into, plan_state


def stored(state: object, chunk_bytes: int = 256) -> tuple[bytes, list[memoryview], int]:
    plan = plan_state(state)
    views = [memoryview(bytearray(chunk_bytes)) for _ in range(0, plan.nbytes, chunk_bytes)]
    copy_into(plan, views, chunk_bytes)
    return plan.layout, views, chunk_bytes


def trained(steps: int = 2, seed: int = 0) -> tuple[torch.nn.Module, torch.optim.Adam]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(5, 3)).sum().backward()
        optimizer.step()
    return model, optimizer


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


def test_tensors_are_filled_in_place() -> None:
    """Every kind of target keeps its identity and takes the stored bytes; other leaves come back."""
    base = torch.randn(4, 6)
    state = {"a": base, "b": base.clone().t(), "c": torch.tensor(7), "n": np.arange(6.0), "step": 3, "e": torch.ones(0)}
    wide = torch.zeros(6, 8)
    into = {
        "a": torch.nn.Parameter(torch.zeros(4, 6)),
        "b": wide[:, ::2],
        "c": torch.tensor(0),
        "n": np.zeros(12)[::2],
        "step": None,
        "e": torch.ones(0),
    }
    got = decode_state(*stored(state), into=into)
    assert all(got[key] is into[key] for key in "abcne")
    assert got["step"] == into["step"] == 3
    assert torch.equal(into["a"], base)
    assert torch.equal(into["b"], state["b"])
    assert wide[:, 1::2].sum() == 0
    assert into["c"] == 7
    assert into["n"].tolist() == state["n"].tolist()


def test_a_view_into_itself_takes_what_was_stored_of_such_a_view() -> None:
    """Elements that share memory were equal when they were stored the same way."""
    windows = torch.arange(5.0).unfold(0, 3, 1)
    into = torch.zeros(5).unfold(0, 3, 1)
    decode_state(*stored({"a": windows}), into={"a": into})
    assert torch.equal(into, windows)


@pytest.mark.parametrize("is_array", [False, True])
def test_a_view_into_itself_takes_nothing_else(is_array: bool) -> None:
    """Of values that differ the last one written would stand in silence: where bytes are wrong there is an error."""
    value: Any = np.eye(3) if is_array else torch.eye(3)
    array = np.lib.stride_tricks.as_strided(np.zeros(5), (3, 3), (8, 8))
    into: Any = array if is_array else torch.zeros(5).unfold(0, 3, 1)
    with pytest.raises(ManifestMismatch, match=r"state\['a'\].*share memory"):
        decode_state(*stored({"a": value}), into={"a": into})


def test_fill_is_seen_by_autograd() -> None:
    """A backward over values that a restore has overwritten fails instead of using the new ones."""
    weight = torch.ones(3, requires_grad=True)
    loss = (weight * weight).sum()
    decode_state(*stored([torch.zeros(3)]), into=[weight])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("steps", [0, 2])
def test_model_and_optimizer_resume(steps: int) -> None:
    """A fresh optimizer takes the state it has no place for; a stepped one is overwritten in place."""
    model, optimizer = trained(3)
    other, fresh = trained(steps, seed=1)
    weight = other[0].weight
    state = {"model": model, "optim": optimizer, "step": 7}
    into = {"model": other, "optim": fresh, "step": 0}
    got = decode_state(*stored(state), into=into)
    assert got == {"model": other, "optim": fresh, "step": 7}
    assert into["step"] == 7
    assert other[0].weight is weight
    assert equal(model.state_dict(), other.state_dict())
    assert equal(optimizer.state_dict(), fresh.state_dict())


def test_stepped_optimizer_goes_back_to_fresh() -> None:
    """A checkpoint from before the first step empties an optimizer that has stepped."""
    model, optimizer = trained(0)
    other, stepped = trained(2, seed=1)
    decode_state(*stored({"m": model, "o": optimizer}), into={"m": other, "o": stepped})
    assert stepped.state_dict()["state"] == {}


def test_schedulers_scalers_and_metadata() -> None:
    """Other Stateful objects get their plain state back, a module its `_metadata`."""
    model, optimizer = trained(1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    optimizer.step()
    scheduler.step()
    other, fresh = trained(1, seed=1)
    behind = torch.optim.lr_scheduler.CosineAnnealingLR(fresh, 10)
    seen: list[Any] = []
    other.register_load_state_dict_pre_hook(lambda _, state, *rest: seen.append(getattr(state, "_metadata", None)))
    decode_state(*stored([model, scheduler]), into=[other, behind])
    assert behind.state_dict() == scheduler.state_dict()
    assert behind.last_epoch == 1
    assert seen


def test_tied_weights_stay_tied_in_the_target() -> None:
    """A tied model restores into a tied model, also where the tie is a view."""

    def make() -> torch.nn.ModuleDict:
        model = torch.nn.ModuleDict({"emb": torch.nn.Embedding(5, 3), "head": torch.nn.Linear(3, 5, bias=False)})
        model["head"].weight = model["emb"].weight
        return model

    model, other = make(), make()
    decode_state(*stored(model), into=other)
    assert torch.equal(other["head"].weight, model["emb"].weight)
    assert other["head"].weight is other["emb"].weight
    base, target = torch.randn(4, 6), torch.zeros(4, 6)
    decode_state(*stored([base, base.t(), base[2]]), into=[target, target.t(), target[2]])
    assert torch.equal(target, base)
    strided = torch.randn(8, 8)[:, ::2]
    twice = torch.zeros(8, 8)[:, ::2]
    decode_state(*stored([strided, strided.detach()]), into=[twice, twice.detach()])
    assert torch.equal(twice, strided)


BASE = torch.arange(6.0)
ONE = torch.zeros(6)


@pytest.mark.parametrize(
    ("state", "into", "path"),
    [
        ({"a": BASE, "b": BASE}, {"a": torch.zeros(6), "b": torch.zeros(6)}, r"state\['b'\]"),
        ({"a": BASE, "b": BASE + 1}, {"a": ONE, "b": ONE}, r"state\['b'\]"),
        ([BASE[:4], BASE[2:]], [ONE[:4], ONE[1:5]], r"state\[1\]"),
        ([BASE.view(2, 3), BASE.view(2, 3).t()], [ONE.view(3, 2).t(), ONE.view(3, 2)], r"state\[\d\]"),
        ({"a": BASE, "b": BASE + 1}, {"a": torch.zeros(6), "b": torch.zeros(5)}, r"state\['b'\].*\[6\].*\[5\]"),
        ({"a": BASE, "b": BASE + 1}, {"a": torch.zeros(6), "b": torch.zeros(6).double()}, "float32.*float64"),
        ({"a": BASE, "b": BASE + 1}, {"a": torch.zeros(6)}, r"state\['b'\]"),
        ({"a": BASE}, {"a": torch.zeros(6), "b": 1}, r"state\['b'\] is in `into`"),
        ({"a": BASE, "b": [1]}, {"a": torch.zeros(6), "b": [1, 2]}, r"state\['b'\].*1 items.*2"),
        ({"a": BASE, "b": 1}, {"a": torch.zeros(6), "b": torch.zeros(1)}, r"state\['b'\].*plain"),
        ({"a": BASE, "b": BASE + 1}, {"a": torch.zeros(6), "b": np.zeros(6, "f4")}, r"state\['b'\].*tensor.*array"),
        ({"a": BASE, "b": BASE + 1}, {"a": torch.zeros(6), "b": None}, r"state\['b'\]"),
        ({"a": BASE, "b": {"c": BASE + 1}}, {"a": torch.zeros(6), "b": [1]}, r"state\['b'\]"),
        ({"a": BASE, "b": BASE + 1}, {"a": torch.zeros(6), "b": torch.zeros(1).expand(6)}, "expanded"),
        ({"a": BASE, "b": BASE + 1}, {"a": torch.zeros(6), "b": torch.zeros(6, device="meta")}, r"state\['b'\].*meta"),
        ({"a": BASE, "b": 1}, {"a": torch.zeros(6), "b": torch.nn.Linear(1, 1)}, r"state\['b'\]"),
        (
            {"a": BASE, "b": torch.nn.Linear(2, 2)},
            {"a": torch.zeros(6), "b": torch.nn.Linear(2, 2, bias=False)},
            "bias",
        ),
        (
            {"a": BASE, "b": torch.nn.Linear(2, 2, bias=False)},
            {"a": torch.zeros(6), "b": torch.nn.Linear(2, 2)},
            "bias",
        ),
    ],
)
def test_mismatch_leaves_the_target_untouched(state: Any, into: Any, path: str) -> None:
    """The first difference is named with both sides, and not one byte has been written."""

    def tensors(value: Any) -> list[torch.Tensor]:
        if isinstance(value, torch.nn.Module):
            return [item.detach() for item in value.parameters()]
        items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else [value]
        if not isinstance(value, dict | list):
            return [value] if isinstance(value, torch.Tensor) and not value.is_meta else []
        return [found for item in items for found in tensors(item)]

    before = [item.clone() for item in tensors(into)]
    layout, views, chunk_bytes = stored(state)
    with pytest.raises(ManifestMismatch, match=path):
        check_into(layout, into)
    with pytest.raises(ManifestMismatch, match=path):
        decode_state(layout, views, chunk_bytes, into=into)
    assert equal(before, tensors(into))


def test_optimizer_of_another_shape_is_refused() -> None:
    """Inside a Stateful object, what has a place must still fit it."""
    _, optimizer = trained(1)
    wrong = torch.optim.Adam([torch.nn.Parameter(torch.zeros(3)) for _ in range(6)])
    for param in wrong.param_groups[0]["params"]:
        param.grad = torch.ones(3)
    wrong.step()
    with pytest.raises(ManifestMismatch, match=r"\['state'\]\[0\]\['exp_avg'\]"):
        decode_state(*stored({"o": optimizer}), into={"o": wrong})


def test_read_only_array_is_refused() -> None:
    """An array that cannot be written is named before anything else is."""
    target = np.zeros(3)
    target.flags.writeable = False
    with pytest.raises(ManifestMismatch, match="read-only"):
        decode_state(*stored([np.ones(3)]), into=[target])


def test_what_only_the_checkpoint_has_comes_back() -> None:
    """Plain objects need no place in `into`; containers keep their stored type."""
    state = collections.OrderedDict(a=torch.ones(2), rng=(1, 2), note={"x": b"y"})
    got = decode_state(*stored(state), into=collections.OrderedDict(a=torch.zeros(2)))
    assert equal(dict(got), dict(state))
    assert type(got) is collections.OrderedDict


class Scaled(torch.Tensor):
    """A wrapper subclass in the traceable protocol: two inner tensors and a context."""

    @staticmethod
    def __new__(cls, data: torch.Tensor, scale: torch.Tensor, bits: int) -> Scaled:
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=torch.float32)

    def __init__(self, data: torch.Tensor, scale: torch.Tensor, bits: int) -> None:
        self.packed, self.scale, self.bits = data, scale, bits

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["packed", "scale"], {"bits": self.bits}

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(func)


def test_a_history_that_has_grown_comes_back() -> None:
    """A restarted script begins with an empty list of losses; only what has bytes to fill must have a place."""
    state = {"a": BASE, "losses": [0.5, 0.25], "best": ()}
    losses: list[float] = []
    into = {"a": torch.zeros(6), "losses": losses, "best": ()}
    got = decode_state(*stored(state), into=into)
    assert got["losses"] == losses == [0.5, 0.25]
    assert into["losses"] is losses
    with pytest.raises(ManifestMismatch, match=r"state\['losses'\]\[1\] was stored with tensors"):
        check_into(stored({"losses": [0.5, BASE]})[0], {"losses": [0.5]})


def test_wrapper_subclass_moves_as_its_inner_tensors() -> None:
    """It needs a live one of the same class and context; its inner tensors are filled."""
    state = [Scaled(torch.arange(4, dtype=torch.int8), torch.tensor(0.5), 4)]
    target = Scaled(torch.zeros(4, dtype=torch.int8), torch.tensor(0.0), 4)
    got = decode_state(*stored(state), into=[target])
    assert got[0] is target
    assert target.packed.tolist() == [0, 1, 2, 3]
    assert target.scale == 0.5
    with pytest.raises(ManifestMismatch, match="context"):
        decode_state(*stored(state), into=[Scaled(torch.zeros(4, dtype=torch.int8), torch.tensor(0.0), 8)])
    with pytest.raises(ManifestMismatch, match="Scaled"):
        decode_state(*stored(state), into=[torch.zeros(4)])


@dataclasses.dataclass
class Progress:
    epoch: int
    seen: list[int]


@dataclasses.dataclass(frozen=True)
class Seeds:
    numpy: int


class Best(NamedTuple):
    loss: float
    step: int


def test_plain_values_go_into_entries_of_dicts_lists_and_dataclasses() -> None:
    """As if the caller had assigned them: every container stays the one that it was, so that others see it, too."""
    for kind in (Progress, Seeds, Best):
        memstore.register(kind)
    state = {
        "w": BASE,
        "epoch": 3,
        "name": "a",
        "best": None,
        "lr": [0.1, {"warm": True}],
        "pair": (1, ("x", 2.0)),
        "progress": Progress(4, [1, 2]),
        "seeds": Seeds(7),
        "record": Best(0.5, 9),
        "tags": {"a", "b"},
        "text": "x" * 5000,
        "big": 1 << 80,
        "blob": b"y" * 500,
        "nested": {"only stored": {"x": 1}},
    }
    progress, rates, nested = Progress(0, []), [0.0, {"warm": False}], {}  # type: ignore[var-annotated]
    into = {
        "w": torch.zeros(6),
        "epoch": 0,
        "name": 5,
        "best": 0.25,
        "lr": rates,
        "pair": (0, ("", 0.0)),
        "progress": progress,
        "seeds": Seeds(0),
        "record": Best(0.0, 0),
        "tags": set(),
        "nested": nested,
    }
    inner = rates[1]
    match = matched(decode_layout(stored(state)[0]), into)
    assert match is not None
    assert match.plain.not_filled == []
    assert into["epoch"] == 0
    decode_state(*stored(state), into=into)
    assert {key: value for key, value in into.items() if key != "w"} == {k: v for k, v in state.items() if k != "w"}
    assert torch.equal(into["w"], BASE)  # type: ignore[arg-type]
    assert (into["progress"], into["lr"], into["nested"]) == (progress, rates, nested)
    assert into["progress"] is progress
    assert rates[1] is inner


def test_values_beside_tensors_in_tuples_are_filled_around_the_same_tensors() -> None:
    """As in numpy's random state; tensors, dicts and lists in the tuples stay the objects that they were."""
    memstore.register(Best)
    np.random.seed(3)
    np.random.rand(5)
    drawn: Any = np.random.get_state()
    state = {
        "rng": {"numpy": drawn},
        "pair": ((3, BASE), "x"),
        "same": (1, BASE + 1),
        "inner": ([{"deep": 1}], BASE + 2),
        "best": Best(BASE + 3, 7),
        "list": [(4, BASE + 4)],  # type: ignore[arg-type]
    }
    np.random.seed(4)
    into: dict[str, Any] = {
        "rng": {"numpy": np.random.get_state()},
        "pair": ((0, torch.zeros(6)), ""),
        "same": (1, torch.zeros(6)),
        "inner": ([{}], torch.zeros(6)),
        "best": Best(torch.zeros(6), 0),  # type: ignore[arg-type]
        "list": [(0, torch.zeros(6))],
    }
    before = {**into, "tensor": into["list"][0][1]}
    match = matched(decode_layout(stored(state)[0]), into)
    assert match is not None
    assert match.plain.not_filled == []
    decode_state(*stored(state), into=into)
    np.random.set_state(into["rng"]["numpy"])
    after_fill = np.random.rand()
    np.random.set_state(drawn)
    assert after_fill == np.random.rand()
    assert into["pair"][0][1] is before["pair"][0][1]
    assert (into["pair"][0][0], into["pair"][1], into["best"].step, into["list"][0][0]) == (3, "x", 7, 4)
    assert (into["inner"], into["inner"][0][0]) == (before["inner"], {"deep": 1})
    assert into["inner"][0] is before["inner"][0]
    assert into["best"].loss is before["best"].loss
    assert into["list"][0][1] is before["tensor"]
    assert torch.equal(before["tensor"], BASE + 4)


def test_what_has_no_place_is_listed_by_path_and_stays() -> None:
    """What no entry holds, and what would take a live object out of the state."""
    state = {"ema": None, "pair": (None, 2)}
    ema, pair = {"w": torch.zeros(2)}, ([torch.zeros(2)], 0)
    into: dict[str, Any] = {"ema": ema, "pair": pair}
    match = matched(decode_layout(stored(state)[0]), into)
    assert match is not None
    assert match.plain.not_filled == ["state['ema']", "state['pair'][0]"]
    decode_state(*stored(state), into=into)
    assert into["ema"] is ema
    assert into["pair"][0] is pair[0]
    assert into["pair"][1] == 2
    match = matched(decode_layout(stored((3, BASE))[0]), (0, torch.zeros(6)))
    assert match is not None
    assert match.plain.not_filled == ["state[0]"]
    match = matched(decode_layout(stored(5)[0]), 4)
    assert match is not None
    assert match.plain.not_filled == ["state"]


def test_a_list_that_stands_twice_is_filled_once() -> None:
    """It is stored twice, and both say the same."""
    losses: list[float] = []
    decode_state(*stored({"a": [1.0, 2.0], "b": [1.0, 2.0]}), into={"a": losses, "b": losses})
    assert losses == [1.0, 2.0]


def test_keys_that_equal_nothing_find_their_entries() -> None:
    """NaN, alone, in a tuple and twice: by their bits, in order."""

    def state(value: float) -> dict[Any, Any]:
        nan = float("nan")
        keys: list[Any] = [nan, float("nan"), (nan, 1), 2.5, complex(0, nan)]
        return {key: torch.full((3,), value + number) for number, key in enumerate(keys)} | {"plain": {nan: value}}

    into = state(0.0)
    decode_state(*stored(state(10.0)), into=into)
    assert [value[0].item() for value in list(into.values())[:-1]] == [10.0, 11.0, 12.0, 13.0, 14.0]
    assert list(into["plain"].values()) == [10.0]
    with pytest.raises(ManifestMismatch, match=r"state\[nan\] is in `into` and was not stored"):
        decode_state(*stored({1.0: BASE}), into={1.0: torch.zeros(6), float("nan"): 1})


def test_a_get_fills_the_epoch_and_says_what_it_could_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """In the log once, with a bound, and in the checkpoint; the values come back in its state."""
    state = {"epoch": 3, "w": BASE, "averages": list(range(12))}
    into = {"epoch": 0, "w": torch.zeros(6), "averages": [{"w": torch.zeros(1)} for _ in range(12)]}
    with one_host(tmp_path) as cluster, one_rank(cluster) as store:
        store.put(1, state).wait("committed", WAIT_S)
        got = store.get(1, rank=0, into=into)
    assert got is not None
    assert into["epoch"] == 3
    assert got.not_filled == tuple(f"state['averages'][{n}]" for n in range(12))
    assert got.state["averages"][7] == 7
    lines = [line for line in caplog.messages if "left 12 values as they were" in line]
    assert len(lines) == 1
    assert "state['averages'][9], ..." in lines[0]


# -- state own shapes ---------------------------------------------------------------------------------
# What has another length in a new process goes to load_state_dict(); another shape of a model is refused (R26).


def shaped_stored(state: object, chunk_bytes: int = 4096) -> tuple[bytes, list[memoryview], int]:
    plan = plan_state(state)
    views = [memoryview(bytearray(chunk_bytes)) for _ in range(0, plan.nbytes, chunk_bytes)]
    copy_into(plan, views, chunk_bytes)
    return plan.layout, views, chunk_bytes


class Holder:
    """An object that keeps whatever it is given: a replay buffer, a sampler, a queue."""

    def __init__(self, **values: Any) -> None:
        self.values = values

    def state_dict(self) -> dict[str, Any]:
        return dict(self.values)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = dict(state)


PAIRS: dict[str, tuple[Any, Any]] = {
    "grown": (torch.arange(9.0), torch.zeros(3)),
    "shrunk": (torch.arange(3.0), torch.zeros(9)),
    "empty": (torch.arange(3.0), torch.zeros(0)),
    "dtype": (torch.arange(3), torch.zeros(3)),
    "array": (np.arange(9.0), np.zeros(3)),
    "array for a tensor": (np.arange(9.0), torch.zeros(3)),
    "tensor for a number": (torch.arange(3.0), 0),
    "number for a tensor": (5, torch.zeros(3)),
    "list": ([torch.arange(3.0), torch.arange(2.0)], [torch.zeros(1)]),
    "deque": (deque([torch.arange(3.0)], maxlen=4), deque(maxlen=4)),
}


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype is other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | deque):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.mark.parametrize("name", PAIRS)
def test_an_object_takes_what_was_stored_in_any_shape(name: str) -> None:
    """Beside a tensor of the same shape, which is filled in place."""
    value, live = PAIRS[name]
    fixed = torch.zeros(2)
    into = {"buffer": Holder(value=live, fixed=fixed)}
    decode_state(*shaped_stored({"buffer": Holder(value=value, fixed=torch.ones(2))}), into=into)
    assert same(value, into["buffer"].values["value"])
    assert into["buffer"].values["fixed"] is fixed
    assert fixed.tolist() == [1, 1]


@pytest.mark.filterwarnings("ignore:.*prototype")
def test_an_object_takes_a_jagged_tensor_of_another_length() -> None:
    """Its class builds it: the live one's parts do not fit."""
    rows = [torch.randn(3, 4), torch.randn(5, 4)]
    holder = Holder(t=torch.nested.nested_tensor([torch.zeros(2, 4)], layout=torch.jagged))
    decode_state(*shaped_stored(Holder(t=torch.nested.nested_tensor(rows, layout=torch.jagged))), into=holder)
    assert all(map(torch.equal, holder.values["t"].unbind(), rows))


class Resizing(torch.nn.Module):
    """A buffer that takes the stored length, beside a parameter and a stock module."""

    def __init__(self, size: int, width: int = 2) -> None:
        super().__init__()
        self.register_buffer("seen", torch.arange(float(size)))
        self.weight = torch.nn.Parameter(torch.full((width,), float(size)))
        self.norm = torch.nn.BatchNorm1d(width)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        self.seen = torch.zeros_like(state_dict[f"{prefix}seen"])
        super()._load_from_state_dict(state_dict, prefix, *rest)


class ExtraState(torch.nn.Module):
    """As of TransformerEngine: a uint8 tensor, empty before the first step."""

    def __init__(self, extra: Any) -> None:
        super().__init__()
        self.weight, self.extra = torch.nn.Parameter(torch.ones(2)), extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def test_a_module_that_resizes_a_buffer_does_so() -> None:
    """Below another module; its parameters are filled."""
    stored_one, fresh = torch.nn.Sequential(Resizing(9)), torch.nn.Sequential(Resizing(3))
    weight = fresh[0].weight
    decode_state(*shaped_stored({"m": stored_one}), into={"m": fresh})
    assert fresh[0].seen.tolist() == list(range(9))
    assert fresh[0].weight is weight
    assert weight.tolist() == [9, 9]


@pytest.mark.parametrize(
    ("extra", "live"),
    [
        (torch.arange(9, dtype=torch.uint8), torch.zeros(0, dtype=torch.uint8)),
        (torch.arange(9, dtype=torch.uint8), torch.zeros(3, dtype=torch.uint8)),
        (torch.arange(9, dtype=torch.uint8), None),
        ({"scale": torch.ones(4), "n": 3}, {"scale": torch.ones(2)}),
    ],
)
def test_a_modules_extra_state_has_any_length(extra: Any, live: Any) -> None:
    """It is handed to set_extra_state()."""
    fresh = torch.nn.Sequential(ExtraState(live))
    decode_state(*shaped_stored({"m": torch.nn.Sequential(ExtraState(extra))}), into={"m": fresh})
    got = fresh[0].extra
    assert torch.equal(got, extra) if isinstance(extra, torch.Tensor) else got["n"] == 3 and got["scale"].numel() == 4


def test_a_lazy_module_takes_its_parameters() -> None:
    """It has none before its first forward."""
    module, fresh = torch.nn.LazyLinear(3), torch.nn.LazyLinear(3)
    module(torch.zeros(2, 5))
    state = shaped_stored({"m": module})
    decode_state(*state, into={"m": fresh})
    assert torch.equal(fresh.weight, module.weight)


def test_a_metrics_list_of_tensors_comes_back() -> None:
    """torchmetrics loads its states itself."""

    def make() -> torchmetrics.CatMetric:
        metric = torchmetrics.CatMetric()
        metric.persistent(True)
        return metric

    metric, fresh = make(), make()
    for number in range(3):
        metric.update(torch.full((number + 1,), float(number)))
    decode_state(*shaped_stored({"metric": metric}), into={"metric": fresh})
    assert torch.equal(torch.cat(fresh.value), torch.cat(metric.value))


class Trainer:
    """An object around a model and its optimizer, as in a framework."""

    def __init__(self, width: int) -> None:
        self.parts = {"model": torch.nn.Linear(width, 2)}
        self.optimizer = torch.optim.SGD(self.parts["model"].parameters(), momentum=0.9)
        self.seen = torch.zeros(width)

    def state_dict(self) -> dict[str, Any]:
        return {"m": self.parts["model"].state_dict(), "seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError("a model of another width was loaded")


def many(count: int) -> torch.optim.Optimizer:
    """An optimizer whose parameters' numbers are stored as a block."""
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(1)) for _ in range(count)], lr=0.1)


SHAPES: dict[str, tuple[Any, Any, str]] = {
    "parameter": (torch.nn.Linear(3, 2), torch.nn.Linear(4, 2), r"state\['x'\]\['weight'\].*\[2, 3\].*\[2, 4\]"),
    "buffer": (torch.nn.BatchNorm1d(3, affine=False), torch.nn.BatchNorm1d(4, affine=False), "running_mean"),
    "parameter of a module that resizes": (Resizing(3, 2), Resizing(3, 4), r"\['weight'\].*\[2\].*\[4\]"),
    "in an object around it": (Trainer(3), Trainer(4), r"\['m'\]\['weight'\].*\[2, 3\].*\[2, 4\]"),
    "groups of many parameters": (many(70), many(71), r"groups of \[70\] parameters.*\[71\]"),
    "missing": (torch.nn.Linear(3, 2), torch.nn.Linear(3, 2, bias=False), r"state\['x'\]\['bias'\]"),
    "more": (torch.nn.Linear(3, 2, bias=False), torch.nn.Linear(3, 2), r"state\['x'\]\['bias'\]"),
}


@pytest.mark.parametrize("name", SHAPES)
def test_another_shape_of_a_model_is_refused_before_anything_is_written(name: str) -> None:
    """In a module, and in an object that has one."""
    value, live, message = SHAPES[name]
    first, (layout, views, chunk_bytes) = torch.zeros(2), shaped_stored({"first": torch.ones(2), "x": value})
    for attempt in (
        lambda into: check_into(layout, into),
        lambda into: decode_state(layout, views, chunk_bytes, into=into),
    ):
        with pytest.raises(ManifestMismatch, match=message):
            attempt({"first": first, "x": live})
    assert first.sum() == 0


def test_the_way_out_of_a_module_that_has_changed_works() -> None:
    """As the message says it: take what does not fit out of got.state['x'], and load the rest."""
    old, new = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2, bias=False)
    layout, views, chunk_bytes = shaped_stored({"x": old})
    with pytest.raises(ManifestMismatch, match=r"got\.state\['x'\].*strict=False"):
        check_into(layout, {"x": new})
    state = decode_state(layout, views, chunk_bytes)
    new.load_state_dict(state["x"], strict=False)
    assert torch.equal(new.weight, old.weight)


def test_a_module_that_is_wrapped_otherwise_is_named_with_its_wrapper() -> None:
    """strict=False would load nothing of it, without a word; without the wrapper it is filled."""
    old, new = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    compiled = torch.compile(new, backend="eager")
    with pytest.raises(ManifestMismatch, match=r"it as '_orig_mod\.weight': give.*model\._orig_mod") as raised:
        check_into(shaped_stored({"x": old})[0], {"x": compiled})
    assert "strict=False" not in str(raised.value)
    decode_state(*shaped_stored({"x": old}), into={"x": compiled._orig_mod})
    assert torch.equal(new.weight, old.weight)


DICTS: dict[str, tuple[Any, Any]] = {
    "state of an optimizer that has not stepped": ({"state": {0: torch.ones(2)}}, {"state": {}}),
    "extra state of another length": ({"_extra_state": torch.ones(9)}, {"_extra_state": torch.ones(3)}),
    "one more": ({}, {"new": torch.ones(2)}),
    "a list": ([1, 2], [1, 2, 3]),
    "an expanded view": (torch.ones(3), torch.zeros(1).expand(3)),
}


@pytest.mark.parametrize("name", DICTS)
def test_what_differs_outside_of_a_module_comes_with_two_ways_on(name: str) -> None:
    """The object itself, or the value out of a get without into=."""
    value, live = DICTS[name]
    layout, views, chunk_bytes = shaped_stored({"x": value})
    with pytest.raises(ManifestMismatch, match=r"state\['x'\].*the object itself.*store\.get\(\) without into="):
        check_into(layout, {"x": live})
    assert same(decode_state(layout, views, chunk_bytes)["x"], value)


def test_a_list_in_itself_takes_the_numbers_that_were_stored() -> None:
    """It is looked through once."""
    ring: list[Any] = [1.0]
    ring.append(ring)
    into = {"x": ring}
    decode_state(*shaped_stored({"x": [0.5] * 100}), into=into)
    assert into == {"x": [0.5] * 100}


def test_a_meta_tensor_is_refused_with_what_to_call() -> None:
    """It has no memory to fill."""
    with torch.device("meta"):
        model = torch.nn.Linear(3, 2)
    with pytest.raises(ManifestMismatch, match=r"to_empty\(device=\.\.\.\) on its module first$"):
        check_into(shaped_stored({"x": torch.nn.Linear(3, 2)})[0], {"x": model})
