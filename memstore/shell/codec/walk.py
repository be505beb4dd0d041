"""From a live state to the tree of its layout, with every tensor and byte string noted, none copied.

Everything that cannot be stored is refused here, by path and type, before anything is copied.
Containers met twice are stored twice; a tensor met twice is stored once.
"""

from __future__ import annotations

import collections
import enum
import struct
from array import array
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import msgpack
import numpy as np
import torch

from memstore.core.format.object_tree import NESTING_MAX, Tag
from memstore.errors import UnsupportedState
from memstore.shell.tensors import subclasses
from memstore.shell.tensors.memory import Key, Leaf, describe_dtype, key_of_tensor, leaf_of_array, leaf_of_tensor

INLINE_BYTES_MAX = 128  # longer byte strings go to the stream
TEXT_CHARS_MAX = 4096  # longer text goes to the stream
FACTORIES: dict[str, Any] = {
    kind.__name__: kind for kind in (list, dict, set, frozenset, tuple, int, float, complex, bool, str, bytes)
}
_TENSOR, _PARAMETER, _TENSOR_TAG = torch.Tensor, torch.nn.Parameter, int(Tag.TENSOR)
_NEVER_STATEFUL = frozenset(
    (str, int, float, bool, type(None), dict, list, tuple, collections.OrderedDict, _TENSOR, _PARAMETER)
)
NUMBERS_MIN = 64  # shorter sequences of numbers stand in the tree item by item
_NUMBER_CODES = {int: "q", float: "d", bool: "b"}  # of arrays
_NUMBERS = {
    (int, Tag.LIST): Tag.INT_LIST,
    (int, Tag.TUPLE): Tag.INT_TUPLE,
    (float, Tag.LIST): Tag.FLOAT_LIST,
    (float, Tag.TUPLE): Tag.FLOAT_TUPLE,
    (bool, Tag.LIST): Tag.BOOL_LIST,
    (bool, Tag.TUPLE): Tag.BOOL_TUPLE,
}
_INT_MIN, _INT_MAX = -(1 << 63), (1 << 64) - 1

_REMEDY = (
    "its type cannot be stored without pickle; convert it, give it state_dict() and load_state_dict(), "
    "or pass an enum, dataclass or named tuple to memstore.register()"
)
_REMEDIES = {  # by the package of a class that a user cannot change
    "torch.distributed._shard": "parts of it lie on other ranks. Save the state through torch.distributed.checkpoint, "
    "which knows them: dcp.save(state, storage_writer=store.dcp_writer(step)); or have FSDP2, which makes DTensors",
    "deepspeed": "it is DeepSpeed's own, in the state_dict() of its engine or optimizer. What to put instead is "
    "under DeepSpeed in docs/guide/frameworks.md",
}


class _Refused(Exception):
    """Collects the path on its way out, so that an accepted state pays nothing for it."""

    def __init__(self, reason: str, value: object) -> None:
        super().__init__(reason)
        self.reason, self.value = reason, value
        self.path: list[str] = []


class StateWalk:
    """One walk over one state; `tree`, `owners` of leaves, `keys` and `blobs` are its result.

    Args:
        known: Keys of the leaves of an earlier state that was stored.
        is_inline: Whether long lists of numbers stand in the tree item by item, to be compared there.

    Raises:
        UnsupportedState: an object cannot be stored; names its path and type.
    """

    def __init__(
        self, state: object, name: str = "state", known: Sequence[Key] = (), *, is_inline: bool = False
    ) -> None:
        self._known, self._is_inline = known, is_inline
        self._leaves: list[Leaf | None] = []  # None: its key is known
        self.owners: list[Any] = []  # the tensors and arrays
        self.keys: list[Key] = []  # of the same
        self.blobs: list[bytes | bytearray] = []
        self.indices: dict[int, int] = {}  # id of a tensor or array -> its leaf
        self._open: set[int] = set()  # containers around the current value
        self._handlers: dict[type, Callable[[Any], Any]] = {
            str: self._text,
            int: self._int,
            dict: self._dict,
            list: lambda value: self._sequence(Tag.LIST, value),
            tuple: lambda value: self._sequence(Tag.TUPLE, value),
            torch.Size: lambda value: self._sequence(Tag.SIZE, value),
            torch.Tensor: self._tensor,
            torch.nn.Parameter: self._tensor,
            np.ndarray: self._array,
            collections.OrderedDict: self._ordered,
            collections.defaultdict: self._defaultdict,
            collections.Counter: lambda value: [Tag.COUNTER, None, self._pairs(value)],
            collections.deque: lambda value: [Tag.DEQUE, value.maxlen, [self._sequence(Tag.LIST, value)]],
            set: lambda value: self._set(Tag.SET, value),
            frozenset: lambda value: self._set(Tag.FROZENSET, value),
            bytes: lambda value: [Tag.BYTES, self._bytes(value)],
            bytearray: lambda value: [Tag.BYTEARRAY, self._bytes(value)],
            complex: lambda value: [Tag.COMPLEX, struct.pack("<dd", value.real, value.imag)],
            torch.dtype: lambda value: [Tag.DTYPE, str(value).removeprefix("torch.")],
            torch.device: lambda value: [Tag.DEVICE, str(value)],
            torch.layout: lambda value: [Tag.TORCH_LAYOUT, str(value).removeprefix("torch.")],
            torch.memory_format: lambda value: [Tag.MEMORY_FORMAT, str(value).removeprefix("torch.")],
        }
        self._dtensors: dict[Any, list[Any]] = {}  # descriptions: thousands are alike
        try:
            self.tree = self._node(state)
        except _Refused as refused:
            path = name + "".join(reversed(refused.path))
            kind = type(refused.value)
            raise UnsupportedState(
                f"{path} is a {kind.__module__}.{kind.__qualname__}: {refused.reason}. Nothing was copied.",
                path=path,
                type_name=f"{kind.__module__}.{kind.__qualname__}",
            ) from None
        finally:
            self._handlers.clear()  # breaks a cycle that would keep every tensor until a collection

    @property
    def is_known(self) -> bool:
        """Return whether these are the known leaves, all of them."""
        return len(self.keys) == len(self._known) and not any(self._leaves)

    def leaves(self) -> list[Leaf]:
        """Return all leaves."""
        return [
            leaf_of_tensor(owner) if leaf is None else leaf
            for leaf, owner in zip(self._leaves, self.owners, strict=True)
        ]

    def _node(self, value: Any) -> Any:
        kind = type(value)
        if kind is float or kind is bool or value is None:
            return value
        handler = self._handlers.get(kind)
        if handler is not None:
            return handler(value)
        return self._other(value)

    def _other(self, value: Any) -> Any:
        """Encode a value that is not of an exact built-in type."""
        kind = type(value)
        if isinstance(value, enum.Enum):
            return self._enum(value)
        if isinstance(value, torch.Tensor):
            return self._tensor_subclass(value)
        if isinstance(value, np.generic):
            array = np.asarray(value)
            return [Tag.SCALAR, [self._described(value, describe_dtype, array.dtype), array.tobytes()]]
        if isinstance(value, np.dtype):
            return [Tag.ARRAY_DTYPE, self._described(value, describe_dtype, value)]
        if is_stateful(value):
            self._enter(value)
            node = self._node(value.state_dict())
            self._open.discard(id(value))
            return node
        if subclasses.is_registered(kind):
            fields = kind._fields if subclasses.is_namedtuple(kind) else list(kind.__dataclass_fields__)
            tag = Tag.NAMEDTUPLE if subclasses.is_namedtuple(kind) else Tag.DATACLASS
            return self._record(tag, value, fields)
        raise _Refused(_remedy(kind) or _REMEDY, value)

    def _enter(self, value: object) -> None:
        """Note a container as open, refusing one that holds itself and nesting that no decoder would take.

        The caller discards the id when it is done; a refusal ends the whole walk.
        """
        if id(value) in self._open:
            raise _Refused("it contains itself; put it without that entry", value)
        if len(self._open) >= NESTING_MAX:
            raise _Refused(f"it is nested deeper than {NESTING_MAX} containers; put it flatter", value)
        self._open.add(id(value))

    def _dict(self, value: dict[Any, Any]) -> Any:
        return [Tag.DICT, None, self._pairs(value)]

    def _pairs(self, value: dict[Any, Any]) -> list[Any]:
        self._enter(value)
        out: list[Any] = []
        key: Any = None
        try:
            for key, item in value.items():
                is_short_text = type(key) is str and len(key) <= TEXT_CHARS_MAX and key.isascii()
                out.append(key if is_short_text else self._key(key))
                kind = type(item)  # nearly all are tensors: spare them two calls
                out.append(self._tensor(item) if kind is _TENSOR or kind is _PARAMETER else self._node(item))
        except _Refused as refused:
            refused.path.append(f"[{_shown(key)}]")
            raise
        self._open.discard(id(value))
        return out

    def _key(self, key: Any) -> Any:
        """Encode a dict's key or a set's item inside the layout, to compare it with `into` without the stream."""
        leaves, blobs = len(self.owners), len(self.blobs)
        before, self._is_inline = self._is_inline, True
        node = self._node(key)
        self._is_inline = before
        if len(self.owners) != leaves or len(self.blobs) != blobs:
            what = "a tensor" if len(self.owners) != leaves else f"text or bytes over {INLINE_BYTES_MAX} bytes"
            raise _Refused(f"{what} cannot be a key or an element of a set", key)
        return node

    def _sequence(self, tag: Tag, value: Collection[Any]) -> Any:
        block = None if self._is_inline or tag is Tag.SIZE else number_block(value)
        if block is not None:
            self.blobs.append(block[1])
            return [_NUMBERS[block[0], tag], len(self.blobs) - 1]
        self._enter(value)
        out: list[Any] = []
        try:
            for item in value:
                out.append(self._node(item))  # noqa: PERF401  its length is the index of a refused item
        except _Refused as refused:
            refused.path.append(f"[{len(out)}]")
            raise
        self._open.discard(id(value))
        return [tag, None, out]

    def _set(self, tag: Tag, value: Iterable[Any]) -> Any:
        try:
            nodes = [self._key(item) for item in value]
        except _Refused as refused:
            refused.path.append("{...}")
            raise
        # Iteration order depends on the hash seed; the packed bytes do not (equal states, equal bytes).
        return [tag, None, sorted(nodes, key=msgpack.packb)]

    def _ordered(self, value: collections.OrderedDict[Any, Any]) -> Any:
        return [Tag.ORDERED, None, [self._node(getattr(value, "_metadata", None)), *self._pairs(value)]]

    def _defaultdict(self, value: collections.defaultdict[Any, Any]) -> Any:
        factory = value.default_factory
        name = None if factory is None else getattr(factory, "__name__", "")
        if name is not None and FACTORIES.get(name) is not factory:
            raise _Refused(f"its default_factory {factory!r} is not one of {', '.join(FACTORIES)}", value)
        return [Tag.DEFAULT, name, self._pairs(value)]

    def _record(self, tag: Tag, value: Any, fields: Iterable[str]) -> Any:
        self._enter(value)
        names, nodes = list(fields), []
        for name in names:
            try:
                nodes.append(self._node(getattr(value, name)))
            except _Refused as refused:
                refused.path.append(f".{name}")
                raise
        self._open.discard(id(value))
        return [tag, [subclasses.class_name(type(value)), names], nodes]

    def _enum(self, value: enum.Enum) -> Any:
        kind = type(value)
        if not subclasses.is_registered(kind):
            raise _Refused(_remedy(kind) or "its class is not registered; call memstore.register() on it", value)
        member: Any = value.name if value.name in kind.__members__ else value.value
        return [Tag.ENUM, [subclasses.class_name(kind), member]]

    def _text(self, value: str) -> Any:
        if value.isascii() and len(value) <= TEXT_CHARS_MAX:
            return value
        data = value.encode("utf-8", "surrogatepass")
        if len(data) <= TEXT_CHARS_MAX and b"\xed" not in data:  # 0xED starts every lone surrogate
            return value
        return [Tag.TEXT, self._bytes(data)]

    def _int(self, value: int) -> Any:
        if _INT_MIN <= value <= _INT_MAX:
            return value
        return [Tag.INT, self._bytes(value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))]

    def _bytes(self, value: bytes | bytearray) -> Any:
        if len(value) <= INLINE_BYTES_MAX:
            return bytes(value)
        self.blobs.append(value)
        return len(self.blobs) - 1

    def _tensor(self, value: torch.Tensor) -> Any:
        index = self.indices.get(id(value))
        if index is None:
            index = len(self.owners)
            key = key_of_tensor(value)
            is_known = key is not None and index < len(self._known) and key == self._known[index]
            self._leaves.append(None if is_known else self._described(value, leaf_of_tensor, value))
            self.indices[id(value)] = index
            self.owners.append(value)
            self.keys.append(key)
        return [_TENSOR_TAG, index]

    def _array(self, value: np.ndarray) -> Any:
        index = self.indices.get(id(value))
        if index is None:
            self._leaves.append(self._described(value, leaf_of_array, value))
            index = self.indices[id(value)] = len(self.owners)
            self.owners.append(value)
            self.keys.append(None)
        return [Tag.ARRAY, index]

    def _tensor_subclass(self, value: torch.Tensor) -> Any:
        if subclasses.is_dtensor(value):
            described = self._described(value, self._dtensor, value)
            return [Tag.DTENSOR, described, [self._node(subclasses.local_tensor(value))]]
        if not subclasses.is_wrapper(value):
            reason = "a tensor subclass without __tensor_flatten__ cannot be stored"
            raise _Refused(_remedy(type(value)) or reason, value)
        inner, context = subclasses.flatten_wrapper(value)
        try:
            nodes = [self._node(item) for item in inner.values()]
            leaves = len(self.owners)
            before, self._is_inline = self._is_inline, True
            nodes.append(self._node(context))
            self._is_inline = before
        except _Refused as refused:
            raise _Refused(f"one of its parts cannot be stored: {refused.reason}", value) from None
        if len(self.owners) != leaves:
            raise _Refused("its flatten context holds tensors", value)
        return [Tag.SUBCLASS, [subclasses.class_name(type(value)), list(inner), *subclasses.outside(value)], nodes]

    def _dtensor(self, value: torch.Tensor) -> Any:
        return subclasses.describe_dtensor(value, self._dtensors)

    def _described(self, value: object, describe: Callable[[Any], Any], part: Any) -> Any:
        """Return what a part of a value is; what cannot be described makes the value refused."""
        try:
            return describe(part)
        except ValueError as error:
            raise _Refused(str(error), value) from None


def number_block(value: Collection[Any]) -> tuple[type, bytes] | None:
    """Return the one type of a long sequence of numbers, and all of them as bytes; None if it is not such a one."""
    if len(value) < NUMBERS_MIN:
        return None
    kind = type(next(iter(value)))
    if kind not in _NUMBER_CODES or set(map(type, value)) != {kind}:
        return None
    try:
        return kind, array(_NUMBER_CODES[kind], value).tobytes()
    except OverflowError:  # beyond 64 bits
        return None


def fits_inline(scalar: bool | int | float | str | None) -> bool:
    """Return whether a plain scalar stands in the tree as itself."""
    if type(scalar) is str:
        return len(scalar) <= TEXT_CHARS_MAX and scalar.isascii()
    return type(scalar) is not int or _INT_MIN <= scalar <= _INT_MAX


def _remedy(kind: type) -> str | None:
    return next((text for package, text in _REMEDIES.items() if f"{kind.__module__}.".startswith(f"{package}.")), None)


def is_stateful(value: object) -> bool:
    """Return whether `value` follows torch's Stateful protocol."""
    if isinstance(value, type):
        return False
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def ask_stateful(state: Any) -> Any:
    """Return a dict with what its Stateful values' state_dict() returns, asked in order; other states as they are."""
    if type(state) is not dict or _NEVER_STATEFUL.issuperset(map(type, state.values())):
        return state
    return {key: value.state_dict() if is_stateful(value) else value for key, value in state.items()}


def _shown(key: Any) -> str:
    text = repr(key)
    return text if len(text) <= 80 else text[:77] + "..."
