"""Tensor subclasses that can be stored by their parts: DTensor and traceable wrapper subclasses.

A DTensor is its local tensor plus a description of mesh and placements; a wrapper subclass
(`__tensor_flatten__`) is its inner tensors plus the flatten context. Both come back only into a
target that matches, or, for a DTensor without a place yet, onto a mesh that the target already uses.
"""

from __future__ import annotations

import sys
from typing import Any
from weakref import WeakKeyDictionary

import torch

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
