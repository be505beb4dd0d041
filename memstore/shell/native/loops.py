"""Copies with digests in C, where the helper was built: one call for many moves, and the GIL is free meanwhile.

Without the helper Python's loops copy, and digests are a pass of their own. Whether large copies store around the cache
is measured by the copies themselves, once for each kind: a few calls take one way and the other by turns, and the
faster one stays. A processor's name says nothing about that.
"""

from __future__ import annotations

import ctypes
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import chain
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from memstore.core.arena import parity_rows
from memstore.core.format.manifest import DIGEST_BYTES, split_digests
from memstore.shell.native import extension
from recovery.parity import product

Move = tuple[int, int, int]  # target address, source address, nbytes
T = TypeVar("T")
CALL_BYTES = 16 << 20  # a call's most, 2 to 5 ms: so long it keeps a signal's handler waiting
LARGE_BYTES = 32 << 20  # a copy of less may find its memory in the cache, which stores around it would not use
MEASURED_CALL_BYTES = 1 << 20
MEASURED_BYTES_MIN = 256 << 10  # of one call: the time of a smaller one says little
MEASURED_CALLS = 8  # by turns; of chunks of 4 MiB two or three milliseconds for each way
MARGIN = 1.05  # so much faster must stores around the cache be: what a copy leaves in the cache is of use to others


class Way:
    """Whether one kind of copy stores around the cache. For several threads: at worst they measure a few calls more."""

    def __init__(self) -> None:
        self._rates = {False: 0.0, True: 0.0}  # the best of each way, bytes a second
        self._calls = 0  # measured

    @property
    def is_known(self) -> bool:
        """Return whether nothing is to be measured any more."""
        return self._calls >= MEASURED_CALLS

    @property
    def is_around(self) -> bool:
        """Return whether stores around the cache were faster by enough."""
        return self._rates[True] > self._rates[False] * MARGIN

    def call(self, work: Callable[..., T], *tables: bytes, nbytes: int, is_large: bool) -> T:
        """Have the helper make moves of so many bytes, which belong to a large copy or to a small one."""
        if not is_large or self.is_known or nbytes < MEASURED_BYTES_MIN:
            return work(*tables, is_large and self.is_around)
        is_around = self._calls % 2 == 1
        self._calls += 1
        began_s = time.thread_time()  # waiting for memory counts, and waiting for a core does not
        result = work(*tables, is_around)
        rate = nbytes / max(time.thread_time() - began_s, 1e-9)
        self._rates[is_around] = max(self._rates[is_around], rate)
        return result

    def parts(self, items: Sequence[Move], *, is_large: bool) -> Iterator[Sequence[Move]]:
        """Cut a copy into calls: a signal's handler runs between two of them. Small ones while they are measured."""
        first, size = 0, 0
        for number, (_, _, nbytes) in enumerate(items):
            limit = CALL_BYTES if self.is_known or not is_large else MEASURED_CALL_BYTES
            if size and size + nbytes > limit:
                yield items[first:number]
                first, size = number, 0
            size += nbytes
        if first < len(items):
            yield items[first:]


_moves, _puts, _gets = Way(), Way(), Way()


def make_moves(moves: Sequence[Move], *, is_large: bool) -> None:
    """Make moves that do not overlap, of a copy that is too large for the cache, or of another."""
    for part in _moves.parts(_short(moves), is_large=is_large):
        table = array("Q", chain.from_iterable(part)).tobytes()
        _moves.call(extension.built.move, table, nbytes=sum(move[2] for move in part), is_large=is_large)


def _short(moves: Sequence[Move]) -> Sequence[Move]:
    """Return moves none of which is longer than a call."""
    if all(move[2] <= CALL_BYTES for move in moves):
        return moves
    return [
        (target + done, source + done, min(CALL_BYTES, nbytes - done))
        for target, source, nbytes in moves
        for done in range(0, nbytes, CALL_BYTES)
    ]


def put_chunks(
    chunks: Sequence[Move],
    moves: npt.NDArray[np.int64],
    bounds: Sequence[int],
    kinds: npt.NDArray[np.uint8] | None = None,
    *,
    is_large: bool,
) -> tuple[list[bytes], list[int]]:
    """Fill chunks, gaps with zeros; return each one's digest as copied, and the rows of moves that are not finite.

    Args:
        chunks: Number, address and nbytes of each; with consecutive numbers.
        moves: Target, source and nbytes of the moves of all chunks, one behind the other, by target: `[moves, 3]`.
        bounds: For each chunk's number the row of `moves` where its moves begin; one entry more for the end.
        kinds: Of the numbers of each move, as in `core/format/dtypes.py`; None: they are not looked at (R39).
        is_large: Whether the whole copy is too large for the cache.
    """
    digests: list[bytes] = []
    bad: list[int] = []
    for part in _puts.parts(chunks, is_large=is_large):
        heads = array("Q")
        for number, address, nbytes in part:
            heads.extend((address, nbytes, bounds[number + 1] - bounds[number]))
        first, end = bounds[part[0][0]], bounds[part[-1][0] + 1]
        tables = heads.tobytes(), moves[first:end].tobytes(), b"" if kinds is None else kinds[first:end].tobytes()
        nbytes = sum(chunk[2] for chunk in part)
        joined, looked = _puts.call(extension.built.put, *tables, nbytes=nbytes, is_large=is_large)
        digests += split_digests(joined)
        bad += [first + row for row, is_bad in enumerate(looked) if is_bad] if any(looked) else []
    return digests, bad


def get_chunk(address: int, nbytes: int, moves: Sequence[Move], *, is_large: bool) -> bytes:
    """Copy parts of a chunk out of its slot, and return the digest that the slot had after the copy."""
    head, table = array("Q", (address, nbytes, len(moves))), array("Q", chain.from_iterable(moves))
    tables = head.tobytes(), table.tobytes(), b""
    digest: bytes = _gets.call(extension.built.get, *tables, nbytes=nbytes, is_large=is_large)[0]
    return digest


# -- socket loops -------------------------------------------------------------------------------------
# Transfers over a socket in C, where the helper was built: one call for many chunks, and the GIL is free meanwhile.


_BYTE = ctypes.c_char
DONE, ENDED, LATE = 0, -1, -2  # how a transfer ended; else an error's number


def receive(
    fd: int, chunks: Sequence[Sequence[memoryview]], *, timeout_s: float, wake_bytes: int
) -> tuple[int, list[bytes]]:
    """Receive chunks from a socket that does not block; return how it ended, and the digests of those that are whole.

    Args:
        fd: The socket's descriptor.
        chunks: Of each the views that it is received into, one at least, in the order of its bytes.
        timeout_s: For each chunk.
        wake_bytes: So many at least, or the last ones, end a wait of a TCP socket from now on; 0 for another socket.
    """
    places = array("Q")
    for views in chunks:
        for view in views:
            places.extend((_address(view), 1, view.nbytes))
        places[-2] = 0  # the next one is of another chunk
    ended: tuple[int, int, bytes] = extension.built.receive_chunks(fd, places.tobytes(), timeout_s, wake_bytes)
    status, count, joined = ended
    return status, split_digests(joined[: count * DIGEST_BYTES])


def send(fd: int, views: Sequence[memoryview], *, timeout_s: float) -> tuple[int, int]:
    """Send views of bytes over a socket that does not block; return how it ended, and the bytes that were sent."""
    rows = array("Q", chain.from_iterable((0, _address(view), view.nbytes) for view in views if view.nbytes))
    ended: tuple[int, int] = extension.built.send(fd, rows.tobytes(), timeout_s)
    return ended


def add_into(row: memoryview, row_nbytes: int, chunk: memoryview, factor: int = 1) -> None:
    """Add a chunk to a row of parity as `parity_rows.add_into` does, which is as fast where nothing is multiplied."""
    if extension.built is None or factor == 1 or not chunk.nbytes:
        parity_rows.add_into(row, row_nbytes, chunk, factor)
        return
    row[row_nbytes : chunk.nbytes] = bytes(max(0, chunk.nbytes - row_nbytes))
    extension.built.add(_address(row), _address(chunk), chunk.nbytes, _halves(factor))


@lru_cache(maxsize=256)
def _halves(factor: int) -> bytes:
    """Return the products of a factor with all low halves of a byte, then with all high ones."""
    return bytes([product(factor, low << shift) for shift in (0, 4) for low in range(16)])


def _address(view: memoryview) -> int:
    if view.readonly:
        address: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
        return address
    return ctypes.addressof(_BYTE.from_buffer(view))  # of every chunk: a sixth of numpy's time
