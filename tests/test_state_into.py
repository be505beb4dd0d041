"""Restoring into live objects: filled in place, refused whole if anything differs (R26)."""

from __future__ import annotations

import collections
from typing import Any

import numpy as np
import pytest
import torch

from memstore.adapters.torch import AppState
from memstore.errors import ManifestMismatch
from memstore.shell.state_decode import check_into, decode_state
from memstore.shell.state_encode import copy_into, plan_state


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
    assert got["step"] == 3
    assert torch.equal(into["a"], base)
    assert torch.equal(into["b"], state["b"])
    assert wide[:, 1::2].sum() == 0
    assert into["c"] == 7
    assert into["n"].tolist() == state["n"].tolist()


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
    got = decode_state(*stored(state), into={"model": other, "optim": fresh, "step": 0})
    assert got == {"model": other, "optim": fresh, "step": 7}
    assert other[0].weight is weight
    assert equal(model.state_dict(), other.state_dict())
    assert equal(optimizer.state_dict(), fresh.state_dict())


def test_stepped_optimizer_goes_back_to_fresh() -> None:
    """A checkpoint from before the first step empties an optimizer that has stepped."""
    model, optimizer = trained(0)
    other, stepped = trained(2, seed=1)
    decode_state(*stored({"m": model, "o": optimizer}), into={"m": other, "o": stepped})
    assert stepped.state_dict()["state"] == {}


@pytest.mark.parametrize("steps", [0, 2])
def test_app_state_resumes(steps: int) -> None:
    """AppState gives a fresh process a place for every byte."""
    model, optimizer = trained(3)
    other, fresh = trained(steps, seed=1)
    into = {"app": AppState(other, fresh), "epoch": 0}
    got = decode_state(*stored({"app": AppState(model, optimizer), "epoch": 5}), into=into)
    assert got["epoch"] == 5
    assert equal(model.state_dict(), other.state_dict())
    assert equal(optimizer.state_dict()["state"], fresh.state_dict()["state"])


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
    got = decode_state(*stored(state), into={"a": torch.zeros(6), "losses": [], "best": ()})
    assert got["losses"] == [0.5, 0.25]
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
    with pytest.raises(ManifestMismatch, match="into="):
        decode_state(*stored(state))
    with pytest.raises(ManifestMismatch, match="context"):
        decode_state(*stored(state), into=[Scaled(torch.zeros(4, dtype=torch.int8), torch.tensor(0.0), 8)])
    with pytest.raises(ManifestMismatch, match="Scaled"):
        decode_state(*stored(state), into=[torch.zeros(4)])
