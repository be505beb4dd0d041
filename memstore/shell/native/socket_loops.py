"""Transfers over a socket in C, where the helper was built: one call for many chunks, and the GIL is free meanwhile.

The socket must not block. How a call ended comes back as a number; what follows from it is the channel's to say.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from itertools import chain

import numpy as np

from memstore.core.format.manifest import DIGEST_BYTES, split_digests
from memstore.shell.native import extension

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


def _address(view: memoryview) -> int:
    if view.readonly:
        address: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
        return address
    return ctypes.addressof(_BYTE.from_buffer(view))  # of every chunk: a sixth of numpy's time
