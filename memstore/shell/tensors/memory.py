"""The memory of tensors and arrays, and which of them share it.

A *leaf* is one tensor or array object of a state. Leaves whose byte extents overlap form a
component, stored once as the extent that covers them, so that tied tensors come back tied. A leaf
alone stores its own elements only, never the storage it is a small view of.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import torch

from memstore.core.format.dtypes import TORCH_ITEMSIZE
from memstore.core.format.layout import Flag, byte_span, is_dense, row_major

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in TORCH_ITEMSIZE if hasattr(torch, name)}
DTYPE_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}
Key = tuple[Any, ...] | None
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(slots=True)
class Leaf:
    """Geometry of one tensor or array; strides in bytes, None if row major; low and high are addresses."""

    owner: Any
    dtype: Any
    itemsize: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    flags: int
    device: str  # "" is host memory
    address: int
    low: int
    high: int


class TensorSource(msgspec.Struct):
    """Bytes to be stored: host memory at `address`, or, if None, the bytes of `owner`, gathered at the copy.

    Of thousands of tensors at every put: a struct is made in half of a data class's time.
    """

    nbytes: int
    address: int | None
    owner: Any  # keeps the memory alive


@dataclass(slots=True)
class Component:
    """Leaves that share one stored extent, each with its offset and strides in it."""

    leaves: list[int]
    rows: list[tuple[int, tuple[int, ...] | None, int]]  # offset, strides, flags
    source: TensorSource
    span: tuple[int, int] | None = None  # the device memory that is stored as it lies; None: host memory, or gathered

    def source_of(self, owner: torch.Tensor) -> TensorSource:
        """Return the source again, of a tensor whose key equals that of the component's first leaf."""
        if self.source.address is not None:
            return TensorSource(self.source.nbytes, self.source.address, owner)
        leaf = leaf_of_tensor(owner)
        return _lone(leaf)[1] if self.span is None else _raw(leaf, *self.span)


def key_of_tensor(tensor: torch.Tensor) -> Key:
    """Return what a tensor's leaf, and its place among others, follow from; None if it has no strides or no memory.

    Of thousands of tensors at every put: each attribute takes a tenth of a microsecond.
    """
    try:
        return (
            tensor.data_ptr(),
            tensor.shape,
            None if tensor.is_contiguous() else tensor.stride(),
            tensor.dtype,
            tensor.device,
            tensor.storage_offset(),
            tensor.untyped_storage().nbytes(),
            tensor.requires_grad,
            tensor.is_conj(),
            tensor.is_neg(),
            type(tensor),
        )
    except RuntimeError:
        return None


def leaf_of_tensor(tensor: torch.Tensor) -> Leaf:
    """Describe a strided, materialised tensor.

    Raises:
        ValueError: it cannot be stored; the message says why.
    """
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        kind = "nested" if tensor.is_nested else "quantized" if tensor.is_quantized else str(tensor.layout)
        raise ValueError(f"{kind} tensors cannot be stored; put its parts, or a dense copy")
    dtype = DTYPE_NAMES.get(tensor.dtype)
    if dtype is None or tensor.is_meta:
        raise ValueError(f"a {'meta' if tensor.is_meta else tensor.dtype} tensor cannot be stored")
    flags = 0
    if type(tensor) is torch.nn.Parameter:
        flags = Flag.PARAMETER | Flag.REQUIRES_GRAD if tensor.requires_grad else Flag.PARAMETER
    if tensor.is_conj():
        flags |= Flag.CONJ
    if tensor.is_neg():
        flags |= Flag.NEG
    device = "" if tensor.is_cpu else str(tensor.device)
    shape, itemsize, address = tuple(tensor.shape), tensor.element_size(), tensor.data_ptr()
    strides, high = None, address + tensor.nbytes
    if not tensor.is_contiguous():
        strides = tuple(step * itemsize for step in tensor.stride())
        high = address + byte_span(shape, strides, itemsize)[1]
    if high - address > tensor.untyped_storage().nbytes():
        raise ValueError("the tensor's storage has been freed or shrunk; put it while its memory is there")
    return Leaf(tensor, dtype, itemsize, shape, strides, flags, device, address, address, high)


def leaf_of_array(array: np.ndarray) -> Leaf:
    """Describe a numpy array without object fields.

    Raises:
        ValueError: its dtype cannot be stored.
    """
    dtype, itemsize = describe_dtype(array.dtype), array.itemsize
    address: int = array.__array_interface__["data"][0]
    strides = None if array.flags.c_contiguous else array.strides
    low, high = (0, array.nbytes) if strides is None or array.nbytes == 0 else byte_span(array.shape, strides, itemsize)
    return Leaf(array, dtype, itemsize, array.shape, strides, Flag.ARRAY, "", address, address + low, address + high)


def describe_dtype(dtype: np.dtype[Any]) -> Any:
    """Return the description of a numpy dtype that `core/format/dtypes.py` defines, or raise ValueError."""
    if dtype.subdtype is not None:
        base, dims = dtype.subdtype
        return ["sub", describe_dtype(base), list(dims)]
    if dtype.names is not None and dtype.fields is not None:
        if any(len(field) > 2 for field in dtype.fields.values()):
            raise ValueError(f"numpy dtype {dtype} has field titles, which are not stored")
        rows = [[name, dtype.fields[name][1], describe_dtype(dtype.fields[name][0])] for name in dtype.names]
        return ["struct", dtype.itemsize, rows]
    if dtype.hasobject or dtype.kind not in "biufcSUVMm" or np.dtype(dtype.str) != dtype:
        raise ValueError(f"numpy dtype {dtype} cannot be stored without pickle; put its tolist()")
    return dtype.str


def dtype_of(description: Any) -> np.dtype[Any]:
    """Return the numpy dtype of a checked description, or raise ValueError."""
    try:
        return _dtype_of(description)
    except TypeError as error:
        raise ValueError(f"numpy does not know the dtype {str(description)[:80]}: {error}") from None


def _dtype_of(description: Any) -> np.dtype[Any]:
    if isinstance(description, str):
        return np.dtype(description)
    if description[0] == "sub":
        sub: np.dtype[Any] = np.dtype((_dtype_of(description[1]), tuple(description[2])))
        return sub
    names, offsets, formats = zip(*description[2], strict=True)
    described: Any = {"names": names, "offsets": offsets, "itemsize": description[1]}
    described["formats"] = [_dtype_of(item) for item in formats]
    struct: np.dtype[Any] = np.dtype(described)
    return struct


def components(leaves: Sequence[Leaf]) -> list[Component]:
    """Group leaves that share bytes, in order of their first leaf; leaves without elements have none."""
    full = sorted(
        (leaf.device, leaf.low, leaf.high, index) for index, leaf in enumerate(leaves) if leaf.high > leaf.low
    )
    groups: list[list[int]] = []
    device, end = "", -1
    for where, low, high, index in full:
        if groups and where == device and low < end:
            groups[-1].append(index)
            end = max(end, high)
        else:
            groups.append([index])
            device, end = where, high
    for group in groups:
        if len(group) > 1:
            group.sort()
    groups.sort()
    found = []
    for group in groups:
        leaf = leaves[group[0]]
        if len(group) > 1 or leaf.strides is not None or leaf.device or leaf.flags & Flag.VIEWS:
            found.append(_component(leaves, group))
        else:  # nearly every tensor of a model: one of a thousand, so spare it the general case
            source = TensorSource(leaf.high - leaf.low, leaf.low, leaf.owner)
            found.append(Component(group, [(0, None, leaf.flags)], source))
    return found


def _component(leaves: Sequence[Leaf], group: list[int]) -> Component:
    first = leaves[group[0]]
    if len(group) == 1 or all(_same_place(first, leaves[index]) for index in group[1:]):
        row, source = _lone(first)
        views = row[2] & Flag.VIEWS
        rows = [(row[0], row[1], (leaves[index].flags & ~Flag.VIEWS) | views) for index in group]
        return Component(group, rows, source)
    low = _aligned_low([leaves[index] for index in group])
    high = max(leaves[index].high for index in group)
    rows = [(leaves[index].address - low, leaves[index].strides, leaves[index].flags) for index in group]
    return Component(group, rows, _raw(first, low, high), (low, high) if first.device else None)


def _aligned_low(members: list[Leaf]) -> int:
    """Return where the extent starts: low enough that every tensor lies a whole number of elements after it."""
    low = min(leaf.low for leaf in members)
    tensors = [leaf for leaf in members if not leaf.flags & Flag.ARRAY]
    floor = min((leaf.owner.untyped_storage().data_ptr() for leaf in tensors), default=low)
    for start in range(low, low - 16, -1):
        if all((leaf.address - start) % leaf.itemsize == 0 for leaf in tensors) and start >= min(low, floor):
            return start
    raise ValueError(f"{len(members)} tensors share memory at odd distances; put copies of them")


def _same_place(one: Leaf, other: Leaf) -> bool:
    if (one.address, one.dtype, one.shape, one.strides) != (other.address, other.dtype, other.shape, other.strides):
        return False
    return one.flags & Flag.VIEWS == other.flags & Flag.VIEWS


def _lone(leaf: Leaf) -> tuple[tuple[int, tuple[int, ...] | None, int], TensorSource]:
    """Store only the leaf's own elements: as they lie if they are dense, else gathered in row-major order."""
    is_view = bool(leaf.flags & Flag.VIEWS)
    if leaf.strides is None and not is_view:
        return (0, None, leaf.flags), _raw(leaf, leaf.low, leaf.high)
    given = leaf.strides or row_major(leaf.shape, leaf.itemsize)
    # An expanded dimension is stored once: shape 1 here, stride 0 in the layout.
    base = tuple(1 if step == 0 else size for size, step in zip(leaf.shape, given, strict=True))
    if not is_view and min(given, default=0) >= 0 and is_dense(base, given, leaf.itemsize):
        return (0, leaf.strides, leaf.flags), _raw(leaf, leaf.low, leaf.high)
    dense = row_major(base, leaf.itemsize)
    strides = tuple(0 if step == 0 else new for step, new in zip(given, dense, strict=True))
    where = tuple(slice(0, 1) if step == 0 else slice(None) for step in given)
    nbytes = leaf.itemsize * int(np.prod(base, dtype=np.int64))
    flags = leaf.flags & ~Flag.VIEWS  # gathering resolves lazy conjugation and negation
    rows = strides if 0 in strides else None
    return (0, rows, flags), TensorSource(nbytes, None, leaf.owner[where] if 0 in strides else leaf.owner)


def _raw(leaf: Leaf, low: int, high: int) -> TensorSource:
    if not leaf.device:
        return TensorSource(high - low, low, leaf.owner)
    return TensorSource(high - low, None, flat_bytes(leaf, low, high))


def flat_bytes(leaf: Leaf, low: int, high: int) -> torch.Tensor:
    """Return the memory of a tensor between two addresses, as it lies: one-dimensional uint8."""
    storage = leaf.owner.untyped_storage()
    flat = torch.empty(0, dtype=torch.uint8, device=leaf.owner.device)
    return flat.set_(storage, low - storage.data_ptr(), (high - low,), (1,))


def flat_source(tensor: torch.Tensor) -> TensorSource:
    """Return a tensor's elements in row-major order, as they lie if they lie so, else gathered.

    Raises:
        ValueError: it cannot be stored; the message says why.
    """
    leaf = leaf_of_tensor(tensor.detach())
    if leaf.high == leaf.low:
        return TensorSource(0, None, tensor)
    if leaf.strides is None and not leaf.flags & Flag.VIEWS:
        return _raw(leaf, leaf.low, leaf.high)
    flat = dense_bytes(tensor.detach())
    return TensorSource(flat.numel(), flat.data_ptr() if flat.is_cpu else None, flat)


def is_flat(owner: Any) -> bool:
    """Return whether these are contiguous bytes of a device, so that no gathering copy is needed."""
    return isinstance(owner, torch.Tensor) and owner.is_contiguous() and owner.dtype is torch.uint8 and owner.dim() == 1


def dense_bytes(owner: Any) -> torch.Tensor:
    """Return a gathered copy of a tensor or array, or a device's flat bytes, as one-dimensional uint8."""
    if isinstance(owner, np.ndarray):
        return torch.from_numpy(np.frombuffer(bytearray(owner.tobytes()), np.uint8))
    if is_flat(owner):
        flat: torch.Tensor = owner
        return flat
    bits = owner.detach()  # no_grad() is not needed, and a signal's handler that raises as it is left would leave it on
    integer = _BITS.get(bits.element_size())
    if integer is not None and not bits.is_neg() and not bits.is_conj():
        bits = bits.view(integer)  # exact, and not every dtype can be copied with strides
    dense = torch.empty(bits.shape, dtype=bits.dtype, device=bits.device)
    dense.copy_(bits)
    return torch.empty(0, dtype=torch.uint8, device=dense.device).set_(
        dense.untyped_storage(), 0, (dense.nbytes,), (1,)
    )


def fill_tensor(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy bit for bit into a live tensor of any strides and device."""
    target = target.detach()
    bits = _BITS.get(source.element_size())
    is_view = target.is_conj() or target.is_neg() or source.is_conj() or source.is_neg()
    if bits is None or is_view:
        target.copy_(source)
    else:
        target.view(bits).copy_(source.view(bits))
