"""Where the plain values of a stored state go in a live one: to entries of its dicts and lists, fields of dataclasses.

What lies in a tuple goes there with a new tuple in the entry that holds it, around the same tensors and objects as
before. What no entry holds, or what would take a live tensor or object out of the state, is listed (R26).
"""

from __future__ import annotations

import dataclasses
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import numpy as np
import torch

from memstore.core.format.object_tree import Node
from memstore.shell.codec.walk import is_stateful

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


def is_live(value: Any) -> bool:
    """Return whether a value is, or has in it, a tensor, an array or an object with load_state_dict()."""
    if isinstance(value, torch.Tensor | np.ndarray) or is_stateful(value):
        return True
    if isinstance(value, dict):
        return any(map(is_live, value.values()))
    return isinstance(value, list | tuple | deque) and any(map(is_live, value))


def _has_identity(value: Any) -> bool:
    if isinstance(value, tuple):
        return any(map(_has_identity, value))
    return (
        isinstance(value, dict | list | torch.Tensor | np.ndarray)
        or is_stateful(value)
        or (dataclasses.is_dataclass(value) and not isinstance(value, type))
    )
