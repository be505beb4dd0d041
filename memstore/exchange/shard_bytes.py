"""The bytes of one rank's shard, read in order: in windows, each digested before it is used."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from memstore.core.format.layout import pieces
from memstore.errors import IntegrityError
from memstore.shell.rank.range_read import Range, ShardRanges
from memstore.shell.tensors.slot_stream import address_of, copy_bytes

WINDOW_BYTES = 64 << 20  # in this memory, and in the arena's in-flight room, at once


class ShardBytes:
    """One rank's shard of one step, pinned only while a window is copied (R7).

    It stands where a `SlotStream` does when a state is built.

    Args:
        ranges: Reads of the job.
        step, rank: Which shard.

    Raises:
        RecoveryError: there is no such shard, or some chunk has no good copy.
    """

    def __init__(self, ranges: ShardRanges, step: int, rank: int) -> None:
        self._ranges, self.step, self.rank = ranges, step, rank
        with ranges.ask(step, rank) as read:
            self.manifest = read.manifest()
        self._window_bytes = WINDOW_BYTES
        self._coming: list[Range] = []
        self._window: dict[Range, bytearray] = {}

    def expect(self, spans: Iterable[Range], window_bytes: int = WINDOW_BYTES) -> None:
        """Say what will be read, so that neighbours come together, at most `window_bytes` or one span at a time."""
        self._window_bytes = window_bytes
        self._coming = sorted({span for span in spans if span[1]})
        self._window = {}

    def take(self, offset: int, nbytes: int) -> bytearray:
        """Return stream bytes, verified, in memory of their own.

        Raises:
            RecoveryError, DigestMismatch: some chunk has no good copy. StepDropped: newer steps took its place.
            IntegrityError: the step was put again meanwhile.
        """
        if not nbytes:
            return bytearray()
        span = (offset, nbytes)
        if span not in self._window:
            later = [other for other in self._coming if other > span]
            self._coming = later
            self._window = self._bring([span, *later])
        return self._window.pop(span)

    def _bring(self, spans: list[Range]) -> dict[Range, bytearray]:
        """Read the first span, and as many of the next as fit into the window with it."""
        if spans[0][1] > WINDOW_BYTES:
            whole = bytearray(spans[0][1])
            for _, _, done, size in pieces(0, len(whole), WINDOW_BYTES):
                memoryview(whole)[done : done + size] = self._read([(spans[0][0] + done, size)])[0]
            return {spans[0]: whole}
        window: list[Range] = []
        total = 0
        for span in spans:
            total += span[1]
            if window and total > self._window_bytes:
                break
            window.append(span)
        return dict(zip(window, self._read(window), strict=True))

    def _read(self, spans: list[Range]) -> list[bytearray]:
        with self._ranges.ask(self.step, self.rank, spans, self.manifest.chunk_bytes) as read:
            if read.manifest() != self.manifest:
                raise IntegrityError(
                    f"step {self.step} of job {self.manifest.shard.job!r} was put again while it was read: begin again"
                )
            return read.bytes_of(spans)

    # -- as a SlotStream ------------------------------------------------------------------------

    def read(self, offset: int, address: int, nbytes: int) -> None:
        """Copy stream bytes to host memory at `address`."""
        if nbytes:
            copy_bytes(address, address_of(np.frombuffer(self.take(offset, nbytes), np.uint8)), nbytes)

    def read_to(self, offset: int, target: torch.Tensor) -> bool:
        """Return False: bytes for a device go through host memory."""
        return False

    def read_bytes(self, offset: int, nbytes: int) -> bytes:
        """Return stream bytes."""
        return bytes(self.take(offset, nbytes))

    def alias(self, offset: int, nbytes: int) -> torch.Tensor | None:
        """Return stream bytes as a tensor with memory of its own."""
        return torch.frombuffer(self.take(offset, nbytes), dtype=torch.uint8)

    def settle(self) -> None:
        """Return at once: every read is done when it is planned."""


def have_same_bytes(one: ShardBytes, at: int, other: ShardBytes, other_at: int, nbytes: int) -> bool:
    """Return whether two ranges hold the same; reads nothing where chunks of equal digest lie under both."""
    chunk_bytes = one.manifest.chunk_bytes
    is_aligned = chunk_bytes == other.manifest.chunk_bytes and at % chunk_bytes == other_at % chunk_bytes
    for index, start, done, size in pieces(at, nbytes, chunk_bytes if is_aligned else WINDOW_BYTES):
        if is_aligned:
            mine, theirs = one.manifest.chunks[index], other.manifest.chunks[(other_at + done) // chunk_bytes]
            if mine.digest == theirs.digest:
                continue
            if start == 0 and size == mine.nbytes == theirs.nbytes:
                return False
        if one.take(at + done, size) != other.take(other_at + done, size):
            return False
    return True
