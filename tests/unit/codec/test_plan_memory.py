"""A remembered plan is the plan of the state at hand, whatever has changed since; and it keeps no tensor alive."""

from __future__ import annotations

import gc
import weakref
from collections import OrderedDict
from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memstore.errors import UnsupportedState
from memstore.shell.codec.encode import PlanMemory, StatePlan, copy_into, plan_state
from memstore.testing.fuzz import targets

CHUNK_BYTES = 64 << 10
State = dict[str, Any]


def stored(plan: StatePlan) -> tuple[bytes, bytes]:
    """Return the layout and the stream that a put of this plan would store."""
    slots = [bytearray(CHUNK_BYTES) for _ in range(-(-plan.nbytes // CHUNK_BYTES))]
    copy_into(plan, [memoryview(slot) for slot in slots], CHUNK_BYTES)
    return plan.layout, b"".join(slots)[: plan.nbytes]


def sources(plan: StatePlan) -> list[tuple[int, int, object]]:
    """Return where tensors are copied from; text is encoded again for each plan."""
    return [
        (offset, source.nbytes, source.address if isinstance(source.owner, torch.Tensor) else "text")
        for offset, source in plan.placed
    ]


def fresh() -> State:
    torch.manual_seed(0)
    base = torch.randn(40_000)
    return {
        "model": OrderedDict(large=base, small=torch.randn(5, 7), tied=base[:10], odd=torch.randn(6, 8).t()[1:]),
        "moments": [torch.nn.Parameter(torch.randn(9)), torch.randn(3, 4, dtype=torch.complex64)],
        "square": torch.randn(4, 4),
        "step": 0,
        "text": "x" * 5000,
        "lr": [0.0, True, None],
    }


def resized(state: State) -> None:
    """The tensor's storage is freed and made again, smaller; the tensor goes with it."""
    tensor = state["model"]["small"]
    tensor.untyped_storage().resize_(0)
    tensor.untyped_storage().resize_(8)
    tensor.set_(tensor.untyped_storage(), 0, (2,), (1,))


def expanded(state: State) -> None:
    state["moments"].append(torch.ones(1, 4).expand(3, 4))


CHANGES: dict[str, Callable[[State], object]] = {
    "nothing": lambda s: None,
    "values": lambda s: s["model"]["large"].add_(1),
    "plain": lambda s: s.update(step=s["step"] + 1, lr=[-0.0, 1, "warm"]),
    "text": lambda s: s.update(text=s["text"] + "y"),
    "state_dict": lambda s: s.update(model=OrderedDict((k, t.detach()) for k, t in s["model"].items())),
    "clone": lambda s: s["model"].update(small=s["model"]["small"].clone()),
    "grown": lambda s: s["model"].update(small=torch.randn(70, 300)),
    "same object twice": lambda s: s.update(again=s["model"]["large"]),
    "same memory twice": lambda s: s.update(again=s["model"]["large"].detach()),
    "untied": lambda s: s["model"].update(tied=s["model"]["tied"].clone()),
    "transposed": lambda s: s["model"]["odd"].t_(),
    "strides": lambda s: s["square"].t_(),
    "shape": lambda s: s["square"].set_(s["square"].untyped_storage(), 0, (2, 8), (8, 1)),
    "parameter": lambda s: s["model"].update(small=torch.nn.Parameter(s["model"]["small"].detach(), False)),
    "fewer": lambda s: s["moments"].pop() if len(s["moments"]) > 2 else None,
    "more": lambda s: s["moments"].append(torch.ones(3)),
    "dtype": lambda s: s["model"].update(large=s["model"]["large"].view(torch.int32)),
    "requires_grad": lambda s: s["moments"][0].requires_grad_(not s["moments"][0].requires_grad),
    "conj": lambda s: s["moments"].__setitem__(1, s["moments"][1].conj()),
    "order": lambda s: s.update(model=OrderedDict(reversed(s["model"].items()))),
    "moved": lambda s: s["moments"].append(s["moments"].pop(0)),
    "array": lambda s: s.update(array=np.arange(20)),
    "no array": lambda s: s.pop("array", None),
    "expanded": expanded,
    "resized": resized,
    "data": lambda s: setattr(s["moments"][0], "data", torch.randn(9)),
}


@settings(max_examples=300)
@given(st.lists(st.sampled_from(sorted(CHANGES)), max_size=16), st.booleans())
def test_it_is_always_the_plan_of_the_state_at_hand(names: list[str], has_text: bool) -> None:
    """Compared with a plan that remembers nothing: the same layout, the same memory, the same bytes."""
    memory, state = PlanMemory(), fresh()
    if not has_text:  # without it the state is recognised by its columns
        state["text"] = ""
    for name in ("nothing", "nothing", *names, "nothing", "values"):
        CHANGES[name](state)
        plan, expected = memory.plan(state), plan_state(state)
        assert sources(plan) == sources(expected), name
        assert stored(plan) == stored(expected), name


@pytest.mark.parametrize("number", range(8))
def test_buffers_that_swap_tie_and_move_are_laid_out_as_a_fresh_walk_would(number: int) -> None:
    """A short run of `make fuzz`: a tie that comes after tensors changed their order in memory is not lost."""
    changes = [*targets.plan_seeds(), *(Random(seed).randbytes(80) for seed in range(8))]
    targets.known_plan(changes[number])


def test_rows_are_used_again_where_only_plain_values_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor is described again, and the plain values are those of now."""
    memory, state = PlanMemory(), fresh()
    before = memory.plan(state)

    def described(tensor: torch.Tensor) -> None:
        raise AssertionError("a tensor was described again")

    monkeypatch.setattr("memstore.shell.codec.walk.leaf_of_tensor", described)
    CHANGES["plain"](state)
    CHANGES["state_dict"](state)
    after = memory.plan(state)
    assert after.layout != before.layout
    assert [offset for offset, _ in after.placed] == [offset for offset, _ in before.placed]


def test_no_tensor_is_kept_alive() -> None:
    """A model that the job has dropped is freed, though no other state was put since."""
    memory = PlanMemory()
    state = fresh()
    memory.plan(state)
    memory.plan(state)
    tensors = [weakref.ref(tensor) for tensor in (*state["model"].values(), *state["moments"])]
    del state
    gc.collect()
    assert [tensor() for tensor in tensors] == [None] * len(tensors)


def test_a_shrunk_storage_is_refused_by_its_path_though_the_tensor_is_known() -> None:
    """Else bytes behind it would be read."""
    memory, state = PlanMemory(), fresh()
    memory.plan(state)
    small = state["model"]["small"]
    small.untyped_storage().resize_(4)
    with pytest.raises(UnsupportedState, match=r"state\['model'\]\['small'\] .* freed or shrunk"):
        memory.plan(state)
    state["model"]["small"] = torch.ones(5, 7)
    assert stored(memory.plan(state)) == stored(plan_state(state))


def test_a_state_that_is_refused_leaves_the_memory_as_it_was() -> None:
    """The next one is planned as if it had not been there."""
    memory, state = PlanMemory(), fresh()
    memory.plan(state)
    for bad in (object(), torch.ones(2, 2).to_sparse(), torch.ones(2, device="meta")):
        with pytest.raises(UnsupportedState, match="bad"):
            memory.plan({"bad": bad, **state})
        assert stored(memory.plan(state)) == stored(plan_state(state))


class Counted:
    """A Stateful object; its state_dict may be collective."""

    def __init__(self) -> None:
        self.weight, self.calls, self.has_grad = torch.ones(3), 0, False

    def state_dict(self) -> State:
        self.calls += 1
        self.has_grad = torch.is_grad_enabled()
        return {"weight": self.weight, "calls": self.calls}

    def load_state_dict(self, state: State) -> None:
        """Unused."""


def test_state_dict_is_called_once_for_each_plan_and_as_the_caller_would() -> None:
    """Whether the plan is remembered or not; with the caller's grad mode."""
    memory, app = PlanMemory(), Counted()
    for calls in (1, 2):
        memory.plan({"app": app})
        assert (app.calls, app.has_grad) == (calls, True)
    with torch.no_grad():
        memory.plan({"app": app})
    assert (app.calls, app.has_grad) == (3, False)
    app.weight = torch.zeros(3)
    memory.plan({"app": app})
    assert app.calls == 4
