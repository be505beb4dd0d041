"""One step as DCP sees one: global tensors in parts, and objects, by name, for a step of any format.

For a step that `store.put` made: names are DCP's. A DTensor's parts are put together by its mesh and placements. What
every rank that has it put alike stands once, under its name; what differs stands once per rank, under
`rank00003.<name>`. Read `put_tree.py` first.
"""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

from memstore.client.dcp.metadata import Place
from memstore.client.dcp.reader import DcpReader
from memstore.core.format.layout import Flag
from memstore.core.format.object_tree import Node, Tag
from memstore.errors import IntegrityError, UnsupportedState
from memstore.exchange.put_tree import Path, PutShard, have_same_leaf
from memstore.exchange.shard_bytes import WINDOW_BYTES, ShardBytes
from memstore.shell.rank.range_read import Range, ShardRanges
from memstore.shell.tensors.memory import DTYPES
from memstore.shell.tensors.subclasses import placement_of


@dataclass(frozen=True)
class Item:
    """A part of a tensor, or an object: what `load` returns, on this host's memory. `span`: its bytes, about."""

    index: MetadataIndex
    shard: ShardBytes
    span: Range
    chunk: ChunkStorageMetadata | None  # None: an object, whose bytes are what DCP stores for it
    load: Callable[[], torch.Tensor | bytes]


@dataclass(frozen=True)
class StepView:
    """`entries` as in DCP's Metadata; `paths` by name; items in the order of their bytes."""

    entries: dict[str, TensorStorageMetadata | BytesStorageMetadata]
    paths: Any
    items: list[Item]
    per_rank: list[str] = field(default_factory=list)  # names of what differs between ranks

    def by_rank(self, *, are_interleaved: bool = False) -> Iterator[tuple[ShardBytes, list[Item]]]:
        """Yield every shard with its items, which it is to expect; the window is shared if shards are read by turns."""
        ranks: dict[int, list[Item]] = defaultdict(list)
        for item in self.items:
            ranks[item.shard.rank].append(item)
        for _, items in sorted(ranks.items()):
            # Objects first, because DCP's writer asks for them first.
            items.sort(key=lambda item: (item.chunk is not None, item.span))
            window_bytes = WINDOW_BYTES // len(ranks) if are_interleaved else WINDOW_BYTES
            items[0].shard.expect((item.span for item in items if item.chunk is not None), window_bytes)
            yield items[0].shard, items


# -- of a step saved through DCP --------------------------------------------------------------------


def view_of_dcp_step(ranges: ShardRanges, step: int, rank: int | None) -> StepView:
    """Return the saved step; of one rank where each saved for itself.

    Raises:
        RecoveryError: there is no metadata of all ranks, or none of this rank. IntegrityError: it names missing parts.
    """
    metadata = DcpReader(ranges, step).read_metadata(**({} if rank is None else {"rank": rank}))
    shards: dict[int, ShardBytes] = {}
    items = []
    places: dict[MetadataIndex, Place] = metadata.storage_data or {}
    for name, entry in metadata.state_dict_metadata.items():
        chunks = entry.chunks if isinstance(entry, TensorStorageMetadata) else [None]
        for chunk in chunks:
            index = MetadataIndex(name, None if chunk is None else chunk.offsets)
            if index not in places:
                raise IntegrityError(f"{name!r} is in the metadata of step {step} and was not written")
            place = places[index]
            if place.rank not in shards:
                shards[place.rank] = ShardBytes(ranges, step, place.rank)
            dtype = entry.properties.dtype if isinstance(entry, TensorStorageMetadata) else None
            load = _loader_of_place(shards[place.rank], place, chunk, dtype)
            items.append(Item(index, shards[place.rank], (place.offset, place.nbytes), chunk, load))
    return StepView(dict(metadata.state_dict_metadata), metadata.planner_data, items)


def _loader_of_place(
    shard: ShardBytes, place: Place, chunk: ChunkStorageMetadata | None, dtype: torch.dtype | None
) -> Callable[[], torch.Tensor | bytes]:
    def load() -> torch.Tensor | bytes:
        data = shard.take(place.offset, place.nbytes)
        if chunk is None or dtype is None:
            return bytes(data)
        if not data:
            return torch.empty(chunk.sizes, dtype=dtype)
        return torch.frombuffer(data, dtype=torch.uint8).view(dtype).reshape(chunk.sizes)

    return load


# -- of a step that store.put made ------------------------------------------------------------------


@dataclass(frozen=True)
class Leaf:
    """One rank's leaf of some name."""

    shard: PutShard
    path: Path
    node: Any

    @property
    def rank(self) -> int:
        """Return its rank."""
        return self.shard.stream.rank


def view_of_put_step(shards: Sequence[ShardBytes]) -> StepView:
    """Return the leaves of all ranks given, put together.

    Raises:
        UnsupportedState: a state that has no names, or a leaf that has no place; says which and why.
    """
    named: dict[str, list[Leaf]] = defaultdict(list)
    for shard in map(PutShard, shards):
        taken: dict[str, Path] = {}
        for path, node in shard.leaves():
            name = ".".join(map(str, path))
            if name in taken:
                raise UnsupportedState(f"{list(taken[name])} and {list(path)} of the state both have the name {name!r}")
            taken[name] = path
            named[name].append(Leaf(shard, path, node))
    view = StepView({}, {}, [])
    for name, leaves in named.items():
        if _is_one(leaves):
            _add(view, name, leaves[0].path, leaves)
            continue
        for group in _groups(leaves):
            prefix = f"rank{group[0].rank:05d}"
            view.per_rank.append(f"{prefix}.{name}")
            _add(view, f"{prefix}.{name}", (prefix, *leaves[0].path), group)
    return view


def _is_dtensor(leaf: Leaf) -> bool:
    return isinstance(leaf.node, Node) and leaf.node.tag is Tag.DTENSOR


def _is_one(leaves: list[Leaf]) -> bool:
    first = leaves[0]
    if any(map(_is_dtensor, leaves)):
        return all(_is_dtensor(leaf) and _described(leaf) == _described(first) for leaf in leaves)
    return all(have_same_leaf(first.shard, first.node, leaf.shard, leaf.node) for leaf in leaves[1:])


def _groups(leaves: list[Leaf]) -> list[list[Leaf]]:
    """Return groups of leaves: DTensors of one description together, all else by rank."""
    groups: dict[Any, list[Leaf]] = defaultdict(list)
    for leaf in leaves:
        groups[repr(_described(leaf)) if _is_dtensor(leaf) else leaf.rank].append(leaf)
    return list(groups.values())


def _described(leaf: Leaf) -> list[Any]:
    """Return mesh, placements, shape and dtype of a DTensor; strides may differ by rank."""
    return [*leaf.node.data[:5], leaf.shard.spec(leaf.node.children[0]).dtype]


def _add(view: StepView, name: str, path: Path, leaves: list[Leaf]) -> None:
    first = leaves[0]
    view.paths[name] = path
    if _is_dtensor(first):
        _add_dtensor(view, name, leaves)
    elif isinstance(first.node, Node) and first.node.tag is Tag.TENSOR:
        shape = torch.Size(first.shard.spec(first.node).shape)
        chunk = ChunkStorageMetadata(torch.Size([0] * len(shape)), shape)
        _add_tensor(view, name, shape, [(chunk, first)])
    else:
        view.entries[name] = BytesStorageMetadata()
        stream = first.shard.stream
        load = _loader_of_object(first, name)
        view.items.append(Item(MetadataIndex(name), stream, first.shard.span(first.node), None, load))


def _add_dtensor(view: StepView, name: str, leaves: list[Leaf]) -> None:
    """Add the parts that the ranks have, each once. UnsupportedState if they are not the whole tensor."""
    parts: dict[torch.Size, tuple[ChunkStorageMetadata, Leaf]] = {}
    shape = torch.Size(leaves[0].node.data[4])
    for leaf in leaves:
        chunk = _part_of(leaf, name)
        if chunk is not None and (chunk.sizes.numel() or not shape.numel()):
            parts.setdefault(chunk.offsets, (chunk, leaf))
    count = sum(chunk.sizes.numel() for chunk, _ in parts.values())
    if count != shape.numel() or not parts:
        raise UnsupportedState(
            f"{name!r}: the ranks read hold {count} of {shape.numel()} elements of this DTensor: read all ranks "
            "(no --rank), or use --format torch for the parts"
        )
    _add_tensor(view, name, shape, list(parts.values()))


def _part_of(leaf: Leaf, name: str) -> ChunkStorageMetadata | None:
    """Return which part of its DTensor a rank holds, or None. Source: torch's own arithmetic of placements."""
    ranks, mesh_shape, _, described, shape, _ = leaf.node.data
    if leaf.rank not in ranks:
        return None
    placements = [placement_of(item) for item in described]
    if any(placement.is_partial() for placement in placements):
        raise UnsupportedState(f"{name!r}: a DTensor of pending sums (Partial) has no global value: reduce it first")
    coordinate = [int(i) for i in np.unravel_index(ranks.index(leaf.rank), mesh_shape)]
    sizes, offsets = _compute_local_shape_and_global_offset(tuple(shape), tuple(mesh_shape), coordinate, placements)
    stored = leaf.shard.spec(leaf.node.children[0]).shape
    if tuple(sizes) != tuple(stored):
        raise UnsupportedState(
            f"{name!r}: rank {leaf.rank} put a part of shape {list(stored)} where its mesh and placements say "
            f"{list(sizes)}: are the store's ranks those of torch.distributed?"
        )
    return ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))


def _add_tensor(
    view: StepView, name: str, shape: torch.Size, parts: Sequence[tuple[ChunkStorageMetadata, Leaf]]
) -> None:
    first = parts[0][1]
    node = first.node.children[0] if _is_dtensor(first) else first.node
    spec = first.shard.spec(node)
    properties = TensorProperties(DTYPES[spec.dtype], requires_grad=bool(spec.flags & Flag.REQUIRES_GRAD))
    view.entries[name] = TensorStorageMetadata(properties, shape, [chunk for chunk, _ in parts])
    for chunk, leaf in parts:
        load = _loader_of_tensor(leaf)
        view.items.append(
            Item(MetadataIndex(name, chunk.offsets), leaf.shard.stream, leaf.shard.span(leaf.node), chunk, load)
        )


def _loader_of_tensor(leaf: Leaf) -> Callable[[], torch.Tensor]:
    def load() -> torch.Tensor:
        tensor: torch.Tensor = leaf.shard.build(leaf.node)
        return tensor.detach().resolve_conj().resolve_neg().contiguous()

    return load


def _loader_of_object(leaf: Leaf, name: str) -> Callable[[], bytes]:
    def load() -> bytes:
        try:
            value = leaf.shard.build(leaf.node)
        except UnsupportedState as error:
            raise UnsupportedState(f"{name!r} of rank {leaf.rank}: {error}") from error
        stream = io.BytesIO()
        torch.save(value, stream)  # what DCP stores for an object
        return stream.getvalue()

    return load
