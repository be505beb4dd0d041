"""Element types by name and size: the only ones that a layout may claim.

Pure. Torch dtypes are a closed list of names. Numpy dtypes are their array-protocol string, such as
"<f8", or a nested description for subarrays and structured types:

    ["sub", base, [dims]]        ["struct", itemsize, [[name, offset, dtype], ...]]

Object dtypes have no description: they would need pickle.
"""

from __future__ import annotations

import math
import re
from typing import Any

# Bytes per element. Quantized dtypes are absent: their scales live outside the storage.
TORCH_ITEMSIZE: dict[str, int] = {
    **dict.fromkeys(("bool", "uint8", "int8", "bits8", "bits1x8", "bits2x4", "bits4x2"), 1),
    **{f"{sign}int{width}": 1 for sign in ("", "u") for width in range(1, 8)},
    **dict.fromkeys(("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"), 1),
    "float4_e2m1fn_x2": 1,
    **dict.fromkeys(("float16", "bfloat16", "int16", "uint16", "bits16"), 2),
    **dict.fromkeys(("float32", "int32", "uint32", "complex32"), 4),
    **dict.fromkeys(("float64", "int64", "uint64", "complex64"), 8),
    "complex128": 16,
}

# Kinds of numbers that may not be finite, as the native helper knows them (R39); 0 is any other.
FLOAT_KINDS: dict[Any, int] = {
    **dict.fromkeys(("float64", "complex128", "<f8", "<c16"), 1),
    **dict.fromkeys(("float32", "complex64", "<f4", "<c8"), 2),
    **dict.fromkeys(("float16", "complex32", "<f2"), 3),
    "bfloat16": 4,
    "float8_e5m2": 5,
    "float8_e4m3fn": 6,
    **dict.fromkeys(("float8_e4m3fnuz", "float8_e5m2fnuz"), 7),
}

ITEMSIZE_MAX = 1 << 31
DIMS_MAX = 64  # as in numpy and torch
_DEPTH_MAX = 16
_FIELDS_MAX = 4096
_SIMPLE = re.compile(r"[<>|]([biufcSUVMm])([0-9]{1,9})(\[[0-9A-Za-zμ/]{1,16}\])?")


def array_itemsize(dtype: Any, depth: int = 0) -> int:
    """Return the element size in bytes of a numpy dtype description.

    Raises:
        ValueError: it is not a description, or a field lies outside its structure.
    """
    if isinstance(dtype, str):
        return _simple_itemsize(dtype)
    if depth >= _DEPTH_MAX:
        raise ValueError(f"a numpy dtype is nested deeper than {_DEPTH_MAX}")
    if not isinstance(dtype, list) or len(dtype) != 3:
        raise ValueError("a numpy dtype is neither a string nor a description of three items")
    if dtype[0] == "sub":
        base, dims = array_itemsize(dtype[1], depth + 1), dtype[2]
        if not isinstance(dims, list) or len(dims) > DIMS_MAX:
            raise ValueError(f"a numpy subarray has no list of at most {DIMS_MAX} dimensions")
        if not all(type(dim) is int and 0 <= dim < ITEMSIZE_MAX for dim in dims):
            raise ValueError("a numpy subarray has dimensions that are not small whole numbers")
        return _limited(base * math.prod(dims))
    if dtype[0] == "struct":
        return _struct_itemsize(dtype[1], dtype[2], depth)
    raise ValueError("a numpy dtype description is of unknown kind")


def _struct_itemsize(itemsize: Any, fields: Any, depth: int) -> int:
    if type(itemsize) is not int or not isinstance(fields, list) or not 0 < len(fields) <= _FIELDS_MAX:
        raise ValueError("a structured numpy dtype has no size or no fields")
    for field in fields:
        if not isinstance(field, list) or len(field) != 3:
            raise ValueError("a numpy field is not a name, an offset and a dtype")
        name, offset, dtype = field
        if not isinstance(name, str) or type(offset) is not int or offset < 0:
            raise ValueError("a numpy field is not a name, an offset and a dtype")
        if offset + array_itemsize(dtype, depth + 1) > itemsize:
            raise ValueError(f"numpy field {name!r} at {offset} ends after its structure of {itemsize} bytes")
    return _limited(itemsize)


def _simple_itemsize(dtype: str) -> int:
    match = _SIMPLE.fullmatch(dtype)
    if match is None:
        raise ValueError(f"{dtype[:80]!r} is not a numpy dtype that can be stored")
    return _limited(int(match[2]) * (4 if match[1] == "U" else 1))


def _limited(itemsize: int) -> int:
    if not 0 <= itemsize < ITEMSIZE_MAX:
        raise ValueError(f"a numpy element of {itemsize} bytes is over the limit of {ITEMSIZE_MAX}")
    return itemsize
