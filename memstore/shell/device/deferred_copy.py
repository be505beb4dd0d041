"""The device memory of one put, copied while training goes on, and the detection of changes to it (R11).

A tensor's version counter is raised by every in-place operation that autograd sees, when the operation is queued, and
not at all by fused optimizers (torch 2.13) and writes through `.data`. So changes that autograd sees are found, and
others are missed: to compare bytes would cost a copy and a wait.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from memstore.shell.device.side_stream import (
    FLIGHTS_MAX,
    Arrival,
    DeviceWrite,
    Piece,
    SideStream,
    by_device,
    copy_out,
    flights,
)
from memstore.shell.threads import SafeEvent

# -- deferred device copy -----------------------------------------------------------------------------
# Copies out of device memory that are ordered while training computes, a few at a time (R11).


class DeferredDeviceCopies:
    """The device copies of one put. Made by the thread that computes; any thread may order and wait."""

    def __init__(self, writes: Sequence[DeviceWrite]) -> None:
        self._lock = threading.Lock()
        self._left: deque[tuple[SideStream, list[Piece]]] = deque()
        self._under_way: deque[Arrival] = deque()
        self._problem: RuntimeError | None = None
        self._last: dict[SideStream, Arrival] = {}  # the newest of each stream: earlier ones arrive before it
        self._addresses = {id(write.source): write.source.data_ptr() for write in writes}
        for device, mine in by_device(writes):
            side = SideStream(device)
            self._left.extend((side, flight) for flight in flights(mine))

    def work(self) -> None:
        """Order the rest, `FLIGHTS_MAX` flights under way, and return when all ordered copies are in the slots.

        Raises:
            RuntimeError: The device's own errors, and memory that is gone. Copies ordered before are waited for.
        """
        while True:
            with self._lock:
                if self._left and len(self._under_way) < FLIGHTS_MAX:
                    self._order_next()
                    continue
                if not self._under_way:
                    break
                arrival = self._under_way[0]  # stays in the list: another thread must wait for it, too
            arrival.wait()
            with self._lock:
                if self._under_way and self._under_way[0] is arrival:
                    self._under_way.popleft()
        if self._problem is not None:
            raise self._problem

    def order_rest(self, deadline_s: float) -> bool:
        """Order everything that is left; False if the deadline (monotonic) passed before. `work` raises any failure."""
        while True:
            with self._lock:
                if not self._left:
                    return True
                self._order_next()
            if time.monotonic() > deadline_s:
                return False

    def hold_current(self) -> None:
        """Make this thread's current streams wait for the ordered copies; the host does not wait."""
        with self._lock:
            last = list(self._last.values())
        for arrival in last:
            arrival.hold_current()

    def drop(self) -> bool:
        """Order nothing more; return whether nothing is under way either."""
        with self._lock:
            self._left.clear()
            return not self._under_way

    def _order_next(self) -> None:
        side, flight = self._left[0]  # it stays there until it is ordered, or an interruption here would lose it
        try:
            if any(source.data_ptr() != self._addresses[id(source)] for source, *_ in flight):
                raise RuntimeError("memory was freed or resized before the fence")
            self._last[side] = side.order(flight, copy_out)
            self._under_way.append(self._last[side])
            self._left.popleft()
        except BaseException as exc:  # Ctrl-C as well: how far this flight came is unknown
            self._problem = RuntimeError(f"a flight was interrupted: {exc!r}")
            self._left.clear()
            with contextlib.suppress(RuntimeError):
                self._under_way.append(side.mark())  # its ordered copies still write
            if not isinstance(exc, RuntimeError):  # not the device's, whose error `work` raises
                raise


# -- deferred copy ------------------------------------------------------------------------------------


@dataclass(slots=True)
class WatchedSource:
    """Memory of one tensor between put and fence; keeps it alive even if the tensor gets other memory.

    Args:
        tensors: The tensors whose version counters a write raises: the tensor, and for a DTensor its local part.
        storage: Its memory.
    """

    tensors: tuple[torch.Tensor, ...]
    storage: torch.UntypedStorage
    _versions: list[int] = field(init=False)
    _storage_address: int = field(init=False)

    def __post_init__(self) -> None:
        self._versions = [tensor._version for tensor in self.tensors]
        self._storage_address = self.storage.data_ptr()

    def is_changed(self) -> bool:
        """Return whether a counter shows a change, or the memory was freed, or moved by a resize of its storage."""
        is_there = self.storage.data_ptr() == self._storage_address
        return not is_there or self._versions != [tensor._version for tensor in self.tensors]


class DeferredCopy:
    """The late copies of one put, which end once.

        flights ordered, arrived in the slots --> ended
          '--a fence ordered the rest: released, so what changes from now on is not looked at

    Args:
        sources: The sources of the copy.
        flights: Their copies.
        keep: Kept alive until the end: the slots' views.
        is_wanted: Called before the copies are ordered; False ends them.
        on_end: Called once, with "" if all was copied and nothing has changed, else with the reason.
        name_of: Names a source for people, by its number.
    """

    def __init__(
        self,
        sources: Sequence[WatchedSource],
        flights: DeferredDeviceCopies,
        *,
        keep: object,
        is_wanted: Callable[[], bool],
        on_end: Callable[[str], None],
        name_of: Callable[[int], str],
    ) -> None:
        self._sources, self.flights = sources, flights
        self._keep, self._is_wanted, self._on_end, self._name_of = keep, is_wanted, on_end, name_of
        self._is_arrived = self._is_ending = self._is_over = self._is_released = False
        self._problem = ""
        self._one_end = threading.RLock()
        self._judging = threading.RLock()  # a signal's handler may wait for the end
        self._verdict: str | None = None  # why the sources are not those of the put, "": they are; None: not checked
        self.ended = SafeEvent()  # set when on_end has returned

    def work(self) -> None:
        """Order the copies and wait until they have arrived."""
        try:
            if not self.ended.is_set():
                if not self._is_wanted():
                    self.stop("it was given up while it was copied")
                self.flights.work()
        except BaseException as exc:
            self.stop(f"device memory could not be copied: {exc}")
            with contextlib.suppress(RuntimeError):
                self.flights.work()  # ordered copies still write
            if not isinstance(exc, RuntimeError):  # not the device's
                raise
        finally:
            self._is_arrived = True
            self._end_if_over()

    def stop(self, why: str) -> None:
        """Order no further copy. A thread that waits for one under way ends the whole then."""
        self._problem = self._problem or why  # first: a thread that finds nothing left must find the reason
        if self.flights.drop():
            self._is_arrived = True
        self._end_if_over()

    def release(self) -> str:
        """Let sources be written from now on, once the rest is ordered.

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
        return self._changed()

    def _changed(self) -> str:
        return next((self._name_of(n) for n, source in enumerate(self._sources) if source.is_changed()), "")

    def _end_if_over(self) -> None:
        if not self._is_arrived:
            return
        with self._one_end:
            if not self._is_ending:
                self._judged()  # first: if a signal's handler raises in it, the next call ends the copy
            if not self._is_ending:
                self._is_ending = True
                try:
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
                    name = self._changed()
                    self._verdict = name and changed_message(name)
                except BaseException as exc:  # a state that may mix two moments is not submitted
                    self._verdict = f"its sources could not be compared: {exc!r}"
                    if not isinstance(exc, RuntimeError):  # not the device's
                        raise
            return self._verdict


def changed_message(name: str) -> str:
    """Return the error text for a tensor that was written to too early."""
    return f"{name} was changed before the fence: change what is put with overlap= only behind store.wait_before_step()"
