"""Pack a state: plan first, refusing what cannot be stored, then one copy straight into slots.

The stream is deterministic, so that equal states on two ranks give equal chunks: extents of 64 KiB
and more in state order, aligned to 64 bytes; then small ones; then byte strings. Gaps are zeroed.
Both steps run on the training thread, between two optimizer steps: nothing may change the state
between them.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Container, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from memstore.core.format.dtypes import FLOAT_KINDS
from memstore.core.format.layout import decode_layout, encode_layout, packed
from memstore.core.format.manifest import (
    LAYOUT_BYTES_MAX,
    Chunk,
    Manifest,
    chunk_hasher,
    chunk_sizes,
    encode_manifest,
    shard_digest,
)
from memstore.core.format.shared_layout import name_at
from memstore.errors import UnsupportedState
from memstore.shell.codec.known_state import KnownSources, KnownState
from memstore.shell.codec.nonfinite import Nonfinite
from memstore.shell.codec.walk import StateWalk, ask_stateful
from memstore.shell.device.side_stream import DeviceWrite, order_all
from memstore.shell.native import extension
from memstore.shell.native.loops import Move
from memstore.shell.tensors.geometry import Unknown, addresses_of
from memstore.shell.tensors.memory import Component, Key, Leaf, TensorSource, components, dense_bytes
from memstore.shell.tensors.placed_sources import PlacedSources
from memstore.shell.tensors.slot_stream import SlotStream, move_all
from recovery.inventory import ShardId

LARGE_BYTES = 64 << 10
LARGE_ALIGNMENT_BYTES = 64  # a cache line
SMALL_ALIGNMENT_BYTES = 16  # the largest element


@dataclass(frozen=True, slots=True)
class StatePlan:
    """Where every byte of a state will stand."""

    layout: bytes
    nbytes: int
    placed: PlacedSources
    shared_chunks: int | None = None  # leading chunks that other ranks put too; None: no shared shard (R34)
    parts: tuple[tuple[str, int, bytes], ...] = ()  # states in one stream: name, offset, layout; () if it is one
    kinds: bytes = b""  # of the numbers of each source, as in `core/format/dtypes.py`; those behind them have none

    def name_at(self, offset: int) -> str:
        """Return the path of the tensor whose bytes begin at a stream offset; slow, for messages."""
        parts = self.parts or (("state", 0, self.layout),)
        name, start, layout = [part for part in parts if part[1] <= offset][-1]
        return name_at(decode_layout(layout), offset - start, name)


@dataclass(frozen=True, slots=True)
class _Places:
    """Where the tensors of a state stand; of a remembered one without their memory."""

    tensors: list[list[Any]]  # rows of the layout, by leaf
    extents: list[tuple[int, int]]
    components: list[Component]  # by extent
    end: int
    kinds: bytes  # by extent

    @classmethod
    def of(cls, leaves: list[Leaf]) -> _Places:
        """Place every tensor; ValueError if some share memory in a way that cannot be stored."""
        groups = components(leaves)
        order = [group for group in groups if group.source.nbytes >= LARGE_BYTES]
        order += [group for group in groups if group.source.nbytes < LARGE_BYTES]
        tensors = [_empty_row(leaf) for leaf in leaves]
        extents, end = [], 0
        for number, group in enumerate(order):
            nbytes = group.source.nbytes
            alignment = LARGE_ALIGNMENT_BYTES if nbytes >= LARGE_BYTES else SMALL_ALIGNMENT_BYTES
            end = -(-end // alignment) * alignment
            extents.append((end, nbytes))
            end += nbytes
            for index, (offset, strides, flags) in zip(group.leaves, group.rows):  # noqa: B905  equal by construction
                row = tensors[index]
                row[0], row[1], row[4], row[5] = number, offset, strides, flags
        return cls(tensors, extents, order, end, bytes(_kind_of(group, leaves) for group in order))

    def forget_memory(self) -> None:
        """Let go of all tensors: what a job no longer uses is not to be kept by us."""
        for component in self.components:
            component.source.owner = None


class _Known:
    """A state that may come again with other numbers, and its plan."""

    def __init__(self, state: object, walk: StateWalk, places: _Places, layout: bytes) -> None:
        self._state = KnownState(state, walk.tree, walk.indices)
        offsets = [offset for offset, _ in places.extents]
        self._sources = KnownSources(walk.leaves(), places.components, offsets, self._state.addresses)
        self._extents, self._tensors = packed(places.extents), packed(places.tensors)
        self._end, self._layout, self._blob_sizes = places.end, layout, list(map(len, walk.blobs))
        self._kinds = places.kinds

    def plan(self, state: object, name: str) -> StatePlan:
        """Lay out the state; Unknown if it is another one."""
        owners, blobs, is_same = self._state.match(state)
        placed = self._sources.placed(owners, addresses_of(owners))
        sizes = list(map(len, blobs))
        rows = _blob_rows(self._end, sizes)
        end = self._end + sum(sizes)
        if not is_same or sizes != self._blob_sizes:
            self._layout = encode_layout(end, self._extents, self._tensors, rows, self._state.tree)
            self._blob_sizes = sizes
            _check_length(self._layout, name)
        return StatePlan(self._layout, end, placed.followed_by(rows, blobs), kinds=self._kinds)


class PlanMemory:
    """Remembers the last state's plan, for states that differ in numbers only, or whose tensors lie where they lay.

    A state of which columns tell that only its numbers and plain values are others is not walked. Any other is walked,
    and its plain values are encoded. If each tensor has the key that it had, in the same order, the rows of the last
    layout count again. No tensor is kept alive.
    """

    def __init__(self) -> None:
        self._last: tuple[list[Key], _Places] | None = None
        self._rows: list[list[Any]] = []  # of the last state that was walked
        self._known: list[_Known] = []  # none or one; taken out while it is used: another thread may put

    def plan(self, state: object, name: str = "state") -> StatePlan:
        """Lay out a state without copying it; calls state_dict() on Stateful objects. Errors call it by its name.

        The plan refers to the state's memory: copy it before the state changes.

        Raises:
            UnsupportedState: an object cannot be stored (by path and type), or plain objects take too much room.
        """
        state = ask_stateful(state)
        with contextlib.suppress(IndexError, Unknown):
            known = self._known.pop()
            plan = known.plan(state, name)
            self._known = [known]
            return plan
        keys, places = self._last or ([], None)  # once: another thread may put
        walk = StateWalk(state, name, keys)
        if places is not None and walk.is_known:
            sources = [each.source_of(walk.owners[each.leaves[0]]) for each in places.components]
        else:
            places = _places_of(walk, name)
            sources = [TensorSource(s.nbytes, s.address, s.owner) for s in (each.source for each in places.components)]
            places.forget_memory()
            self._last = None if None in walk.keys else (walk.keys, places)
        plan = _plan_of(walk, places, sources, name)
        # Not the first time: a state that has another structure at each put is not worth it.
        if places.tensors == self._rows:
            with contextlib.suppress(Unknown):
                self._known = [_Known(state, walk, places, plan.layout)]
        self._rows = places.tensors
        return plan


def plan_state(state: object, name: str = "state") -> StatePlan:
    """Lay out a state as a `PlanMemory` does, and remember nothing."""
    walk = StateWalk(ask_stateful(state), name)
    places = _places_of(walk, name)
    return _plan_of(walk, places, [each.source for each in places.components], name)


def _places_of(walk: StateWalk, name: str) -> _Places:
    try:
        return _Places.of(walk.leaves())
    except ValueError as error:
        raise UnsupportedState(f"the {name} cannot be stored: {error}. Nothing was copied.") from None


def _plan_of(walk: StateWalk, places: _Places, sources: list[TensorSource], name: str) -> StatePlan:
    placed = PlacedSources.of((offset, source) for (offset, _), source in zip(places.extents, sources, strict=True))
    rows = _blob_rows(places.end, list(map(len, walk.blobs)))
    end = sum(rows[-1]) if rows else places.end
    layout = encode_layout(end, places.extents, places.tensors, rows, walk.tree)
    _check_length(layout, name)
    return StatePlan(layout, end, placed.followed_by(rows, walk.blobs), kinds=places.kinds)


def _kind_of(group: Component, leaves: list[Leaf]) -> int:
    """Return the kind of a source's numbers; 0 where tensors look at it as different ones, or none as a whole."""
    kinds = {leaves[index].dtype if isinstance(leaves[index].dtype, str) else "" for index in group.leaves}
    spans = (leaves[index].high - leaves[index].low for index in group.leaves)
    is_one = len(group.leaves) == 1 or (len(kinds) == 1 and group.source.nbytes in spans)
    return FLOAT_KINDS.get(kinds.pop(), 0) if is_one else 0


def _blob_rows(begin: int, sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Return offset and nbytes of each: one behind the other."""
    return [(end - size, size) for end, size in zip(accumulate(sizes, initial=begin), (0, *sizes), strict=True)][1:]


def _check_length(layout: bytes, name: str) -> None:
    if len(layout) > LAYOUT_BYTES_MAX:
        raise UnsupportedState(
            f"the {name}'s plain objects take {len(layout)} bytes and the limit is {LAYOUT_BYTES_MAX}; "
            "put long lists of one kind of numbers, or as tensors or numpy arrays. Nothing was copied."
        )


def cuda_device_of(plan: StatePlan) -> int | None:
    """Return the index of the CUDA device that the first of a state's bytes there lie on, or None."""
    if not torch.cuda.is_initialized():
        return None
    owners = (owner for owner in plan.placed.owners if isinstance(owner, torch.Tensor))
    return next((owner.device.index for owner in owners if owner.is_cuda), None)


def copy_into(
    plan: StatePlan, views: Sequence[memoryview], chunk_bytes: int, *, look: Nonfinite | None = None
) -> list[bytes] | None:
    """Copy the planned stream into slots; view i takes stream bytes [i * chunk_bytes, ...).

    Every byte of [0, plan.nbytes) is written, gaps as zeros; returns when device copies have arrived.

    Args:
        plan: Of the state, whose memory is as it was planned.
        views: Of the slots.
        chunk_bytes: Their size.
        look: Takes the tensors that have numbers which are not finite; None: they are not looked at (R39).

    Returns:
        The digest of every chunk, if all of it is host memory that the native helper copied: of the bytes as copied.

    Raises:
        ValueError: the views are too few, too small or read-only.
    """
    stream = slot_stream(plan, views, chunk_bytes)
    table = plan.placed.host_table() if extension.is_there() else None
    if table is not None:
        digests, bad = stream.fill(table, plan.kinds.ljust(len(table), b"\0") if look is not None else b"")
        if look is not None:
            look.found(bad)
        return digests
    if look is not None:
        look.begin(plan.placed, plan.kinds)
    copy_all_but(plan, stream, ())
    return None


def slot_stream(plan: StatePlan, views: Sequence[memoryview], chunk_bytes: int) -> SlotStream:
    """Return the slots as one stream to write to; raises what `copy_into` does."""
    if any(view.readonly for view in views):
        raise ValueError("a slot's view is read-only")
    return SlotStream(views, chunk_bytes, plan.nbytes)


def copy_all_but(plan: StatePlan, stream: SlotStream, late: Container[int]) -> None:
    """Copy the planned stream but for the sources of these numbers in `plan.placed`."""
    writes: list[DeviceWrite] = []
    moves: list[Move] = []
    end = 0
    for number, (offset, source) in enumerate(plan.placed):
        if offset > end:
            stream.zero(end, offset - end)
        if number in late:
            pass
        elif source.address is not None:
            stream.plan_write(offset, source.address, source.nbytes, moves)
        else:
            flat = dense_bytes(source.owner)
            if flat.is_cpu:
                stream.write(offset, flat.data_ptr(), source.nbytes)
            else:
                writes.append(DeviceWrite(flat, stream.host_pieces(offset, flat.numel())))
        end = offset + source.nbytes
    if plan.nbytes > end:
        stream.zero(end, plan.nbytes - end)
    ordered = order_all(writes)
    try:
        move_all(moves)  # while device copies are under way
    finally:
        ordered.wait()  # also if a move raises: the caller gives the slots back


def plan_digest(plan: StatePlan, shard: ShardId, world_size: int, chunk_bytes: int) -> str:
    """Return the digest that the shard would have if the planned state were put now; stores nothing (R14)."""
    digests: list[bytes] = []
    hasher, left = chunk_hasher(), chunk_bytes

    def feed(data: memoryview) -> None:
        nonlocal hasher, left
        while data.nbytes:
            hasher.update(data[:left])
            data, left = data[left:], left - min(left, data.nbytes)
            if not left:
                digests.append(hasher.digest())
                hasher, left = chunk_hasher(), chunk_bytes

    end = 0
    for offset, source in plan.placed:
        feed(memoryview(bytes(offset - end)))
        if source.address is not None:
            feed(memoryview((ctypes.c_ubyte * source.nbytes).from_address(source.address)).cast("B"))
        else:
            feed(memoryview(dense_bytes(source.owner).cpu().numpy().data))
        end = offset + source.nbytes
    feed(memoryview(bytes(plan.nbytes - end)))
    if left < chunk_bytes:
        digests.append(hasher.digest())
    chunks = map(Chunk, digests, chunk_sizes(plan.nbytes, chunk_bytes))
    manifest = Manifest(shard, world_size, plan.layout, plan.nbytes, chunk_bytes, tuple(chunks))
    return shard_digest(encode_manifest(manifest))


def _empty_row(leaf: Leaf) -> list[Any]:
    # Only the kind of device: ranks on cuda:0 and cuda:1 give equal layouts.
    kind = leaf.device.partition(":")[0] if leaf.device else None
    return [None, 0, leaf.dtype, leaf.shape, None, leaf.flags, kind]
