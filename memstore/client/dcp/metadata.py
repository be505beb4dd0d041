"""DCP's Metadata as bytes, field by field, without pickle; and where it stands in a shard.

    [format, version, [entry, ...], planner data, [stray, ...]]      msgpack, then zlib
    entry   [fqn, nil, place]                                        an object that the planner made bytes of
            [fqn, [dtype, layout, requires_grad, memory format, pinned, size], [[offsets, sizes, place], ...]]
    place   [rank, first byte of its stream, nbytes], or nil if no rank wrote it
    stray   [fqn, offsets | nil, place]                              written, but no chunk of any entry
    planner data   [layout, bytes] of the state codec

A shard saved through DCP has no tensors in its layout: its stream is raw items, its tree says so (`SavedLayout`),
and on the coordinator where the metadata stands. Decoded bytes may come from any source.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgpack
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from memstore.client.checkpoint import DCP_KEY
from memstore.core.format.layout import decode_layout, encode_layout
from memstore.errors import MemstoreError, ProtocolError, UnsupportedState
from memstore.shell.codec.decode import StateBuild, decode_state
from memstore.shell.codec.encode import copy_into, plan_state
from memstore.shell.codec.walk import StateWalk
from memstore.shell.tensors.memory import DTYPE_NAMES, DTYPES

FORMAT = 1
METADATA_BYTES_MAX = 1 << 30  # of msgpack: ten million chunks
INFLATION_MAX = 64  # decompressed bytes for each stored byte: bounds the memory to read it
INFLATION_SLACK_BYTES = 1 << 16
_LAYOUTS = {"strided": torch.strided}
_MEMORY_FORMATS = {
    "contiguous": torch.contiguous_format,
    "channels_last": torch.channels_last,
    "preserve": torch.preserve_format,
}
_MEMORY_NAMES = {value: name for name, value in _MEMORY_FORMATS.items()}


@dataclass(frozen=True)
class Place:
    """Where an item's bytes stand: in the stream of which rank, from which byte, how many."""

    rank: int
    offset: int
    nbytes: int


@dataclass(frozen=True)
class SavedLayout:
    """What the tree of a shard saved through DCP says: `metadata` is [offset, nbytes] on a coordinator."""

    metadata: tuple[int, int] | None
    is_global: bool  # the metadata is of all ranks; False where every rank saved for itself

    def encode(self, nbytes: int) -> bytes:
        """Return the layout of a shard of `nbytes`."""
        place = None if self.metadata is None else list(self.metadata)
        tree = StateWalk({DCP_KEY: FORMAT, "metadata": place, "is_global": self.is_global}).tree
        return encode_layout(nbytes, [], [], [], tree)

    @classmethod
    def decode(cls, data: bytes) -> SavedLayout | None:
        """Decode the layout; None if the shard was not saved through DCP. ProtocolError if it is malformed."""
        layout = decode_layout(data)
        if layout.extents or layout.blobs:
            return None
        tree = StateBuild(layout, None).node(layout.tree)
        if not isinstance(tree, dict) or DCP_KEY not in tree:
            return None
        if tree[DCP_KEY] != FORMAT:
            raise ProtocolError(f"a DCP shard of format {str(tree[DCP_KEY])[:20]}; this memstore reads {FORMAT}")
        place = tree.get("metadata")
        if place is not None:
            offset, nbytes = _counts(place, 2)
            if offset + nbytes > layout.nbytes:
                raise ProtocolError(f"DCP metadata of {nbytes} bytes at {offset} ends behind the shard")
            place = (offset, nbytes)
        return cls(place, tree.get("is_global") is True)


def encode_metadata(metadata: Metadata) -> bytes:
    """Return the metadata's bytes; `storage_data` maps MetadataIndex to Place.

    Raises:
        UnsupportedState: a planner put something into it that has no encoding; names what.
    """
    places: dict[MetadataIndex, Place] = dict(metadata.storage_data or {})
    entries: list[Any] = []
    for fqn, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, BytesStorageMetadata):
            entries.append([fqn, None, _row(places.pop(MetadataIndex(fqn), None))])
            continue
        chunks = [
            [list(c.offsets), list(c.sizes), _row(places.pop(MetadataIndex(fqn, c.offsets), None))]
            for c in entry.chunks
        ]
        entries.append([fqn, [*_properties(fqn, entry.properties), list(entry.size)], chunks])
    strays = [[i.fqn, None if i.offset is None else list(i.offset), _row(place)] for i, place in places.items()]
    try:
        row = [FORMAT, metadata.version, entries, _pack_plain(metadata.planner_data), strays]
        packed: bytes = msgpack.packb(row, use_bin_type=True)
    except (TypeError, ValueError, OverflowError) as error:
        raise UnsupportedState(f"DCP's metadata cannot be stored: {error}") from None
    if len(packed) > METADATA_BYTES_MAX:
        raise UnsupportedState(f"DCP's metadata takes {len(packed)} bytes, the limit is {METADATA_BYTES_MAX}")
    data = zlib.compress(packed, 1)  # names and sizes repeat: a tenth is left
    return data if len(packed) <= _inflated_max(len(data)) else zlib.compress(packed, 0)


def decode_metadata(data: bytes) -> Metadata:
    """Return the Metadata in `data`, which may come from anywhere. ProtocolError."""
    try:
        inflater, limit = zlib.decompressobj(), _inflated_max(len(data))
        packed = inflater.decompress(data, limit)
        if not inflater.eof or inflater.unused_data:
            raise ValueError(f"it inflates to more than {limit} bytes, ends too soon or too late")
        form, version, entries, planner, strays = msgpack.unpackb(packed, raw=False)
        if form != FORMAT:
            raise ValueError(f"format {str(form)[:20]} is not {FORMAT}, the one this memstore reads")
        places: dict[MetadataIndex, Place] = {}
        tensors = {_text(fqn): _entry(_text(fqn), kind, rest, places) for fqn, kind, rest in entries}
        for fqn, offsets, place in strays:
            places[MetadataIndex(_text(fqn), None if offsets is None else _counts(offsets))] = _place(place)
        planner_data = _unpack_plain(planner)
        return Metadata(tensors, planner_data, places, version=None if version is None else _text(version))
    except MemstoreError:
        raise
    except Exception as error:  # msgpack and zlib raise half a dozen unrelated types for bad bytes
        raise ProtocolError(f"{len(data)} bytes are not DCP metadata: {type(error).__name__}: {error}") from None


def estimate_bytes(names: Mapping[str, int], world_size: int) -> int:
    """Return about how many bytes the metadata of a state will take: fqn -> dimensions of its tensors."""
    chunk_bytes = sum(24 + 12 * dims for dims in names.values())
    return 4096 + (sum(len(name) + 60 for name in names) + world_size * chunk_bytes) // 2


def _inflated_max(nbytes: int) -> int:
    return min(METADATA_BYTES_MAX, INFLATION_MAX * nbytes + INFLATION_SLACK_BYTES)


def _entry(fqn: str, kind: Any, rest: Any, places: dict[MetadataIndex, Place]) -> Any:
    if kind is None:
        if rest is not None:
            places[MetadataIndex(fqn)] = _place(rest)
        return BytesStorageMetadata()
    dtype, layout, requires_grad, memory_format, pinned, size = kind
    chunks = []
    for offsets, sizes, place in rest:
        chunk = ChunkStorageMetadata(torch.Size(_counts(offsets)), torch.Size(_counts(sizes)))
        if place is not None:
            found = _place(place)
            if found.nbytes != math.prod(chunk.sizes) * DTYPES[dtype].itemsize:
                raise ValueError(f"{fqn!r}: a chunk of shape {list(chunk.sizes)} in {found.nbytes} bytes")
            places[MetadataIndex(fqn, chunk.offsets)] = found
        chunks.append(chunk)
    properties = TensorProperties(
        DTYPES[dtype], _LAYOUTS[layout], requires_grad is True, _MEMORY_FORMATS[memory_format], pinned is True
    )
    return TensorStorageMetadata(properties, torch.Size(_counts(size)), chunks)


def _properties(fqn: str, properties: TensorProperties) -> Iterator[Any]:
    if properties.dtype not in DTYPE_NAMES or properties.layout is not torch.strided:
        raise UnsupportedState(f"{fqn!r} is a {properties.layout} tensor of {properties.dtype}: it cannot be stored")
    yield DTYPE_NAMES[properties.dtype]
    yield "strided"
    yield bool(properties.requires_grad)
    yield _MEMORY_NAMES[properties.memory_format]
    yield bool(properties.pin_memory)


def _row(place: Place | None) -> list[int] | None:
    return None if place is None else [place.rank, place.offset, place.nbytes]


def _place(row: Any) -> Place:
    return Place(*_counts(row, 3))


def _counts(row: Any, length: int | None = None) -> list[int]:
    if not isinstance(row, list) or (length is not None and len(row) != length):
        raise ValueError(f"{str(row)[:40]} is not a list" + ("" if length is None else f" of {length} numbers"))
    if any(type(n) is not int or not 0 <= n < 1 << 62 for n in row):
        raise ValueError(f"{str(row)[:40]} has something else than whole numbers from 0")
    return row


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"a {type(value).__name__} stands where a name belongs")
    return value


def _pack_plain(value: Any) -> list[bytes]:
    plan = plan_state(value)
    stream = bytearray(plan.nbytes)
    copy_into(plan, [memoryview(stream)] if plan.nbytes else [], max(plan.nbytes, 1))
    return [plan.layout, bytes(stream)]


def _unpack_plain(row: Any) -> Any:
    layout, stream = row
    return decode_state(layout, [memoryview(stream)] if stream else [], max(len(stream), 1))
