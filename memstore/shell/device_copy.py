"""Copies from device tensors into host memory: on a stream beside training's, bounded in flight (R11).

The side stream waits for what training's stream has been given so far, and the host for the side stream's events alone:
other streams of the device go on. Where a device's module has no streams the copies are plain ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from memstore.shell.slot_stream import tensor_at

FLIGHT_BYTES = 256 << 20  # ordered between two events; one more flight may be under way
FLIGHTS_MAX = 2


class DeviceWrite(NamedTuple):
    """One-dimensional uint8 device memory and the host addresses of its pieces: (address, start, nbytes)."""

    source: torch.Tensor
    pieces: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class Ordered:
    """Copies under way; keeps their sources until they have arrived."""

    events: Sequence[Any]
    writes: Sequence[DeviceWrite]

    def wait(self) -> None:
        """Return when all bytes are in host memory."""
        for event in self.events:
            event.synchronize()


def flights(
    writes: Iterable[DeviceWrite], limit_bytes: int = FLIGHT_BYTES
) -> Iterator[list[tuple[torch.Tensor, int, int, int]]]:
    """Yield the pieces (source, address, start, nbytes) in order, at most `limit_bytes` together or one alone."""
    flight: list[tuple[torch.Tensor, int, int, int]] = []
    total = 0
    for source, pieces in writes:
        for address, start, nbytes in pieces:
            if flight and total + nbytes > limit_bytes:
                yield flight
                flight, total = [], 0
            flight.append((source, address, start, nbytes))
            total += nbytes
    if flight:
        yield flight


def order_all(writes: Sequence[DeviceWrite]) -> Ordered:
    """Order the copies behind what the current streams have been given; wait() on the result ends them.

    Blocks for all but the last `FLIGHTS_MAX` flights of each device.
    """
    last: list[Any] = []
    for device in dict.fromkeys(write.source.device for write in writes):
        module = torch.get_device_module(device)
        mine = [write for write in writes if write.source.device == device]
        try:
            if hasattr(module, "Stream"):
                last += _order(module, device, mine)
            else:
                for flight in flights(mine):
                    _copy(flight)
        except BaseException:
            Ordered(last, writes).wait()  # of the devices before
            raise
    return Ordered(last, writes)


def _order(module: Any, device: torch.device, writes: Sequence[DeviceWrite]) -> list[Any]:
    side = module.Stream(device)
    side.wait_stream(module.current_stream(device))
    events: list[Any] = []
    try:
        with module.stream(side):
            for flight in flights(writes):
                if len(events) == FLIGHTS_MAX:
                    events.pop(0).synchronize()
                _copy(flight)
                # blocking: the host sleeps until the event instead of spinning on a core that training may want.
                event = module.Event(blocking=True) if device.type == "cuda" else module.Event()
                event.record(side)
                events.append(event)
    except BaseException:
        last = module.Event()
        last.record(side)
        last.synchronize()  # the caller gives the slots back: nothing that was ordered may still be written
        raise
    if device.type == "cuda":
        for write in writes:
            write.source.record_stream(side)  # should the caller fail before it waits
    return events


def _copy(flight: Iterable[tuple[torch.Tensor, int, int, int]]) -> None:
    for source, address, start, nbytes in flight:
        tensor_at(address, nbytes).copy_(source[start : start + nbytes], non_blocking=True)
