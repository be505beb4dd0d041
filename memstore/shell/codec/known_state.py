"""Recognise a state that differs from an earlier one in its numbers only, column by column instead of value by value.

The containers of one depth are read together: their lengths, their keys, the types of what they hold. So a state of
thousands of tensors takes a few calls that run in C. Only what these columns describe fully is taken: dicts, ordered
dicts, counters, lists and tuples with text or whole numbers as keys; tensors, Parameters and DTensors of strided
memory; plain scalars; long lists of numbers, each as the block that it is stored as. Everything else is left to the
walk, and so is every state in which a column differs. No tensor is kept alive.
"""

from __future__ import annotations

import sys
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from itertools import chain, compress
from operator import attrgetter, is_, methodcaller
from typing import Any
from weakref import ref

import numpy as np
import torch

from memstore.shell.codec.walk import NUMBERS_MIN, fits_inline, number_block
from memstore.shell.tensors.geometry import Geometry, Shapes, Unknown, addresses_of, require, types_of
from memstore.shell.tensors.memory import Component, Leaf
from memstore.shell.tensors.placed_sources import HostTable, PlacedSources, host_table

_MAPS, _SEQUENCES = (dict, OrderedDict, Counter), (list, tuple)
_NUMBERS = frozenset((int, float, bool))
ITEMS_MAX = 1 << 16  # of a list: one that is longer, and no block of numbers, costs more than a walk saves
_CONTAINERS = frozenset((*_MAPS, *_SEQUENCES))
_SCALARS = frozenset((int, float, bool, str, type(None)))
_KEYS = frozenset((str, int))
_TENSORS = frozenset((torch.Tensor, torch.nn.Parameter))
_SPEC, _MESH, _PLACEMENTS, _LOCAL = map(attrgetter, ("_spec", "mesh", "placements", "_local_tensor"))
_VALUES = methodcaller("values")  # dict.values() of an ordered dict would not follow its order
Slot = tuple[list[Any], int]  # where the node of a value stands in the tree: in which list, at which place


class _Depth:
    """The containers of one depth: lengths, keys, and the types of what they hold; where of that is which kind."""

    def __init__(self, containers: list[Any], kinds: list[type]) -> None:
        self.kinds = kinds  # of the containers, which the depth above has compared
        self._kinds_met = frozenset(kinds)
        self._are_maps = self._kinds_met.issubset(_MAPS)
        self.lengths, self.keys, items = self._read(containers)
        self.key_types, self.item_types = types_of(self.keys), types_of(items)
        found = set(self.item_types)
        require(set(self.key_types) <= _KEYS)
        dtensors = {kind for kind in found - _CONTAINERS - _SCALARS - _TENSORS if _is_dtensor(kind)}
        require(found <= _CONTAINERS | _SCALARS | _TENSORS | dtensors)
        self.numbers = bytes(map(_is_block, items))
        self.scalars, self.tensors, self.dtensors = (
            bytes(kind in kinds for kind in self.item_types) for kinds in (_SCALARS, _TENSORS, frozenset(dtensors))
        )
        self.containers = bytes(
            kind in _CONTAINERS and not block for kind, block in zip(self.item_types, self.numbers, strict=True)
        )
        self.has = tuple(any(mask) for mask in (self.scalars, self.tensors, self.dtensors, self.numbers))
        self.next_kinds = list(compress(self.item_types, self.containers))

    def _read(self, containers: list[Any]) -> tuple[list[int], list[Any], list[Any]]:
        parts: Iterable[Any]
        if self._are_maps:
            maps, parts = containers, map(_VALUES, containers)
        else:
            kinds = [kind in _MAPS for kind in self.kinds]
            maps = list(compress(containers, kinds))
            parts = (_VALUES(each) if is_map else each for each, is_map in zip(containers, kinds, strict=True))
        items = list(chain.from_iterable(parts))
        if OrderedDict in self._kinds_met:
            # What torch's state_dict() notes of its modules: not among the values, and stored all the same.
            items += [getattr(each, "_metadata", None) for each in containers if type(each) is OrderedDict]
        return list(map(len, containers)), list(chain.from_iterable(maps)), items

    def open(self, containers: list[Any]) -> list[Any]:
        """Return what these containers hold; Unknown if it is not as in the known ones."""
        lengths, keys, items = self._read(containers)
        require(lengths == self.lengths and types_of(items) == self.item_types)
        require(keys == self.keys and types_of(keys) == self.key_types)
        return items

    def slots(self, nodes: list[Any]) -> list[Slot]:
        """Return where the items' nodes stand, given the containers' nodes."""
        found: list[Slot] = []
        for node, kind, length in zip(nodes, self.kinds, self.lengths, strict=True):
            step = 2 if kind in _MAPS else 1
            start = 2 if kind is OrderedDict else step - 1
            found += [(node[2], start + step * number) for number in range(length)]
        return found + [(node[2], 0) for node, kind in zip(nodes, self.kinds, strict=True) if kind is OrderedDict]


def _is_block(item: Any) -> bool:
    """Return whether an item is stored as a block of numbers; Unknown if it may become one, or is too long."""
    if type(item) not in _SEQUENCES or len(item) < NUMBERS_MIN:
        return False
    if type(item[0]) not in _NUMBERS:
        require(len(item) <= ITEMS_MAX)
        return False
    require(number_block(item) is not None)
    return True


def _is_dtensor(kind: type) -> bool:
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and issubclass(kind, module.DTensor)


class _Meshes:
    """What is described of DTensors: mesh by identity, placements, global shape and strides."""

    def __init__(self, dtensors: list[Any]) -> None:
        specs = list(map(_SPEC, dtensors))
        meshes = list(map(_MESH, specs))
        self._ids = list(map(id, meshes))
        self._alive = [ref(mesh) for mesh in {id(mesh): mesh for mesh in meshes}.values()]
        self._placements, self._shapes = list(map(_PLACEMENTS, specs)), Shapes(dtensors)

    def check(self, dtensors: list[Any]) -> None:
        """Raise Unknown if these are described otherwise."""
        specs = list(map(_SPEC, dtensors))
        # The id of a mesh that is gone may be another's.
        require(list(map(id, map(_MESH, specs))) == self._ids and all(mesh() is not None for mesh in self._alive))
        require(list(map(_PLACEMENTS, specs)) == self._placements)
        self._shapes.check(dtensors)


class KnownState:
    """The columns of a state that was walked.

    Args:
        state: The state.
        tree: Its tree; plain values are replaced in it by those of the last state that was recognised.
        indices: The leaf of each tensor, by the tensor's id.

    Raises:
        Unknown: it holds something that columns do not describe.
    """

    def __init__(self, state: Any, tree: Any, indices: dict[int, int]) -> None:
        self.tree = tree
        self._root = type(state)
        require(self._root in _CONTAINERS)
        self._depths: list[_Depth] = []
        slots, blobs = list[Slot](), list[int]()
        containers, kinds, nodes = [state], [self._root], [tree]
        while containers:
            depth = _Depth(containers, kinds)
            self._depths.append(depth)
            items, places = depth.open(containers), depth.slots(nodes)
            slots += compress(places, depth.scalars)
            blobs += [inside[at][1] for inside, at in compress(places, depth.numbers)]
            containers, kinds = list(compress(items, depth.containers)), depth.next_kinds
            nodes = [inside[at] for inside, at in compress(places, depth.containers)]
        tensors, dtensors, scalars, numbers = self._open(state)
        self._dtensors = _Meshes(dtensors)
        self._number_kinds = [kind for kind, _ in numbers]
        self._in_stream = sorted(range(len(blobs)), key=blobs.__getitem__)  # the depths have them in another order
        require(set(types_of(tensors)) <= _TENSORS)  # a DTensor may be made of wrappers
        self._leaves = [indices[id(tensor)] for tensor in tensors]  # of each place of a tensor
        firsts = {leaf: number for number, leaf in reversed(list(enumerate(self._leaves)))}
        self._firsts = [firsts[leaf] for leaf in range(len(firsts))]
        self._slots, self._scalars = slots, scalars
        self._float_bits = _float_bits(scalars)
        require(all(map(fits_inline, scalars)))
        self._at_shared_address: list[int] = []  # leaves; here each is a tensor of its own, as `indices` goes by its id
        owners = self._owners(tensors)
        self._geometry, self.addresses = Geometry(owners), addresses_of(owners)
        met = Counter(self.addresses)
        self._at_shared_address += [leaf for leaf, address in enumerate(self.addresses) if met[address] > 1]

    def _open(self, state: Any) -> tuple[list[Any], list[Any], list[Any], list[tuple[type, bytes]]]:
        """Return tensors, with the local ones of DTensors, the DTensors, the plain scalars, and blocks of numbers."""
        tensors, dtensors, scalars, numbers = list[Any](), list[Any](), list[Any](), list[Any]()
        containers = [state]
        for depth in self._depths:
            items = depth.open(containers)
            has_scalars, has_tensors, has_dtensors, has_numbers = depth.has
            if has_scalars:
                scalars += compress(items, depth.scalars)
            if has_tensors:
                tensors += compress(items, depth.tensors)
            if has_dtensors:
                found = list(compress(items, depth.dtensors))
                dtensors += found
                tensors += map(_LOCAL, found)
            if has_numbers:
                numbers += map(number_block, compress(items, depth.numbers))
            containers = list(compress(items, depth.containers))
        require(None not in numbers)
        return tensors, dtensors, scalars, numbers

    def _owners(self, tensors: list[Any]) -> list[Any]:
        """Return the tensor of each leaf; Unknown if other places than before have the same tensor.

        Only leaves that once shared an address are compared. If two others became one tensor, one of them moved, and
        KnownSources raises Unknown.
        """
        owners = list(map(tensors.__getitem__, self._firsts))
        require(len({id(owners[leaf]) for leaf in self._at_shared_address}) == len(self._at_shared_address))
        if len(owners) < len(tensors):
            require(all(map(is_, tensors, map(owners.__getitem__, self._leaves))))
        return owners

    def match(self, state: Any) -> tuple[list[torch.Tensor], list[bytes], bool]:
        """Return the tensors of a state by leaf, its blocks of numbers, and whether the scalars are those of the last.

        Raises:
            Unknown: it is not this state with other numbers.
        """
        require(type(state) is self._root)
        tensors, dtensors, scalars, numbers = self._open(state)
        require([kind for kind, _ in numbers] == self._number_kinds)
        self._dtensors.check(dtensors)
        owners = self._owners(tensors)
        self._geometry.check(owners)
        return owners, [numbers[at][1] for at in self._in_stream], self._take(scalars)

    def _take(self, scalars: list[Any]) -> bool:
        """Put plain values into the tree; return whether they were there."""
        bits = _float_bits(scalars)
        # The depths have compared their types, so equal ones are the same but for floats: 0.0 equals -0.0.
        if scalars == self._scalars and bits == self._float_bits:
            return True
        require(all(map(fits_inline, scalars)))
        for (inside, at), scalar in zip(self._slots, scalars, strict=True):
            inside[at] = scalar
        self._scalars, self._float_bits = scalars, bits
        return False


def _float_bits(scalars: list[Any]) -> bytes:
    return array("d", [each for each in scalars if type(each) is float]).tobytes()


class KnownSources:
    """Where the bytes of a known state's tensors are copied from and to; a tensor alone in its memory may move.

    Args:
        leaves: Of the state.
        components: In stream order.
        offsets: Of each in the stream.
        addresses: Of each leaf.
    """

    def __init__(
        self, leaves: Sequence[Leaf], components: Sequence[Component], offsets: Sequence[int], addresses: list[int]
    ) -> None:
        self._components, self._offsets, self._addresses = components, offsets, addresses
        self._firsts = [each.leaves[0] for each in components]
        self._sizes = [each.source.nbytes for each in components]
        self._starts = [each.source.address for each in components]
        self._table: HostTable | None = None
        self._gathered = [number for number, start in enumerate(self._starts) if start is None]
        self._may_move = {
            each.leaves[0]: number
            for number, each in enumerate(components)
            if len(each.leaves) == 1 and not leaves[each.leaves[0]].device
        }
        members = [[leaves[at] for at in each.leaves] for each in components]
        spans = [(min(each.low for each in group), max(each.high for each in group)) for group in members]
        host = [number for number, group in enumerate(members) if not group[0].device]
        self._rows = {number: row for row, number in enumerate(host)}  # of the spans, by component
        self._spans = np.array([spans[number] for number in host], np.int64).reshape(-1, 2)

    def placed(self, owners: list[Any], addresses: list[int]) -> PlacedSources:
        """Return the source of each component; Unknown if memory is shared otherwise than before."""
        if addresses != self._addresses:
            self._move(addresses)
        firsts = list(map(owners.__getitem__, self._firsts))
        for number in self._gathered:
            firsts[number] = self._components[number].source_of(firsts[number]).owner
        if self._table is None and not self._gathered:
            self._table = host_table(self._offsets, self._starts, self._sizes)
        return PlacedSources(self._offsets, self._sizes, self._starts, firsts, self._table)

    def _move(self, addresses: list[int]) -> None:
        spans = self._spans.copy()
        starts = list(self._starts)
        for leaf, (now, then) in enumerate(zip(addresses, self._addresses, strict=True)):
            if now == then:  # also of one without elements: they lie at 0
                continue
            number = self._may_move.get(leaf)
            if number is None:
                raise Unknown
            spans[self._rows[number]] += now - then
            if starts[number] is not None:  # else it is gathered
                starts[number] = now
        in_order = spans[np.argsort(spans[:, 0], kind="stable")]  # `_rows` go by `spans` itself
        require(bool((in_order[:-1, 1] <= in_order[1:, 0]).all()))
        self._spans, self._starts, self._addresses, self._table = spans, starts, addresses, None
