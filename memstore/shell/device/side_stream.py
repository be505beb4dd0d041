"""Copies between device tensors and host memory, on a stream beside training's, with bounded flights (R11).

A side stream waits for what training's stream has been given so far, and the host for the side stream's events alone:
other streams of the device go on. Where a device's module has no streams the copies are plain ones. A piece lies in one
slot, so within one range of registered memory (`pinned_slots`): CUDA refuses a copy across two of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import torch

from memstore.core.format.layout import batches
from memstore.shell.tensors.slot_stream import tensor_at

# Ordered between two events; one more flight may be under way. A copy of another stream, such as the number that
# `.item()` asks for, stands behind both: 5 ms at 25 GB/s.
FLIGHT_BYTES = 64 << 20
FLIGHTS_MAX = 2

Piece = tuple[torch.Tensor, int, int, int]  # flat uint8 device memory, host address, first byte in the memory, nbytes


class DeviceWrite(NamedTuple):
    """One-dimensional uint8 device memory and the host addresses of its pieces: (address, start, nbytes)."""

    source: torch.Tensor
    pieces: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class Ordered:
    """Copies under way; keeps their sources until they have arrived."""

    arrivals: Sequence[Arrival]
    writes: Sequence[DeviceWrite]

    def wait(self) -> None:
        """Return when all bytes are in host memory."""
        for arrival in self.arrivals:
            arrival.wait()


class SideStream:
    """A stream of one device beside the computing ones. Made in the computing thread: it begins behind its stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._module: Any = torch.get_device_module(device)
        self._stream = self._module.Stream(device)
        self._stream.wait_stream(self._module.current_stream(device))

    def order(self, flight: Iterable[Piece], copy: Callable[[Piece], None]) -> Arrival:
        """Order copies behind those ordered before, from any thread; return their end."""
        with self.on_device(), self._module.stream(self._stream):
            for piece in flight:
                if self.device.type == "cuda":
                    piece[0].record_stream(self._stream)  # should its owner free it before the end
                copy(piece)
        return self.mark()

    def mark(self) -> Arrival:
        """Return the arrival of all copies ordered so far."""
        # blocking: the host sleeps until the event instead of spinning on a core that training may want.
        event = self._module.Event(blocking=True) if self.device.type == "cuda" else self._module.Event()
        with self.on_device():
            event.record(self._stream)
        return Arrival(self, event)

    def on_device(self) -> AbstractContextManager[Any]:
        """Choose the device for this thread: otherwise it would get a context of 500 MB on device 0."""
        return self._module.device(self.device) if hasattr(self._module, "device") else nullcontext()

    def current(self) -> Any:
        """Return the stream that this thread gives its work."""
        return self._module.current_stream(self.device)


class Arrival(NamedTuple):
    """The end of the work queued on a stream so far. A wait for it raises the device's errors."""

    side: SideStream
    event: Any

    def wait(self) -> None:
        """Wait for it, in any thread."""
        with self.side.on_device():
            self.event.synchronize()

    def hold_current(self) -> None:
        """Make later work of this thread's current stream wait for it; the host does not wait."""
        self.side.current().wait_event(self.event)


def has_streams(device: torch.device) -> bool:
    """Return whether copies from and to this device can be ordered beside training's."""
    try:
        return hasattr(torch.get_device_module(device), "Stream")
    except RuntimeError:  # no such module: meta
        return False


def flights(writes: Iterable[DeviceWrite], limit_bytes: int = FLIGHT_BYTES) -> Iterator[list[Piece]]:
    """Return the pieces (source, address, start, nbytes) in order, at most `limit_bytes` together or one alone."""
    found = ((source, *piece) for source, pieces in writes for piece in pieces)
    return batches(found, lambda piece: piece[3], limit_bytes)


def by_device(writes: Sequence[DeviceWrite]) -> Iterator[tuple[torch.device, list[DeviceWrite]]]:
    """Yield every device with its writes."""
    for device in dict.fromkeys(write.source.device for write in writes):
        yield device, [write for write in writes if write.source.device == device]


def order_all(writes: Sequence[DeviceWrite]) -> Ordered:
    """Order the copies behind the current streams' work; wait() on the result ends them.

    Blocks for all but the last `FLIGHTS_MAX` flights of each device.
    """
    last: list[Arrival] = []
    for device, mine in by_device(writes):
        try:
            last += _order(device, mine)
        except BaseException:
            Ordered(last, writes).wait()  # of the devices before
            raise
    return Ordered(last, writes)


def _order(device: torch.device, writes: Sequence[DeviceWrite]) -> Sequence[Arrival]:
    if not has_streams(device):
        for piece in chain.from_iterable(flights(writes)):
            copy_out(piece)
        return ()
    side, under_way = SideStream(device), deque[Arrival]()
    try:
        for flight in flights(writes):
            if len(under_way) == FLIGHTS_MAX:
                under_way.popleft().wait()
            under_way.append(side.order(flight, copy_out))
    except BaseException:
        side.mark().wait()  # the caller gives the slots back: no ordered copy may still write to them
        raise
    return under_way


def copy_out(piece: Piece) -> None:
    """Order one copy into host memory on the current stream."""
    source, address, start, nbytes = piece
    tensor_at(address, nbytes).copy_(source[start : start + nbytes], non_blocking=True)


def copy_in(piece: Piece) -> None:
    """Order one copy out of host memory on the current stream."""
    target, address, start, nbytes = piece
    target[start : start + nbytes].copy_(tensor_at(address, nbytes), non_blocking=True)
