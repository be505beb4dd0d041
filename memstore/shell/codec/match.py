"""Check a stored state against the live one that it is restored into, before a byte is written (R26).

Paths, kinds, dtypes, shapes and ties must agree; plain values may differ, and go where `plain_places` says.
What a Stateful object has no place for yet, such as the state of an optimizer that has not stepped, is left to its
load_state_dict(); a module's entries, though, must all be there on both sides.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgpack
import numpy as np
import torch

from memstore.core.format.layout import Layout, TensorSpec, may_overlap_itself, row_major
from memstore.core.format.object_tree import Node, Tag
from memstore.errors import ManifestMismatch, UnsupportedState
from memstore.shell.codec.plain_places import Place, PlainPlaces, entry, field, handled, is_mutable, item
from memstore.shell.codec.walk import StateWalk, is_stateful
from memstore.shell.tensors import registry, subclasses
from memstore.shell.tensors.memory import (
    DTYPE_NAMES,
    Leaf,
    components,
    dense_bytes,
    describe_dtype,
    leaf_of_array,
    leaf_of_tensor,
)

_MAPS = (Tag.DICT, Tag.ORDERED, Tag.DEFAULT)
_SEQUENCES = (Tag.LIST, Tag.TUPLE)
_HOLDS_BYTES = (Tag.TENSOR, Tag.ARRAY, Tag.DTENSOR, Tag.SUBCLASS)
Places = dict[int, Any]  # id of a node -> the live tensor, array or subclass to fill there


class StateMatch:
    """The places in `into` for what `layout` stores as `name`; `keys` turns a stored key node into a key.

    Raises:
        ManifestMismatch: names the first path that differs and both sides.
    """

    def __init__(self, layout: Layout, into: object, name: str, keys: Callable[[Any], Any]) -> None:
        self.places: Places = {}
        self.leaves: dict[int, Leaf] = {}  # id of a tensor's or array's node -> the Leaf of its target
        self.statefuls: dict[int, Any] = {}  # id of a node -> the object whose load_state_dict takes it
        self.meshes: list[Any] = []
        self._overlapping: list[tuple[str, TensorSpec, Any]] = []  # targets in which several elements share memory
        self.plain = PlainPlaces()
        self._layout, self._keys = layout, keys
        self._filled: list[tuple[str, int, Leaf]] = []  # path, index of the stored tensor, live target
        self._homeless: list[tuple[str, Node]] = []
        self._match(layout.tree, into, name, is_strict=True, place=None)
        for path, node in self._homeless:
            if self.mesh_of(node) is None:
                raise ManifestMismatch(
                    f"{path} was stored as a DTensor and `into` uses no device mesh like {node.data[:3]}"
                )
        self._check_ties()

    def check_overlapping(self, value: Callable[[TensorSpec], Any]) -> None:
        """Compare filled views whose elements share memory with the stored values: they can hold only like values.

        Raises:
            ManifestMismatch: One does not.
        """
        for path, spec, target in self._overlapping:
            if spec.extent is not None and not torch.equal(dense_bytes(target), dense_bytes(value(spec))):
                raise ManifestMismatch(
                    f"{path} was stored with other values than its elements in `into` can have, which share memory "
                    "(unfold, as_strided): put and fill the tensor that it is a view of"
                )

    def mesh_of(self, node: Node) -> Any:
        """Return a live mesh equal to the one a stored DTensor was on, or None."""
        return next((mesh for mesh in self.meshes if subclasses.describe_mesh(mesh) == node.data[:3]), None)

    def _match(self, node: Any, target: Any, path: str, *, is_strict: bool, place: Place) -> None:
        if isinstance(node, Node) and node.tag in _HOLDS_BYTES:
            self._match_tensor(node, target, path, is_strict=is_strict)
        elif is_stateful(target):
            self._match_stateful(node, target, path)
        elif not isinstance(node, Node):
            self._match_leaf(node, target, path, is_strict=is_strict, place=place)
        elif node.tag in _MAPS and isinstance(target, dict):
            self._match_dict(node, target, path, is_strict=is_strict, place=place)
        elif node.tag in _SEQUENCES and type(target) is (list if node.tag is Tag.LIST else tuple):
            self._match_items(node, target, path, is_strict=is_strict, place=place)
        elif node.tag in (Tag.DATACLASS, Tag.NAMEDTUPLE) and registry.registered(node.data[0]) is type(target):
            self._match_record(node, target, path, is_strict=is_strict, place=place)
        elif _holds_bytes(node):
            self._homeless_below(node, path, is_strict, f"as a {node.tag.name.lower()}", target)
        else:
            self._match_leaf(node, target, path, is_strict=is_strict, place=place)

    def _match_stateful(self, node: Any, target: Any, path: str) -> None:
        if isinstance(target, torch.optim.Optimizer):
            params = [param for group in target.param_groups for param in group["params"]]
            self.meshes += [param.device_mesh for param in params if subclasses.is_dtensor(param)]
            if type(target).load_state_dict is torch.optim.Optimizer.load_state_dict:
                check_groups(node, target, path)
        # A module's parameters all exist; other objects may still have to create their state.
        self._match(node, target.state_dict(), path, is_strict=isinstance(target, torch.nn.Module), place=handled)
        self.statefuls[id(node)] = target
        if not isinstance(node, Node):
            raise ManifestMismatch(f"{path} was stored as {_shown(node)} and is a {type(target).__name__} in `into`")

    def _match_leaf(self, node: Any, target: Any, path: str, *, is_strict: bool, place: Place) -> None:
        if is_strict and isinstance(target, torch.Tensor | np.ndarray):
            raise ManifestMismatch(f"{path} was stored as a plain object and is a {_shown(target)} in `into`")
        self.plain.take(node, target, path, place)

    def _match_record(self, node: Node, target: Any, path: str, *, is_strict: bool, place: Place) -> None:
        names = node.data[1]
        is_open, is_tuple, since = is_mutable(target), isinstance(target, tuple), len(self.plain.assignments)
        if not is_open and not is_tuple and not _holds_bytes(node):
            items = [getattr(target, name, None) for name in names]
            place = handled if self.plain.take_whole(node, items, place) else place
        parts: dict[str, Any] = {}
        for name, child in zip(names, node.children, strict=True):
            inner = field(place, target, name) if is_open else _within(place)
            if is_tuple and place is not None:
                inner = entry(place, parts, name)
            self._match(child, getattr(target, name, None), f"{path}.{name}", is_strict=is_strict, place=inner)
        if is_tuple:
            self.plain.rebuild(place, lambda: target._replace(**parts), since)

    def _match_dict(self, node: Node, target: dict[Any, Any], path: str, *, is_strict: bool, place: Place) -> None:
        pairs = node.children[1:] if node.tag is Tag.ORDERED else node.children
        stored = self._by_live_key(zip(pairs[::2], pairs[1::2], strict=True), target)
        for key, child in stored.items():
            where = f"{path}[{key!r}]"
            inner = entry(place, target, key)
            if key in target:
                self._match(child, target[key], where, is_strict=is_strict, place=inner)
            elif _holds_bytes(child):
                self._homeless_below(child, where, is_strict, "with tensors", None)
            else:
                self.plain.take(child, None, where, inner)
        missing = [key for key in target if key not in stored]
        if missing and is_strict:
            raise ManifestMismatch(f"{path}[{missing[0]!r}] is in `into` and was not stored")

    def _by_live_key(self, pairs: Iterable[tuple[Any, Any]], target: dict[Any, Any]) -> dict[Any, Any]:
        """Return the stored values under the keys of `target`: a NaN equals no other, and is found by its bits."""
        stored: dict[Any, Any] = {}
        unequal: dict[bytes, list[Any]] | None = None
        for key_node, child in pairs:
            key = self._keys(key_node)
            if key not in target and not isinstance(key, str | int | bytes):
                if unequal is None:
                    unequal = _unequal_keys(target)
                same = unequal.get(msgpack.packb(_raw(key_node)))
                key = same.pop(0) if same else key
            stored[key] = child
        return stored

    def _match_items(self, node: Node, target: Sequence[Any], path: str, *, is_strict: bool, place: Place) -> None:
        if is_strict and len(node.children) < len(target):  # the live entry has no counterpart in the checkpoint
            raise ManifestMismatch(f"{path} was stored with {len(node.children)} items and has {len(target)} in `into`")
        is_open, since = isinstance(target, list), len(self.plain.assignments)
        parts = target if isinstance(target, list) else list(target)
        for index, child in enumerate(node.children):
            where = f"{path}[{index}]"
            inner = item(place, parts, index) if is_open or place is not None else None
            if index < len(target):
                self._match(child, target[index], where, is_strict=is_strict, place=inner)
            elif _holds_bytes(child):
                self._homeless_below(child, where, is_strict, "with tensors", None)
            else:
                self.plain.take(child, None, where, inner)
        if not is_open:
            self.plain.rebuild(place, lambda: tuple(parts), since)

    def _homeless_below(self, node: Any, path: str, is_strict: bool, stored: str, target: Any) -> None:
        """Refuse bytes without a place, or, inside a Stateful object, note what needs a mesh to exist."""
        if is_strict:
            raise ManifestMismatch(f"{path} was stored {stored} and `into` has {_shown(target)} there")
        if not isinstance(node, Node):
            return
        if node.tag is Tag.SUBCLASS:
            raise ManifestMismatch(f"{path} was stored as a {node.data[0]} and `into` has none to fill")
        if node.tag is Tag.DTENSOR:
            self._homeless.append((path, node))
        for index, child in enumerate(node.children):
            self._homeless_below(child, f"{path}<{index}>", is_strict, stored, None)

    def _match_tensor(self, node: Node, target: Any, path: str, *, is_strict: bool) -> None:
        is_tensor = isinstance(target, torch.Tensor)
        if not is_strict and not is_tensor and not isinstance(target, np.ndarray):
            self._homeless_below(node, path, is_strict, "", target)
        elif node.tag is Tag.DTENSOR and subclasses.is_dtensor(target):
            self._match_dtensor(node, target, path)
        elif node.tag is Tag.SUBCLASS and is_tensor and registry.class_name(type(target)) == node.data[0]:
            self._match_wrapper(node, target, path)
        elif node.tag is Tag.TENSOR and type(target) in (torch.Tensor, torch.nn.Parameter):
            self._match_leaf_bytes(node, leaf_or_mismatch(leaf_of_tensor, target, path), target, path)
        elif node.tag is Tag.ARRAY and type(target) is np.ndarray:
            if not target.flags.writeable:
                raise ManifestMismatch(f"{path} is a read-only array in `into`; it cannot be filled")
            self._match_leaf_bytes(node, leaf_or_mismatch(leaf_of_array, target, path), target, path)
        else:
            kind = node.data[0] if node.tag is Tag.SUBCLASS else node.tag.name.lower()
            raise ManifestMismatch(f"{path} was stored as a {kind} and is {_shown(target)} in `into`")

    def _match_leaf_bytes(self, node: Node, leaf: Leaf, target: Any, path: str) -> None:
        spec = self._layout.tensors[node.data]
        if (spec.dtype, spec.shape) != (leaf.dtype, leaf.shape):
            raise ManifestMismatch(
                f"{path} was stored as {spec.dtype} {list(spec.shape)} and is {leaf.dtype} {list(leaf.shape)} in `into`"
            )
        if leaf.strides and any(not step and size > 1 for step, size in zip(leaf.strides, leaf.shape, strict=True)):
            raise ManifestMismatch(f"{path} is an expanded view in `into`; one element cannot take many values")
        if leaf.strides and may_overlap_itself(leaf.shape, leaf.strides, leaf.itemsize):
            self._overlapping.append((path, spec, target))
        self.places[id(node)], self.leaves[id(node)] = target, leaf
        self._filled.append((path, node.data, leaf))

    def _match_dtensor(self, node: Node, target: Any, path: str) -> None:
        described = subclasses.describe_dtensor(target)
        for what, old, new in zip(
            ("mesh ranks", "mesh shape", "mesh names", "placements", "shape"), node.data, described, strict=False
        ):
            if old != new:
                raise ManifestMismatch(f"{path}: DTensor stored with {what} {old}, `into` has {new}")
        self.meshes.append(target.device_mesh)
        self._match(
            node.children[0], subclasses.local_tensor(target), f"{path}.to_local()", is_strict=True, place=handled
        )
        self.places[id(node)] = target

    def _match_wrapper(self, node: Node, target: Any, path: str) -> None:
        inner, context = subclasses.flatten_wrapper(target)
        try:
            packed = msgpack.packb(StateWalk(context).tree)
        except UnsupportedState as error:
            raise ManifestMismatch(f"{path}: the subclass's flatten context cannot be compared: {error}") from None
        if list(inner) != node.data[1] or packed != msgpack.packb(_raw(node.children[-1])):
            raise ManifestMismatch(f"{path}: stored {node.data[0]} and the one in `into` differ in parts or context")
        for (name, part), child in zip(inner.items(), node.children[:-1], strict=True):
            self._match(child, part, f"{path}.{name}", is_strict=True, place=handled)
        self.places[id(node)] = target

    def _check_ties(self) -> None:
        """Compare which tensors share memory, and how, on both sides."""
        groups = components([leaf for _, _, leaf in self._filled])
        component = {position: number for number, group in enumerate(groups) for position in group.leaves}
        first_stored: dict[int, int] = {}
        first_live: dict[int, int] = {}
        for position, (path, index, leaf) in enumerate(self._filled):
            spec = self._layout.tensors[index]
            if spec.extent is None:
                continue
            first = first_stored.setdefault(spec.extent, position)
            other = first_live.setdefault(component[position], position)
            if first != other:
                shared = self._filled[min(first, other)][0]
                side = "was stored sharing" if first < other else "shares in `into`"
                raise ManifestMismatch(f"{path} {side} memory with {shared}, on that side only; tie both sides alike")
            _, first_index, first_leaf = self._filled[first]
            if first != position and not _same_view(self._layout.tensors[first_index], spec, first_leaf, leaf):
                raise ManifestMismatch(
                    f"{path} looks into the memory of {self._filled[first][0]} at another place than was stored"
                )


def check_groups(node: Any, optimizer: torch.optim.Optimizer, path: str) -> None:
    """Refuse an optimizer that has its parameters in other groups, or others of them, than was stored.

    Its state is stored by the parameters' numbers: it would refuse the one, and take the other for its own.
    """
    stored = [_entries(group) for group in getattr(_entries(node).get("param_groups"), "children", ())]
    counts = [len(getattr(group.get("params"), "children", ())) for group in stored]
    live = [len(group["params"]) for group in optimizer.param_groups]
    kind = f"the {type(optimizer).__name__} in `into`"
    remedy = "build it as it was, or put memstore.adapters.torch.NamedOptimizer(model, optimizer), which goes by names"
    if all(counts) and stored and counts != live:
        raise ManifestMismatch(f"{path} was stored with groups of {counts} parameters, and {kind} has {live}: {remedy}")
    for number, (old, new) in enumerate(zip(stored, optimizer.param_groups, strict=False)):
        pairs = zip(getattr(old.get("param_names"), "children", ()), new.get("param_names", ()), strict=False)
        for was, now in pairs:
            if was != now:
                raise ManifestMismatch(
                    f"{path}: group {number} was stored with {was!r} where {kind} has {now!r}, which would take its "
                    f"state: {remedy}"
                )


def _entries(node: Any) -> dict[str, Any]:
    """Return the stored values of a plain dict under its keys of text."""
    pairs = node.children if isinstance(node, Node) and node.tag is Tag.DICT else ()
    return {key: child for key, child in zip(pairs[::2], pairs[1::2], strict=True) if isinstance(key, str)}


def leaf_or_mismatch(describe: Callable[[Any], Leaf], target: Any, path: str) -> Leaf:
    """Describe a live target; raise a mismatch for one that could not be stored."""
    try:
        return describe(target)
    except ValueError as error:
        raise ManifestMismatch(f"{path} cannot be filled in `into`: {error}") from None


def _same_view(first_spec: TensorSpec, spec: TensorSpec, first_leaf: Leaf, leaf: Leaf) -> bool:
    """Return whether two stored tensors overlap in memory as two live ones do."""
    if (spec.offset, spec.shape, spec.strides) == (first_spec.offset, first_spec.shape, first_spec.strides):
        return (leaf.address, leaf.shape, leaf.strides) == (first_leaf.address, first_leaf.shape, first_leaf.strides)
    pairs = ((first_spec, first_leaf), (spec, leaf))
    if spec.offset - first_spec.offset != leaf.address - first_leaf.address:
        return False
    return all(old.strides == (new.strides or row_major(new.shape, new.itemsize)) for old, new in pairs)


def _holds_bytes(node: Any) -> bool:
    if not isinstance(node, Node):
        return False
    return node.tag in _HOLDS_BYTES or any(_holds_bytes(child) for child in node.children)


def _within(place: Place) -> Place:
    """Return the place of an item in an immutable container."""
    return handled if place is handled else None


def _unequal_keys(target: dict[Any, Any]) -> dict[bytes, list[Any]]:
    """Return the keys of a dict that may not equal their stored form (NaNs), by the form stored now."""
    found: dict[bytes, list[Any]] = {}
    for key in target:
        if not isinstance(key, str | int | bytes):
            with contextlib.suppress(UnsupportedState):
                found.setdefault(msgpack.packb(StateWalk(key).tree), []).append(key)
    return found


def _raw(node: Any) -> Any:
    if not isinstance(node, Node):
        return node
    head = [int(node.tag), node.data]
    return [*head, [_raw(child) for child in node.children]] if node.children else head


def _shown(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{type(value).__name__} {DTYPE_NAMES.get(value.dtype, value.dtype)} {list(value.shape)}"
    if isinstance(value, np.ndarray):
        return f"array {describe_dtype(value.dtype)} {list(value.shape)}"
    if value is None:
        return "nothing"
    name = type(value).__qualname__ if dataclasses.is_dataclass(value) else type(value).__name__
    return f"an {name}" if name[0] in "aeiouAEIOU" else f"a {name}"
