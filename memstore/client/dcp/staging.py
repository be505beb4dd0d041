"""Stage a state for DCP's async_save: every tensor's bytes into one stream, a placeholder tensor in its place.

A placeholder tensor has shape, dtype and, for a DTensor, mesh and placements, but no memory: it lives on the meta
device, and its storage offset is where its bytes stand in the stream. So DCP's planner plans on it, and the
planner's tensor for an item says where the item's bytes are.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor

from memstore.core.format.layout import row_major
from memstore.errors import UnsupportedState
from memstore.shell.device.side_stream import DeviceWrite, order_all
from memstore.shell.native.loops import Move
from memstore.shell.tensors.memory import TensorSource, flat_source
from memstore.shell.tensors.slot_stream import SlotStream, move_all

LARGE_BYTES = 64 << 10  # larger tensors come first, so that unchanged ones keep their chunks when small ones change
ALIGNMENT_BYTES = 64
OBJECT_NBYTES = 2048  # of torch.save's archive around an object, and of its name in the metadata
SCALAR_NBYTES = 16
_STREAM_MAX = 1 << 50


@dataclass(frozen=True)
class StagedState:
    """A staged state and the plan of its bytes: `placed` holds (stream offset, source) in stream order."""

    state: Any
    nbytes: int
    placed: tuple[tuple[int, TensorSource], ...]
    dims: dict[str, int]  # path of every tensor -> its dimensions
    objects_nbytes: int  # about, of what DCP will make of the plain objects


def stage_state(state: Any) -> StagedState:
    """Plan where every tensor's bytes go and return the state with placeholder tensors; copies plain objects.

    Raises:
        UnsupportedState: a tensor that cannot be stored; names its path. Nothing was copied.
    """
    walk = _StagingWalk()
    walk.find(state, "")
    order = sorted(range(len(walk.sources)), key=lambda i: walk.sources[i].nbytes < LARGE_BYTES)
    placed, end = [], 0
    offsets = [0] * len(order)
    for number in order:
        source = walk.sources[number]
        offsets[number] = end
        if source.nbytes:
            placed.append((end, source))
        end = -(-(end + source.nbytes) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return StagedState(walk.build(state, offsets), end, tuple(placed), walk.dims, walk.objects_nbytes)


def copy_sources(placed: Sequence[tuple[int, TensorSource]], stream: SlotStream, nbytes: int) -> None:
    """Copy planned bytes into a stream of `nbytes`, gaps as zeros; returns when device copies have arrived."""
    writes: list[DeviceWrite] = []
    moves: list[Move] = []
    end = 0
    for offset, source in placed:
        stream.zero(end, offset - end)
        if source.address is not None:
            stream.plan_write(offset, source.address, source.nbytes, moves)
        else:
            writes.append(DeviceWrite(source.owner, stream.host_pieces(offset, source.owner.numel())))
        end = offset + source.nbytes
    stream.zero(end, nbytes - end)
    ordered = order_all(writes)
    move_all(moves)  # while device copies are under way
    ordered.wait()


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def object_nbytes(value: Any, seen: set[int]) -> int:
    """Return about how many bytes torch.save makes of a plain object, beside its archive; `seen` ends cycles."""
    if isinstance(value, bytes | bytearray):
        return len(value.decode("latin-1").encode())  # as text: pickle's protocol 2 has no bytes
    if isinstance(value, str):
        return len(value.encode(errors="replace")) + SCALAR_NBYTES
    if isinstance(value, int):
        return value.bit_length() // 8 + SCALAR_NBYTES
    if isinstance(value, np.ndarray):
        return 2 * value.nbytes + SCALAR_NBYTES
    if id(value) in seen:
        return SCALAR_NBYTES
    seen.add(id(value))
    parts: list[Any] = []
    if isinstance(value, dict):
        parts = [*value.keys(), *value.values()]
    elif isinstance(value, list | tuple | set | frozenset):
        parts = list(value)
    elif hasattr(value, "__dict__"):
        parts = [vars(value)]
    return SCALAR_NBYTES + sum(object_nbytes(part, seen) for part in parts)


@dataclass
class _StagingWalk:
    """Finds every tensor once; tensors over the same memory share their bytes."""

    sources: list[TensorSource] = field(default_factory=list)
    numbers: dict[int, int] = field(default_factory=dict)  # id of a tensor -> its source
    known: dict[Any, int] = field(default_factory=dict)
    dims: dict[str, int] = field(default_factory=dict)
    objects_nbytes: int = 0

    def find(self, value: Any, path: str) -> bool:
        """Find what lies below; False for what DCP saves as one object: plain, or a list without tensors."""
        if isinstance(value, torch.Tensor):
            self._add(value, path)
            return True
        if isinstance(value, dict):
            below = [(child, self.find(child, f"{path}.{key}" if path else str(key))) for key, child in value.items()]
        elif isinstance(value, list | tuple):
            below = [(child, self.find(child, f"{path}.{index}")) for index, child in enumerate(value)]
        else:
            return False
        is_split = isinstance(value, dict) or any(found for _, found in below)
        for child in (child for child, found in below if is_split and not found):
            self.objects_nbytes += OBJECT_NBYTES + object_nbytes(child, set())
        return is_split

    def _add(self, tensor: torch.Tensor, path: str) -> None:
        if isinstance(tensor, ShardedTensor):
            raise UnsupportedState(f"{path}: a ShardedTensor cannot be staged; use DTensor, or dcp.save")
        part = local_part(tensor)
        try:
            source = flat_source(part)
        except ValueError as error:
            raise UnsupportedState(f"{path}: {error}. Nothing was copied.") from None
        key = (source.address, source.nbytes) if source.address is not None and source.nbytes else id(source)
        self.dims[path] = tensor.dim()
        if key not in self.known:
            self.known[key] = len(self.sources)
            self.sources.append(source)
        self.numbers[id(tensor)] = self.known[key]

    def build(self, value: Any, offsets: Sequence[int]) -> Any:
        if isinstance(value, torch.Tensor):
            part = local_part(value)
            placeholder = placeholder_tensor(part.shape, part.dtype, offsets[self.numbers[id(value)]])
            if not isinstance(value, DTensor):
                return placeholder
            return DTensor.from_local(
                placeholder,
                value.device_mesh,
                value.placements,
                run_check=False,
                shape=value.shape,
                stride=value.stride(),
            )
        if isinstance(value, dict):
            return {key: self.build(child, offsets) for key, child in value.items()}
        if isinstance(value, list | tuple):
            children = [self.build(child, offsets) for child in value]
            if isinstance(value, tuple):
                return type(value)(*children) if hasattr(value, "_fields") else tuple(children)
            return children
        return copy.deepcopy(value)


def placeholder_tensor(shape: Sequence[int], dtype: torch.dtype, offset: int) -> torch.Tensor:
    """Return a tensor without memory whose storage offset is `offset`."""
    base = torch.empty(_STREAM_MAX, dtype=dtype, device="meta")
    return base.as_strided(tuple(shape), row_major(shape, 1), offset)
