"""Ranges of the stream of any rank's shard, without bringing the whole shard here (R7, R27).

A reader asks for the chunks that its ranges lie in; the holder brings those, and only those (`partial_read.py`). The
bytes are copied out of the slots first and digested again after, chunk by chunk: a reader that was fenced or too slow
may have copied another owner's bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from typing import Any

import numpy as np

from memstore.core.format.layout import pieces
from memstore.core.format.manifest import Manifest, chunk_digest, decode_manifest
from memstore.errors import DigestMismatch, IntegrityError, PeerTimeout
from memstore.shell.arena.page_locks import PageHold
from memstore.shell.rank.holder_link import HolderLink
from memstore.shell.tensors.slot_stream import address_of, copy_bytes
from memstore.shell.threads.answers import answer_of
from recovery.inventory import ShardId

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
class Asked:
    """A read that is under way; opened or dropped in the end."""

    future: Future[dict[str, Any]]
    step: int | None
    attempt: int | None
    rank: int


@dataclass(frozen=True)
class OpenRanges:
    """Chunks of one shard, pinned for this process until `close`."""

    manifest: Manifest
    step: int
    attempt: int
    views: dict[int, memoryview]  # by chunk
    pin: int
    link: HolderLink
    hold: PageHold

    def copy(self, offset: int, address: int, nbytes: int) -> None:
        """Copy stream bytes to host memory, unverified. IntegrityError if they were not asked for."""
        if offset + nbytes > self.manifest.nbytes:  # the slot goes on behind it, with bytes that nothing digests
            raise IntegrityError(f"{self.manifest.shard} ends at {self.manifest.nbytes}, wanted {nbytes} from {offset}")
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
        """Digest every chunk that was copied from. DigestMismatch: the copied bytes are not those of the put."""
        for index, view in self.views.items():
            if chunk_digest(view) != self.manifest.chunks[index].digest:
                raise DigestMismatch(f"chunk {index} of {self.manifest.shard} changed while it was read: read again")

    def close(self) -> None:
        """Let go of the slots."""
        self.hold.close()
        self.link.notify({"k": "unpin", "pin": self.pin})


class ShardRanges:
    """Reads of one job through one link; `attempt` chooses among steps of one number, None leaves it to the lineage."""

    def __init__(self, link: HolderLink, job: str, timeout_s: float = 600.0, attempt: int | None = None) -> None:
        self.link, self.job, self.timeout_s, self.attempt = link, job, timeout_s, attempt

    def ask(
        self, step: int | None, rank: int, ranges: Iterable[Range] = (), chunk_bytes: int = 1, *,
        attempt: int | None = None,
    ) -> Asked:  # fmt: skip
        """Begin to bring ranges of a shard of `chunk_bytes` here; `open` waits for them. No ranges: its manifest.

        `attempt` names who put the step, where several lineages have one of that number; None: the one of all reads.
        """
        attempt = self.attempt if attempt is None else attempt
        body = {
            "job": self.job, "step": step, "rank": rank, "chunks": chunk_runs(ranges, chunk_bytes),
            "of_attempt": attempt,
        }  # fmt: skip
        return Asked(self.link.call_soon("read", body), step, attempt, rank)

    def open(self, asked: Asked) -> OpenRanges:
        """Wait for the chunks asked for.

        Raises:
            RecoveryError: the step or the rank is not there, or some chunk has no good copy.
            IntegrityError: another shard came than was asked for.
            PeerTimeout: it took too long.
        """
        try:
            answer = answer_of(asked.future, self.timeout_s)
        except FutureTimeout:
            if asked.future.done():
                raise
            self.drop(asked)
            look = self.link.commands("see `memstore status`")
            raise PeerTimeout(
                f"chunks of job {self.job!r} were not brought here within {self.timeout_s:g} s: {look}, "
                "or raise timeout_s", operation="read", limit_s=self.timeout_s,
            ) from None  # fmt: skip
        try:
            return self._opened(asked, answer)
        except BaseException:
            self.drop(asked)
            raise

    def _opened(self, asked: Asked, answer: dict[str, Any]) -> OpenRanges:
        manifest = decode_manifest(bytes(answer["manifest"]))
        shard, step, attempt = manifest.shard, int(answer["step"]), int(answer["attempt"])
        wanted = ShardId(
            self.job, attempt if asked.attempt is None else asked.attempt,
            step if asked.step is None else asked.step, asked.rank,
        )  # fmt: skip
        if shard != wanted:
            raise IntegrityError(f"asked for {wanted}, and {shard} came: read again")
        slots = {index: int(slot) for index, slot in enumerate(answer["slots"]) if slot is not None}
        hold = self.link.mapping.open().reading()
        hold.add(slots.values())
        views = {index: self.link.view(slot, manifest.chunks[index].nbytes) for index, slot in slots.items()}
        return OpenRanges(manifest, step, attempt, views, int(answer["pin"]), self.link, hold)

    def drop(self, asked: Asked) -> None:
        """Give back what it has brought here, or still brings: it is not opened any more."""
        self.link.forget_call(asked.future)
        asked.future.add_done_callback(self._give_back)

    def _give_back(self, future: Future[dict[str, Any]]) -> None:
        if future.exception() is None:
            self.link.notify({"k": "unpin", "pin": future.result()["pin"]})
