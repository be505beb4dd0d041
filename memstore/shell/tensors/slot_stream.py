"""A shard's byte stream laid over chunk-sized slots: write into it, read out of it.

Slot i holds stream bytes [i * chunk_bytes, ...). Ranges that cross a slot border are split here and
nowhere else. A write is a list of plain memory moves, collected first and then shared out to a few
threads: a move costs a third of a microsecond to call, a tensor copy between 0.5 and 5.
"""

from __future__ import annotations

import _thread
import contextlib
import ctypes
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from memstore.core.format.layout import batches, pieces
from memstore.core.format.manifest import chunk_sizes
from memstore.shell.native import extension, loops
from memstore.shell.native.loops import Move

PARALLEL_COPY_BYTES = 256 << 10  # below it one memmove beats a tensor copy (measured on 2 cores)
# Below the size of a core's own cache (512 KiB and more): up to a quarter faster than moves of a whole chunk, where the
# machine is not in its slow pace (benchmarks/notes/put.md).
MOVE_BYTES = 448 << 10
THREAD_BYTES = 16 << 20  # at least as much for each thread: starting one costs 0.1 ms, 3 MiB of copying
BLOCKS_PER_THREAD = 16  # of a copy: if fewer, threads wait longer for the last one; 64 copy slower (notes/put.md)
THREADS_MAX = 8  # a few cores fill a socket's memory bus; the others belong to data loading


class SlotStream:
    """Views of the slots of one shard.

    Args:
        views: One per chunk, in order; each at least as long as its chunk. Read-only ones can be read.
        chunk_bytes: Size of every chunk but the last.
        nbytes: Length of the stream.

    Raises:
        ValueError: the views do not hold a stream of that length.
    """

    def __init__(self, views: Sequence[memoryview], chunk_bytes: int, nbytes: int) -> None:
        if chunk_bytes <= 0 or len(views) < -(-nbytes // chunk_bytes):
            raise ValueError(f"{len(views)} slots of {chunk_bytes} bytes do not hold a stream of {nbytes} bytes")
        # A handler that raised twice cut off a copy of this thread and the wait for its last blocks.
        _wait_for([turn for turn, caller in list(_moving.items()) if caller == threading.get_ident()])
        arrays = [np.frombuffer(view, np.uint8) for view in views[: -(-nbytes // chunk_bytes)]]
        for index, array in enumerate(arrays):
            if array.size < min(chunk_bytes, nbytes - index * chunk_bytes):
                raise ValueError(f"slot {index} has {array.size} bytes of the {chunk_bytes} that its chunk may take")
        self._arrays = arrays  # keep the views alive as long as their addresses are used
        self._addresses = [address_of(array) for array in arrays]
        self._chunk_bytes, self._nbytes = chunk_bytes, nbytes

    def fill(self, extents: npt.NDArray[np.int64], kinds: bytes = b"") -> tuple[list[bytes], list[int]]:
        """Copy host memory over the whole stream, gaps as zeros; return every chunk's digest as it was copied.

        With kinds also the offsets of extents that have numbers which are not finite. Needs the native helper.

        Args:
            extents: Stream offset, address and nbytes of each, in stream order: `[extents, 3]`.
            kinds: Of the numbers of each, as in `core/format/dtypes.py`; empty: they are not looked at.
        """
        moves, bounds, extent = self._moves(extents)
        looked = np.frombuffer(kinds, np.uint8)[extent] if kinds else None
        sizes = chunk_sizes(self._nbytes, self._chunk_bytes)
        chunks = [(number, *chunk) for number, chunk in enumerate(zip(self._addresses, sizes, strict=True))]
        digests: dict[int, bytes] = {}
        bad: list[int] = []
        is_large = self._nbytes >= loops.LARGE_BYTES

        def work(block: Sequence[Move]) -> None:
            found, rows = loops.put_chunks(block, moves, bounds, looked, is_large=is_large)
            digests.update(zip((number for number, _, _ in block), found, strict=True))
            bad.extend(rows)

        if chunks:
            in_threads(chunks, work)
        return [digests[number] for number in range(len(chunks))], extents[np.unique(extent[bad]), 0].tolist()

    def _moves(self, extents: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], list[int], npt.NDArray[np.int64]]:
        """Cut extents at slot borders.

        Returns:
            Target, source and nbytes of each move, where each slot's moves begin, and the extent of each move.
        """
        full = np.flatnonzero(extents[:, 2] > 0)
        offsets, addresses, nbytes = extents[full].T
        first = offsets // self._chunk_bytes
        counts = (offsets + nbytes - 1) // self._chunk_bytes - first + 1  # of the slots that each lies in
        extent = np.repeat(np.arange(len(counts)), counts)
        slots = first[extent] + np.arange(len(extent)) - np.repeat(np.cumsum(counts) - counts, counts)
        begin = np.maximum(offsets[extent], slots * self._chunk_bytes)
        end = np.minimum((offsets + nbytes)[extent], (slots + 1) * self._chunk_bytes)
        targets = np.array(self._addresses, np.int64)[slots] + begin % self._chunk_bytes
        moves = np.stack((targets, addresses[extent] + begin - offsets[extent], end - begin), axis=1)
        return moves, np.searchsorted(slots, np.arange(len(self._addresses) + 1)).tolist(), full[extent]

    def write(self, offset: int, address: int, nbytes: int) -> None:
        """Copy `nbytes` host bytes at `address` into the stream at `offset`."""
        moves: list[Move] = []
        self.plan_write(offset, address, nbytes, moves)
        move_all(moves)

    def plan_write(self, offset: int, address: int, nbytes: int, moves: list[Move]) -> None:
        """Append the moves of a write to `moves`."""
        slot, start = divmod(offset, self._chunk_bytes)
        if start + nbytes <= self._chunk_bytes:  # most tensors: spare them the loop
            moves.append((self._addresses[slot] + start, address, nbytes))
            return
        for slot, start, done, size in pieces(offset, nbytes, self._chunk_bytes):
            moves.append((self._addresses[slot] + start, address + done, size))

    def host_pieces(self, offset: int, nbytes: int) -> tuple[tuple[int, int, int], ...]:
        """Return where stream bytes lie: (address, offset in the range, nbytes) of each piece."""
        return tuple(
            (self._addresses[slot] + start, done, size)
            for slot, start, done, size in pieces(offset, nbytes, self._chunk_bytes)
        )

    def zero(self, offset: int, nbytes: int) -> None:
        """Zero a gap, so that equal states give equal chunks."""
        for slot, start, _, size in pieces(offset, nbytes, self._chunk_bytes):
            ctypes.memset(self._addresses[slot] + start, 0, size)

    def read(self, offset: int, address: int, nbytes: int) -> None:
        """Copy stream bytes at `offset` to host memory at `address`."""
        for slot, start, done, size in pieces(offset, nbytes, self._chunk_bytes):
            copy_bytes(address + done, self._addresses[slot] + start, size)

    def read_to(self, offset: int, target: torch.Tensor) -> bool:
        """Return False: bytes for a device go through host memory."""
        return False

    def read_bytes(self, offset: int, nbytes: int) -> bytes:
        """Return stream bytes as an object of their own."""
        buffer = np.empty(nbytes, np.uint8)
        self.read(offset, address_of(buffer), nbytes)
        return buffer.tobytes()

    def alias(self, offset: int, nbytes: int) -> torch.Tensor | None:
        """Return stream bytes without a copy, or None if they cross a border, are unaligned or may not be written."""
        slot, start = divmod(offset, self._chunk_bytes)
        if start + nbytes > self._chunk_bytes or not self._arrays[slot].flags.writeable or self._addresses[slot] % 16:
            return None
        return torch.from_numpy(self._arrays[slot][start : start + nbytes])

    def settle(self) -> None:
        """Return at once: every read is done when it is planned."""


def move_all(moves: Sequence[Move]) -> None:
    """Make the moves, on several threads if there is enough to do; they must not overlap."""
    is_large = sum(move[2] for move in moves) >= loops.LARGE_BYTES
    in_threads(moves, partial(loops.make_moves, is_large=is_large) if extension.is_there() else _move)


def copy_threads(nbytes: int) -> int:
    """Return how many threads copy so many bytes."""
    return max(1, min(torch.get_num_threads(), THREADS_MAX, nbytes // THREAD_BYTES))


def in_threads(moves: Sequence[Move], work: Callable[[Sequence[Move]], None]) -> None:
    """Share moves out to several threads if there is enough to do; return when `work` has done all, or raise its error.

    Who is done with a block of moves takes the next: no thread waits long for one that began later, or lost its core.
    """
    total = sum(move[2] for move in moves)
    threads_count = copy_threads(total)
    block_bytes = total // (threads_count * BLOCKS_PER_THREAD)
    left = iter([moves] if threads_count == 1 else list(batches(moves, lambda move: move[2], block_bytes)))
    turns: list[_thread.LockType] = []  # each is held while its thread moves blocks
    errors: list[BaseException] = []  # such as a MemoryError: the block is not whole
    caller = threading.get_ident()

    def help_out(turn: _thread.LockType) -> None:
        with turn:
            _moving[turn] = caller
            try:
                for block in left:
                    work(block)
            except BaseException as exc:
                errors.append(exc)
            del _moving[turn]

    try:
        for _ in range(threads_count - 1):
            turns.append(_thread.allocate_lock())
            with contextlib.suppress(RuntimeError):  # the limit of threads or of memory: this one makes the moves
                _thread.start_new_thread(help_out, (turns[-1],))
        for block in left:
            work(block)
        _wait_for(turns)  # one that has not begun finds no block left
    except BaseException:
        deque(left, maxlen=0)  # in one step, which no signal's handler comes before: no thread takes another block
        _wait_for(turns)
        raise
    if errors:
        raise errors[0]


_moving: dict[_thread.LockType, int] = {}  # the threads that move blocks, and for which thread


def _wait_for(turns: Iterable[_thread.LockType]) -> None:
    for turn in turns:
        with turn:
            pass


def _move(moves: Sequence[Move]) -> None:
    memmove = ctypes.memmove
    for target, source, nbytes in moves:
        if nbytes <= MOVE_BYTES:  # most tensors: spare them the loop
            memmove(target, source, nbytes)
            continue
        for done in range(0, nbytes, MOVE_BYTES):
            memmove(target + done, source + done, min(MOVE_BYTES, nbytes - done))


def copy_bytes(target: int, source: int, nbytes: int) -> None:
    """Copy host bytes between two addresses that do not overlap."""
    if nbytes < PARALLEL_COPY_BYTES:
        ctypes.memmove(target, source, nbytes)
    else:
        tensor_at(target, nbytes).copy_(tensor_at(source, nbytes))


def tensor_at(address: int, nbytes: int) -> torch.Tensor:
    """Return host memory as a uint8 tensor that keeps nothing alive."""
    return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)


def byte_array(data: bytes) -> np.ndarray:
    """Return bytes as an array over the same memory."""
    return np.frombuffer(data, np.uint8)


def address_of(array: np.ndarray) -> int:
    """Return the address of an array's first element."""
    address: int = array.__array_interface__["data"][0]
    return address
