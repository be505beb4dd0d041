"""One step as DCP sees one: global tensors in parts, and objects, by name, for a step of any format.

For a step that `store.put` made: names are DCP's. A DTensor's parts are put together by its mesh and placements. What
every rank that has it put alike stands once, under its name; what differs stands once per rank, under
`rank00003.<name>`. Read `put_tree.py` first.
"""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
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
from memstore.core.format.layout import Flag, TensorSpec
from memstore.core.format.object_tree import Node, Tag
from memstore.errors import IntegrityError, UnsupportedState
from memstore.exchange.put_tree import Path, PutShard, have_same_leaf
from memstore.exchange.shard_bytes import WINDOW_BYTES, ShardBytes
from memstore.shell.rank.range_read import Range, ShardRanges
from memstore.shell.tensors.memory import DTYPES
from memstore.shell.tensors.subclasses import placement_of

Entry = TensorStorageMetadata | BytesStorageMetadata


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

    entries: dict[str, Entry]
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


def tensor_entry(entries: Mapping[str, Entry], name: str) -> TensorStorageMetadata:
    """Return the entry of a name that is a tensor's."""
    entry = entries[name]
    assert isinstance(entry, TensorStorageMetadata)
    return entry


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
            load = partial(_stored, shards[place.rank], place, entry, chunk)
            items.append(Item(index, shards[place.rank], (place.offset, place.nbytes), chunk, load))
    return StepView(dict(metadata.state_dict_metadata), metadata.planner_data, items)


def _stored(
    shard: ShardBytes, place: Place, entry: Entry, chunk: ChunkStorageMetadata | None
) -> torch.Tensor | bytes:  # fmt: skip
    data = shard.take(place.offset, place.nbytes)
    if chunk is None or isinstance(entry, BytesStorageMetadata):
        return bytes(data)
    flat = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    return flat.view(entry.properties.dtype).reshape(chunk.sizes)


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

    @property
    def is_dtensor(self) -> bool:
        """Whether it is a part of a global tensor."""
        return isinstance(self.node, Node) and self.node.tag is Tag.DTENSOR

    @property
    def spec(self) -> TensorSpec:
        """What the layout says of its tensor, of a DTensor the rank's own part."""
        return self.shard.spec(self.node.children[0] if self.is_dtensor else self.node)


def view_of_put_step(shards: Sequence[ShardBytes]) -> StepView:
    """Return the leaves of all ranks given, put together.

    Raises:
        UnsupportedState: a state that has no names, or a leaf that has no place; says which and why.
    """
    named: dict[str, list[Leaf]] = defaultdict(list)
    for shard in map(PutShard, shards):
        taken: dict[str, Path] = {}
        for path, node in shard.leaves():
            name = _name(path)
            if name in taken:
                raise UnsupportedState(f"{list(taken[name])} and {list(path)} of the state both have the name {name!r}")
            taken[name] = path
            named[name].append(Leaf(shard, path, node))
    view = StepView({}, {}, [])
    for leaves in named.values():
        groups = _groups(leaves)
        for group in groups:
            path = leaves[0].path
            if len(groups) > 1:
                path = (f"rank{group[0].rank:05d}", *path)
                view.per_rank.append(_name(path))
            _add(view, path, group)
    return view


def _name(path: Path) -> str:
    return ".".join(map(str, path))


def _groups(leaves: list[Leaf]) -> list[list[Leaf]]:
    """Return one group if all are equal, else DTensors of one description together and all else by rank."""
    first = leaves[0]
    if not any(leaf.is_dtensor for leaf in leaves) and all(
        have_same_leaf(first.shard, first.node, leaf.shard, leaf.node) for leaf in leaves[1:]
    ):
        return [leaves]
    groups: dict[Any, list[Leaf]] = defaultdict(list)
    for leaf in leaves:
        groups[repr(_described(leaf)) if leaf.is_dtensor else leaf.rank].append(leaf)
    return list(groups.values())


def _described(leaf: Leaf) -> list[Any]:
    """Return mesh, placements, shape and dtype of a DTensor; strides may differ by rank."""
    return [*leaf.node.data[:5], leaf.spec.dtype]


def _add(view: StepView, path: Path, leaves: list[Leaf]) -> None:
    first, name = leaves[0], _name(path)
    view.paths[name] = path
    if first.is_dtensor:
        shape = torch.Size(first.node.data[4])
        _add_tensor(view, name, shape, _parts_of_dtensor(leaves, name, shape))
    elif isinstance(first.node, Node) and first.node.tag is Tag.TENSOR:
        shape = torch.Size(first.spec.shape)
        _add_tensor(view, name, shape, [(ChunkStorageMetadata(torch.Size([0] * len(shape)), shape), first)])
    else:
        view.entries[name] = BytesStorageMetadata()
        _add_item(view, name, None, first, partial(_object, first, name))


def _parts_of_dtensor(leaves: list[Leaf], name: str, shape: torch.Size) -> list[tuple[ChunkStorageMetadata, Leaf]]:
    """Return the parts that the ranks have, each once. UnsupportedState if they are not the whole tensor."""
    parts: dict[torch.Size, tuple[ChunkStorageMetadata, Leaf]] = {}
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
    return list(parts.values())


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
    stored = leaf.spec.shape
    if tuple(sizes) != tuple(stored):
        raise UnsupportedState(
            f"{name!r}: rank {leaf.rank} put a part of shape {list(stored)} where its mesh and placements say "
            f"{list(sizes)}: are the store's ranks those of torch.distributed?"
        )
    return ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))


def _add_tensor(
    view: StepView, name: str, shape: torch.Size, parts: Sequence[tuple[ChunkStorageMetadata, Leaf]]
) -> None:
    spec = parts[0][1].spec
    properties = TensorProperties(DTYPES[spec.dtype], requires_grad=bool(spec.flags & Flag.REQUIRES_GRAD))
    view.entries[name] = TensorStorageMetadata(properties, shape, [chunk for chunk, _ in parts])
    for chunk, leaf in parts:
        _add_item(view, name, chunk, leaf, partial(_tensor, leaf))


def _add_item(
    view: StepView, name: str, chunk: ChunkStorageMetadata | None, leaf: Leaf, load: Callable[[], torch.Tensor | bytes]
) -> None:
    index = MetadataIndex(name, None if chunk is None else chunk.offsets)
    view.items.append(Item(index, leaf.shard.stream, leaf.shard.span(leaf.node), chunk, load))


def _tensor(leaf: Leaf) -> torch.Tensor:
    tensor: torch.Tensor = leaf.shard.build(leaf.node)
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def _object(leaf: Leaf, name: str) -> bytes:
    """Return what DCP stores for an object."""
    try:
        value = leaf.shard.build(leaf.node)
    except UnsupportedState as error:
        raise UnsupportedState(f"{name!r} of rank {leaf.rank}: {error}") from error
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()
