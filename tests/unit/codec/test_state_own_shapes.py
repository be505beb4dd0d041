"""What has another length in a new process goes to load_state_dict(); another shape of a model is refused (R26)."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import pytest
import torch
import torchmetrics

from memstore.errors import ManifestMismatch
from memstore.shell.codec.decode import check_into, decode_state
from memstore.shell.codec.encode import copy_into, plan_state


def stored(state: object, chunk_bytes: int = 4096) -> tuple[bytes, list[memoryview], int]:
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
    decode_state(*stored({"buffer": Holder(value=value, fixed=torch.ones(2))}), into=into)
    assert same(value, into["buffer"].values["value"])
    assert into["buffer"].values["fixed"] is fixed
    assert fixed.tolist() == [1, 1]


@pytest.mark.filterwarnings("ignore:.*prototype")
def test_an_object_takes_a_jagged_tensor_of_another_length() -> None:
    """Its class builds it: the live one's parts do not fit."""
    rows = [torch.randn(3, 4), torch.randn(5, 4)]
    holder = Holder(t=torch.nested.nested_tensor([torch.zeros(2, 4)], layout=torch.jagged))
    decode_state(*stored(Holder(t=torch.nested.nested_tensor(rows, layout=torch.jagged))), into=holder)
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
    decode_state(*stored({"m": stored_one}), into={"m": fresh})
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
    decode_state(*stored({"m": torch.nn.Sequential(ExtraState(extra))}), into={"m": fresh})
    got = fresh[0].extra
    assert torch.equal(got, extra) if isinstance(extra, torch.Tensor) else got["n"] == 3 and got["scale"].numel() == 4


def test_a_lazy_module_takes_its_parameters() -> None:
    """It has none before its first forward."""
    module, fresh = torch.nn.LazyLinear(3), torch.nn.LazyLinear(3)
    module(torch.zeros(2, 5))
    state = stored({"m": module})
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
    decode_state(*stored({"metric": metric}), into={"metric": fresh})
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
    first, (layout, views, chunk_bytes) = torch.zeros(2), stored({"first": torch.ones(2), "x": value})
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
    layout, views, chunk_bytes = stored({"x": old})
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
        check_into(stored({"x": old})[0], {"x": compiled})
    assert "strict=False" not in str(raised.value)
    decode_state(*stored({"x": old}), into={"x": compiled._orig_mod})
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
    layout, views, chunk_bytes = stored({"x": value})
    with pytest.raises(ManifestMismatch, match=r"state\['x'\].*the object itself.*store\.get\(\) without into="):
        check_into(layout, {"x": live})
    assert same(decode_state(layout, views, chunk_bytes)["x"], value)


def test_a_list_in_itself_takes_the_numbers_that_were_stored() -> None:
    """It is looked through once."""
    ring: list[Any] = [1.0]
    ring.append(ring)
    into = {"x": ring}
    decode_state(*stored({"x": [0.5] * 100}), into=into)
    assert into == {"x": [0.5] * 100}


def test_a_meta_tensor_is_refused_with_what_to_call() -> None:
    """It has no memory to fill."""
    with torch.device("meta"):
        model = torch.nn.Linear(3, 2)
    with pytest.raises(ManifestMismatch, match=r"to_empty\(device=\.\.\.\) on its module first$"):
        check_into(stored({"x": torch.nn.Linear(3, 2)})[0], {"x": model})
