"""Torch's comparison of tensors is relied on only where it is there and tells apart what it must."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from memstore.shell.tensors import geometry
from memstore.shell.tensors.geometry import Geometry, Shapes, Unknown, are_guards_right


@pytest.fixture(autouse=True)
def asked_again() -> Iterator[None]:
    are_guards_right.cache_clear()
    yield
    are_guards_right.cache_clear()


def test_this_torch_is_right() -> None:
    """Else puts are slower, not wrong: a new torch that fails here is to be looked at."""
    assert are_guards_right()


class Guards:
    """A comparison that overlooks one difference."""

    def __init__(self, overlooked: int, base: torch.Tensor) -> None:
        self.real, self.overlooked = geometry_guards([base, torch.zeros(7)]), overlooked
        self.others = geometry._others(base)

    def check(self, *tensors: torch.Tensor) -> bool:
        other = self.others[self.overlooked]
        is_overlooked = tensors[0].layout is other.layout and repr_of(tensors[0]) == repr_of(other)
        return bool(is_overlooked or self.real.check(*tensors))


geometry_guards = geometry.torch_guards


def repr_of(tensor: torch.Tensor) -> Any:
    strides = tensor.stride() if tensor.layout is torch.strided else None
    flags = tensor.is_conj(), tensor.is_neg(), tensor.requires_grad, tensor.device
    return type(tensor), tensor.shape, strides, tensor.dtype, flags


@pytest.mark.parametrize("overlooked", range(12))
def test_one_that_overlooks_a_difference_is_not_used(overlooked: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them is asked for."""
    monkeypatch.setattr(geometry, "torch_guards", lambda tensors: Guards(overlooked, tensors[0]))
    assert not are_guards_right()


def test_one_that_sees_a_difference_in_numbers_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would only cost time."""

    class Never:
        def check(self, *tensors: torch.Tensor) -> bool:
            return False

    monkeypatch.setattr(geometry, "torch_guards", lambda tensors: Never())
    assert not are_guards_right()


def test_a_torch_without_it_or_with_another_one_is_read_by_attributes(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not public, so it may go."""

    def other(*tensors: torch.Tensor) -> None:
        raise SystemError("bad argument to internal function")

    monkeypatch.setattr(torch._C._dynamo.guards, "TensorGuards", other)
    assert not are_guards_right()
    known = Geometry([torch.zeros(3)])
    known.check([torch.ones(3)])
    with pytest.raises(Unknown):
        known.check([torch.ones(4)])


def test_one_that_failed_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here it would say that all are the same."""

    class Always:
        def check(self, *tensors: torch.Tensor) -> bool:
            return True

    monkeypatch.setattr(geometry, "torch_guards", lambda tensors: Always())
    with pytest.raises(Unknown):
        Geometry([torch.zeros(3)]).check([torch.ones(3, dtype=torch.int32)])


def test_attributes_decide_where_it_sees_a_difference() -> None:
    """Its view depends on the thread's modes, such as autocast."""
    known, shapes = Geometry([torch.zeros(3)]), Shapes([torch.zeros(3)])
    with torch.autocast("cpu"):
        known.check([torch.ones(3)])
        shapes.check([torch.ones(3)])
        with pytest.raises(Unknown):
            known.check([torch.ones(3, requires_grad=True)])
        with pytest.raises(Unknown):
            shapes.check([torch.ones(3, 1)])


def test_no_tensor_is_kept_alive() -> None:
    """What a job no longer uses is not to be kept by us."""
    import weakref

    tensors = [torch.zeros(3)]
    alive = weakref.ref(tensors[0])
    known = Geometry(tensors)
    del tensors
    assert alive() is None
    known.check([torch.zeros(3)])


@pytest.mark.parametrize("tensor", [torch.ones(2, 2).to_sparse(), torch.nested.nested_tensor([torch.ones(2)])])
def test_a_tensor_without_strides_or_memory_is_unknown(tensor: torch.Tensor) -> None:
    """It is for the walk to refuse."""
    with pytest.raises(Unknown):
        Geometry([tensor])
    with pytest.raises(Unknown):
        geometry.addresses_of([torch.ones(2), torch.ones(2, 2).to_sparse()])
