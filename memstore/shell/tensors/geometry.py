"""Compare thousands of tensors with what they were like at an earlier look: all but where they lie, and their numbers.

Torch has such a comparison for its compiler, in C++: one call for all tensors, a tenth of the time of reading their
attributes. It is no public interface, so it is used only after it has seen, in this process, every
difference that matters here. Where it is missing, fails, or sees a difference, the attributes are read and they decide.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch

_SHAPE, _DTYPE, _DEVICE, _REQUIRES_GRAD, _IS_NESTED = map(
    attrgetter, ("shape", "dtype", "device", "requires_grad", "is_nested")
)


class Unknown(Exception):
    """The state is not the known one, or not of the kind that can be known."""


def require(is_same: bool) -> None:
    """Raise `Unknown` if something differs."""
    if not is_same:
        raise Unknown


def types_of(items: Sequence[Any]) -> list[type]:
    """Return the exact type of each."""
    return list(map(type, items))


def addresses_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return where each begins; Unknown if one has no memory of its own."""
    try:
        return list(map(torch.Tensor.data_ptr, tensors))
    except RuntimeError:
        raise Unknown from None


class Shapes:
    """Shapes and strides of tensors, of any class, that were looked at."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._columns, self._guards = _shapes(tensors), _guards_of(tensors)

    def check(self, tensors: Sequence[torch.Tensor]) -> None:
        """Raise Unknown if one of these has others."""
        if self._guards is None or not self._guards.check(*tensors):
            require(_shapes(tensors) == self._columns)


class Geometry:
    """What, with its address, says all of a tensor's leaf; Unknown if one has no strides or no memory."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._places, self._columns = _places(tensors), _geometry(tensors)  # first: what guards do not bear ends here
        self._guards = _guards_of(tensors)

    def check(self, tensors: Sequence[torch.Tensor]) -> None:
        """Raise Unknown if one of these differs."""
        require(_places(tensors) == self._places)
        if self._guards is None or not self._guards.check(*tensors):
            require(_geometry(tensors) == self._columns)


def _shapes(tensors: Sequence[torch.Tensor]) -> tuple[list[Any], ...]:
    return list(map(_SHAPE, tensors)), list(map(torch.Tensor.stride, tensors))


def _geometry(tensors: Sequence[torch.Tensor]) -> tuple[list[Any], ...]:
    """Return what torch's guards compare too."""
    kind = torch.Tensor
    try:
        return (
            types_of(tensors),
            *_shapes(tensors),
            list(map(_DTYPE, tensors)),
            list(map(_DEVICE, tensors)),
            list(map(_REQUIRES_GRAD, tensors)),
            list(map(kind.is_conj, tensors)),
            list(map(kind.is_neg, tensors)),
        )
    except RuntimeError:
        raise Unknown from None


def _places(tensors: Sequence[torch.Tensor]) -> tuple[list[int], list[int]]:
    """Return the offset of each in its storage, and the storage's size: it may have been freed or shrunk.

    Unknown if one is sparse or nested: torch's guards would end the process, as their sizes cannot be read.
    """
    kind = torch.Tensor
    require(not any(map(_IS_NESTED, tensors)))
    try:
        sizes = list(map(torch.UntypedStorage.nbytes, map(kind.untyped_storage, tensors)))
        offsets: Any = map(kind.storage_offset, tensors)
        return list(offsets), sizes
    except RuntimeError:
        raise Unknown from None


def _guards_of(tensors: Sequence[torch.Tensor]) -> Any:
    """Return torch's comparison with these, of which it keeps none alive; None if there is none to rely on."""
    return torch_guards(tensors) if are_guards_right() else None


def torch_guards(tensors: Sequence[torch.Tensor]) -> Any:
    """Return torch's comparison, untried; None if it has none, or another one."""
    try:
        make: Any = torch._C._dynamo.guards.TensorGuards
        return make(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
    except Exception:  # of another torch
        return None


@functools.cache
def are_guards_right() -> bool:
    """Return whether torch's comparison takes like for like, and sees each difference that matters to us."""
    try:
        with torch.inference_mode(False):
            base = torch.zeros(2, 2, dtype=torch.complex64, device="cpu")
            like, others = _like(base), _others(base)
            second = torch.zeros(7, device="cpu")
        guards = torch_guards([base, second])
        return all(guards.check(each, second) for each in like) and not any(
            guards.check(*pair) for each in others for pair in ((each, second), (base, each))
        )
    except Exception:  # of another torch
        return False


def _like(base: torch.Tensor) -> list[torch.Tensor]:
    return [base, torch.ones_like(base), base.detach(), torch.zeros_like(base.expand(3, 2, 2))[1]]


def _others(base: torch.Tensor) -> list[torch.Tensor]:
    return [
        base.t(),
        base.expand(1, 2, 2),
        base[:1],
        base.view(4),
        torch.cat((base, base), 1)[:, :2],
        base.conj(),
        torch._neg_view(base),
        base.to(torch.complex128),
        base.view(torch.float32),
        base.to("meta"),
        base.clone().requires_grad_(),
        torch.nn.Parameter(base, requires_grad=False),
    ]
