"""The layout of a shared shard: the shared part, the rank's own part, and the ranks that wrote it. Pure (R34).

    stream    [shared state | zeros up to a chunk | own state]     a rank that does not copy has its own state alone
    layout    no tensors; its tree is a dict of one key, under which lie the fields of a `SharedShardLayout`, packed

The shared part ends where a chunk ends, so that equal shared states are equal chunks on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from memstore.core.format.layout import Layout, decode_layout, encode_layout
from memstore.core.format.manifest import Manifest
from memstore.core.format.object_tree import MAPS, Count, Node, Tag
from memstore.errors import ProtocolError

# -- tensor paths -------------------------------------------------------------------------------------
# What the tensor at an offset of a stream is called: its path in the state. Pure; slow, for messages.


def name_at(layout: Layout, offset: int, root: str = "state") -> str:
    """Return the path of the first tensor whose stored bytes begin at `offset`, such as "state['model']['w']"."""
    extents = [number for number, (start, _) in enumerate(layout.extents) if start == offset]
    for path, node in tensor_paths(layout.tree, root):
        if layout.tensors[node.data].extent in extents:
            return path
    return f"the bytes at {offset} of {root}"


def tensor_paths(node: Any, path: str) -> Iterator[tuple[str, Node]]:
    """Yield path and node of every tensor and array below a node that stands at `path`."""
    if isinstance(node, Node) and node.tag in (Tag.TENSOR, Tag.ARRAY):
        yield path, node
    for where, child in children_of(node, path):
        yield from tensor_paths(child, where)


def children_of(node: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield path and node of what lies in a node that stands at `path`; a dict's keys are left out."""
    if not isinstance(node, Node):
        return
    if node.tag in MAPS:
        pairs = node.children[node.tag is Tag.ORDERED :]
        for key, child in zip(pairs[::2], pairs[1::2], strict=True):
            yield f"{path}[{key.data if isinstance(key, Node) else key!r}]", child
    elif node.tag in (Tag.DATACLASS, Tag.NAMEDTUPLE, Tag.SUBCLASS):
        for name, child in zip(node.data[1], node.children, strict=False):  # a subclass has its context behind them
            yield f"{path}.{name}", child
    elif node.tag in (Tag.DTENSOR, Tag.DEQUE):
        yield path, node.children[0]
    else:
        for index, child in enumerate(node.children):
            yield f"{path}[{index}]", child


# -- shared layout ------------------------------------------------------------------------------------


SHARED_SHARD_KEY = "memstore.client.shared_shard"
_PIECE_BYTES = 1 << 20  # of bytes in a tree
_HEAD_BYTES = 64  # the key stands there: nothing but the size and three empty tables comes before the tree


class ShardPart(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One state in the stream: its layout, its first chunk, its bytes."""

    layout: bytes
    first_chunk: Count
    nbytes: Count

    def chunks_count(self, chunk_bytes: int) -> int:
        """The number of its chunks."""
        return -(-self.nbytes // chunk_bytes)


class SharedShardLayout(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What one rank of a shard stored."""

    shard: Count
    shards: Count
    writers: tuple[Count, ...]  # ranks whose shards hold the shared state
    writers_by_shard: tuple[tuple[Count, ...], ...]  # of rank 0 only
    shared: ShardPart | None
    own: ShardPart
    format: Literal[2] = 2

    def encode(self, nbytes: int) -> bytes:
        """Return the layout of a stream of `nbytes`: its tree has these fields packed, in pieces."""
        packed = msgspec.msgpack.encode(self)
        pieces = [[Tag.BYTES, packed[at : at + _PIECE_BYTES]] for at in range(0, len(packed), _PIECE_BYTES)]
        return encode_layout(nbytes, [], [], [], [Tag.DICT, None, [SHARED_SHARD_KEY, [Tag.LIST, None, pieces]]])

    @classmethod
    def decode(cls, manifest: Manifest) -> SharedShardLayout | None:
        """Return the checked description of a shard from any source; None if it is no shared shard.

        Raises:
            ProtocolError: It contradicts itself or its manifest.
        """
        if manifest.layout.find(SHARED_SHARD_KEY.encode(), 0, _HEAD_BYTES) < 0:
            return None
        layout = decode_layout(manifest.layout)
        tree: Any = layout.tree
        if layout.tensors or layout.blobs or layout.nbytes != manifest.nbytes:
            return None  # a state that has such a key
        if not isinstance(tree, Node) or tree.tag is not Tag.DICT or tree.children[:1] != (SHARED_SHARD_KEY,):
            return None
        try:
            decoded = _DECODER.decode(b"".join(piece.data for piece in tree.children[1].children))
            decoded._check(manifest)
        except (AttributeError, TypeError, ValueError, msgspec.MsgspecError) as error:
            raise ProtocolError(f"the layout of {manifest.shard} is malformed: {error}") from None
        return decoded

    def _check(self, manifest: Manifest) -> None:
        ranks = {*self.writers, *(rank for row in self.writers_by_shard for rank in row)}
        if not self.writers or any(rank >= manifest.world_size for rank in ranks):
            raise ValueError(f"writers {sorted(ranks)[:10]} of {manifest.world_size} ranks")
        if self.shard >= self.shards or len(self.writers_by_shard) not in (0, self.shards):
            raise ValueError(f"shard {self.shard} of {self.shards}, {len(self.writers_by_shard)} of them with writers")
        for part in (self.shared, self.own):
            end = part.first_chunk * manifest.chunk_bytes + part.nbytes if part is not None and part.nbytes else 0
            if end > manifest.nbytes:
                raise ValueError(f"a part ends at byte {end}, the stream at {manifest.nbytes}")


_DECODER = msgspec.msgpack.Decoder(SharedShardLayout)


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
