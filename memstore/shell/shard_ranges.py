"""Ranges of the stream of any rank's shard, without bringing the whole shard here (R7, R27).

A reader asks for the chunks that its ranges lie in; the holder brings those, and only those (`excerpts.py`). The
bytes are copied out of the slots first and digested again after, chunk by chunk: a reader that was fenced or too slow
may have copied what others wrote.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from typing import Any

import numpy as np

from memstore.core.layout import pieces
from memstore.core.manifest import Manifest, chunk_digest, decode_manifest
from memstore.errors import DigestMismatch, IntegrityError, PeerTimeout
from memstore.shell.rank_link import RankLink
from memstore.shell.slot_stream import address_of, copy_bytes

Range = tuple[int, int]  # first byte of the stream, nbytes


def chunk_runs(ranges: Iterable[Range], chunk_bytes: int) -> list[list[int]]:
    """Return the chunks that ranges touch as [first, count] runs.

    >>> chunk_runs([(0, 1), (5, 4), (40, 0)], 4)
    [[0, 3]]
    """
    spans = sorted((start // chunk_bytes, (start + size - 1) // chunk_bytes) for start, size in ranges if size)
    runs: list[list[int]] = []
    for first, last in spans:  # never chunk by chunk: the ranges may come from hostile metadata
        end = sum(runs[-1]) if runs else -1
        if first > end:
            runs.append([first, last + 1 - first])
        else:
            runs[-1][1] = max(end, last + 1) - runs[-1][0]
    return runs


@dataclass(frozen=True)
class OpenRanges:
    """Chunks of one shard, pinned for this process until `close`."""

    manifest: Manifest
    step: int
    attempt: int
    views: dict[int, memoryview]  # by chunk
    pin: int
    link: RankLink

    def copy(self, offset: int, address: int, nbytes: int) -> None:
        """Copy stream bytes to host memory, unverified. IntegrityError if they were not asked for."""
        for index, start, done, size in pieces(offset, nbytes, self.manifest.chunk_bytes):
            if index not in self.views:
                raise IntegrityError(f"byte {offset + done} of {self.manifest.shard} is not among the chunks read")
            copy_bytes(address + done, address_of(np.frombuffer(self.views[index], np.uint8)) + start, size)

    def read(self, offset: int, nbytes: int) -> bytearray:
        """Return a copy of stream bytes, unverified."""
        data = bytearray(nbytes)
        if nbytes:
            self.copy(offset, address_of(np.frombuffer(data, np.uint8)), nbytes)
        return data

    def verify(self) -> None:
        """Digest every chunk that was copied from. DigestMismatch: what was copied is not what was put."""
        for index, view in self.views.items():
            if chunk_digest(view) != self.manifest.chunks[index].digest:
                raise DigestMismatch(f"chunk {index} of {self.manifest.shard} changed while it was read: read again")

    def close(self) -> None:
        """Let go of the slots."""
        self.link.notify({"k": "unpin", "pin": self.pin})


class ShardRanges:
    """Reads of one job through one link; `attempt` chooses among steps of one number, None leaves it to the lineage."""

    def __init__(self, link: RankLink, job: str, timeout_s: float = 600.0, attempt: int | None = None) -> None:
        self.link, self.job, self.timeout_s, self.attempt = link, job, timeout_s, attempt

    def ask(
        self, step: int | None, rank: int, ranges: Iterable[Range] = (), chunk_bytes: int = 1
    ) -> Future[dict[str, Any]]:
        """Begin to bring ranges of a shard of `chunk_bytes` here; `open` waits for them. No ranges: its manifest."""
        body: dict[str, Any] = {"job": self.job, "step": step, "rank": rank}
        body |= {"chunks": chunk_runs(ranges, chunk_bytes), "of_attempt": self.attempt}
        return self.link.call_soon("read", body)

    def open(self, asked: Future[dict[str, Any]]) -> OpenRanges:
        """Wait for what was asked for.

        Raises:
            RecoveryError: the step or the rank is not there, or some chunk has no good copy.
            PeerTimeout: it took too long.
        """
        try:
            answer = asked.result(self.timeout_s)
        except FutureTimeout:
            if asked.done():
                raise
            self.link.forget_call(asked)
            raise PeerTimeout(
                f"chunks of job {self.job!r} were not brought here within {self.timeout_s:g} s: see `memstore status`, "
                "or raise timeout_s", operation="read", limit_s=self.timeout_s,
            ) from None  # fmt: skip
        manifest = decode_manifest(bytes(answer["manifest"]))
        views = {
            index: self.link.view(int(slot), manifest.chunks[index].nbytes)
            for index, slot in enumerate(answer["slots"])
            if slot is not None
        }
        return OpenRanges(manifest, int(answer["step"]), int(answer["attempt"]), views, int(answer["pin"]), self.link)
