"""The layout of a shared shard: the shared part, the rank's own part, and the ranks that wrote it. Pure (R34).

    stream    [shared state | zeros up to a chunk | own state]     a rank that does not copy has its own state alone
    layout    no tensors; its tree is a dict that holds the two states' own layouts, each over its part of the stream

The shared part ends where a chunk ends, so that equal shared states are equal chunks on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from memstore.core.format.layout import decode_layout, encode_layout
from memstore.core.format.manifest import Manifest
from memstore.core.format.object_tree import Node, Tag, checked_count
from memstore.core.format.tensor_paths import tensor_paths
from memstore.errors import ProtocolError

NATURAL_KEY = "memstore.client.shared_shard"
FORMAT = 1
_PIECE_BYTES = 1 << 20  # of bytes in a tree
_HEAD_BYTES = 64  # the key stands there: nothing but the size and three empty tables comes before the tree


@dataclass(frozen=True, slots=True)
class Part:
    """One state in the stream: its layout, its first chunk, its bytes."""

    layout: bytes
    first_chunk: int
    nbytes: int

    def chunks_count(self, chunk_bytes: int) -> int:
        """The number of its chunks."""
        return -(-self.nbytes // chunk_bytes)


@dataclass(frozen=True, slots=True)
class NaturalLayout:
    """What one rank of a shard stored."""

    shard: int
    shards: int
    copiers: tuple[int, ...]  # ranks whose shards hold the shared state
    roster: tuple[tuple[int, ...], ...]  # copiers by shard; of rank 0 only
    shared: Part | None
    own: Part

    def encode(self, nbytes: int) -> bytes:
        """Return the layout of a stream of `nbytes`."""
        fields: dict[str, Any] = {
            NATURAL_KEY: FORMAT, "shard": self.shard, "shards": self.shards, "copiers": self.copiers,
            "roster": self.roster, "shared": _packed(self.shared), "own": _packed(self.own),
        }  # fmt: skip
        return encode_layout(nbytes, [], [], [], _node(fields))

    @classmethod
    def decode(cls, manifest: Manifest) -> NaturalLayout | None:
        """Return the checked description of a shard from any source; None if it is no shared shard.

        Raises:
            ProtocolError: It contradicts itself or its manifest.
        """
        if manifest.layout.find(NATURAL_KEY.encode(), 0, _HEAD_BYTES) < 0:
            return None
        layout = decode_layout(manifest.layout)
        if layout.tensors or layout.blobs or layout.nbytes != manifest.nbytes:
            return None  # a state that has such a key
        try:
            fields = _plain(layout.tree)
            if not isinstance(fields, dict) or NATURAL_KEY not in fields:
                return None
            if fields[NATURAL_KEY] != FORMAT:
                raise ValueError(f"format {str(fields[NATURAL_KEY])[:20]} is not {FORMAT}")
            return cls._checked(fields, manifest)
        except (LookupError, TypeError, ValueError) as error:
            raise ProtocolError(f"the layout of {manifest.shard} is malformed: {error}") from None

    @classmethod
    def _checked(cls, fields: dict[str, Any], manifest: Manifest) -> NaturalLayout:
        natural = cls(
            checked_count(fields["shard"], "shard"), checked_count(fields["shards"], "shards"),
            tuple(checked_count(rank, "copier") for rank in fields["copiers"]),
            tuple(tuple(checked_count(rank, "copier") for rank in ranks) for ranks in fields["roster"]),
            _part(fields["shared"], manifest), _own(fields["own"], manifest),
        )  # fmt: skip
        ranks = {*natural.copiers, *(rank for row in natural.roster for rank in row)}
        if not natural.copiers or any(rank >= manifest.world_size for rank in ranks):
            raise ValueError(f"copiers {sorted(ranks)[:10]} of {manifest.world_size} ranks")
        if natural.shard >= natural.shards or len(natural.roster) not in (0, natural.shards):
            raise ValueError(f"shard {natural.shard} of {natural.shards}, {len(natural.roster)} of them with copiers")
        return natural


def _packed(part: Part | None) -> list[Any] | None:
    if part is None:
        return None
    pieces = [part.layout[at : at + _PIECE_BYTES] for at in range(0, len(part.layout), _PIECE_BYTES)]
    return [pieces, part.first_chunk, part.nbytes]


def _own(value: Any, manifest: Manifest) -> Part:
    part = _part(value, manifest)
    if part is None:
        raise ValueError("it has no part of its own")
    return part


def _part(value: Any, manifest: Manifest) -> Part | None:
    if value is None:
        return None
    pieces, first_chunk, nbytes = value
    part = Part(b"".join(pieces), checked_count(first_chunk, "first chunk"), checked_count(nbytes, "size"))
    if nbytes and first_chunk * manifest.chunk_bytes + nbytes > manifest.nbytes:
        raise ValueError(f"{nbytes} bytes from chunk {first_chunk} pass the stream's end at {manifest.nbytes}")
    return part


def _node(value: Any) -> Any:
    if isinstance(value, dict):
        return [Tag.DICT, None, [item for key, child in value.items() for item in (key, _node(child))]]
    if isinstance(value, list | tuple):
        return [Tag.LIST, None, [_node(item) for item in value]]
    return [Tag.BYTES, value] if isinstance(value, bytes) else value


def _plain(node: Any) -> Any:
    if not isinstance(node, Node):
        return node
    if node.tag is Tag.DICT:
        keys, values = node.children[::2], node.children[1::2]
        return {_plain(key): _plain(value) for key, value in zip(keys, values, strict=True)}
    if node.tag is Tag.LIST:
        return [_plain(child) for child in node.children]
    if node.tag is Tag.BYTES and isinstance(node.data, bytes):
        return node.data
    raise ValueError(f"a {node.tag.name.lower()} stands in it")


# -- which tensors differ ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Extent:
    """Bytes of the stream that one or several named tensors look into."""

    offset: int
    nbytes: int
    names: tuple[str, ...]


def extents_in(layout: bytes, first_chunk: int, chunks: Sequence[int], chunk_bytes: int) -> list[Extent]:
    """Return the tensors' extents in these chunks of a shard, with names such as `state['model']['weight']`."""
    decoded = decode_layout(layout)
    names: dict[int, list[str]] = {}
    for path, node in tensor_paths(decoded.tree, "state"):
        extent = decoded.tensors[node.data].extent
        if extent is not None:
            names.setdefault(extent, []).append(path)
    wanted, start = set(chunks), first_chunk * chunk_bytes
    found = []
    for index, (offset, nbytes) in enumerate(decoded.extents):
        first, last = (start + offset) // chunk_bytes, (start + offset + nbytes - 1) // chunk_bytes
        if any(chunk in wanted for chunk in range(first, last + 1)):
            found.append(Extent(start + offset, nbytes, tuple(names.get(index, ()))))
    return found
