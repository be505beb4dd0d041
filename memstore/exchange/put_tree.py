"""The tree of a shard that `store.put` made, whole as torch's file, or leaf by leaf, as DCP names leaves.

As in its flatten_state_dict, dicts are entered; so is a list with a tensor, a dict or such a list in it; all else is a
leaf, tuples included.
"""

from __future__ import annotations

import pathlib
import struct
from collections.abc import Iterator
from typing import Any

import torch
from msgspec.structs import replace
from torch.serialization import get_unsafe_globals_in_checkpoint

from memstore.core.format.layout import Layout, TensorSpec, byte_span, decode_layout
from memstore.core.format.object_tree import BLOB_TAGS, MAPS, Node, Tag
from memstore.errors import UnsupportedState
from memstore.exchange.shard_bytes import ShardBytes, have_same_bytes
from memstore.shell.codec.decode import StateBuild, guarded
from memstore.shell.rank.range_read import Range

Path = tuple[str | int, ...]
TENSORS = (Tag.TENSOR, Tag.DTENSOR)
_IN_TABLES = (Tag.TENSOR, Tag.ARRAY)


class PutShard(StateBuild):
    """One rank's shard and its objects: all in host memory, a DTensor as the rank's own part of it.

    Raises:
        UnsupportedState: a class that is not registered here, or a tensor subclass.
    """

    def __init__(self, stream: ShardBytes) -> None:
        self.layout: Layout = decode_layout(stream.manifest.layout)
        self.stream = stream
        super().__init__(self.layout, stream, is_alias=True)

    def node(self, node: Any) -> Any:
        """Return the object of a node."""
        if isinstance(node, Node) and node.tag is Tag.DTENSOR:
            return self.node(node.children[0])
        if isinstance(node, Node) and node.tag is Tag.SUBCLASS:
            raise UnsupportedState(
                f"the state holds a {node.data[0]}, a tensor subclass, which no format has a place for: take it with "
                "memstore.reader(...).get(), and save its plain tensors"
            )
        return super().node(node)

    def _tensor(self, spec: TensorSpec) -> torch.Tensor:
        return super()._tensor(replace(spec, device=None))  # never in the memory of a device that trains

    def build(self, node: Any) -> Any:
        """Return the object of a node and keep nothing of it. ProtocolError if it means nothing."""
        try:
            return guarded(lambda: self.node(node))
        finally:
            self._extents.clear()
            self._tensors.clear()

    def leaves(self) -> Iterator[tuple[Path, Any]]:
        """Yield path and node of every leaf. UnsupportedState if the state is no dict."""
        if not _is_mapping(self.layout.tree):
            raise UnsupportedState("the state is not a dict, so its tensors have no names: use --format torch")
        yield from self._leaves(self.layout.tree, ())

    def _leaves(self, node: Any, path: Path) -> Iterator[tuple[Path, Any]]:
        if _is_mapping(node):
            pairs = node.children[1:] if node.tag is Tag.ORDERED else node.children
            for key, child in zip(pairs[::2], pairs[1::2], strict=True):
                yield from self._leaves(child, (*path, str(self.build(key))))
        elif _is_entered(node):
            for index, child in enumerate(node.children):
                yield from self._leaves(child, (*path, index))
        else:
            yield path, node

    def spec(self, node: Node) -> TensorSpec:
        """Return the row of a tensor or array."""
        row: TensorSpec = self.layout.tensors[node.data]
        return row

    def span(self, node: Any) -> Range:
        """Return where a leaf's bytes begin, and how many they are, if it is a tensor or array."""
        if isinstance(node, Node) and node.tag is Tag.DTENSOR:
            return self.span(node.children[0])
        if isinstance(node, Node) and node.tag in _IN_TABLES and (extent := self.spec(node).extent) is not None:
            return self.layout.extents[extent]
        return 0, 0


def have_same_leaf(one: PutShard, node: Any, other: PutShard, other_node: Any) -> bool:
    """Return whether two leaves of two ranks are equal, bit for bit."""
    if not isinstance(node, Node) or not isinstance(other_node, Node):
        return _scalar_bits(node) == _scalar_bits(other_node)
    if node.tag is not other_node.tag or len(node.children) != len(other_node.children):
        return False
    if node.tag in _IN_TABLES:
        return _have_same_tensor(one, one.spec(node), other, other.spec(other_node))
    if node.tag in BLOB_TAGS:
        return one.blob(node.data) == other.blob(other_node.data)
    if node.data != other_node.data:
        return False
    children = zip(node.children, other_node.children, strict=True)
    return all(have_same_leaf(one, a, other, b) for a, b in children)


def _have_same_tensor(one: PutShard, spec: TensorSpec, other: PutShard, other_spec: TensorSpec) -> bool:
    if replace(spec, extent=None, offset=0) != replace(other_spec, extent=None, offset=0):
        return False
    if spec.extent is None or other_spec.extent is None:
        return spec.extent is other_spec.extent
    low, high = byte_span(spec.shape, spec.strides, spec.itemsize)
    at = one.layout.extents[spec.extent][0] + spec.offset + low
    other_at = other.layout.extents[other_spec.extent][0] + other_spec.offset + low
    return have_same_bytes(one.stream, at, other.stream, other_at, high - low)


def _scalar_bits(value: Any) -> tuple[type, Any]:
    """Return a float's bits, so that NaN equals itself and 0.0 is not -0.0; True is not 1."""
    return type(value), struct.pack("<d", value) if isinstance(value, float) else value


def _is_mapping(node: Any) -> bool:
    return isinstance(node, Node) and node.tag in MAPS


def _is_entered(node: Any) -> bool:
    return (
        isinstance(node, Node)
        and node.tag is Tag.LIST
        and any(
            _is_mapping(child) or _is_entered(child) or (isinstance(child, Node) and child.tag in TENSORS)
            for child in node.children
        )
    )


# -- as a file of torch -----------------------------------------------------------------------


def file_name(rank: int) -> str:
    """Return the name of a rank's file."""
    return f"rank_{rank:05d}.pt"


def write_torch(stream: ShardBytes, folder: pathlib.Path) -> dict[str, Any]:
    """Write one rank's state; return notes for readers of the file.

    `unsafe_globals` are the names that torch.load(weights_only=True) refuses, [] where it reads the file as it is;
    `dtensors` counts DTensors that stand there as this rank's part.

    Raises:
        UnsupportedState: a class that is not registered here, or a tensor subclass.
    """
    shard = PutShard(stream)
    stream.expect([*shard.layout.extents, *shard.layout.blobs])
    path = folder / file_name(stream.rank)
    with path.open("wb") as file:  # torch's own opening hides the file system's error
        torch.save(shard.build(shard.layout.tree), file)
    return {
        "file": path.name,
        "unsafe_globals": sorted(set(get_unsafe_globals_in_checkpoint(path))),
        "dtensors": _count(shard.layout.tree, Tag.DTENSOR),
    }


def _count(node: Any, tag: Tag) -> int:
    return 0 if not isinstance(node, Node) else (node.tag is tag) + sum(_count(child, tag) for child in node.children)
