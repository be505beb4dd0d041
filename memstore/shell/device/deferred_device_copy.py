"""Copies out of device memory that are ordered while training computes, a few at a time (R11).

made at the put, behind training's stream --the copy thread, flight by flight--> ordered --event--> in the slots
a fence orders the rest, and makes the stream of the optimizer's step wait for it; the host waits for nothing
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Sequence

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
