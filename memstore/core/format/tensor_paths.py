"""What the tensor at an offset of a stream is called: its path in the state. Pure; slow, for messages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from memstore.core.format.layout import Layout
from memstore.core.format.object_tree import MAPS, Node, Tag


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
