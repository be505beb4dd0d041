"""Check a stored state against the live one that it is restored into, before a byte is written (R26).

Paths, kinds, dtypes, shapes and ties must agree; plain values may differ, and go where `plain_places` says.
What a Stateful object has no place for yet, such as the state of an optimizer that has not stepped, or has in another
shape, is left to its load_state_dict(). A module's entries, though, must all be there on both sides, and what has the
shapes of a model must have those that were stored.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from types import FunctionType, ModuleType
from typing import Any

import msgpack
import numpy as np
import torch

from memstore.core.format.layout import Layout, TensorSpec, may_overlap_itself, row_major
from memstore.core.format.object_tree import MAPS, NUMBER_BYTES, Node, Tag, nodes_in
from memstore.core.format.shared_layout import children_of
from memstore.errors import ManifestMismatch, UnsupportedState
from memstore.shell.codec.plain_places import Place, PlainPlaces, entry, field, handled, is_live, is_mutable, item
from memstore.shell.codec.walk import StateWalk, is_stateful
from memstore.shell.tensors import subclasses
from memstore.shell.tensors.memory import (
    DTYPE_NAMES,
    Leaf,
    components,
    dense_bytes,
    describe_dtype,
    leaf_of_array,
    leaf_of_tensor,
)

# -- stateful shapes ----------------------------------------------------------------------------------
# Which tensors of an object with load_state_dict() have one shape only, and which are for that method to take.


_Module, _Optimizer = torch.nn.Module, torch.optim.Optimizer
_DEPTH_MAX, _OBJECTS_MAX = 4, 10_000  # how far modules are looked for below an object's attributes
_LEAVES = (str, bytes, int, float, bool, type(None), type, FunctionType, ModuleType, torch.Tensor)


def fixed_memory(owner: object) -> frozenset[int]:
    """Return where tensors begin that have the shapes of a model: of an object, and of what models it has."""
    tensors = (tensor for each in _models_in(owner) for tensor in _fixed_tensors(each))
    return frozenset(address for tensor in tensors for address in _addresses_of(tensor) if address)


def is_in(tensor: Any, memory: frozenset[int]) -> bool:
    """Return whether a tensor lies in this memory."""
    return not memory.isdisjoint(_addresses_of(tensor))


def entries_of_own_loading(module: torch.nn.Module, keys: Iterable[Any]) -> set[Any]:
    """Return those of the keys of state_dict() that modules load in their own way, and so may have or lack."""
    modules = dict(module.named_modules(remove_duplicate=False))
    found = set()
    for key in keys:
        prefix, _, name = str(key).rpartition(".")
        owner = modules.get(prefix)
        if owner is not None and _loads_in_its_own_way(owner) and name not in owner._parameters:
            found.add(key)
    return found


def _loads_in_its_own_way(module: torch.nn.Module) -> bool:
    kind = type(module)
    is_torchs = kind.__module__.startswith("torch.nn.modules.")  # they take new versions of keys, and no other shapes
    is_plain = kind._load_from_state_dict is _Module._load_from_state_dict and not module._load_state_dict_pre_hooks
    return not is_torchs and not is_plain


def _models_in(owner: object) -> Iterator[torch.nn.Module | torch.optim.Optimizer]:
    """Yield the modules and optimizers that an object is or has, breadth first."""
    waiting, seen = [owner], {id(owner)}
    for _ in range(_DEPTH_MAX):
        below: list[Any] = []
        for each in waiting:
            if isinstance(each, _Module | _Optimizer):
                yield each
            elif isinstance(each, dict):
                below += each.values()
            elif isinstance(each, list | tuple | set | frozenset):
                below += each
            else:
                below += getattr(each, "__dict__", {}).values()
        waiting = [each for each in below if not isinstance(each, _LEAVES) and id(each) not in seen]
        seen.update(map(id, waiting))
        if len(seen) > _OBJECTS_MAX:
            return


def _fixed_tensors(model: torch.nn.Module | torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    if isinstance(model, _Optimizer):
        yield from (value for state in model.state.values() for value in _values(state))
        return
    yield from model.parameters()
    for module in model.modules():
        if not _loads_in_its_own_way(module):
            yield from module.buffers(recurse=False)


def _values(state: Any) -> Iterator[torch.Tensor]:
    if isinstance(state, torch.Tensor):
        yield state
    elif isinstance(state, dict | list | tuple):
        for value in state.values() if isinstance(state, dict) else state:
            yield from _values(value)


def _addresses_of(tensor: Any) -> Iterator[int]:
    """Yield where a tensor's storage begins, or those of its parts."""
    if subclasses.is_dtensor(tensor):
        yield from _addresses_of(subclasses.local_tensor(tensor))
    elif subclasses.is_wrapper(tensor):
        for part in subclasses.flatten_wrapper(tensor)[0].values():
            yield from _addresses_of(part)
    elif isinstance(tensor, torch.Tensor):
        with contextlib.suppress(RuntimeError):  # it has no memory of its own, or none yet
            yield tensor.untyped_storage().data_ptr()


# -- match --------------------------------------------------------------------------------------------


_SEQUENCES = {tag: list if tag.name.endswith("LIST") else tuple for tag in (Tag.LIST, Tag.TUPLE, *NUMBER_BYTES)}
_PLAIN = frozenset((str, int, float, bool, type(None)))
_HOLDS_BYTES = (Tag.TENSOR, Tag.ARRAY, Tag.DTENSOR, Tag.SUBCLASS)
_OF_WRAPPERS = frozenset(("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "module"))  # in names
Places = dict[int, Any]  # id of a node -> the live tensor, array or subclass to fill there


class StateMatch:
    """The places in `into` for what `layout` stores as `name`; `keys` turns a stored key node into a key.

    Raises:
        ManifestMismatch: names the first path that differs and both sides.
    """

    def __init__(self, layout: Layout, into: object, name: str, keys: Callable[[Any], Any]) -> None:
        self.places: Places = {}
        self.leaves: dict[int, Leaf] = {}  # id of a tensor's or array's node -> the Leaf of its target
        self.statefuls: dict[
            int, tuple[str, Any]
        ] = {}  # id of a node -> path and object whose load_state_dict takes it
        self.meshes: list[Any] = []
        self._overlapping: list[tuple[str, TensorSpec, Any]] = []  # targets in which several elements share memory
        self.plain = PlainPlaces()
        self._layout, self._keys = layout, keys
        self._filled: list[tuple[str, int, Leaf]] = []  # path, index of the stored tensor, live target
        self._homeless: list[tuple[str, Node]] = []
        self._owner: Any = None  # the object with load_state_dict() whose state is being compared
        self._fixed: dict[int, frozenset[int]] = {}  # by id of such an object
        try:
            self._match(layout.tree, into, name, is_strict=True, place=None)
        except ManifestMismatch as error:
            if not hasattr(error, "lacks_remedy"):
                raise
            raise ManifestMismatch(
                f"{error}: give what was put, built as it was then (the object itself where that is its state_dict()), "
                "or take the value from the state of got = store.get() without into="
            ) from None
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
        elif node.tag is Tag.COUNTER and type(target) is Counter and not _holds_bytes(node):
            self.plain.take_counts(node, target, place)
        elif node.tag in MAPS and isinstance(target, dict):
            self._match_dict(node, target, path, is_strict=is_strict, place=place)
        elif _SEQUENCES.get(node.tag) is type(target):
            self._match_sequence(node, target, path, is_strict=is_strict, place=place)
        elif node.tag is Tag.DEQUE and type(target) is deque:
            self._match_sequence(node.children[0], target, path, is_strict=is_strict, place=place)
        elif node.tag in (Tag.DATACLASS, Tag.NAMEDTUPLE) and subclasses.registered(node.data[0]) is type(target):
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
                self._check_groups(node, target, path)
        if not isinstance(node, Node):
            raise _differs(f"{path} was stored as {_shown(node)} and is a {type(target).__name__} in `into`")
        outer, self._owner = self._owner, target
        if isinstance(target, torch.nn.Module):
            self._match_module(node, target, path)
        else:
            self._match(node, target.state_dict(), path, is_strict=False, place=handled)
        self._owner = outer
        self.statefuls[id(node)] = path, target

    def _match_module(self, node: Node, module: torch.nn.Module, path: str) -> None:
        """Match a module, whose parameters all exist; other objects may still have to create their state."""
        live = module.state_dict()
        try:
            if node.tag in MAPS and isinstance(live, dict):
                self._match_dict(node, live, path, is_strict=False, place=handled, module=module)
            else:
                self._match(node, live, path, is_strict=True, place=handled)
        except ManifestMismatch as error:
            if not hasattr(error, "lacks_remedy"):
                raise
            if _holds(node, (Tag.DTENSOR,)):
                raise ManifestMismatch(
                    f"{error}: build and shard it as it was; what other ranks or another sharding shall load is saved "
                    "through DCP (store.dcp_writer, store.dcp_reader)"
                ) from None
            raise ManifestMismatch(
                f"{error}; to load what fits: got = store.get() without into=, take the entries that do not fit out of "
                f"got.{path}, and pass it to load_state_dict(..., strict=False)"
            ) from None

    def _check_groups(self, node: Any, optimizer: torch.optim.Optimizer, path: str) -> None:
        """Refuse an optimizer that has its parameters in other groups, or others of them, than was stored.

        Its state is stored by the parameters' numbers: it would refuse the one, and take the other for its own.
        """
        stored = [_entries(group) for group in getattr(_entries(node).get("param_groups"), "children", ())]
        counts = [self._count(group.get("params")) for group in stored]
        live = [len(group["params"]) for group in optimizer.param_groups]
        kind = f"the {type(optimizer).__name__} in `into`"
        remedy = (
            "build it as it was, or put memstore.adapters.torch.NamedOptimizer(model, optimizer), which goes by names"
        )
        if all(counts) and stored and counts != live:
            raise ManifestMismatch(
                f"{path} was stored with groups of {counts} parameters, and {kind} has {live}: {remedy}"
            )
        for number, (old, new) in enumerate(zip(stored, optimizer.param_groups, strict=False)):
            pairs = zip(getattr(old.get("param_names"), "children", ()), new.get("param_names", ()), strict=False)
            for was, now in pairs:
                if was != now:
                    raise ManifestMismatch(
                        f"{path}: group {number} was stored with {was!r} where {kind} has {now!r}, which would take "
                        f"its state: {remedy}"
                    )

    def _is_fixed(self, target: Any, is_strict: bool) -> bool:
        """Return whether a live value must be what was stored: it is no business of a load_state_dict()."""
        if is_strict or self._owner is None:
            return True
        if id(self._owner) not in self._fixed:
            self._fixed[id(self._owner)] = fixed_memory(self._owner)
        return is_in(target, self._fixed[id(self._owner)])

    def _match_leaf(self, node: Any, target: Any, path: str, *, is_strict: bool, place: Place) -> None:
        if isinstance(target, torch.Tensor | np.ndarray) and self._is_fixed(target, is_strict):
            raise _differs(f"{path} was stored as a plain object and is a {_shown(target)} in `into`")
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

    def _match_dict(
        self,
        node: Node,
        target: dict[Any, Any],
        path: str,
        *,
        is_strict: bool,
        place: Place,
        module: torch.nn.Module | None = None,
    ) -> None:
        """Match the entries; those of a module must all be there, but for what it loads in its own way."""
        pairs = node.children[1:] if node.tag is Tag.ORDERED else node.children
        stored = self._by_live_key(zip(pairs[::2], pairs[1::2], strict=True), target)
        one_sided = stored.keys() ^ target.keys()
        if module is not None:
            one_sided -= entries_of_own_loading(module, one_sided)
        for key, child in stored.items():
            where = f"{path}[{key!r}]"
            inner = entry(place, target, key)
            if key in target:
                self._match(child, target[key], where, is_strict=is_strict, place=inner)
            elif _holds_bytes(child):
                is_needed = is_strict or (module is not None and key in one_sided)
                if is_needed and module is not None:
                    _check_wrapping(where, key, target)
                self._homeless_below(child, where, is_needed, "with tensors", None)
            else:
                self.plain.take(child, None, where, inner)
        missing = [key for key in target if key in one_sided and key not in stored]
        if missing and (is_strict or module is not None):
            raise _differs(f"{path}[{missing[0]!r}] is in `into` and was not stored")

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

    def _match_sequence(self, node: Node, target: Sequence[Any], path: str, *, is_strict: bool, place: Place) -> None:
        """Match a list, tuple or deque with one that is stored item by item, or as a block of numbers."""
        count, is_refilled = self._count(node), type(target) is deque and not _holds_bytes(node)
        if is_strict and count < len(target) and not is_refilled:  # live entries without a counterpart
            raise _differs(f"{path} was stored with {count} items and has {len(target)} in `into`")
        if node.tag in NUMBER_BYTES or is_refilled:
            self._match_whole(node, target, path, is_strict=is_strict, place=place)
        else:
            self._match_items(node, target, path, is_strict=is_strict, place=place)

    def _match_whole(self, node: Node, target: Sequence[Any], path: str, *, is_strict: bool, place: Place) -> None:
        """Note that all items are assigned at once, around live tensors and objects."""
        live = []
        if not _PLAIN.issuperset(map(type, target)):
            live = [index for index, each in enumerate(target) if is_live(each)]
        for index in live:
            self._match_leaf(None, target[index], f"{path}[{index}]", is_strict=is_strict, place=_within(place))
        self.plain.take_items(node, target, frozenset(live), path, place)

    def _count(self, node: Any) -> int:
        """Return the items of a stored list; 0 of what is none."""
        if not isinstance(node, Node) or node.tag not in NUMBER_BYTES:
            return len(getattr(node, "children", ()))
        nbytes = len(node.data) if isinstance(node.data, bytes) else self._layout.blobs[node.data][1]
        return nbytes // NUMBER_BYTES[node.tag]

    def _match_items(self, node: Node, target: Sequence[Any], path: str, *, is_strict: bool, place: Place) -> None:
        is_open, since = isinstance(target, list | deque), len(self.plain.assignments)
        parts = target if isinstance(target, list | deque) else list(target)
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
            raise _differs(f"{path} was stored {stored} and `into` has {_shown(target)} there")
        if not isinstance(node, Node):
            return
        if node.tag is Tag.SUBCLASS:
            try:
                subclasses.wrapper_class(node.data[0])
            except UnsupportedState as error:
                raise ManifestMismatch(f"{path} has no place in `into`, and cannot be built: {error}") from None
        if node.tag is Tag.DTENSOR:
            self._homeless.append((path, node))
        for where, child in children_of(node, path):
            self._homeless_below(child, where, is_strict, stored, None)

    def _match_tensor(self, node: Node, target: Any, path: str, *, is_strict: bool) -> None:
        is_tensor = isinstance(target, torch.Tensor)
        is_array = isinstance(target, np.ndarray)
        is_uninitialized = self._owner is not None and is_tensor and torch.nn.parameter.is_lazy(target)
        if is_uninitialized or (not is_strict and not is_tensor and not is_array):
            self._homeless_below(node, path, False, "", target)
        elif node.tag is Tag.DTENSOR and subclasses.is_dtensor(target):
            self._match_dtensor(node, target, path)
        elif node.tag is Tag.SUBCLASS and is_tensor and subclasses.class_name(type(target)) == node.data[0]:
            self._match_or_leave_wrapper(node, target, path, is_strict)
        elif node.tag is Tag.TENSOR and type(target) in (torch.Tensor, torch.nn.Parameter):
            self._match_leaf_bytes(node, leaf_or_mismatch(leaf_of_tensor, target, path), target, path, is_strict)
        elif node.tag is Tag.ARRAY and type(target) is np.ndarray:
            if not target.flags.writeable and self._is_fixed(target, is_strict):
                raise _differs(f"{path} is a read-only array in `into`; it cannot be filled")
            self._match_leaf_bytes(node, leaf_or_mismatch(leaf_of_array, target, path), target, path, is_strict)
        elif not self._is_fixed(target, is_strict):
            self._homeless_below(node, path, False, "", target)
        else:
            kind = node.data[0] if node.tag is Tag.SUBCLASS else node.tag.name.lower()
            raise _differs(f"{path} was stored as a {kind} and is {_shown(target)} in `into`")

    def _match_leaf_bytes(self, node: Node, leaf: Leaf, target: Any, path: str, is_strict: bool) -> None:
        spec = self._layout.tensors[node.data]
        is_other = (spec.dtype, spec.shape) != (leaf.dtype, leaf.shape) or _is_read_only(target)
        if is_other and not self._is_fixed(target, is_strict):
            return
        if (spec.dtype, spec.shape) != (leaf.dtype, leaf.shape):
            raise _differs(
                f"{path} was stored as {spec.dtype} {list(spec.shape)} and is {leaf.dtype} {list(leaf.shape)} in `into`"
            )
        if leaf.strides and any(not step and size > 1 for step, size in zip(leaf.strides, leaf.shape, strict=True)):
            raise _differs(f"{path} is an expanded view in `into`; one element cannot take many values")
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
                raise _differs(f"{path}: DTensor stored with {what} {old}, `into` has {new}")
        self.meshes.append(target.device_mesh)
        self._match(
            node.children[0], subclasses.local_tensor(target), f"{path}.to_local()", is_strict=True, place=handled
        )
        self.places[id(node)] = target

    def _match_or_leave_wrapper(self, node: Node, target: Any, path: str, is_strict: bool) -> None:
        filled, overlapping = len(self._filled), len(self._overlapping)
        try:
            self._match_wrapper(node, target, path)
        except ManifestMismatch:
            if self._is_fixed(target, is_strict):
                raise
            del self._filled[filled:], self._overlapping[overlapping:]
            for part in nodes_in(node):
                self.places.pop(id(part), None)
            self._homeless_below(node, path, False, "", None)

    def _match_wrapper(self, node: Node, target: Any, path: str) -> None:
        inner, context = subclasses.flatten_wrapper(target)
        try:
            packed = msgpack.packb(StateWalk(context, is_inline=True).tree)
        except UnsupportedState as error:
            raise ManifestMismatch(f"{path}: the subclass's flatten context cannot be compared: {error}") from None
        if list(inner) != node.data[1] or packed != msgpack.packb(_raw(node.children[-1])):
            raise _differs(f"{path}: stored {node.data[0]} and the one in `into` differ in parts or context")
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


def _entries(node: Any) -> dict[str, Any]:
    """Return the stored values of a plain dict under its keys of text."""
    pairs = node.children if isinstance(node, Node) and node.tag is Tag.DICT else ()
    return {key: child for key, child in zip(pairs[::2], pairs[1::2], strict=True) if isinstance(key, str)}


def _differs(message: str) -> ManifestMismatch:
    """Return an error to which the remedy is added further out: it depends on what the two sides lie in."""
    return ManifestMismatch(message, lacks_remedy=True)


def _check_wrapping(path: str, stored: str, target: Collection[str]) -> None:
    """Refuse a module that is wrapped otherwise than it was: strict=False would load nothing of it."""
    now = next((key for key in target if key != stored and _unwrapped(key) == _unwrapped(stored)), None)
    if now is not None:
        raise ManifestMismatch(
            f"{path} was stored and `into` has it as {now!r}: give the module wrapped as it was put, best at each put "
            "and get without torch.compile (model._orig_mod) and without DDP (model.module)"
        )


def _unwrapped(key: str) -> str:
    return ".".join(part for part in key.split(".") if part not in _OF_WRAPPERS)


def leaf_or_mismatch(describe: Callable[[Any], Leaf], target: Any, path: str) -> Leaf:
    """Describe a live target; raise a mismatch for one that could not be stored."""
    if isinstance(target, torch.Tensor) and target.is_meta:
        raise ManifestMismatch(f"{path} is on the meta device in `into`: call to_empty(device=...) on its module first")
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
    return _holds(node, _HOLDS_BYTES)


def _holds(node: Any, tags: Collection[Tag]) -> bool:
    return isinstance(node, Node) and (node.tag in tags or any(_holds(child, tags) for child in node.children))


def _is_read_only(target: Any) -> bool:
    return isinstance(target, np.ndarray) and not target.flags.writeable


def _within(place: Place) -> Place:
    """Return the place of an item in an immutable container."""
    return handled if place is handled else None


def _unequal_keys(target: dict[Any, Any]) -> dict[bytes, list[Any]]:
    """Return the keys of a dict that may not equal their stored form (NaNs), by the form stored now."""
    found: dict[bytes, list[Any]] = {}
    for key in target:
        if not isinstance(key, str | int | bytes):
            with contextlib.suppress(UnsupportedState):
                found.setdefault(msgpack.packb(StateWalk(key, is_inline=True).tree), []).append(key)
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
