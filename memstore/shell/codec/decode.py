"""Rebuild a state from its layout and its stream, new or into the live objects of a training loop."""

from __future__ import annotations

import collections
import struct
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from memstore.core.format.layout import Flag, Layout, TensorSpec, decode_layout, is_dense
from memstore.core.format.object_tree import NUMBER_BYTES, Node, Tag, nodes_in
from memstore.errors import LoadError, ManifestMismatch, MemstoreError, ProtocolError, UnsupportedState
from memstore.shell.codec.match import StateMatch
from memstore.shell.codec.walk import FACTORIES
from memstore.shell.tensors import subclasses
from memstore.shell.tensors.memory import DTYPES, Leaf, dtype_of, fill_tensor, flat_bytes
from memstore.shell.tensors.slot_stream import SlotStream

# -- byte stream --------------------------------------------------------------------------------------
# The source of a restored state: the bytes of a shard.


class ByteStream(Protocol):
    """Where a shard's bytes come from: its slots, or reads of its parts."""

    def read(self, offset: int, address: int, nbytes: int) -> None:
        """Copy stream bytes to host memory, at the latest in the next `settle`."""

    def read_to(self, offset: int, target: torch.Tensor) -> bool:
        """Copy stream bytes into flat uint8 device memory, at the latest in the next `settle`; False if it does not."""

    def read_bytes(self, offset: int, nbytes: int) -> bytes:
        """Return stream bytes as an object of their own."""

    def alias(self, offset: int, nbytes: int) -> torch.Tensor | None:
        """Return stream bytes without a copy, or None."""

    def settle(self) -> None:
        """Return once every read is done, and verified where this stream verifies."""


# -- decode -------------------------------------------------------------------------------------------


WAITING_BYTES_MAX = 256 << 20  # host memory in transit to a device


def check_into(layout: bytes, into: object, name: str = "state") -> None:
    """Check that a stored state fits the live one; writes nothing (R26). Errors call it by its name.

    Raises:
        ManifestMismatch: names the first path that differs and both sides.
        ProtocolError: the layout is malformed.
    """
    matched(decode_layout(layout), into, name)


def decode_state(
    layout: bytes, views: Sequence[memoryview], chunk_bytes: int, *, into: object = None, copy: bool = True
) -> Any:
    """Return the state that `plan_state` and `copy_into` stored.

    With `into`, tensors and arrays are filled in place and are part of the returned state;
    Stateful objects get load_state_dict() and are part of it, too; entries of dicts, lists and dataclasses
    get the other values. Nothing is written unless everything fits. Without it, tensors are new, on
    their kind of device if this process has one, else in host memory.

    Args:
        layout: From the manifest.
        views: Slot views, view i holding stream bytes [i * chunk_bytes, ...).
        chunk_bytes: From the manifest.
        into: The live state, of the stored structure.
        copy: False lets host tensors alias writable views; the caller then keeps the slots for as long.

    Raises:
        ManifestMismatch: `into` differs, or is needed (DTensor, tensor subclasses) and missing.
        UnsupportedState: a class in the state is not registered in this process.
        ProtocolError: the layout is malformed.
    """
    decoded = decode_layout(layout)
    try:
        stream = SlotStream(views, chunk_bytes, decoded.nbytes)
    except ValueError as error:
        raise ProtocolError(f"the bytes do not fit their layout: {error}") from None
    return build_state(decoded, stream, matched(decoded, into), is_alias=not copy)


def matched(layout: Layout, into: object, name: str = "state") -> StateMatch | None:
    """Find where a stored state goes in the live one, if one is given; raises what `check_into` does."""
    return None if into is None else guarded(lambda: StateMatch(layout, into, name, StateBuild(layout, None).node))


def build_state(layout: Layout, stream: ByteStream, match: StateMatch | None, *, is_alias: bool = False) -> Any:
    """Do what `decode_state` does, from any stream that is as long as the layout says."""
    build = StateBuild(layout, stream, match, is_alias=is_alias)
    # Everything is built before the first live byte is written, and all are written, and verified if the stream
    # does that, before any load_state_dict(), which may read the tensors of another object.
    guarded(build.bring_parts)
    state = guarded(lambda: build.node(layout.tree))
    guarded(build.fill)
    build.settle()
    if match is not None:
        match.check_overlapping(build.value)
    build.assign()
    build.load()
    return state


def guarded(work: Callable[[], Any]) -> Any:
    """Run code that interprets names and values of a layout; raise its errors as faults of the layout."""
    try:
        return work()
    except _Malformed as error:
        raise ProtocolError(f"a layout is malformed: {error}") from None


class _Malformed(Exception):
    """A value that passed the layout's checks but has no meaning."""


class StateBuild:
    """Builds objects out of nodes; `match` has the live tensors and Stateful objects."""

    def __init__(
        self, layout: Layout, stream: ByteStream | None, match: StateMatch | None = None, *, is_alias: bool = False
    ) -> None:
        self._layout, self._stream, self._match, self._is_alias = layout, stream, match, is_alias
        self._places = {} if match is None else match.places
        self._leaf_of = {} if match is None else match.leaves
        self._statefuls = {} if match is None else match.statefuls
        self._assigned = {} if match is None else match.plain.by_node
        self._extents: dict[tuple[int, str | None], torch.Tensor] = {}
        self._tensors: dict[int, Any] = {}
        self._loads: list[tuple[str, Any, Any]] = []  # path, object, what it gets
        self._values: dict[int, Any] = {}  # id of a node that is assigned -> its object
        self._later: list[Callable[[], object]] = []  # steps that need bytes that were read, in order
        self._waiting_bytes = 0  # host memory kept for them

    def node(self, node: Any) -> Any:
        """Return the object of a node."""
        if not isinstance(node, Node):
            return node
        if id(node) in self._places:
            return self._places[id(node)]
        try:
            value = _BUILDERS[node.tag](self, node)
        except (TypeError, ValueError, KeyError, AttributeError, RuntimeError, OverflowError) as error:
            if isinstance(error, MemstoreError):
                raise
            raise _Malformed(f"a {node.tag.name.lower()} cannot be rebuilt: {error}") from None
        if id(node) in self._assigned:
            self._values[id(node)] = value
        if id(node) not in self._statefuls:
            return value
        path, stateful = self._statefuls[id(node)]
        self._loads.append((path, stateful, value))
        return stateful

    def bring_parts(self) -> None:
        """Bring the inner tensors of new tensor subclasses: their classes may look at the numbers."""
        wrappers = [
            node for node in nodes_in(self._layout.tree) if node.tag is Tag.SUBCLASS and id(node) not in self._places
        ]
        parts = [part for node in wrappers for part in nodes_in(node) if part.tag in (Tag.TENSOR, Tag.ARRAY)]
        for part in parts:
            self.build_tensor(part)
        if parts:
            self.settle()

    def fill(self) -> None:
        """Write every matched tensor and array."""
        for node in nodes_in(self._layout.tree):
            target = self._places.get(id(node))
            if target is not None and node.tag in (Tag.TENSOR, Tag.ARRAY):
                self._fill(self._layout.tensors[node.data], target, self._leaf_of[id(node)])

    def settle(self) -> None:
        """Wait for the bytes read so far, then run the steps that need them."""
        if self._stream is not None:
            self._stream.settle()
        later, self._later, self._waiting_bytes = self._later, [], 0
        for work in later:
            work()

    def assign(self) -> None:
        """Assign plain values to the entries that are there for them."""
        for node, assign in () if self._match is None else self._match.plain.assignments:
            assign(self._values[id(node)] if isinstance(node, Node) else node)

    def load(self) -> None:
        """Hand every Stateful object its state, inner ones first.

        Raises:
            LoadError: One of them did not take it.
        """
        for number, (path, stateful, value) in enumerate(self._loads):
            try:
                stateful.load_state_dict(value)
            except Exception as exc:
                done = ", ".join(["all tensors", *(written for written, _, _ in self._loads[:number])])
                raise LoadError(
                    f"{type(stateful).__name__}.load_state_dict() raised {type(exc).__name__}: {exc} (of {path}; "
                    f"written by then: {done})"
                ) from exc

    def _fill(self, spec: TensorSpec, target: Any, leaf: Leaf) -> None:
        if spec.extent is None or self._stream is None:
            return
        is_same_order = spec.is_row_major and leaf.strides is None
        is_same_order |= leaf.strides == spec.strides and is_dense(spec.shape, spec.strides, spec.itemsize)
        if (
            is_same_order
            and not (spec.flags | leaf.flags) & Flag.VIEWS
            and self._read(self._layout.extents[spec.extent][0] + spec.offset, leaf)
        ):
            if isinstance(target, torch.Tensor) and not target.is_inference():
                torch.autograd.graph.increment_version(target)  # written behind autograd's back
        elif spec.flags & Flag.ARRAY:
            array = self._array(spec)
            self._later.append(lambda: np.copyto(target, array))
        else:
            tensor = self._tensor(spec)
            self._later.append(lambda: fill_tensor(target, tensor))

    def _read(self, start: int, leaf: Leaf) -> bool:
        """Have the bytes read to where the leaf lies; False for a device that they cannot be read to."""
        assert self._stream is not None
        if leaf.device:
            return self._stream.read_to(start, flat_bytes(leaf, leaf.low, leaf.high))
        self._stream.read(start, leaf.address, leaf.high - leaf.low)
        return True

    def _extent(self, index: int, device: str | None) -> torch.Tensor:
        """Return an extent's bytes, the same object for every tensor that looks into it."""
        buffer = self._extents.get((index, device))
        if buffer is not None:
            return buffer
        offset, nbytes = self._layout.extents[index]
        if self._stream is None:
            raise _Malformed("a tensor stands where only plain keys may")
        if device is not None and has_device(device):
            extent = self._on_device(self._stream, offset, nbytes, device)
        else:
            extent = self._on_host(self._stream, offset, nbytes)
        self._extents[index, device] = extent
        return extent

    def _on_host(self, stream: ByteStream, offset: int, nbytes: int) -> torch.Tensor:
        alias = stream.alias(offset, nbytes) if self._is_alias else None
        if alias is None:
            alias = torch.empty(nbytes, dtype=torch.uint8)
            stream.read(offset, alias.data_ptr(), nbytes)
        return alias

    def _on_device(self, stream: ByteStream, offset: int, nbytes: int, device: str) -> torch.Tensor:
        """Return device memory that gets the bytes: directly, if the stream can, else through host memory."""
        buffer = torch.empty(nbytes, dtype=torch.uint8, device=device)
        if not stream.read_to(offset, buffer):
            if self._waiting_bytes > WAITING_BYTES_MAX:
                self.settle()
            host = self._on_host(stream, offset, nbytes)
            self._later.append(lambda: buffer.copy_(host))
            self._waiting_bytes += nbytes
        return buffer

    def _tensor(self, spec: TensorSpec) -> torch.Tensor:
        dtype = DTYPES[spec.dtype]
        if spec.extent is None:
            device = spec.device if spec.device is not None and has_device(spec.device) else "cpu"
            return torch.empty(spec.shape, dtype=dtype, device=device)
        buffer = self._extent(spec.extent, spec.device)
        strides = tuple(step // spec.itemsize for step in spec.strides)
        tensor = torch.empty(0, dtype=dtype, device=buffer.device)
        tensor.set_(buffer.untyped_storage(), spec.offset // spec.itemsize, spec.shape, strides)
        if spec.flags & Flag.CONJ:
            tensor = tensor.conj()
        return torch._neg_view(tensor) if spec.flags & Flag.NEG else tensor

    def _array(self, spec: TensorSpec) -> np.ndarray:
        dtype = dtype_of(spec.dtype)
        if spec.extent is None:
            # Not np.empty: it turns "<U0" into "<U1", and so allocates memory for many empty elements.
            nothing: np.ndarray = np.ndarray(spec.shape, dtype, bytearray())
            return nothing
        buffer = self._extent(spec.extent, None).numpy()
        array: np.ndarray = np.ndarray(spec.shape, dtype, buffer, spec.offset, spec.strides)
        return array

    def value(self, spec: TensorSpec) -> Any:
        """Return a new tensor or array of the stored values."""
        return self._array(spec) if spec.flags & Flag.ARRAY else self._tensor(spec)

    def build_tensor(self, node: Node) -> Any:
        """Return a tensor or array, the same one for every node that names it."""
        if node.data in self._tensors:
            return self._tensors[node.data]
        spec = self._layout.tensors[node.data]
        value: Any = self.value(spec)
        if spec.flags & Flag.PARAMETER:
            value = torch.nn.Parameter(value, requires_grad=bool(spec.flags & Flag.REQUIRES_GRAD))
        self._tensors[node.data] = value
        return value

    def build_dtensor(self, node: Node) -> Any:
        """Return a DTensor on a mesh that `into` uses."""
        mesh = None if self._match is None else self._match.mesh_of(node)
        if mesh is None:
            raise ManifestMismatch("the state holds DTensors: pass into= with the live, sharded state")
        local = self.node(node.children[0])
        if local.device.type != mesh.device_type:
            self.settle()  # its bytes must have arrived before they are copied
        return subclasses.build_dtensor(local.to(mesh.device_type), node.data, mesh)

    def blob(self, data: Any) -> bytes:
        """Return the bytes of a node: inline, or from the stream."""
        if isinstance(data, bytes):
            return data
        if self._stream is None:
            raise _Malformed("a key lies in the stream")
        return self._stream.read_bytes(*self._layout.blobs[data])

    def items(self, node: Node) -> Iterator[Any]:
        """Yield the objects of a node's children."""
        return (self.node(child) for child in node.children)

    def pairs(self, children: Sequence[Any], target: dict[Any, Any]) -> Any:
        """Fill a dict from alternating keys and values."""
        for key, value in zip(children[::2], children[1::2], strict=True):
            target[self.node(key)] = self.node(value)
        if len(target) * 2 != len(children):
            raise _Malformed("a dict holds a key twice")
        return target

    def build_ordered(self, node: Node) -> Any:
        """Return an OrderedDict with its `_metadata`, if it had any."""
        value = self.pairs(node.children[1:], collections.OrderedDict())
        metadata = self.node(node.children[0])
        if metadata is not None:
            value._metadata = metadata
        return value

    def build_record(self, node: Node) -> Any:
        """Return an instance of a registered class without a call of its `__init__`."""
        name, fields = node.data
        cls = _registered(name)
        is_tuple = subclasses.is_namedtuple(cls)
        known = list(cls._fields) if is_tuple else list(getattr(cls, "__dataclass_fields__", ()))
        if is_tuple != (node.tag is Tag.NAMEDTUPLE) or known != fields:
            raise ManifestMismatch(f"{name} was stored with fields {fields} and has {known} in this process")
        if is_tuple:
            return cls._make(self.items(node))
        value = object.__new__(cls)
        for field, item in zip(fields, self.items(node), strict=True):
            object.__setattr__(value, field, item)
        return value


def has_device(kind: str) -> bool:
    """Return whether this process can hold tensors on this kind of device."""
    try:
        return bool(torch.get_device_module(kind).is_available())
    except (RuntimeError, AttributeError):
        return False


def _registered(name: str) -> Any:
    cls = subclasses.registered(name)
    if cls is None:
        raise UnsupportedState(f"the state holds a {name}, which this process did not pass to memstore.register()")
    return cls


def _enum(build: StateBuild, node: Node) -> Any:
    name, member = node.data
    cls = _registered(name)
    return cls[member] if isinstance(member, str) and member in cls.__members__ else cls(member)


def _scalar(build: StateBuild, node: Node) -> Any:
    description, raw = node.data
    return np.ndarray((), dtype_of(description), bytearray(raw) or None)[()]


def _named(kind: type) -> Callable[[StateBuild, Node], Any]:
    def build(_: StateBuild, node: Node) -> Any:
        value = getattr(torch, node.data, None)
        if type(value) is not kind:
            raise _Malformed(f"torch has no {kind.__name__} named {node.data!r}")
        return value

    return build


def _default(build: StateBuild, node: Node) -> Any:
    factory = None if node.data is None else FACTORIES[node.data]
    return build.pairs(node.children, collections.defaultdict(factory))


def _numbers(build: StateBuild, node: Node) -> Any:
    raw, tag = build.blob(node.data), node.tag
    if tag in (Tag.BOOL_LIST, Tag.BOOL_TUPLE):
        return list(map(bool, raw)) if tag is Tag.BOOL_LIST else tuple(map(bool, raw))
    numbers = array("q" if tag in (Tag.INT_LIST, Tag.INT_TUPLE) else "d")
    numbers.frombytes(raw)
    return numbers.tolist() if tag in (Tag.INT_LIST, Tag.FLOAT_LIST) else tuple(numbers)


def _subclass(build: StateBuild, node: Node) -> Any:
    name, attributes, *outside = node.data
    *parts, context = build.items(node)
    return subclasses.build_wrapper(name, dict(zip(attributes, parts, strict=True)), context, outside)


_BUILDERS: dict[Tag, Callable[[StateBuild, Node], Any]] = {
    Tag.LIST: lambda build, node: list(build.items(node)),
    Tag.TUPLE: lambda build, node: tuple(build.items(node)),
    Tag.SET: lambda build, node: set(build.items(node)),
    Tag.FROZENSET: lambda build, node: frozenset(build.items(node)),
    Tag.SIZE: lambda build, node: torch.Size(build.items(node)),
    Tag.DEQUE: lambda build, node: collections.deque(build.node(node.children[0]), node.data),
    **dict.fromkeys(NUMBER_BYTES, _numbers),
    Tag.DICT: lambda build, node: build.pairs(node.children, {}),
    Tag.COUNTER: lambda build, node: build.pairs(node.children, collections.Counter()),
    Tag.ORDERED: StateBuild.build_ordered,
    Tag.DEFAULT: _default,
    Tag.TENSOR: StateBuild.build_tensor,
    Tag.ARRAY: StateBuild.build_tensor,
    Tag.SCALAR: _scalar,
    Tag.DTENSOR: StateBuild.build_dtensor,
    Tag.SUBCLASS: _subclass,
    Tag.BYTES: lambda build, node: build.blob(node.data),
    Tag.BYTEARRAY: lambda build, node: bytearray(build.blob(node.data)),
    Tag.TEXT: lambda build, node: build.blob(node.data).decode("utf-8", "surrogatepass"),
    Tag.INT: lambda build, node: int.from_bytes(build.blob(node.data), "little", signed=True),
    Tag.COMPLEX: lambda build, node: complex(*struct.unpack("<dd", node.data)),
    Tag.DTYPE: _named(torch.dtype),
    Tag.DEVICE: lambda build, node: torch.device(node.data),
    Tag.TORCH_LAYOUT: _named(torch.layout),
    Tag.MEMORY_FORMAT: _named(torch.memory_format),
    Tag.ARRAY_DTYPE: lambda build, node: dtype_of(node.data),
    Tag.ENUM: _enum,
    Tag.DATACLASS: StateBuild.build_record,
    Tag.NAMEDTUPLE: StateBuild.build_record,
}
