"""A shard's byte stream laid over chunk-sized slots: write into it, read out of it.

Slot i holds stream bytes [i * chunk_bytes, ...). Ranges that cross a slot border are split here and
nowhere else. Small pieces go through memmove, whose call costs a third of a microsecond; larger ones
through torch's copy, which uses every intra-op thread. Both release the GIL for the bytes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch

from memstore.core.layout import pieces

PARALLEL_COPY_BYTES = 256 << 10  # below it one memmove beats starting the threads (measured on 2 cores)


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
        arrays = [np.frombuffer(view, np.uint8) for view in views[: -(-nbytes // chunk_bytes)]]
        for index, array in enumerate(arrays):
            if array.size < min(chunk_bytes, nbytes - index * chunk_bytes):
                raise ValueError(f"slot {index} has {array.size} bytes of the {chunk_bytes} that its chunk may take")
        self._arrays = arrays  # keep the views alive as long as their addresses are used
        self._addresses = [address_of(array) for array in arrays]
        self._chunk_bytes = chunk_bytes

    def write(self, offset: int, address: int, nbytes: int) -> None:
        """Copy `nbytes` host bytes at `address` into the stream at `offset`."""
        slot, start = divmod(offset, self._chunk_bytes)
        if start + nbytes <= self._chunk_bytes and nbytes < PARALLEL_COPY_BYTES:  # most tensors: spare them the loop
            ctypes.memmove(self._addresses[slot] + start, address, nbytes)
            return
        for slot, start, done, size in pieces(offset, nbytes, self._chunk_bytes):
            copy_bytes(self._addresses[slot] + start, address + done, size)

    def write_device(self, offset: int, source: torch.Tensor) -> None:
        """Order the copy of a one-dimensional uint8 device tensor; the caller synchronizes."""
        for slot, start, done, size in pieces(offset, source.numel(), self._chunk_bytes):
            target = tensor_at(self._addresses[slot] + start, size)
            target.copy_(source[done : done + size], non_blocking=True)

    def zero(self, offset: int, nbytes: int) -> None:
        """Zero a gap, so that equal states give equal chunks."""
        for slot, start, _, size in pieces(offset, nbytes, self._chunk_bytes):
            ctypes.memset(self._addresses[slot] + start, 0, size)

    def read(self, offset: int, address: int, nbytes: int) -> None:
        """Copy stream bytes at `offset` to host memory at `address`."""
        for slot, start, done, size in pieces(offset, nbytes, self._chunk_bytes):
            copy_bytes(address + done, self._addresses[slot] + start, size)

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


def copy_bytes(target: int, source: int, nbytes: int) -> None:
    """Copy host bytes between two addresses that do not overlap."""
    if nbytes < PARALLEL_COPY_BYTES:
        ctypes.memmove(target, source, nbytes)
    else:
        tensor_at(target, nbytes).copy_(tensor_at(source, nbytes))


def tensor_at(address: int, nbytes: int) -> torch.Tensor:
    """Return host memory as a uint8 tensor that keeps nothing alive."""
    return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)


def address_of(array: np.ndarray) -> int:
    """Return the address of an array's first element."""
    address: int = array.__array_interface__["data"][0]
    return address
