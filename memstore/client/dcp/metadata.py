"""DCP's Metadata as bytes, field by field, without pickle; and where it stands in a shard.

    A `_Record`, as msgpack, then zlib: every name with its properties and the chunks that ranks wrote; `strays` are
    written, but no chunk of any entry. The planner's data are bytes of the state codec, with their layout.

A shard saved through DCP has no tensors in its layout: its stream is raw items, its tree says so (`SavedLayout`),
and on the coordinator where the metadata stands. Decoded bytes may come from any source.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
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
from memstore.core.format.object_tree import Count
from memstore.errors import MemstoreError, ProtocolError, UnsupportedState
from memstore.shell.codec.decode import StateBuild, decode_state
from memstore.shell.codec.encode import copy_into, plan_state
from memstore.shell.codec.walk import StateWalk
from memstore.shell.tensors.memory import DTYPE_NAMES, DTYPES

FORMAT: Literal[2] = 2
METADATA_BYTES_MAX = 1 << 30  # of msgpack: ten million chunks
INFLATION_MAX = 64  # decompressed bytes for each stored byte: bounds the memory to read it
INFLATION_SLACK_BYTES = 1 << 16
_MEMORY_FORMATS = {
    "contiguous": torch.contiguous_format,
    "channels_last": torch.channels_last,
    "preserve": torch.preserve_format,
}
_MEMORY_NAMES = {value: name for name, value in _MEMORY_FORMATS.items()}


class _Row(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    pass


class Place(_Row, frozen=True):
    """Where an item's bytes stand: in the stream of which rank, from which byte, how many."""

    rank: Count
    offset: Count
    nbytes: Count


class _Chunk(_Row, frozen=True):
    offsets: tuple[Count, ...]
    sizes: tuple[Count, ...]
    place: Place | None  # None: no rank wrote it


class _Tensor(_Row, frozen=True):
    dtype: str
    requires_grad: bool
    memory_format: str
    pin_memory: bool
    size: tuple[Count, ...]
    chunks: tuple[_Chunk, ...]


class _Entry(_Row, frozen=True):
    fqn: str
    tensor: _Tensor | None  # None: an object that the planner made bytes of
    place: Place | None  # of an object


class _Stray(_Row, frozen=True):
    fqn: str
    offsets: tuple[Count, ...] | None
    place: Place


class _Record(_Row, frozen=True):
    format: Literal[2]
    version: str | None
    entries: tuple[_Entry, ...]
    planner_layout: bytes
    planner_stream: bytes
    strays: tuple[_Stray, ...]


_RECORD = msgspec.msgpack.Decoder(_Record)


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
            try:
                place = msgspec.convert(place, tuple[Count, Count])
            except msgspec.ValidationError as error:
                raise ProtocolError(f"where its DCP metadata stands is malformed: {error}") from None
            if sum(place) > layout.nbytes:
                raise ProtocolError(f"DCP metadata of {place[1]} bytes at {place[0]} ends behind the shard")
        return cls(place, tree.get("is_global") is True)


def encode_metadata(metadata: Metadata) -> bytes:
    """Return the metadata's bytes; `storage_data` maps MetadataIndex to Place.

    Raises:
        UnsupportedState: a planner put something into it that has no encoding; names what.
    """
    places: dict[MetadataIndex, Place] = dict(metadata.storage_data or {})
    entries = tuple(_entry(fqn, entry, places) for fqn, entry in metadata.state_dict_metadata.items())
    strays = tuple(_Stray(i.fqn, None if i.offset is None else tuple(i.offset), place) for i, place in places.items())
    try:
        packed = msgspec.msgpack.encode(
            _Record(FORMAT, metadata.version, entries, *_pack_plain(metadata.planner_data), strays)
        )
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
        record = _RECORD.decode(packed)
        places: dict[MetadataIndex, Place] = {}
        entries = {entry.fqn: _read_entry(entry, places) for entry in record.entries}
        places |= {MetadataIndex(stray.fqn, stray.offsets): stray.place for stray in record.strays}
        layout, stream = record.planner_layout, record.planner_stream
        planner_data = decode_state(layout, [memoryview(stream)] if stream else [], max(len(stream), 1))
        return Metadata(entries, planner_data, places, version=record.version)
    except MemstoreError:
        raise
    except Exception as error:  # msgspec, torch and zlib raise half a dozen unrelated types for bad bytes
        raise ProtocolError(f"{len(data)} bytes are not DCP metadata: {type(error).__name__}: {error}") from None


def estimate_bytes(names: Mapping[str, int], world_size: int) -> int:
    """Return about how many bytes the metadata of a state will take: fqn -> dimensions of its tensors."""
    chunk_bytes = sum(24 + 12 * dims for dims in names.values())
    return 4096 + (sum(len(name) + 60 for name in names) + world_size * chunk_bytes) // 2


def _inflated_max(nbytes: int) -> int:
    return min(METADATA_BYTES_MAX, INFLATION_MAX * nbytes + INFLATION_SLACK_BYTES)


def _entry(fqn: str, entry: TensorStorageMetadata | BytesStorageMetadata, places: dict[MetadataIndex, Place]) -> _Entry:
    """Take an entry's places out of `places`."""
    if isinstance(entry, BytesStorageMetadata):
        return _Entry(fqn, None, places.pop(MetadataIndex(fqn), None))
    is_known = entry.properties.dtype in DTYPE_NAMES and entry.properties.layout is torch.strided
    if not is_known:
        raise UnsupportedState(
            f"{fqn!r} is a {entry.properties.layout} tensor of {entry.properties.dtype}: it cannot be stored"
        )
    chunks = (
        _Chunk(tuple(chunk.offsets), tuple(chunk.sizes), places.pop(MetadataIndex(fqn, chunk.offsets), None))
        for chunk in entry.chunks
    )
    properties = entry.properties
    tensor = _Tensor(
        DTYPE_NAMES[properties.dtype],
        bool(properties.requires_grad),
        _MEMORY_NAMES[properties.memory_format],
        bool(properties.pin_memory),
        tuple(entry.size),
        tuple(chunks),
    )
    return _Entry(fqn, tensor, None)


def _read_entry(entry: _Entry, places: dict[MetadataIndex, Place]) -> TensorStorageMetadata | BytesStorageMetadata:
    """Put an entry's places into `places`."""
    tensor = entry.tensor
    if tensor is None:
        if entry.place is not None:
            places[MetadataIndex(entry.fqn)] = entry.place
        return BytesStorageMetadata()
    chunks, dtype = [], DTYPES[tensor.dtype]
    for row in tensor.chunks:
        chunk = ChunkStorageMetadata(torch.Size(row.offsets), torch.Size(row.sizes))
        if row.place is not None:
            if row.place.nbytes != math.prod(row.sizes) * dtype.itemsize:
                raise ValueError(f"{entry.fqn!r}: a chunk of shape {list(row.sizes)} in {row.place.nbytes} bytes")
            places[MetadataIndex(entry.fqn, chunk.offsets)] = row.place
        chunks.append(chunk)
    properties = TensorProperties(
        dtype, torch.strided, tensor.requires_grad, _MEMORY_FORMATS[tensor.memory_format], tensor.pin_memory
    )
    return TensorStorageMetadata(properties, torch.Size(tensor.size), chunks)


def _pack_plain(value: Any) -> tuple[bytes, bytes]:
    plan = plan_state(value)
    stream = bytearray(plan.nbytes)
    copy_into(plan, [memoryview(stream)] if plan.nbytes else [], max(plan.nbytes, 1))
    return plan.layout, bytes(stream)
