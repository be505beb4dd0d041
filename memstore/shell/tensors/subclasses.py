"""Tensor subclasses that can be stored by their parts: DTensor and traceable wrapper subclasses.

A DTensor is its local tensor plus a description of mesh and placements; a wrapper subclass
(`__tensor_flatten__`) is its inner tensors plus the flatten context. A DTensor comes back only into a
target that matches, or onto a mesh that the target already uses. A wrapper subclass without a place
is built again by its class's `__tensor_unflatten__`.
"""

from __future__ import annotations

import dataclasses
import enum
import sys
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch

from memstore.core.format.layout import Flag
from memstore.errors import ConfigError, ManifestMismatch, UnsupportedState

# -- registry -----------------------------------------------------------------------------------------
# Classes that a state may hold instances of: enums, dataclasses and named tuples, by explicit consent.


C = TypeVar("C", bound=type)

_BY_NAME: dict[str, type[Any]] = {}


def register(cls: C) -> C:
    """Allow instances of `cls` in states; usable as a class decorator.

    A dataclass or named tuple is stored field by field and comes back without a call of its
    `__init__`; an enum member is stored by name. A tensor subclass is stored by its parts, registered
    or not, and comes back through its `__tensor_unflatten__`: to register it here imports it before a
    get, and lets a class come back that is defined in a function. Registering a class again, as a
    module reload does, replaces the older one.

    Raises:
        ConfigError: `cls` is neither an enum, nor a dataclass, nor a named tuple, nor a tensor subclass with
            `__tensor_flatten__` and `__tensor_unflatten__`.
    """
    if not isinstance(cls, type) or not (
        issubclass(cls, enum.Enum) or dataclasses.is_dataclass(cls) or is_namedtuple(cls) or is_wrapper_class(cls)
    ):
        raise ConfigError(
            f"{cls!r} cannot be registered: only enums, dataclasses, named tuples and tensor subclasses with "
            "__tensor_flatten__ and __tensor_unflatten__ can; give other classes state_dict() and load_state_dict()"
        )
    _BY_NAME[class_name(cls)] = cls
    return cls


def class_name(cls: type[Any]) -> str:
    """Return the name under which a class is stored."""
    return f"{cls.__module__}:{cls.__qualname__}"


def is_namedtuple(cls: type[Any]) -> bool:
    """Return whether `cls` came from namedtuple() or NamedTuple."""
    return issubclass(cls, tuple) and isinstance(getattr(cls, "_fields", None), tuple)


def is_wrapper_class(cls: type[Any]) -> bool:
    """Return whether a class is of tensors that can be built out of their parts."""
    return issubclass(cls, torch.Tensor) and hasattr(cls, "__tensor_flatten__") and hasattr(cls, "__tensor_unflatten__")


def is_registered(cls: type[Any]) -> bool:
    """Return whether exactly this class was registered."""
    return _BY_NAME.get(class_name(cls)) is cls


def registered(name: str) -> type[Any] | None:
    """Return the class registered under a stored name."""
    return _BY_NAME.get(name)


# -- subclasses ---------------------------------------------------------------------------------------


DTensorDescription = list[Any]  # [mesh ranks, mesh shape, dim names | None, placements, shape, strides]


_described: WeakKeyDictionary[Any, list[Any]] = WeakKeyDictionary()  # by mesh


def is_dtensor(value: object) -> bool:
    """Return whether `value` is a DTensor, without importing torch.distributed for it."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def is_wrapper(value: object) -> bool:
    """Return whether `value` is a tensor made of inner tensors that it can name."""
    return isinstance(value, torch.Tensor) and hasattr(type(value), "__tensor_flatten__") and not is_dtensor(value)


def local_tensor(value: Any) -> torch.Tensor:
    """Return this rank's part of a DTensor, sharing its memory.

    Not by to_local() in a no_grad(): if a signal's handler raises as that is left, training goes on without gradients.
    """
    local: torch.Tensor = value._local_tensor
    return local


def describe_dtensor(value: Any, known: dict[Any, list[Any]] | None = None) -> DTensorDescription:
    """Return mesh, placements and global geometry as plain values, or raise ValueError.

    Args:
        known: What was returned for other DTensors that live, for a look before mesh and placements are described.
    """
    mesh, placements = value.device_mesh, value.placements
    described = None if known is None else known.get((id(mesh), placements))
    if described is None:
        described = [*describe_mesh(mesh), [describe_placement(item) for item in placements]]
        if known is not None:
            known[id(mesh), placements] = described
    return [*described, list(value.shape), list(value.stride())]


def describe_mesh(mesh: Any) -> list[Any]:
    """Return [ranks, shape, dim names | None]; the device type is left out, a restore may move it.

    Not to be changed: cached for each mesh, because torch computes the ranks of a mesh on every access (30 us).
    """
    known = _described.get(mesh)
    if known is None:
        ranks, names = mesh.mesh, mesh.mesh_dim_names
        known = [ranks.flatten().tolist(), list(ranks.shape), None if names is None else list(names)]
        _described[mesh] = known
    return known


def describe_placement(placement: Any) -> list[Any]:
    """Return one placement as plain values, or raise ValueError."""
    kind = type(placement).__name__
    if kind == "Shard":
        return ["Shard", placement.dim]
    if kind == "_StridedShard":
        return ["_StridedShard", placement.dim, placement.split_factor]
    if kind == "Replicate":
        return ["Replicate"]
    if kind == "Partial":
        return ["Partial", str(placement.reduce_op)]
    raise ValueError(f"DTensor placement {placement} cannot be stored")


def placement_of(described: Any) -> Any:
    """Return the placement that a description names, or raise ValueError."""
    from torch.distributed.tensor import Partial, Replicate, Shard, placement_types

    kinds: dict[str, Any] = {"Shard": Shard, "Replicate": Replicate, "Partial": Partial}
    kinds["_StridedShard"] = getattr(placement_types, "_StridedShard", None)
    kind = kinds.get(described[0]) if isinstance(described, list) and described else None
    if kind is None:
        raise ValueError(f"DTensor placement {str(described)[:80]} is unknown")
    if described[0] == "_StridedShard":
        return kind(described[1], split_factor=described[2])
    return kind(*described[1:])


def build_dtensor(local: torch.Tensor, description: DTensorDescription, mesh: Any) -> Any:
    """Return a DTensor around `local` on a mesh that matches the description."""
    from torch.distributed.tensor import DTensor

    placements = [placement_of(item) for item in description[3]]
    shape, strides = torch.Size(description[4]), tuple(description[5])
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=strides)


def flatten_wrapper(value: Any) -> tuple[dict[str, Any], Any]:
    """Return a wrapper subclass's inner tensors by attribute, and its flatten context."""
    names, context = value.__tensor_flatten__()
    return {name: getattr(value, name) for name in names}, context


def outside(value: Any) -> list[Any]:
    """Return what a wrapper subclass looks like from outside: shape and strides, None if symbolic, and flags."""
    numbers: list[Any] = [list(value.shape), list(value.stride())]
    flags = 0
    if isinstance(value, torch.nn.Parameter):
        flags = Flag.PARAMETER | Flag.REQUIRES_GRAD if value.requires_grad else Flag.PARAMETER
    return [*(each if all(type(size) is int for size in each) else None for each in numbers), flags]


def wrapper_class(name: str) -> Any:
    """Return the tensor subclass that a stored name means: one that was registered, or that this process has imported.

    Nothing is imported, and no code of a module runs, by a name out of stored bytes.

    Raises:
        UnsupportedState: there is none, or it cannot be built out of its parts; says what to do.
    """
    cls = registered(name) or _imported(name)
    if cls is None:
        raise UnsupportedState(
            f"the state holds a {name}, a tensor subclass that this process has not imported: import it before get(), "
            "or pass it to memstore.register()"
        )
    if not is_wrapper_class(cls):
        raise UnsupportedState(
            f"the state holds a {name}, which has no __tensor_unflatten__: pass into= with a live one to fill"
        )
    return cls


def _imported(name: str) -> Any:
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        # Not getattr: a module's __getattr__ may import.
        found = vars(found).get(part) if hasattr(found, "__dict__") else None
    return found if isinstance(found, type) and class_name(found) == name else None


def build_wrapper(name: str, inner: dict[str, Any], context: Any, outside: list[Any]) -> Any:
    """Return a wrapper subclass of these parts; `outside` is what the function of that name returned.

    Raises:
        UnsupportedState: its class is not known here. ManifestMismatch: its class refuses the parts.
    """
    cls, (shape, strides, flags) = wrapper_class(name), outside
    try:
        size = None if shape is None else torch.Size(shape)
        value = cls.__tensor_unflatten__(inner, context, size, None if strides is None else tuple(strides))
        if type(value) is not cls or (size is not None and value.shape != size):
            raise TypeError(f"it made a {type(value).__name__} of shape {list(value.shape)} out of {shape}")
        return torch.nn.Parameter(value, bool(flags & Flag.REQUIRES_GRAD)) if flags & Flag.PARAMETER else value
    except Exception as error:  # of another version of the class, or of a malformed layout
        raise ManifestMismatch(
            f"the state holds a {name}, which this process's class cannot build from what was stored: {error!r}"
        ) from error
