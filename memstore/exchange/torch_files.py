"""`rank_00000.pt`: what one rank put, for torch.load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint

from memstore.core.format.object_tree import Node, Tag
from memstore.exchange.put_tree import PutShard
from memstore.exchange.shard_bytes import ShardBytes


def file_name(rank: int) -> str:
    """Return the name of a rank's file."""
    return f"rank_{rank:05d}.pt"


def write_torch(stream: ShardBytes, folder: Path) -> dict[str, Any]:
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
