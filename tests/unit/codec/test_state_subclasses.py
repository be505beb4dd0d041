"""Tensor subclasses that are made of tensors are built again by their class, where a get has no live one to fill."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

import memstore
from memstore.errors import ConfigError, ManifestMismatch, UnsupportedState
from memstore.shell.codec.decode import check_into, decode_state
from memstore.shell.codec.encode import copy_into, plan_state
from memstore.shell.tensors import subclasses


def stored(state: object, chunk_bytes: int = 4096) -> tuple[bytes, list[memoryview], int]:
    plan = plan_state(state)
    views = [memoryview(bytearray(chunk_bytes)) for _ in range(0, plan.nbytes, chunk_bytes)]
    copy_into(plan, views, chunk_bytes)
    return plan.layout, views, chunk_bytes


class Halves(torch.Tensor):
    """A tensor of packed numbers, a scale and a context, as of low-bit optimizers; its class reads the scale."""

    packed: torch.Tensor
    scale: torch.Tensor
    label: Any

    @staticmethod
    def __new__(cls, packed: torch.Tensor, scale: torch.Tensor, label: Any) -> Halves:
        made: Halves = torch.Tensor._make_wrapper_subclass(cls, packed.shape, dtype=torch.float32)  # type: ignore[attr-defined]
        return made

    def __init__(self, packed: torch.Tensor, scale: torch.Tensor, label: Any) -> None:
        self.packed, self.scale, self.label = packed, scale, label
        self.factor = float(scale)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["packed", "scale"], {"label": self.label, "all": list(range(100))}

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Any], context: Any, size: Any, strides: Any) -> Halves:
        assert context["all"] == list(range(100))
        if context["label"] == "bad":
            raise AssertionError("an older version")
        return Halves(inner["packed"], inner["scale"], context["label"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return Halves(args[0].packed, args[0].scale, args[0].label)
        raise NotImplementedError(func)


def halves(label: str = "x", factor: float = 0.5) -> Halves:
    return Halves(torch.arange(6, dtype=torch.int8), torch.tensor(factor), label)


class Slow(torch.optim.Optimizer):
    """An optimizer whose state is low-bit."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for number, param in enumerate(group["params"]):
                self.state[param] = {"moment": halves(factor=number + 0.5), "step": 3}


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module, imported as a user's own is, with the class in it."""
    module = ModuleType("their_tensors")
    monkeypatch.setitem(sys.modules, "their_tensors", module)
    module.Halves = Halves  # type: ignore[attr-defined]
    monkeypatch.setattr(Halves, "__module__", "their_tensors")
    return module


def test_without_into_it_comes_back_equal() -> None:
    """Its parts are there, and verified, before its class sees them."""
    got = decode_state(*stored([halves(), torch.nn.Parameter(halves("p"), requires_grad=False)]))
    assert [type(each) for each in got] == [Halves, Halves]
    assert got[0].packed.tolist() == list(range(6))
    assert (got[0].factor, got[0].label, got[1].label) == (0.5, "x", "p")
    assert [isinstance(each, torch.nn.Parameter) for each in got] == [False, True]
    two: Any = decode_state(*stored({"t": TwoTensor(torch.ones(2, 3).t(), torch.zeros(2, 3).t())}))["t"]  # type: ignore[no-untyped-call]
    assert (two.shape, two.stride(), two.b.sum()) == ((3, 2), (1, 3), 0)


@pytest.mark.parametrize("has_stepped", [False, True])
def test_a_fresh_optimizer_takes_low_bit_state(has_stepped: bool) -> None:
    """It has no tensors to fill before its first step; one that has stepped is filled in place."""

    def make() -> Slow:
        return Slow([torch.nn.Parameter(torch.zeros(6)) for _ in range(2)])

    optimizer, fresh = make(), make()
    optimizer.step()
    if has_stepped:
        fresh.step()
    decode_state(*stored({"opt": optimizer}), into={"opt": fresh})
    states = [fresh.state[param] for param in fresh.param_groups[0]["params"]]
    assert [(type(each["moment"]), float(each["moment"].scale)) for each in states] == [(Halves, 0.5), (Halves, 1.5)]


def test_a_class_is_found_by_name_where_it_is_imported_and_nothing_is_imported(elsewhere: ModuleType) -> None:
    """A module's __getattr__, which may import, is not asked."""
    state = stored({"opt": [halves()]})

    def imports(name: str) -> Any:
        raise AssertionError(f"{name} was asked for by name")

    elsewhere.__getattr__ = imports  # type: ignore[method-assign]
    assert type(decode_state(*state)["opt"][0]) is Halves
    del elsewhere.Halves
    with pytest.raises(UnsupportedState, match=r"their_tensors:Halves.*import it before get\(\), or .*register"):
        decode_state(*state)
    optimizer, fresh = Slow([torch.nn.Parameter(torch.zeros(6))]), Slow([torch.nn.Parameter(torch.zeros(6))])
    optimizer.step()
    with pytest.raises(ManifestMismatch, match=r"\['o'\]\['state'\]\[0\]\['moment'\].*their_tensors:Halves.*import"):
        check_into(stored({"o": optimizer})[0], {"o": fresh})


def test_a_registered_class_comes_back_wherever_it_was_defined(
    elsewhere: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a function, too."""
    del elsewhere.Halves
    monkeypatch.setattr(subclasses, "_BY_NAME", {})
    memstore.register(Halves)
    assert type(decode_state(*stored([halves()]))[0]) is Halves
    with pytest.raises(ConfigError, match="__tensor_unflatten__"):
        memstore.register(torch.nn.Parameter)


@pytest.mark.parametrize(
    "name", [b"builtins:exec__!!!", b"torch:Tensor!!!!!!", b"os.path:join!!!!!!", b"no.such:Thing!!!!!"]
)
def test_what_a_layout_names_is_a_tensor_subclass_or_refused(name: bytes, elsewhere: ModuleType) -> None:
    """No other object is called, whatever the stored name."""
    layout, views, chunk_bytes = stored([halves()])
    assert layout.count(b"their_tensors:Halves") == 1
    wanted = name.replace(b"!", b"")
    start = layout.index(b"their_tensors:Halves")
    assert layout[start - 1] == 0xA0 + 20  # msgpack's length of the text
    changed = layout[: start - 1] + bytes([0xA0 + len(wanted)]) + wanted + layout[start + 20 :]
    with pytest.raises(UnsupportedState, match=wanted.decode()):
        decode_state(changed, views, chunk_bytes)


def test_a_class_that_refuses_the_parts_is_named() -> None:
    """It may be of another version."""
    with pytest.raises(ManifestMismatch, match=r"Halves.*an older version"):
        decode_state(*stored([halves("bad")]))


@pytest.mark.filterwarnings("ignore:.*prototype")
def test_jagged_tensors_come_back() -> None:
    """Alone, and filled in place."""
    rows = [torch.randn(3, 4), torch.randn(5, 4)]
    jagged = torch.nested.nested_tensor(rows, layout=torch.jagged)
    live = torch.nested.nested_tensor([torch.zeros(3, 4), torch.zeros(5, 4)], layout=torch.jagged)
    decode_state(*stored({"t": jagged}), into={"t": live})
    for got in (decode_state(*stored({"t": jagged}))["t"], live):
        assert all(map(torch.equal, got.unbind(), rows))


def test_torchao_optimizers_go_on_in_a_fresh_process_as_they_would_have() -> None:
    """8 bits, 4 bits and fp8 under a plain optimizer: the losses after a restore are those of the unbroken run."""
    optim = pytest.importorskip("torchao.optim")

    def make(kind: Any, seed: int) -> tuple[torch.nn.Module, Any]:
        torch.manual_seed(seed)
        model = torch.nn.Linear(256, 64)
        return model, kind(model.parameters(), lr=1e-3)

    def train(model: torch.nn.Module, optimizer: Any, steps: int) -> list[float]:
        losses = []
        for number in range(steps):
            torch.manual_seed(number)
            loss = model(torch.randn(8, 256)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    for kind in (optim.AdamW8bit, optim.AdamW4bit, optim.AdamWFp8):
        model, optimizer = make(kind, 0)
        train(model, optimizer, 3)
        state = stored({"model": model, "optimizer": optimizer})
        other, fresh = make(kind, 1)
        decode_state(*state, into={"model": other, "optimizer": fresh})
        assert train(other, fresh, 4) == train(model, optimizer, 4)
