"""How a state maps onto its stream of bytes: the tree of objects and the tables it points into.

Pure. The stream holds the bytes of tensors, arrays, long strings and lists of numbers; the layout holds everything
else. It is one msgpack array, without pickle:

    [format, nbytes, extents, tensors, blobs, tree]
    extents   [[offset, nbytes], ...]     stored bytes that one or several tensors look into; in stream order
    tensors   [[extent | nil, offset, dtype, shape, strides | nil, flags, device | nil], ...]
              offset and strides in bytes, nil strides: row major; nil extent: no elements; nil device: cpu
    blobs     [[offset, nbytes], ...]     bytes-like leaves, long strings, long lists of numbers
    tree      a node, see `object_tree.py`

A layout may come from anywhere (a peer, a disk). `decode_layout` checks every number before a reader
allocates or reads by it: tensors lie inside their extents, extents inside the stream without overlap.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import msgspec

from memstore.core.format.dtypes import DIMS_MAX, TORCH_ITEMSIZE, array_itemsize
from memstore.core.format.manifest import LAYOUT_BYTES_MAX
from memstore.core.format.object_tree import INT_LIMIT, Count, decode_node
from memstore.core.format.releases import reader_of
from memstore.errors import ProtocolError

FORMAT = 2
T = TypeVar("T")


class Flag:
    """What else must be known to rebuild a tensor: bits of a plain int, which put adds up for every tensor."""

    ARRAY = 1  # numpy
    PARAMETER = 2
    REQUIRES_GRAD = 4
    CONJ = 8
    NEG = 16
    VIEWS = CONJ | NEG


class TensorSpec(msgspec.Struct, frozen=True):
    """One tensor or array: `extent` is None if it has no elements; offset and strides in bytes."""

    extent: int | None
    offset: int
    dtype: Any
    itemsize: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    is_row_major: bool
    flags: int
    device: str | None


@dataclass(frozen=True, slots=True)
class Layout:
    """A decoded layout whose numbers have all been checked."""

    nbytes: int
    extents: tuple[tuple[int, int], ...]
    tensors: tuple[TensorSpec, ...]
    blobs: tuple[tuple[int, int], ...]
    tree: Any


class _TensorRow(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    extent: Count | None
    offset: Count
    dtype: Any
    shape: tuple[Count, ...]
    strides: tuple[Annotated[int, msgspec.Meta(gt=-INT_LIMIT, lt=INT_LIMIT)], ...] | None
    flags: Annotated[int, msgspec.Meta(ge=0, le=31)]
    device: Annotated[str, msgspec.Meta(max_length=32)] | None


class _LayoutRow(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    format: int
    nbytes: Count
    extents: tuple[tuple[Count, Count], ...]
    tensors: tuple[_TensorRow, ...]
    blobs: tuple[tuple[Count, Count], ...]
    tree: Any


_ROW = msgspec.msgpack.Decoder(_LayoutRow)
_ENCODER = msgspec.msgpack.Encoder()


def row_major(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """Return the byte strides of a dense row-major tensor.

    >>> row_major((2, 3), 4)
    (12, 4)
    """
    strides, step = [], itemsize
    for size in reversed(shape):
        strides.append(step)
        step *= max(1, size)
    return tuple(reversed(strides))


def is_dense(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> bool:
    """Return whether the elements fill their extent exactly once, in any order of dimensions.

    >>> is_dense((2, 3), (4, 8), 4), is_dense((2, 3), (4, 16), 4), is_dense((2, 1), (4, -99), 4)
    (True, False, True)
    """
    expected = itemsize
    for stride, size in sorted((stride, size) for stride, size in zip(strides, shape, strict=True) if size != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def may_overlap_itself(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> bool:
    """Return whether two elements may share bytes. False is a proof: no dimension steps into what smaller ones reach.

    >>> may_overlap_itself((3, 3), (4, 4), 4), may_overlap_itself((2, 3), (-12, 4), 4)
    (True, False)
    """
    reach = itemsize
    for stride, size in sorted((abs(stride), size) for stride, size in zip(strides, shape, strict=True) if size != 1):
        if stride < reach and 0 not in shape:
            return True
        reach += (size - 1) * stride
    return False


def byte_span(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> tuple[int, int]:
    """Return the first and one past the last byte touched, relative to the first element; shape has no zero.

    >>> byte_span((2, 3), (-12, 4), 4)
    (-12, 12)
    """
    reach = [(size - 1) * stride for size, stride in zip(shape, strides, strict=True)]
    return sum(step for step in reach if step < 0), sum(step for step in reach if step > 0) + itemsize


def pieces(offset: int, nbytes: int, chunk_bytes: int) -> Iterator[tuple[int, int, int, int]]:
    """Cut a range of the stream at slot borders: yield (slot, offset in slot, offset in range, nbytes).

    >>> list(pieces(6, 5, 4))
    [(1, 2, 0, 2), (2, 0, 2, 3)]
    """
    done = 0
    while done < nbytes:
        slot, start = divmod(offset + done, chunk_bytes)
        size = min(chunk_bytes - start, nbytes - done)
        yield slot, start, done, size
        done += size


def batches(items: Iterable[T], nbytes_of: Callable[[T], int], most_bytes: int) -> Iterator[list[T]]:
    """Cut items, in order, into batches of at most `most_bytes`, or of one item.

    >>> list(batches([3, 1, 5, 1], lambda nbytes: nbytes, 4))
    [[3, 1], [5], [1]]
    """
    batch: list[T] = []
    total = 0
    for item in items:
        nbytes = nbytes_of(item)
        if batch and total + nbytes > most_bytes:
            yield batch
            batch, total = [], 0
        batch.append(item)
        total += nbytes
    if batch:
        yield batch


def packed(table: Any) -> msgspec.Raw:
    """Return a table of a layout, for `encode_layout`, packed: for one that is the same again."""
    return msgspec.Raw(_ENCODER.encode(table))


def encode_layout(nbytes: int, extents: Any, tensors: Any, blobs: list[Any], tree: Any) -> bytes:
    """Return the layout's bytes. The caller compares their length with `LAYOUT_BYTES_MAX`."""
    return _ENCODER.encode([FORMAT, nbytes, extents, tensors, blobs, tree])


def decode_layout(data: bytes | bytearray | memoryview) -> Layout:
    """Return the checked layout in `data`, which may come from anywhere.

    Raises:
        ProtocolError: `data` is not a layout, passes a limit, or points outside itself.
    """
    if len(data) > LAYOUT_BYTES_MAX:
        raise ProtocolError(f"a layout of {len(data)} bytes is over the limit of {LAYOUT_BYTES_MAX}")
    try:
        return _layout(_ROW.decode(data))
    except (ValueError, msgspec.MsgspecError, RecursionError) as error:
        raise ProtocolError(f"{len(data)} bytes are not a layout: {error}") from None


def _layout(row: _LayoutRow) -> Layout:
    if row.format != FORMAT:
        raise ValueError(f"format {row.format}, this memstore reads {FORMAT}: {reader_of('layout', row.format)}")
    end = 0
    for offset, size in row.extents + row.blobs:
        if offset < end or offset + size > row.nbytes or size == 0:
            raise ValueError(
                f"{size} bytes at {offset} overlap what comes before or pass the stream's end at {row.nbytes}"
            )
        end = offset + size
    specs = tuple(_tensor(item, row.extents) for item in row.tensors)
    tree = decode_node(row.tree, [bool(spec.flags & Flag.ARRAY) for spec in specs], len(row.blobs))
    return Layout(row.nbytes, row.extents, specs, row.blobs, tree)


def _tensor(row: _TensorRow, extents: Sequence[tuple[int, int]]) -> TensorSpec:
    is_array = row.flags & Flag.ARRAY
    if not is_array and (type(row.dtype) is not str or row.dtype not in TORCH_ITEMSIZE):
        raise ValueError(f"{str(row.dtype)[:40]!r} is not a tensor dtype that can be stored")
    itemsize = array_itemsize(row.dtype) if is_array else TORCH_ITEMSIZE[row.dtype]
    shape, strides = row.shape, row.strides
    has_too_many_dims = len(shape) > DIMS_MAX  # first: the product of millions of large numbers takes days
    if has_too_many_dims or (math.prod(shape) or math.prod(size or 1 for size in shape)) * max(itemsize, 1) > INT_LIMIT:
        raise ValueError(f"a tensor has {len(shape)} dimensions or more than {INT_LIMIT} bytes")
    if strides is None:
        strides = row_major(shape, itemsize)
    elif len(strides) != len(shape):
        raise ValueError(f"a tensor has {len(strides)} strides and {len(shape)} dimensions")
    elif not is_array and any(stride < 0 or stride % itemsize for stride in strides):
        raise ValueError(f"a tensor has strides {list(strides)} that are negative or no multiple of {itemsize} bytes")
    spec = TensorSpec(
        row.extent, row.offset, row.dtype, itemsize, shape, strides, row.strides is None, row.flags, row.device
    )
    _check_bounds(spec, extents)
    return spec


def _check_bounds(spec: TensorSpec, extents: Sequence[tuple[int, int]]) -> None:
    is_empty = 0 in spec.shape or spec.itemsize == 0
    if is_empty != (spec.extent is None):
        raise ValueError(f"a tensor of shape {list(spec.shape)} has elements but no bytes, or bytes but no elements")
    if spec.extent is None:
        return
    if spec.extent >= len(extents):
        raise ValueError(f"a tensor names extent {spec.extent} of {len(extents)}")
    if spec.is_row_major:
        low, high = 0, math.prod(spec.shape) * spec.itemsize
    else:
        low, high = byte_span(spec.shape, spec.strides, spec.itemsize)
    offset, nbytes = spec.offset, extents[spec.extent][1]
    if offset + low < 0 or offset + high > nbytes:
        raise ValueError(f"a tensor reaches from {offset + low} to {offset + high} in an extent of {nbytes} bytes")
    if not spec.flags & Flag.ARRAY and offset % spec.itemsize:
        raise ValueError(f"a tensor starts at byte {offset}, between two elements of {spec.itemsize} bytes")
