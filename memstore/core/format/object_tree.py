"""The tree of objects in a layout: explicit tags, and what each of them may hold.

Pure. Read `layout.py` first. A node is nil, bool, 64-bit integer, float or str for themselves, else
[tag, data] or [tag, data, [child, ...]]. Nothing here trusts its input.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, NamedTuple

import msgspec

from memstore.core.format.dtypes import array_itemsize

INT_LIMIT = 1 << 62
Count = Annotated[int, msgspec.Meta(ge=0, lt=INT_LIMIT)]
NESTING_MAX = 100  # containers inside containers; a level takes up to five of Python's 1000 stack frames
_INLINE_BYTES_MAX = 1 << 20


class Tag(enum.IntEnum):
    """What a tree node is. Numbers are part of the format: add, never renumber."""

    LIST = 1
    TUPLE = 2
    SET = 3  # children sorted by their packed bytes
    FROZENSET = 4
    SIZE = 5  # torch.Size
    DEQUE = 6  # data: maxlen or nil; child: its items as a list, of any of the tags of one
    DICT = 10  # children: key, value, key, value, ...
    ORDERED = 11  # children: `_metadata` or nil, key, value, ...
    DEFAULT = 12  # data: name of the built-in default_factory or nil
    COUNTER = 13
    TENSOR = 20  # data: index into tensors
    ARRAY = 21  # data: index into tensors
    SCALAR = 22  # data: [numpy dtype, bytes]
    DTENSOR = 23  # data: [mesh ranks, mesh shape, dim names | nil, placements, shape, strides]; child: local tensor
    # data: [class, [attribute, ...], shape | nil, strides | nil, flags]; children: inner tensors, the flatten context
    SUBCLASS = 24
    BYTES = 30  # data of BYTES, BYTEARRAY, TEXT, INT and lists of numbers: the bytes, or an index into blobs
    BYTEARRAY = 31
    TEXT = 32  # utf-8 with surrogates passed
    INT = 33  # two's complement, little endian
    COMPLEX = 34  # data: real and imaginary part as two little-endian doubles
    DTYPE = 40  # data: name
    DEVICE = 41
    TORCH_LAYOUT = 42
    MEMORY_FORMAT = 43
    ARRAY_DTYPE = 44  # data: numpy dtype
    ENUM = 50  # data: [class, member name, or value of a combined flag]
    DATACLASS = 51  # data: [class, [field, ...]]; children: the fields' values
    NAMEDTUPLE = 52
    INT_LIST = 60  # long lists and tuples of numbers of one kind: signed 64-bit integers, little endian
    INT_TUPLE = 61
    FLOAT_LIST = 62  # little-endian doubles
    FLOAT_TUPLE = 63
    BOOL_LIST = 64  # a byte each
    BOOL_TUPLE = 65


MAPS = (Tag.DICT, Tag.ORDERED, Tag.DEFAULT, Tag.COUNTER)
# What each number of a block of numbers takes.
NUMBER_BYTES = {
    Tag.INT_LIST: 8,
    Tag.INT_TUPLE: 8,
    Tag.FLOAT_LIST: 8,
    Tag.FLOAT_TUPLE: 8,
    Tag.BOOL_LIST: 1,
    Tag.BOOL_TUPLE: 1,
}
BLOB_TAGS = frozenset({Tag.BYTES, Tag.BYTEARRAY, Tag.TEXT, Tag.INT, *NUMBER_BYTES})
_TAGS: dict[int, Tag] = {int(tag): tag for tag in Tag}


class Node(NamedTuple):
    """One tagged node of the tree; its identity names one place in the state."""

    tag: Tag
    data: Any
    children: tuple[Any, ...] = ()


def nodes_in(tree: Any) -> Iterator[Node]:
    """Yield every tagged node of a tree, itself and below."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, Node):
            yield node
            waiting.extend(node.children)


def decode_node(item: Any, are_arrays: Sequence[bool], blobs_count: int, depth: int = 0) -> Any:
    """Return a checked tree: scalars for themselves, `Node` for everything tagged."""
    if not isinstance(item, list):
        if item is None or type(item) in (bool, int, float, str):
            return item
        raise ValueError(f"a {type(item).__name__} stands in the tree where a node belongs")
    if depth > NESTING_MAX:
        raise ValueError(f"the tree is nested deeper than {NESTING_MAX}")
    if len(item) not in (2, 3):
        raise ValueError(f"a node of {len(item)} items is neither [tag, data] nor [tag, data, children]")
    tag = _TAGS.get(item[0]) if type(item[0]) is int else None
    data = item[1]
    if tag is None:
        raise ValueError(f"a node has the unknown tag {str(item[0])[:40]!r}")
    below = _checked_list(item[2], None, "children") if len(item) == 3 else []
    _SHAPES[tag](data, len(below))
    if tag in (Tag.TENSOR, Tag.ARRAY):
        if data >= len(are_arrays) or are_arrays[data] != (tag is Tag.ARRAY):
            raise ValueError(f"a node names tensor {data} of {len(are_arrays)}, or one of the other kind")
    elif tag in BLOB_TAGS and type(data) is int and data >= blobs_count:
        raise ValueError(f"a node names blob {data} of {blobs_count}")
    # Most children are a dict's text keys: taken as they are, they cost no call.
    children = [
        child if type(child) is str else decode_node(child, are_arrays, blobs_count, depth + 1) for child in below
    ]
    return Node(tag, data, tuple(children))


def _checked_count(value: Any, what: str) -> int:
    """Return `value` if it is a whole number from 0 up; else ValueError."""
    if type(value) is not int or not 0 <= value < INT_LIMIT:
        raise ValueError(f"{what} {str(value)[:40]} is not a whole number from 0 to {INT_LIMIT}")
    return value


def _checked_list(value: Any, length: int | None, what: str) -> list[Any]:
    """Return `value` if it is a list, of `length` items unless None; else ValueError."""
    if not isinstance(value, list) or (length is not None and len(value) != length):
        raise ValueError(f"{what} is not a list" + ("" if length is None else f" of {length} items"))
    return value


def _require(is_right: bool, what: str) -> None:
    if not is_right:
        raise ValueError(f"a node is not {what}")


def _plain(data: Any, count: int) -> None:
    _require(data is None, "a plain sequence")


def _deque(data: Any, count: int) -> None:
    _require((data is None or _checked_count(data, "maxlen") >= 0) and count == 1, "a deque of one list")


def _pairs(data: Any, count: int) -> None:
    _require(data is None and count % 2 == 0, "a dict of pairs")


def _ordered(data: Any, count: int) -> None:
    _require(data is None and count % 2 == 1, "an ordered dict of pairs after its metadata")


def _default(data: Any, count: int) -> None:
    _require((data is None or type(data) is str) and count % 2 == 0, "a default dict of pairs")


def _index(data: Any, count: int) -> None:
    _checked_count(data, "tensor index")
    _require(count == 0, "a leaf")


def _scalar(data: Any, count: int) -> None:
    dtype, raw = _checked_list(data, 2, "numpy scalar")
    _require(count == 0 and type(raw) is bytes and len(raw) == array_itemsize(dtype), "a numpy scalar of its size")


def _array_dtype(data: Any, count: int) -> None:
    array_itemsize(data)
    _require(count == 0, "a leaf")


def _bytes(data: Any, count: int) -> None:
    is_inline = type(data) is bytes and len(data) <= _INLINE_BYTES_MAX
    _require(count == 0 and (is_inline or _checked_count(data, "blob index") >= 0), "bytes or a blob")


def _complex(data: Any, count: int) -> None:
    _require(count == 0 and type(data) is bytes and len(data) == 16, "a complex number")


def _name(data: Any, count: int) -> None:
    _require(count == 0 and type(data) is str and len(data) <= 64, "a short name")


def _member(data: Any, count: int) -> None:
    name, member = _checked_list(data, 2, "enum member")
    _require(count == 0 and type(name) is str and type(member) in (str, int), "an enum member")


def _record(data: Any, count: int) -> None:
    name, fields = _checked_list(data, 2, "record")
    names = _checked_list(fields, None, "fields")
    _require(type(name) is str and len(names) == count, "a record with a value for every field")
    _require(all(type(field) is str for field in names) and len(set(names)) == count, "a record of distinct fields")


def _subclass(data: Any, count: int) -> None:
    name, attributes, shape, strides, flags = _checked_list(data, 5, "tensor subclass")
    _record([name, attributes], count - 1)
    for numbers in (shape, strides):
        for number in () if numbers is None else _checked_list(numbers, None, "subclass numbers"):
            _checked_count(number, "subclass number")
    _require(type(flags) is int and 0 <= flags < 32, "a tensor subclass with flags")


def _dtensor(data: Any, count: int) -> None:
    ranks, shape, names, placements, size, strides = _checked_list(data, 6, "DTensor")
    for numbers in (ranks, shape, size, strides):
        for number in _checked_list(numbers, None, "DTensor numbers"):
            _checked_count(number, "DTensor number")
    if names is not None:
        _require(
            all(type(name) is str for name in _checked_list(names, len(shape), "mesh names")),
            "a mesh of named dimensions",
        )
    _checked_list(placements, len(shape), "placements")
    _require(count == 1, "a DTensor of one local tensor")


_SHAPES: dict[Tag, Callable[[Any, int], None]] = {
    **dict.fromkeys((Tag.LIST, Tag.TUPLE, Tag.SET, Tag.FROZENSET, Tag.SIZE), _plain),
    Tag.DEQUE: _deque,
    **dict.fromkeys((Tag.DICT, Tag.COUNTER), _pairs),
    Tag.ORDERED: _ordered,
    Tag.DEFAULT: _default,
    **dict.fromkeys((Tag.TENSOR, Tag.ARRAY), _index),
    Tag.SCALAR: _scalar,
    Tag.DTENSOR: _dtensor,
    Tag.SUBCLASS: _subclass,
    **dict.fromkeys(BLOB_TAGS, _bytes),
    Tag.COMPLEX: _complex,
    **dict.fromkeys((Tag.DTYPE, Tag.DEVICE, Tag.TORCH_LAYOUT, Tag.MEMORY_FORMAT), _name),
    Tag.ARRAY_DTYPE: _array_dtype,
    Tag.ENUM: _member,
    **dict.fromkeys((Tag.DATACLASS, Tag.NAMEDTUPLE), _record),
}
