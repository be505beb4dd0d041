"""Reads of a shard whose slots may be lost meanwhile: copied chunk by chunk, each digested right after (R7, R26).

A chunk is copied and then digested in its slot, piece by piece: digesting while the piece is still in the cache adds
about 10 % to the copy; a separate pass would add 50 %. The digest after proves the copy. A chunk found bad is brought
again from another copy and copied again; only when none is good does the read fail.

A GPU copies chunks itself out of the slots, on a stream of its own, some flights of them at a time; each is digested
when the event behind its copy has come, on other threads, while the next are on their way: the same proof.

Chunks that come from other hosts are received straight to where they go, digested on the way.
"""

from __future__ import annotations

import ctypes
import os
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
import torch

from memstore.core.format.layout import batches, pieces
from memstore.core.format.manifest import Manifest, chunk_digest, chunk_hasher
from memstore.errors import DigestMismatch, FencedError, IntegrityError, MemstoreError, StepDropped
from memstore.shell.device.side_stream import (
    FLIGHT_BYTES,
    FLIGHTS_MAX,
    Arrival,
    Piece,
    SideStream,
    copy_in,
    has_streams,
)
from memstore.shell.native import extension, loops
from memstore.shell.tensors.slot_stream import MOVE_BYTES, THREADS_MAX, address_of, in_threads
from memstore.shell.threads import ProgressLog

BUFFERED_BYTES = 16 << 20  # of each connection, in one call, if some chunks go to a device: these are buffered
REPAIR_TRIES = 3  # in which no chunk comes: the first may only show that this host's copy is bad, the next avoids it

Move = tuple[int, int, int]  # target address, first byte in the chunk, nbytes
DeviceMove = tuple[torch.Tensor, int, int, int]  # flat device memory, first byte in it and in the chunk, nbytes
Views = list[tuple[int, memoryview]]  # of chunks, by index


class Copies(NamedTuple):
    """The planned copies out of each chunk."""

    host: dict[int, list[Move]]
    device: dict[int, list[DeviceMove]]


class Target(NamedTuple):
    """Where the bytes of a chunk are received, in their order, and what is to be done once they are there and right."""

    views: Sequence[memoryview]
    finish: Callable[[], object]


class Targets(NamedTuple):
    """Where chunks are received."""

    of: Callable[[int, int], Target]  # of a chunk (index, nbytes); called in the thread that receives it
    call_bytes: int  # received in one call at most


class ChunkSource(Protocol):
    """Chunks of one shard on this host, unverified."""

    def take(self, wanted: Sequence[int]) -> Views:
        """Wait until the chunks are here; return each, one that is not as an empty view."""

    def remote(self, wanted: Sequence[int]) -> list[int]:
        """Return those of the chunks that `fetching` brings, and `take` does not."""

    def fetching(self, indices: Sequence[int], targets: Targets) -> AbstractContextManager[Callable[[], list[int]]]:
        """Receive chunks in other threads; the given function waits, and returns those that are not there."""

    def pin(self, views: Views, device: int) -> None:
        """Register the slots of taken chunks with a CUDA device; not called in a thread that computes."""

    def repair(self, wanted: Sequence[int], use: Callable[[Mapping[int, memoryview]], None]) -> None:
        """Bring chunks again, from copies that were digested, and pass them to `use`."""


class CheckedStream:
    """One shard's stream. Reads are planned; `settle` makes them. Used by one thread."""

    def __init__(self, manifest: Manifest, source: ChunkSource) -> None:
        self._manifest, self._source, shard = manifest, source, manifest.shard
        self._log = ProgressLog(f"{shard.job} rank {shard.rank}: copying step {shard.step} out", manifest.nbytes)
        self._copies = Copies({}, {})  # planned
        self._private: dict[int, bytes] = {}  # verified copies of the few chunks that plain objects lie in
        self.repaired: set[int] = set()  # chunks that were damaged or did not come, and were brought again
        self.has_written = False

    def read(self, offset: int, address: int, nbytes: int) -> None:
        """Plan a copy to host memory: its bytes are there, and verified, once `settle` has returned.

        IntegrityError if the stream ends before: the slot's bytes behind the shard's end are covered by no digest.
        """
        if offset + nbytes > self._manifest.nbytes:
            shard, end = self._manifest.shard, self._manifest.nbytes
            raise IntegrityError(f"{shard} ends at {end}, wanted {nbytes} bytes from {offset}")
        for chunk, start, done, size in pieces(offset, nbytes, self._manifest.chunk_bytes):
            self._copies.host.setdefault(chunk, []).append((address + done, start, size))

    def read_later(self, offset: int, nbytes: int) -> bytearray:
        """Plan a copy to memory of its own, likewise, and return that."""
        data = bytearray(nbytes)
        if nbytes:
            self.read(offset, address_of(np.frombuffer(data, np.uint8)), nbytes)
        return data

    def read_to(self, offset: int, target: torch.Tensor) -> bool:
        """Plan a copy to flat uint8 device memory, likewise; False if its device has no streams."""
        if not has_streams(target.device):
            return False
        for chunk, start, done, size in pieces(offset, target.numel(), self._manifest.chunk_bytes):
            self._copies.device.setdefault(chunk, []).append((target, done, start, size))
        return True

    def read_bytes(self, offset: int, nbytes: int) -> bytes:
        """Return verified stream bytes now."""
        parts = pieces(offset, nbytes, self._manifest.chunk_bytes)
        return b"".join(self._own(chunk)[start : start + size] for chunk, start, _, size in parts)

    def alias(self, offset: int, nbytes: int) -> torch.Tensor | None:
        """Return None: slots that were not verified must not be read."""
        return None

    def settle(self) -> None:
        """Make every planned copy and verify every chunk that it came from.

        Raises:
            DigestMismatch: Some chunk is bad in every copy there is; what was read is unusable.
            StepDropped: Newer commits took the step's room while it was read.
            MemstoreError: From the source, if chunks do not come.
        """
        copies, self._copies = self._copies, Copies({}, {})
        self._copy(copies, is_target=True)

    def _own(self, chunk: int) -> bytes:
        """Return a verified copy of one chunk."""
        if chunk not in self._private:
            data = np.empty(self._manifest.chunks[chunk].nbytes, np.uint8)
            self._copy(Copies({chunk: [(address_of(data), 0, data.size)]}, {}))
            self._private[chunk] = data.tobytes()
        return self._private[chunk]

    def _copy(self, copies: Copies, *, is_target: bool = False) -> None:
        left, bad = dict.fromkeys([*copies.host, *copies.device]), []
        streams: dict[torch.device, SideStream] = {}
        remote = self._source.remote(list(left))
        if remote:
            self.has_written |= is_target
            left = {index: None for index in left if index not in set(remote)}
            # here, not in the threads that receive: a side stream begins behind this thread's stream
            open_streams((move[0].device for index in remote for move in copies.device.get(index, ())), streams)
        # For digests of what devices copy by themselves: torchrun leaves torch only one thread.
        threads_count = min(os.cpu_count() or 1, THREADS_MAX)
        call_bytes = BUFFERED_BYTES if copies.device else self._manifest.nbytes
        targets = Targets(partial(self._target, copies, streams), call_bytes)
        with (
            self._source.fetching(remote, targets) as fetched,
            ThreadPoolExecutor(threads_count, thread_name_prefix="memstore-copy") as workers,  # starts them on demand
        ):
            if left:
                views = self._source.take(list(left))
                self.has_written |= is_target
                bad += self._copy_to_devices([v for v in views if v[0] in copies.device], copies, streams, workers)
                views = [v for v in views if v[0] not in copies.device]
                bad += self._copy_to_host(views, copies)
            bad += fetched()
        if bad:
            self._repair(sorted(bad), copies)

    def _target(self, copies: Copies, streams: dict[torch.device, SideStream], index: int, nbytes: int) -> Target:
        """Return where a chunk's bytes are received: where they go, or a buffer if some go to a device, or twice."""
        moves = sorted(copies.host.get(index, ()), key=lambda move: move[1])
        parts = segments(moves, nbytes) if index not in copies.device else None
        if parts is not None:
            return Target([_view_at(address, size) for address, size in parts], partial(self._log.add, nbytes))
        buffer = np.empty(nbytes, np.uint8)
        view = buffer.data.cast("B")

        def spread() -> None:
            for target, start, size in moves:
                ctypes.memmove(target, address_of(buffer) + start, size)
            for arrival in order_chunks([(index, view)], copies.device, streams):
                arrival.wait()
            self._log.add(nbytes)

        return Target([view], spread)

    def _copy_to_host(self, views: Views, copies: Copies) -> list[int]:
        """Copy chunks to host memory, on several threads if there is enough to do; return the bad ones."""
        view_of, bad = dict(views), list[int]()

        def work(block: Sequence[tuple[int, int, int]]) -> None:
            bad.extend(self._copy_job([(index, view_of[index]) for index, _, _ in block], copies))

        in_threads([(index, 0, view.nbytes) for index, view in views], work)  # which go by the bytes alone
        return bad

    def _copy_job(self, views: Views, copies: Copies) -> list[int]:
        """Copy chunks to host memory; return those whose digest was wrong afterwards."""
        is_large, bad = self._manifest.nbytes >= loops.LARGE_BYTES, list[int]()
        for index, view in views:
            if not copy_chunk(view, copies.host.get(index, ()), self._digest(index), is_large):
                bad.append(index)
            self._log.add(view.nbytes)
        return bad

    def _copy_to_devices(
        self, views: Views, copies: Copies, streams: dict[torch.device, SideStream], workers: ThreadPoolExecutor
    ) -> list[int]:
        """Have devices copy chunks, and digest each flight once it has arrived; return the bad ones."""
        under_way: deque[tuple[list[Arrival], Views]] = deque()
        jobs: list[Future[list[int]]] = []

        def land() -> None:
            arrivals, flight = under_way.popleft()
            for arrival in arrivals:
                arrival.wait()
            jobs.append(workers.submit(self._copy_job, flight, copies))

        try:
            for flight in batches(views, lambda item: item[1].nbytes, FLIGHT_BYTES):
                for index in {move[0].device.index for i, _ in flight for move in copies.device[i] if move[0].is_cuda}:
                    workers.submit(self._source.pin, flight, index).result()
                if len(under_way) == FLIGHTS_MAX:
                    land()
                under_way.append((order_chunks(flight, copies.device, streams), flight))
        finally:
            while under_way:
                land()
        return [index for job in jobs for index in job.result()]

    def _digest(self, index: int) -> bytes:
        return self._manifest.chunks[index].digest

    def _repair(self, bad: list[int], copies: Copies) -> None:
        left = set(bad)

        def use(views: Mapping[int, memoryview]) -> None:
            for index in sorted(left & set(views)):
                for arrival in order_chunks([(index, views[index])], copies.device, {}):
                    arrival.wait()
                if copy_chunk(views[index], copies.host.get(index, ()), self._digest(index)):
                    left.discard(index)

        problem: MemstoreError | None = None
        tries = 0
        while left:
            if tries == REPAIR_TRIES:
                raise DigestMismatch(
                    f"chunks {sorted(left)[:10]} of {self._manifest.shard} were damaged or did not come, and no good "
                    f"copy was found{f': {problem}' if problem else ''}"
                ) from problem
            count = len(left)
            try:
                self._source.repair(sorted(left), use)
            except (StepDropped, FencedError):
                raise
            except MemstoreError as exc:
                problem = exc
            tries = tries + 1 if len(left) == count else 0
        self.repaired.update(bad)


def segments(moves: Sequence[Move], nbytes: int) -> list[tuple[int | None, int]] | None:
    """Return where the bytes of a chunk go, in order: (address, or None for nowhere, nbytes); None if some go twice.

    >>> segments([(1000, 4, 2), (2000, 6, 1)], 8)
    [(None, 4), (1000, 2), (2000, 1), (None, 1)]
    """
    found: list[tuple[int | None, int]] = []
    done = 0
    for target, start, size in moves:
        if start < done:
            return None
        found += [(None, start - done)] * (start > done) + [(target, size)]
        done = start + size
    return found + [(None, nbytes - done)] * (nbytes > done)


def _view_at(address: int | None, nbytes: int) -> memoryview:
    """Return memory of the reader, or a view that is received into and forgotten."""
    if address is None:
        return memoryview(bytearray(nbytes))
    return memoryview((ctypes.c_ubyte * nbytes).from_address(address)).cast("B")


def open_streams(devices: Iterable[torch.device], streams: dict[torch.device, SideStream]) -> None:
    """Open a side stream for each device that has none."""
    for device in devices:
        if device not in streams:
            streams[device] = SideStream(device)


def order_chunks(
    flight: Views, moves: Mapping[int, list[DeviceMove]], streams: dict[torch.device, SideStream]
) -> list[Arrival]:
    """Have devices copy parts of chunks out of the slots; return an arrival for each device."""
    copies: dict[torch.device, list[Piece]] = {}
    for index, view in flight:
        for target, first, start, nbytes in moves.get(index, ()) if view.nbytes else ():
            address = address_of(np.frombuffer(view, np.uint8)) + start
            copies.setdefault(target.device, []).append((target, address, first, nbytes))
    open_streams(copies, streams)
    return [streams[device].order(pieces_of, copy_in) for device, pieces_of in copies.items()]


def copy_chunk(view: memoryview, moves: Sequence[Move], digest: bytes, is_large: bool = False) -> bool:
    """Copy parts of a chunk, of a large read or of another; return whether it had this digest after the copy."""
    if not view.nbytes:  # lost after it was staged
        return False
    address = address_of(np.frombuffer(view, np.uint8))
    in_order = sorted(moves, key=lambda move: move[1])
    if extension.is_there():
        table = [(target, address + start, nbytes) for target, start, nbytes in in_order]
        return loops.get_chunk(address, view.nbytes, table, is_large=is_large) == digest
    memmove, hasher, done, is_proved = ctypes.memmove, chunk_hasher(), 0, True
    for target, start, nbytes in in_order:
        is_proved &= start >= done  # else these bytes were digested before this copy of them
        for at in range(0, nbytes, MOVE_BYTES):
            end = start + min(at + MOVE_BYTES, nbytes)
            memmove(target + at, address + start + at, end - start - at)
            if end - done >= MOVE_BYTES:
                hasher.update(view[done:end])
                done = end
    hasher.update(view[done:])
    return (hasher.digest() if is_proved else chunk_digest(view)) == digest
