"""Copies out of device memory: in order, in bounded flights, each byte in its place (R11)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from memstore.shell.codec.decode import decode_state
from memstore.shell.codec.encode import copy_into, plan_state
from memstore.shell.device import side_stream
from memstore.shell.device.side_stream import FLIGHTS_MAX, DeviceWrite, flights, order_all

CHUNK_BYTES = 256


@given(st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=5), max_size=6), st.integers(1, 40))
def test_flights_keep_the_order_and_the_limit(sizes: list[list[int]], limit: int) -> None:
    """Every piece once, none beside others beyond the limit, and no flight that the next piece would have fitted in."""
    writes = [
        DeviceWrite(torch.empty(0), tuple((address, 0, nbytes) for address, nbytes in enumerate(group)))
        for group in sizes
    ]
    made = list(flights(writes, limit))
    assert [piece[1:] for flight in made for piece in flight] == [piece for write in writes for piece in write.pieces]
    totals = [sum(piece[3] for piece in flight) for flight in made]
    assert all(total <= limit or len(flight) == 1 for total, flight in zip(totals, made, strict=True))
    assert all(total + after[0][3] > limit for total, after in zip(totals, made[1:], strict=False))


def _write(source: torch.Tensor, target: torch.Tensor, piece_bytes: int) -> DeviceWrite:
    starts = range(0, source.numel(), piece_bytes)
    return DeviceWrite(
        source,
        tuple((target.data_ptr() + at, at, min(piece_bytes, source.numel() - at)) for at in starts),
    )


@pytest.mark.parametrize("has_streams", [True, False])
def test_every_byte_arrives_in_its_place(monkeypatch: pytest.MonkeyPatch, has_streams: bool) -> None:
    """On torch's own cpu device, which has streams and events by name, and on one whose module has none."""
    monkeypatch.setattr(side_stream, "flights", lambda writes: flights(writes, 100))
    if not has_streams:
        monkeypatch.setattr(torch, "get_device_module", lambda device: object())
    sources = [torch.randint(0, 255, (size,), dtype=torch.uint8) for size in (1000, 7, 333)]
    targets = [torch.zeros_like(source) for source in sources]
    ordered = order_all([_write(s, t, 64) for s, t in zip(sources, targets, strict=True)])
    ordered.wait()
    assert len(ordered.arrivals) == (FLIGHTS_MAX if has_streams else 0)
    assert all(torch.equal(s, t) for s, t in zip(sources, targets, strict=True))


def test_no_more_than_two_flights_are_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """The third is ordered when the first has arrived; the side stream begins behind the current one."""
    waits: list[str] = []

    class Event(torch.cpu.Event):
        def __init__(self) -> None:
            super().__init__()
            self.number = sum(line.startswith("event") for line in waits)
            waits.append(f"event {self.number}")

        def synchronize(self) -> None:
            waits.append(f"wait {self.number}")

    class Stream(torch.cpu.Stream):
        def wait_stream(self, stream: Any) -> None:
            waits.append("behind the current stream")

    monkeypatch.setattr(torch.cpu, "Event", Event)
    monkeypatch.setattr(torch.cpu, "Stream", Stream)
    monkeypatch.setattr(side_stream, "flights", lambda writes: flights(writes, 64))
    source = torch.arange(255, dtype=torch.uint8)
    target = torch.zeros_like(source)
    order_all([_write(source, target, 64)]).wait()
    assert torch.equal(source, target)
    assert waits == [
        "behind the current stream", "event 0", "event 1", "wait 0", "event 2", "wait 1", "event 3", "wait 2", "wait 3",
    ]  # fmt: skip


def test_what_was_ordered_is_waited_for_when_a_later_copy_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller gives the slots back: of the flight that failed as well a part may be under way."""
    waits: list[str] = []

    class Event(torch.cpu.Event):
        def __init__(self) -> None:
            super().__init__()
            waits.append("event")

        def synchronize(self) -> None:
            waits.append("wait")

    def copy(piece: Any) -> None:
        if "event" in waits:
            raise KeyboardInterrupt

    monkeypatch.setattr(torch.cpu, "Event", Event)
    monkeypatch.setattr(side_stream, "flights", lambda writes: flights(writes, 64))
    monkeypatch.setattr(side_stream, "copy_out", copy)
    source = torch.arange(255, dtype=torch.uint8)
    with pytest.raises(KeyboardInterrupt):
        order_all([_write(source, torch.zeros_like(source), 64)])
    assert waits == ["event", "event", "wait"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_a_state_on_a_gpu_comes_back_bit_for_bit() -> None:
    """Queued work on the current stream is part of what is copied."""
    weight = torch.rand(1000, 1000, device="cuda")
    for _ in range(50):
        weight.mul_(1.01)
    state = {"w": weight, "t": weight.t(), "part": weight[:, 3]}
    plan = plan_state(state)
    views = [memoryview(bytearray(CHUNK_BYTES)) for _ in range(-(-plan.nbytes // CHUNK_BYTES))]
    copy_into(plan, views, CHUNK_BYTES)
    got = decode_state(plan.layout, views, CHUNK_BYTES)
    assert all(torch.equal(got[name], state[name]) for name in state)
