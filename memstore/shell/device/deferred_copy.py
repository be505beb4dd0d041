"""Memory moves that are made while training goes on, and the detection of changes to their sources (R11).

A tensor's version counter is raised by every in-place operation that autograd sees, but only when the operation is
done, and not at all by fused optimizers (torch 2.13), by writes through `.data` or through numpy. So host memory is
digested before the put returns, and each piece of the copy after it was made: equal digests say that the slot holds
the bytes of the put. The first digest costs half of a plain copy, the second a tenth (D153).

A source that is not compared whole is checked by counters, and in host memory by a cache line in every MiB, from the
first on. Device memory is checked by counters and storage alone: comparing would cost a copy and a wait. A counter
rises when the operation is queued, so changes that autograd sees are found, and others are missed.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import xxhash

from memstore.shell.device.deferred_device_copy import DeferredDeviceCopies
from memstore.shell.native.copy_loops import Move
from memstore.shell.tensors.own_memory import copy_own
from memstore.shell.tensors.slot_stream import in_threads
from memstore.shell.threads.safe_condition import SafeEvent, is_of_handler

# A move keeps a core, and its waiting callers, for up to 1.6 ms; after each the thread asks for the GIL again, which a
# Python loop gives up every 5 ms.
MOVE_BYTES = 16 << 20
SAMPLE_EVERY_BYTES = 1 << 20  # half a millisecond a GiB
SAMPLE_BYTES = 64  # a cache line: as cheap to read as one of its bytes


@dataclass(slots=True)
class WatchedSource:
    """Memory of one tensor between put and fence; keeps it alive even if the tensor gets other memory.

    Args:
        tensors: The tensors whose version counters a write raises: the tensor, and for a DTensor its local part.
        storage: Its memory.
        is_whole: Its copy is compared with all that was there at the put; else counters tell, and samples of host
            memory.
    """

    tensors: tuple[torch.Tensor, ...]
    storage: torch.UntypedStorage
    is_whole: bool = True
    _versions: list[int] = field(init=False)
    _storage_address: int = field(init=False)

    def __post_init__(self) -> None:
        self._versions = [tensor._version for tensor in self.tensors]
        self._storage_address = self.storage.data_ptr()

    def is_there(self) -> bool:
        """Return whether the memory was neither freed nor moved by a resize of its storage."""
        return self.storage.data_ptr() == self._storage_address

    def is_counted_change(self) -> bool:
        """Return whether a counter shows a change, or the memory is gone, for sources checked by counters."""
        if self.is_whole:
            return False  # the slot holds the put's bytes, or the copy has failed by now
        return not self.is_there() or self._versions != [tensor._version for tensor in self.tensors]


def in_pieces(moves: Iterable[Move], limit_bytes: int = MOVE_BYTES) -> Iterator[Move]:
    """Join moves that are adjacent on both sides, and cut those longer than `limit_bytes`.

    >>> list(in_pieces([(0, 100, 4), (4, 104, 4), (20, 108, 9)], 8))
    [(0, 100, 8), (20, 108, 8), (28, 116, 1)]
    """
    target = source = waiting = 0
    for to, at, nbytes in moves:
        if waiting and (to != target + waiting or at != source + waiting):
            yield target, source, waiting
            waiting = 0
        if not waiting:
            target, source = to, at
        waiting += nbytes
        while waiting >= limit_bytes:
            yield target, source, limit_bytes
            target, source, waiting = target + limit_bytes, source + limit_bytes, waiting - limit_bytes
    if waiting:
        yield target, source, waiting


def digest_of(address: int, nbytes: int, *, is_whole: bool) -> bytes:
    """Digest host memory, all of it or its samples."""
    memory: Any = (ctypes.c_uint8 * nbytes).from_address(address)
    if not is_whole and nbytes > SAMPLE_BYTES:
        count = (nbytes - SAMPLE_BYTES) // SAMPLE_EVERY_BYTES + 1
        lines: np.ndarray = np.ndarray((count, SAMPLE_BYTES), np.uint8, memory, 0, (SAMPLE_EVERY_BYTES, 1))
        memory = lines.tobytes()
    return xxhash.xxh3_128_digest(memory)


class DeferredCopy:
    """The late moves of one put. Any number of threads call `work`; the thread that makes the last move ends it, once.

        host moves made --device copies in the slots--> ended
          '--a fence ordered the device copies: released, so what changes from now on is not looked at

    Host memory is digested when it is made: nothing may write to it until then.

    Args:
        sources: The sources of the copy, each with its moves; device memory has none.
        flights: The copies of device memory, if there is any.
        keep: Kept alive until the end: the slots' views.
        is_wanted: Called before every move; False ends the copy.
        on_end: Called once, with "" if all was copied and nothing has changed, else with the reason.
        name_of: Names a source for people, by its number.
    """

    def __init__(
        self, sources: Sequence[tuple[WatchedSource, Sequence[Move]]], *, keep: object, is_wanted: Callable[[], bool],
        on_end: Callable[[str], None], name_of: Callable[[int], str], flights: DeferredDeviceCopies | None = None,
    ) -> None:  # fmt: skip
        self._sources = [source for source, _ in sources]
        self._moves = deque((number, move) for number, (_, moves) in enumerate(sources) for move in in_pieces(moves))
        self._keep, self._is_wanted, self._on_end, self._name_of = keep, is_wanted, on_end, name_of
        self._digests = self._digested()
        self.flights = flights
        self._moves_count = len(self._moves)
        # A signal's handler may raise anywhere. So a move counts only once it is recorded here, and a
        # thread enters the busy set before it takes one, until it is done; each in one step of a deque, a set, a list.
        self._made: list[int] = []
        self._busy: set[object] = set()
        self._is_device_done = flights is None
        self._is_ending = self._is_over = self._is_released = False
        self._problem = ""
        self._one_end = threading.RLock()
        self._judging = threading.RLock()  # a signal's handler may wait for the end
        self._verdict: str | None = None  # name of the changed source, "" for none; None: not checked yet
        self.moved = SafeEvent()  # set when host memory is copied
        self.ended = SafeEvent()  # set when on_end has returned

    @property
    def nbytes_left(self) -> int:
        """Return the bytes that no thread has begun to copy."""
        return sum(nbytes for _, (_, _, nbytes) in list(self._moves))

    def work(self, deadline_s: float = float("inf")) -> None:
        """Make moves until none is left or the deadline (monotonic) passes; ends the copy after the last."""
        try:
            while self._make_one() and time.monotonic() <= deadline_s:
                pass
        except BaseException as exc:  # Ctrl-C, a signal's handler: how far this move came is unknown
            self.stop(f"a move was interrupted: {exc!r}")
            raise
        self._end_if_over()

    def _make_one(self) -> bool:
        """Make a move; False if none was left."""
        me = object()
        try:
            self._busy.add(me)
            try:
                number, move = self._moves.popleft()
            except IndexError:
                return False
            problem = self._make(number, move)
            if not problem:
                self._made.append(number)
        finally:
            self._busy.discard(me)
        if problem:
            self.stop(problem)
        return True

    def work_device(self) -> None:
        """Order the device's copies and wait until they have arrived."""
        if self.flights is not None and not self.ended.is_set():
            try:
                if not self._is_wanted():
                    self.stop("it was given up while it was copied")
                self.flights.work()
            except Exception as exc:
                self.stop(f"device memory could not be copied: {exc}")
                if is_of_handler(exc):
                    with contextlib.suppress(RuntimeError):
                        self.flights.work()  # ordered copies still write
                    self._is_device_done = True
                    self._end_if_over()
                    raise
            self._is_device_done = True
        self._end_if_over()

    def stop(self, why: str) -> None:
        """Make no further move. A thread in the middle of one finishes it, and then ends the copy."""
        self._problem = self._problem or why  # first: a thread that finds nothing left must find the reason
        self._moves.clear()
        if self.flights is not None and self.flights.drop():
            self._is_device_done = True
        self._end_if_over()

    def release(self) -> str:
        """Let sources be written from now on, once host memory is copied and the rest is ordered.

        A change that shows now fails the put at its end; returned is the name of a source whose counter shows a change
        that the end did not see, or "". A microsecond a source; "" the second time.
        """
        if self._is_released:
            return ""
        self._is_released = True
        problem = self._judged()
        if problem:
            self.stop(problem)
            return ""
        return self._counted_change()

    def _counted_change(self) -> str:
        return next((self._name_of(n) for n, s in enumerate(self._sources) if s.is_counted_change()), "")

    def _make(self, number: int, move: Move) -> str:
        target, at, nbytes = move
        source = self._sources[number]
        if not self._is_wanted():
            return "it was given up while it was copied"
        if not source.is_there() or not copy_own(target, at, nbytes):
            return f"the memory of {self._name_of(number)} was freed or resized before the fence"
        if digest_of(target, nbytes, is_whole=source.is_whole) != self._digests[move]:
            return changed_message(self._name_of(number))
        return ""

    def _digested(self) -> dict[Move, bytes]:
        """Digest the bytes to be moved, with as many threads as a copy of them would take."""
        digests: dict[Move, bytes] = {}
        is_whole = {move: self._sources[number].is_whole for number, move in self._moves}

        def digest(moves: Sequence[Move]) -> None:
            for move in moves:
                digests[move] = digest_of(*move[1:], is_whole=is_whole[move])

        in_threads([move for _, move in self._moves], digest)
        return digests

    def _end_if_over(self) -> None:
        if self._moves or self._busy:  # in this order: the thread that took the last move is busy by then
            return
        self.moved.set()
        if not self._is_device_done:
            return
        with self._one_end:
            if not self._is_ending:
                self._judged()  # first: if a signal's handler raises in it, the next call ends the copy
            if not self._is_ending:
                self._is_ending = True
                try:
                    if len(self._made) < self._moves_count:
                        self._problem = self._problem or "a move was interrupted"
                    self._on_end(self._problem or self._judged())
                finally:
                    self._is_over = True
            if self._is_over:  # else a signal's handler asks in the middle of on_end
                self.ended.set()

    def _judged(self) -> str:
        """Check once for changes: at the end, or at the fence if that comes first."""
        with self._judging:
            if self._verdict is None:
                try:
                    name = next((self._name_of(n) for n, s in enumerate(self._sources) if s.is_counted_change()), "")
                    self._verdict = name and changed_message(name)
                except Exception as exc:  # a state that may mix two moments is not submitted
                    self._verdict = f"its sources could not be compared: {exc!r}"
                    if is_of_handler(exc):
                        raise
            return self._verdict


def changed_message(name: str) -> str:
    """Return the error text for a tensor that was written to too early."""
    return f"{name} was changed before the fence: change what is put with overlap= only behind store.wait_before_step()"
