"""A state is recognised without a walk only if nothing but its numbers, addresses and plain values have changed."""

from __future__ import annotations

import math
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.testing._internal.two_tensor import TwoTensor

from memstore.errors import UnsupportedState
from memstore.shell.codec import encode, known_state
from memstore.shell.codec.encode import PlanMemory, StatePlan, copy_into, plan_state
from memstore.shell.codec.known_state import KnownState
from memstore.shell.codec.walk import StateWalk
from memstore.shell.tensors import geometry
from memstore.shell.tensors.geometry import Unknown

CHUNK_BYTES = 64 << 10


@pytest.fixture(params=["torch's guards", "attributes"], autouse=True)
def compared_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors are compared in one call, or attribute by attribute where torch has none to rely on."""
    if request.param == "attributes":
        monkeypatch.setattr(geometry, "are_guards_right", lambda: False)


@pytest.fixture
def mesh() -> Iterator[Any]:
    """A mesh of one rank without sockets."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    dist.destroy_process_group()


def stored(plan: StatePlan) -> tuple[bytes, bytes, list[Any]]:
    """Return the layout, the stream, and the addresses that a put of this plan would store from."""
    slots = [bytearray(b"\xff" * CHUNK_BYTES) for _ in range(-(-plan.nbytes // CHUNK_BYTES))]
    copy_into(plan, [memoryview(slot) for slot in slots], CHUNK_BYTES)
    sources = [source for _, source in plan.placed if isinstance(source.owner, torch.Tensor)]
    return plan.layout, b"".join(slots)[: plan.nbytes], [source.address for source in sources]


def learned(state: Any) -> PlanMemory:
    """Return a memory that knows the state."""
    memory = PlanMemory()
    memory.plan(state)
    memory.plan(state)
    assert memory._known
    return memory


def walks(memory: PlanMemory, state: Any, monkeypatch: pytest.MonkeyPatch) -> int:
    """Plan a state, which must be right; return how many walks that took."""
    seen: list[Any] = []

    def walk(*given: Any) -> StateWalk:
        seen.append(given)
        return StateWalk(*given)

    with monkeypatch.context() as patch:
        patch.setattr(encode, "StateWalk", walk)
        plan = memory.plan(state)
    assert stored(plan) == stored(plan_state(state))
    return len(seen)


def fresh() -> dict[Any, Any]:
    torch.manual_seed(0)
    base, one = torch.randn(40), torch.randn(6)
    counts = OrderedDict(a=1, b=2)
    counts.move_to_end("a")
    weights = OrderedDict(w=torch.randn(5, 7), b=torch.randn(7, 5).t(), p=torch.nn.Parameter(torch.randn(3)))
    weights._metadata = OrderedDict({"": {"version": 1}})  # type: ignore[attr-defined]
    return {
        "model": weights, "tied": [base, base[8:20]], "twice": [base], "large": torch.randn(20_000),
        "view": torch.randn(6, 9)[:, 2:5], "complex": torch.randn(4, dtype=torch.complex64),
        "empty": torch.zeros(4)[:0],
        "none": [torch.empty(0), torch.empty(0)],
        "named": {"a": torch.ones(3), "b": torch.zeros(3)}, "same": [one, one.detach()],
        "sizes": [[torch.ones(1), torch.ones(2)], [torch.ones(2)]], "pair": (1, "x"), "lr": 0.0, "step": 1, "on": True,
        1: torch.ones(2), "expanded": torch.ones(1, 4).expand(3, 4), "counts": counts, "keys": {1: torch.ones(2)},
    }  # fmt: skip


RECOGNISED: dict[str, Callable[[dict[Any, Any]], object]] = {
    "nothing": lambda s: None,
    "numbers": lambda s: s["large"].add_(1),
    "plain": lambda s: s.update(step=2, pair=(7, "yy")),
    "counts": lambda s: s["counts"].update(b=7),
    "minus zero": lambda s: s.update(lr=-0.0),
    "nan": lambda s: s.update(lr=math.nan),
    "another nan": lambda s: s.update(lr=struct.unpack("<d", struct.pack("<Q", 0x7FF8000000000123))[0]),
    "metadata": lambda s: s["model"]._metadata[""].update(version=2),
    "other objects": lambda s: s["model"].update(w=s["model"]["w"].detach()),
    "at another address": lambda s: s.update(large=s["large"].clone()),
    "gathered from another address": lambda s: s.update(view=torch.randn(6, 9)[:, 2:5]),
    "empty elsewhere": lambda s: s.update(empty=torch.zeros(4)[:0]),
    "all elsewhere": lambda s: s.update({k: t.clone() for k, t in s.items() if k in ("large", "complex", 1)}),
}


@pytest.mark.parametrize("name", RECOGNISED)
def test_other_numbers_addresses_and_plain_values_take_no_walk(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what is stored is what a plan that remembers nothing would store; also of the state after that."""
    state = fresh()
    memory = learned(state)
    RECOGNISED[name](state)
    assert walks(memory, state, monkeypatch) == 0
    state["large"].add_(1)
    assert walks(memory, state, monkeypatch) == 0


def shared_by_moves(state: dict[Any, Any]) -> None:
    """Two tensors of the sizes that they had lie in one another now."""
    base = torch.zeros(20_000)
    state["large"], state["complex"] = base, base[:8].view(torch.complex64)


CHANGED: dict[str, Callable[[dict[Any, Any]], object]] = {
    "lengths": lambda s: s.update(sizes=[s["sizes"][0][:1], [s["sizes"][0][1], *s["sizes"][1]]]),
    "type of a container": lambda s: s.update(tied=tuple(s["tied"])),
    "type of a plain value": lambda s: s.update(on=1),
    "none": lambda s: s.update(step=None),
    "name": lambda s: s.update(model=OrderedDict((k + "x", t) for k, t in s["model"].items())),
    "order": lambda s: s["model"].move_to_end("w"),
    "type of a key": lambda s: s.update(keys={True: torch.ones(2)}),
    "metadata gone": lambda s: s["model"].__dict__.clear(),
    "parameter": lambda s: s["model"].update(w=torch.nn.Parameter(s["model"]["w"], False)),
    "requires_grad": lambda s: s["model"]["p"].requires_grad_(False),
    "dtype": lambda s: s.update(large=s["large"].view(torch.int32)),
    "shape": lambda s: s.update(large=s["large"].view(100, 200)),
    "strides": lambda s: s["model"].update(b=s["model"]["b"].contiguous()),
    "conj": lambda s: s.update(complex=s["complex"].conj()),
    "neg": lambda s: s.update(complex=torch._neg_view(s["complex"])),
    "tied where it was not": lambda s: s.update({1: s["sizes"][1][0]}),
    "another name": lambda s: s.update(named={"a": s["named"]["a"], "c": s["named"]["b"]}),
    "another order": lambda s: s.update(named=dict(reversed(s["named"].items()))),
    "tied though of another object": lambda s: s["named"].update(b=s["named"]["a"].detach()),
    "an empty one twice": lambda s: s.update(none=[s["none"][0]] * 2),
    "first of the same elsewhere": lambda s: s["same"].__setitem__(0, s["same"][0].clone()),
    "second of the same elsewhere": lambda s: s["same"].__setitem__(1, s["same"][0].clone()),
    "twice where it was not": lambda s: s.update(view=s["model"]["w"]) or s["model"].update(w=s["view"]),
    "another object of the same memory": lambda s: s.update(twice=[s["twice"][0].detach()]),
    "no longer twice": lambda s: s.update(twice=[s["twice"][0].clone()]),
    "tied one elsewhere": lambda s: s["tied"].__setitem__(1, torch.ones(12)),
    "shared by moves": shared_by_moves,
    "array": lambda s: s.update(step=np.ones(3)),
    "tensor for a plain value": lambda s: s.update(step=torch.ones(3)),
    "long text": lambda s: s.update(pair=(1, "x" * 5000)),
    "long number": lambda s: s.update(step=1 << 70),
}


@pytest.mark.parametrize("name", CHANGED)
def test_a_state_that_has_changed_otherwise_is_walked(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is stored is never laid out as the state of before."""
    state = fresh()
    memory = learned(state)
    CHANGED[name](state)
    assert walks(memory, state, monkeypatch) == 1
    assert walks(memory, state, monkeypatch) <= 1


def test_the_type_of_the_whole_state_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dict is not an ordered one, though they are equal."""
    state = {"a": torch.ones(3), "b": torch.ones(2)}
    assert walks(learned(state), OrderedDict(state), monkeypatch) == 1


def test_a_storage_that_was_freed_or_shrunk_where_it_lies_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else bytes behind it would be read."""
    state = fresh()
    memory = learned(state)
    large = state["large"]
    known = memory._known[0]
    address = large.data_ptr()
    large.untyped_storage().resize_(4)
    with monkeypatch.context() as patch:
        real = geometry.addresses_of
        patch.setattr(encode, "addresses_of", lambda ts: [address if t is large else real([t])[0] for t in ts])
        with pytest.raises(Unknown):
            known.plan(state, "state")
    with pytest.raises(UnsupportedState, match=r"state\['large'\] .* freed or shrunk"):
        memory.plan(state)


@pytest.mark.parametrize("bad", ["sparse", "nested", "meta"])
def test_what_cannot_be_stored_in_a_tensors_place_is_refused(bad: str) -> None:
    """By its path, as in a state that is not known."""
    state = fresh()
    memory = learned(state)
    one = torch.ones(2)
    made: dict[str, Callable[[], torch.Tensor]] = {
        "sparse": one.to_sparse,
        "nested": lambda: torch.nested.nested_tensor([one]),
        "meta": lambda: one.to("meta"),
    }
    state[1] = made[bad]()
    with pytest.raises(UnsupportedState, match=r"state\[1\]"):
        memory.plan(state)


def test_another_place_in_a_larger_storage_is_another_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """An extent that several tensors share begins no earlier than their storage does."""
    state = {"a": torch.zeros(8)[4:]}
    memory = learned(state)
    state["a"] = torch.zeros(8)[3:7]
    assert walks(memory, state, monkeypatch) == 1


def sharded(local: torch.Tensor, mesh: Any, placement: Any, rows: int = 4) -> DTensor:
    shape, strides = torch.Size((rows, 3)), (3, 1)
    return DTensor.from_local(local, mesh, [placement], run_check=False, shape=shape, stride=strides)


def test_dtensors_are_known_by_mesh_placements_and_whole_shape(mesh: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The local tensor stays the same one in all of them."""
    local = torch.zeros(4, 3)
    state: dict[str, Any] = {"w": sharded(local, mesh, Shard(0)), "v": sharded(torch.ones(4, 3), mesh, Replicate())}
    memory = learned(state)
    assert walks(memory, state, monkeypatch) == 0
    state["w"] = sharded(torch.ones(4, 3), mesh, Shard(0))
    assert walks(memory, state, monkeypatch) == 0
    other = init_device_mesh("cpu", (1,), mesh_dim_names=("other",))
    for changed in (
        sharded(local, mesh, Shard(1)),
        sharded(local, mesh, Shard(0), 8),
        sharded(local, other, Shard(0)),
        local,
    ):
        state["w"] = changed
        assert walks(memory, state, monkeypatch) == 1
        state["w"] = sharded(local, mesh, Shard(0))
        for _ in range(3):
            memory.plan(state)
        assert walks(memory, state, monkeypatch) == 0


def test_a_dtensor_made_of_wrappers_is_walked_every_time(mesh: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its parts are the leaves."""
    two: Any = TwoTensor
    memory, state = PlanMemory(), {"w": sharded(two(torch.ones(4, 3), torch.zeros(4, 3)), mesh, Shard(0))}
    assert [walks(memory, state, monkeypatch) for _ in range(3)] == [1, 1, 1]


class Described(torch.Tensor):
    """What stands for a DTensor on a mesh that can be freed."""

    _spec: Any


def test_a_mesh_that_is_gone_is_not_taken_for_one_of_the_same_id(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next object may have its place."""

    class Mesh:
        pass

    def on(mesh: Any) -> list[Any]:
        made = torch.zeros(2).as_subclass(Described)
        made._spec = SimpleNamespace(mesh=mesh, placements=())
        return [made]

    monkeypatch.setattr(known_state, "id", lambda each: 1, raising=False)
    kept = Mesh()
    known_state._Meshes(on(kept)).check(on(kept))
    gone = known_state._Meshes(on(Mesh()))
    with pytest.raises(Unknown):
        gone.check(on(Mesh()))


UNKNOWABLE: dict[str, Any] = {
    "array": {"a": np.ones(3)},
    "key": {("a", 1): torch.ones(2)},
    "true": {True: torch.ones(2)},
    "set": {"a": {1, 2}, "t": torch.ones(2)},
    "text": {"a": "x" * 5000, "t": torch.ones(2)},
    "number": {"a": 1 << 70},
    "tensor": torch.ones(3),
}


@pytest.mark.parametrize("name", UNKNOWABLE)
def test_what_columns_do_not_describe_is_walked_every_time(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And stored as it is."""
    memory, state = PlanMemory(), UNKNOWABLE[name]
    assert [walks(memory, state, monkeypatch) for _ in range(3)] == [1, 1, 1]


def test_a_put_amid_the_recognition_of_another_state_takes_its_own_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal's handler or another thread may put; plain values are written into the one tree."""
    state, other = fresh(), fresh()
    memory = learned(state)
    real = KnownState.match
    plans: list[Any] = []

    def match(self: KnownState, given: Any) -> Any:
        found = real(self, given)
        if not plans:
            plans.append(None)
            other["step"] = 99
            plans[0] = memory.plan(other)
        return found

    monkeypatch.setattr(KnownState, "match", match)
    state["step"] = 5
    mine = memory.plan(state)
    assert stored(mine) == stored(plan_state(state))
    assert stored(plans[0]) == stored(plan_state(other))
    assert stored(memory.plan(state)) == stored(plan_state(state))


class Asked:
    """A Stateful object."""

    def __init__(self, calls: list[Any]) -> None:
        self.weight, self.calls = torch.ones(3), calls

    def state_dict(self) -> dict[str, Any]:
        self.calls.append(self)
        return {"weight": self.weight, "calls": len(self.calls)}

    def load_state_dict(self, state: Any) -> None:
        """Unused."""


def test_objects_are_asked_once_for_each_plan_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the state is recognised or not: state_dict() may be collective."""
    calls: list[Any] = []
    state: dict[str, Any] = {"a": Asked(calls), "b": Asked(calls), "t": torch.ones(2)}
    memory = PlanMemory()
    for number in range(5):
        if number == 4:
            state["t"] = torch.ones(5)
        memory.plan(state)
        assert calls == [state["a"], state["b"]] * (number + 1)
        assert bool(memory._known) == (number in (1, 2, 3))
