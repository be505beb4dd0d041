"""The items of a DCP checkpoint, read and written through any storage of DCP's; a step of `store.put` as such items."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace as replace_row
from torch.distributed.checkpoint import planner
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

from memstore.core.format.layout import TensorSpec, decode_layout, pieces
from memstore.core.format.manifest import chunk_digest
from memstore.core.format.object_tree import Node, Tag
from memstore.errors import IntegrityError, UnsupportedState
from memstore.exchange import Progress
from memstore.shell.codec.decode import StateBuild, guarded
from memstore.shell.rank.shard_read import ShardRanges
from memstore.shell.tensors.slot_stream import SlotStream
from memstore.shell.tensors.subclasses import placement_of

WINDOW_BYTES = 64 << 20  # of a shard, in the arena's in-flight room
Value = torch.Tensor | bytes  # a part of a tensor, or what DCP stores for an object
Values = dict[MetadataIndex, Value]
Item = tuple[MetadataIndex, ChunkStorageMetadata | None, int]  # None and 0 of an object, else its bytes


def items_of(metadata: Metadata) -> Iterator[Item]:
    """Yield every item."""
    for name, entry in metadata.state_dict_metadata.items():
        for chunk in entry.chunks if isinstance(entry, TensorStorageMetadata) else [None]:
            size = 0 if chunk is None else chunk.sizes.numel() * entry.properties.dtype.itemsize  # type: ignore[union-attr]
            yield MetadataIndex(name, None if chunk is None else chunk.offsets), chunk, size


class _Held(DefaultLoadPlanner, DefaultSavePlanner):  # type: ignore[misc]
    """Keeps what is read, and has what is written; objects stay bytes, never decoded."""

    def __init__(self, entries: dict[str, Any], values: Values, progress: Progress) -> None:
        self.entries, self.values, self.progress = entries, values, progress

    def resolve_tensor(self, read_item: planner.ReadItem) -> torch.Tensor:
        return torch.empty(read_item.lengths, dtype=self.entries[read_item.storage_index.fqn].properties.dtype)

    def commit_tensor(self, read_item: planner.ReadItem, tensor: torch.Tensor) -> None:
        self.values[read_item.storage_index] = tensor
        self.progress(tensor.nbytes)

    def load_bytes(self, read_item: planner.ReadItem, value: io.BytesIO) -> None:
        self.values[read_item.storage_index] = value.getvalue()

    def resolve_data(self, write_item: planner.WriteItem) -> torch.Tensor | io.BytesIO:
        found = self.values[write_item.index]
        self.progress(0 if isinstance(found, bytes) else found.nbytes)
        return io.BytesIO(found) if isinstance(found, bytes) else found


def read_items(reader: StorageReader, metadata: Metadata, wanted: Sequence[Item], progress: Progress) -> Values:
    """Return the wanted items of a checkpoint whose metadata the reader has; `progress` takes the bytes of tensors."""
    items, values = [], Values()
    for index, chunk, _ in wanted:
        kind = planner.LoadItemType.BYTE_IO if chunk is None else planner.LoadItemType.TENSOR
        sizes = torch.Size([]) if chunk is None else chunk.sizes
        start = torch.Size([0] * len(sizes))
        items.append(planner.ReadItem(kind, index, start, index, start, sizes))
    reader.read_data(planner.LoadPlan(items), _Held(metadata.state_dict_metadata, values, progress)).wait()
    return values


def write_items(
    writer: StorageWriter, plan: planner.SavePlan, metadata: Metadata, values: Values, progress: Progress
) -> list[WriteResult]:
    """Write items of a checkpoint under a plan of the writer's that has none yet; `progress` as `read_items`."""
    entries: dict[str, Any] = metadata.state_dict_metadata
    items = []
    for index, value in values.items():
        kind, data = planner.WriteItemType.BYTE_IO, None
        if isinstance(value, torch.Tensor) and index.offset is not None:
            kind, chunk = planner.WriteItemType.SHARD, ChunkStorageMetadata(index.offset, value.size())
            data = planner.TensorWriteData(chunk, entries[index.fqn].properties, entries[index.fqn].size)
        items.append(planner.WriteItem(index, kind, tensor_data=data))
    written: list[WriteResult] = writer.write_data(replace(plan, items=items), _Held(entries, values, progress)).wait()
    return written


# -- of a step that store.put made ------------------------------------------------------------------


def read_shard(ranges: ShardRanges, step: int, rank: int, progress: Progress) -> tuple[bytes, memoryview]:
    """Return the layout and the bytes of a shard, digested on their way."""
    with ranges.ask(step, rank) as read:
        manifest = read.manifest()
    data = memoryview(bytearray(manifest.nbytes))
    for _, _, done, size in pieces(0, manifest.nbytes, WINDOW_BYTES):
        with ranges.ask(step, rank, [(done, size)], manifest.chunk_bytes) as read:
            if read.manifest() != manifest:
                raise IntegrityError(f"step {step} was put again while it was read: begin again")
            data[done : done + size] = read.bytes_of([(done, size)])[0]
        progress(size)
    return manifest.layout, data


class _RankState(StateBuild):
    """One rank's objects, all in host memory; a DTensor is the rank's own part, and its node is in `parts`."""

    def __init__(self, layout: bytes, data: memoryview) -> None:
        decoded, self.parts = decode_layout(layout), dict[int, tuple[torch.Tensor, Node]]()
        super().__init__(decoded, SlotStream([data], max(len(data), 1), len(data)), is_alias=True)
        self.state = guarded(lambda: self.node(decoded.tree))

    def node(self, node: Any) -> Any:
        if isinstance(node, Node) and node.tag is Tag.DTENSOR:
            local = self.node(node.children[0]).detach()  # an object of its own, which `parts` keeps
            self.parts[id(local)] = local, node
            return local
        if isinstance(node, Node) and node.tag is Tag.SUBCLASS:
            raise UnsupportedState(
                f"the state holds a {node.data[0]}, a tensor subclass, which no format has a place for: take it with "
                "memstore.reader(...).get(), and save its plain tensors"
            )
        return super().node(node)

    def _tensor(self, spec: TensorSpec) -> torch.Tensor:
        return super()._tensor(replace_row(spec, device=None))  # never in the memory of a device that trains


def write_put_step(
    ranges: ShardRanges, step: int, ranks: Sequence[int], writer: StorageWriter, progress: Progress
) -> tuple[Metadata, list[WriteResult], list[str]]:
    """Write every item once; return metadata and results for the writer's `finish`, and the names that differ by rank.

    `progress` takes the bytes of the ranks' shards, as they are read.

    Raises:
        UnsupportedState: a state that has no names, or a leaf that has no place; says which and why.
    """
    metadata, results, written, per_rank = Metadata({}, {}), list[WriteResult](), set[MetadataIndex](), set[str]()
    entries: dict[str, Any] = metadata.state_dict_metadata
    first: dict[str, Any] = {}  # name -> what tells the leaf of the first rank that has it
    owners: dict[Any, int] = {}  # a DTensor -> the first rank that has it
    plans = writer.prepare_global_plan([planner.SavePlan([]) for _ in ranks])
    for rank, plan in zip(ranks, plans, strict=True):
        values: Values = {}
        for path, value, node in _leaves(_RankState(*read_shard(ranges, step, rank, progress))):
            name = ".".join(map(str, path))
            key, entry, chunk = _described(name, value, node, rank)
            owner = rank if node is None else owners.setdefault((name, key), rank)
            if first.setdefault(name, key) != key:
                path, name = (f"rank{owner:05d}", *path), f"rank{owner:05d}.{name}"
                per_rank.add(name)
                if first.setdefault(name, key) != key:
                    raise UnsupportedState(f"{name!r} is a name of the state, and of what rank {owner} has: rename it")
            entry, metadata.planner_data[name] = entries.setdefault(name, entry), path
            index = MetadataIndex(name, None if chunk is None else chunk.offsets)
            if index in written or (chunk is None and node is not None):
                continue
            written.add(index)
            values[index] = value
            if chunk is not None:
                entry.chunks.append(chunk)
        results += write_items(writer, plan, metadata, values, lambda nbytes: None)
    for name, entry in entries.items():
        if isinstance(entry, TensorStorageMetadata):
            count, wanted = sum(chunk.sizes.numel() for chunk in entry.chunks), entry.size.numel()
            if count != wanted or not entry.chunks:
                raise UnsupportedState(
                    f"{name!r}: the ranks read hold {count} of {wanted} elements of this DTensor: read all ranks "
                    "(no --rank)"
                )
    return metadata, results, sorted(per_rank)


def _leaves(rank: _RankState) -> Iterator[tuple[tuple[Any, ...], Value, Node | None]]:
    """Yield path and value of every leaf, and the node of a DTensor."""
    if not isinstance(rank.state, dict):
        raise UnsupportedState("the state is not a dict, so its tensors have no names: memstore.reader().get() it")
    try:
        flat, paths = flatten_state_dict(rank.state)
    except ValueError as error:
        raise UnsupportedState(f"two entries of the state have one name, joined by dots: {error}") from error
    for name, value in flat.items():
        if isinstance(value, torch.Tensor):
            dense = value.detach().resolve_conj().resolve_neg().contiguous()
            yield paths[name], dense, rank.parts.get(id(value), (None, None))[1]
        else:
            torch.save(value, stream := io.BytesIO())
            yield paths[name], stream.getvalue(), None


def _described(name: str, value: Value, node: Node | None, rank: int) -> tuple[Any, Any, ChunkStorageMetadata | None]:
    """Return what tells a leaf from another of its name, its entry without chunks, and its part; None of an object."""
    if isinstance(value, bytes):
        return chunk_digest(value), BytesStorageMetadata(), None
    properties = TensorProperties(value.dtype)
    if node is not None:  # whose strides may differ by rank
        entry = TensorStorageMetadata(properties, torch.Size(node.data[4]), [])
        return repr((node.data[:5], value.dtype)), entry, _part_of(name, value, node, rank)
    raw: Any = value.reshape(-1).view(torch.uint8).numpy()
    whole = ChunkStorageMetadata(torch.Size([0] * value.dim()), value.shape)
    key = repr((value.dtype, value.shape, chunk_digest(memoryview(raw))))
    return key, TensorStorageMetadata(properties, value.shape, []), whole


def _part_of(name: str, local: torch.Tensor, node: Node, rank: int) -> ChunkStorageMetadata | None:
    """Return which part of its DTensor a rank holds, None if none. Source: torch's own arithmetic of placements."""
    ranks, mesh_shape, _, described, shape, _ = node.data
    if rank not in ranks:
        return None
    placements = [placement_of(item) for item in described]
    if any(placement.is_partial() for placement in placements):
        raise UnsupportedState(f"{name!r}: a DTensor of pending sums (Partial) has no global value: reduce it first")
    coordinate = [int(i) for i in np.unravel_index(ranks.index(rank), mesh_shape)]
    sizes, offsets = _compute_local_shape_and_global_offset(tuple(shape), tuple(mesh_shape), coordinate, placements)
    if tuple(sizes) != tuple(local.shape):
        raise UnsupportedState(
            f"{name!r}: rank {rank} put a part of shape {list(local.shape)} where its mesh and placements say "
            f"{list(sizes)}: are the store's ranks those of torch.distributed?"
        )
    is_empty = 0 in sizes and 0 not in shape
    return None if is_empty else ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
