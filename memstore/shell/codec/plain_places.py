"""Where the plain values of a stored state go in a live one: to entries of its dicts and lists, fields of dataclasses.

What lies in a tuple goes there with a new tuple in the entry that holds it, around the same tensors and objects as
before. What no entry holds, or what would take a live tensor or object out of the state, is listed (R26). So is what
goes into a dict that some object's state_dict() made: the object does not see it.
"""

from __future__ import annotations

import dataclasses
import sys
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from memstore.core.format.object_tree import NESTING_MAX, Node
from memstore.shell.codec.walk import is_stateful
from memstore.shell.tensors import subclasses

_held = {"alone": object()}
_ONE_REFERENCE = sys.getrefcount(_held["alone"])  # what is counted of an object that one dict alone has
Place = Callable[[Any], object] | None  # assigns a value; None: there is no entry to assign to


def handled(value: Any) -> None:
    """Assign nothing: the value is set with its container, by a load_state_dict or an outer entry."""


class PlainPlaces:
    """The assignments of one restore, in order, and the paths of what has no place."""

    def __init__(self) -> None:
        self.assignments: list[tuple[Any, Callable[[Any], object]]] = []  # a node, or the value itself
        self.by_node: dict[int, Node] = {}
        self.not_filled: list[str] = []

    def take(self, node: Any, target: Any, path: str, place: Place) -> None:
        """Note where a stored value goes instead of `target`, which is not changed: other code may refer to it."""
        if place is handled:
            return
        if place is None or is_live(target):
            is_same = not isinstance(node, Node) and type(node) is type(target) and node == target
            if not is_same:
                self.not_filled.append(path)
            return
        self.assignments.append((node, place))
        if isinstance(node, Node):
            self.by_node[id(node)] = node

    def take_items(self, node: Node, target: Sequence[Any], live: Collection[int], path: str, place: Place) -> None:
        """Note that a list or deque gets stored items, all but those at `live`; in place of a tuple comes a new one."""
        if place is handled:
            return
        if not isinstance(target, list | deque) and place is None:
            self.not_filled.append(path)
            return

        def assign(stored: Iterable[Any]) -> None:
            items = [target[index] if index in live else value for index, value in enumerate(stored)]
            if isinstance(target, list | deque):
                target.clear()
                target.extend(items)
            elif place is not None:
                place(tuple(items))

        self.assignments.append((node, assign))
        self.by_node[id(node)] = node

    def take_counts(self, node: Node, target: Counter[Any], place: Place) -> None:
        """Note that a counter gets the stored counts, and no others."""

        def assign(stored: Counter[Any]) -> None:
            target.clear()
            target.update(stored)

        if place is not handled:
            self.assignments.append((node, assign))
            self.by_node[id(node)] = node

    def rebuild(self, place: Place, make: Callable[[], Any], since: int) -> None:
        """Note that a tuple is replaced in its entry if something goes into it: if more than `since` is noted."""
        if place is not None and place is not handled and len(self.assignments) > since:
            self.assignments.append((None, lambda _: place(make())))

    def take_whole(self, node: Node, items: Sequence[Any], place: Place) -> bool:
        """Note that a frozen record of these live items is replaced; False if it must stay."""
        if place is None or place is handled or any(_has_identity(item) for item in items):
            return False
        self.assignments.append((node, place))
        self.by_node[id(node)] = node
        return True


def entry(place: Place, container: dict[Any, Any], key: Any) -> Place:
    """Return the place of a dict's entry; `place` is the dict's own."""

    def assign(value: Any) -> None:
        container[key] = value

    return handled if place is handled else assign


def item(place: Place, container: list[Any] | deque[Any], index: int) -> Place:
    """Return the place of a list's or deque's item, there or next to come."""

    def assign(value: Any) -> None:
        if index < len(container):
            container[index] = value
        else:
            container.append(value)

    return handled if place is handled else assign


def field(place: Place, owner: Any, name: str) -> Place:
    """Return the place of a dataclass's field."""

    def assign(value: Any) -> None:
        setattr(owner, name, value)

    return handled if place is handled else assign


def is_mutable(record: Any) -> bool:
    """Return whether the fields of a registered class's instance can be assigned."""
    return dataclasses.is_dataclass(record) and not getattr(record, "__dataclass_params__").frozen  # noqa: B009


def copies(state: Any, name: str, around: tuple[int, ...] = ()) -> Iterator[str]:
    """Yield the paths in a state to dicts that state_dict() of some object made, and that are no part of the object.

    Such a dict has private names among its keys, or is an optimizer's. Of a module's only those entries are yielded
    that share no memory with anything else: its parameters and buffers are there themselves. A state that contains
    itself or is nested too deep ends there: the plan of it refuses it. `around` has the ids of what it lies in.
    """
    if id(state) in around or len(around) >= NESTING_MAX:
        return
    inside = (*around, id(state))
    if isinstance(state, dict):
        if getattr(state, "_metadata", None) is not None:  # torch's note in the dict of a module
            yield from (f"{name}[{key!r}]" for key in _copied_keys(state))
        elif {"state", "param_groups"} <= state.keys() or any(type(key) is str and key[:1] == "_" for key in state):
            yield name
        else:
            for key, value in state.items():
                yield from copies(value, f"{name}[{key!r}]", inside)
    elif isinstance(state, list | tuple):
        for index, value in enumerate(state):
            yield from copies(value, f"{name}[{index}]", inside)


def _copied_keys(state: dict[Any, Any]) -> list[Any]:
    """Return the keys of a module's state_dict() whose values nothing but this dict has."""
    storages = {key: _storage_of(value) for key, value in state.items()}
    tensors_here = Counter(storages.values())
    lone = torch.empty(1)
    more = _uses(_storage_of(lone) or 0) - 1  # what is counted beside the tensors
    return [
        key
        for key, storage in storages.items()
        if storage is None
        or (sys.getrefcount(state[key]) <= _ONE_REFERENCE and _uses(storage) - more <= tensors_here[storage])
    ]


def _uses(storage: int) -> int:
    """Return how many tensors share a storage; many if this torch does not say."""
    count = getattr(torch._C, "_storage_Use_Count", None)
    return sys.maxsize if count is None or not storage else int(count(storage))


def _storage_of(value: Any) -> int | None:
    """Return the storage of a tensor; None for a plain value, 0 for a tensor of another kind."""
    local = subclasses.local_tensor(value) if subclasses.is_dtensor(value) else value
    if not isinstance(local, torch.Tensor):
        return None
    is_plain = type(local) is torch.Tensor and local.layout is torch.strided
    return int(local.untyped_storage()._cdata) if is_plain else 0


def is_live(value: Any) -> bool:
    """Return whether a value is, or has in it, a tensor, an array or an object with load_state_dict()."""
    seen: set[int] = set()  # of containers: one may contain itself
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, torch.Tensor | np.ndarray) or is_stateful(each):
            return True
        if isinstance(each, dict | list | tuple | deque) and id(each) not in seen:
            seen.add(id(each))
            waiting += each.values() if isinstance(each, dict) else each
    return False


def _has_identity(value: Any) -> bool:
    if isinstance(value, tuple):
        return any(map(_has_identity, value))
    return (
        isinstance(value, dict | list | torch.Tensor | np.ndarray)
        or is_stateful(value)
        or (dataclasses.is_dataclass(value) and not isinstance(value, type))
    )
