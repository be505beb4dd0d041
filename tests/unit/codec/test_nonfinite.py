"""Numbers that are not finite are found while a put is copied, in every kind of float, and named by tensor (R39)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from memstore.shell.codec.encode import PlanMemory, StatePlan, copy_into, plan_state
from memstore.shell.codec.nonfinite import NAMES_MAX, Nonfinite
from memstore.shell.native import extension
from memstore.shell.tensors.memory import DTYPES

CHUNK_BYTES = 4096
NAN, INF = float("nan"), float("inf")
WITH_INFINITY = ("float64", "float32", "float16", "bfloat16", "complex64", "complex128", "float8_e5m2")
WITHOUT = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2fnuz")
BAD = [
    (name, bad)
    for name in (*WITH_INFINITY, *WITHOUT)
    for bad in ((NAN, INF, -INF) if name in WITH_INFINITY else (NAN,))
]


@pytest.fixture(autouse=True, params=["helper", "torch"])
def how(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The native helper looks while it digests; torch does where there is none."""
    if request.param == "helper" and not extension.is_there():
        pytest.skip("the native helper is not built")
    if request.param == "torch":
        monkeypatch.setattr(extension, "is_there", lambda: False)
    return str(request.param)


def found(plan: StatePlan) -> list[str]:
    """Copy a planned state and return the tensors that have such numbers."""
    slots = [memoryview(bytearray(CHUNK_BYTES)) for _ in range(-(-plan.nbytes // CHUNK_BYTES))]
    look = Nonfinite()
    copy_into(plan, slots, CHUNK_BYTES, look=look)
    return look.names(plan.name_at)


def numbers(count: int, name: str) -> torch.Tensor:
    """Return finite numbers of both signs, the largest among them."""
    made = torch.linspace(-3, 3, count).to(DTYPES[name])
    if not name.startswith("complex"):
        made[0] = torch.tensor(torch.finfo(made.dtype).max, dtype=torch.float64).to(made.dtype)
    return made


def put_at(tensor: torch.Tensor, place: int, bad: float) -> None:
    """Set one number; of eight bits torch sets bytes alone."""
    one = torch.tensor([bad]).to(tensor.dtype)
    tensor.view(torch.uint8).reshape(len(tensor), -1)[place] = one.view(torch.uint8)


@pytest.mark.parametrize(("name", "bad"), BAD)
@pytest.mark.parametrize("count", [1, 7, 9001])
def test_one_number_anywhere_is_found_and_its_tensor_named(name: str, bad: float, count: int) -> None:
    """The first, one in the middle and the last, also behind chunk borders; beside others that are finite."""
    tensor = numbers(count, name)
    state = {"first": torch.ones(11), "weights": tensor, "last": np.arange(3.0), "note": b"\xff" * 99}
    assert found(plan_state(state)) == []
    for place in {0, count // 2, count - 1}:
        tensor = numbers(count, name)
        put_at(tensor, place, bad)
        assert found(plan_state({**state, "weights": tensor})) == ["state['weights']"]


def test_bits_of_whole_numbers_and_bytes_are_no_numbers_that_can_be_infinite() -> None:
    """All bits are set in each of them: as a float that would be a NaN."""
    state = {
        "int32": torch.full((500,), -1, dtype=torch.int32),
        "uint8": torch.full((500,), 255, dtype=torch.uint8),
        "bool": torch.ones(500, dtype=torch.bool),
        "array": np.full(500, -1),
        "bytes": b"\xff" * 9000,
        "text": "\xff" * 9000,
        "number": NAN,
    }
    assert found(plan_state(state)) == []


def test_memory_that_is_shared_is_looked_at_as_its_tensors_see_it() -> None:
    """Tied tensors are named once; what is seen as floats and as bits is not looked at, for it may be either."""
    weights = torch.ones(1000)
    weights[5] = NAN
    assert found(plan_state({"weights": weights, "tied": weights, "part": weights[:10]})) == ["state['weights']"]
    packed = torch.full((400,), 255, dtype=torch.uint8)
    assert found(plan_state({"bits": packed, "floats": packed.view(torch.float32)})) == []
    assert found(plan_state({"column": torch.full((40, 40), INF)[:, 3]})) == ["state['column']"]


def test_a_state_that_is_known_is_looked_at_like_the_first() -> None:
    """Its plan is remembered; numbers and plain values change from step to step."""
    memory, weights = PlanMemory(), torch.ones(3000)
    for step in range(6):
        weights[step] = NAN if step % 2 else 1.0
        weights[step - 1 if step else 0] = 1.0
        state: dict[str, Any] = {"step": step, "weights": weights, "count": torch.tensor(step)}
        assert found(memory.plan(state)) == (["state['weights']"] if step % 2 else [])


def test_the_first_tensors_are_named_and_the_others_counted() -> None:
    """A loss that is NaN is in all of them after one step."""
    names = found(plan_state({f"w{number}": torch.full((9,), NAN) for number in range(NAMES_MAX + 5)}))
    assert (len(names), names[-1]) == (NAMES_MAX + 1, "and 5 more")
