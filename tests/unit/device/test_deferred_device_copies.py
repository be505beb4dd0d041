"""Device copies that are ordered while training computes, and the fence that orders the rest (R11)."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from interruption import interrupt
from lazy_device import LazyDevice

from memstore.client.overlapped_copy import OptimizerMemory, optimizer_tensors
from memstore.shell.codec.decode import decode_state
from memstore.shell.codec.encode import copy_into, plan_state
from memstore.shell.device import deferred_copy, side_stream
from memstore.shell.device.deferred_copy import DeferredCopy, DeferredDeviceCopies, WatchedSource
from memstore.shell.device.side_stream import FLIGHTS_MAX, DeviceWrite, flights, order_all
from memstore.shell.tensors.memory import TensorSource

FLIGHT_BYTES = 100
WAIT_S = 60.0
Pair = tuple[torch.Tensor, torch.Tensor]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> LazyDevice:
    monkeypatch.setattr(deferred_copy, "flights", lambda writes: flights(writes, FLIGHT_BYTES))
    return LazyDevice(monkeypatch, deferred_copy, "copy_out")


def pair(nbytes: int) -> Pair:
    return torch.randint(1, 255, (nbytes,), dtype=torch.uint8), torch.zeros(nbytes, dtype=torch.uint8)


def write(source: torch.Tensor, target: torch.Tensor) -> DeviceWrite:
    starts = range(0, source.numel(), FLIGHT_BYTES)
    pieces = tuple((target.data_ptr() + at, at, min(FLIGHT_BYTES, source.numel() - at)) for at in starts)
    return DeviceWrite(source, pieces)


def late(pairs: list[Pair], made: DeferredDeviceCopies, ends: list[str], *, is_wanted: bool = True) -> DeferredCopy:
    sources = [WatchedSource((source,), source.untyped_storage()) for source, _ in pairs]
    return DeferredCopy(
        sources,
        made,
        keep=pairs,
        is_wanted=lambda: is_wanted,
        on_end=ends.append,
        name_of=lambda number: f"tensor {number}",
    )


def test_the_copy_thread_keeps_two_flights_under_way(device: LazyDevice) -> None:
    """The third is ordered when the first has arrived; at the end all bytes are in their place."""
    source, target = pair(10 * FLIGHT_BYTES)
    made = DeferredDeviceCopies([write(source, target)])
    most = []
    device.before_copies = lambda: most.append(device.ordered - device.arrived)
    made.work()
    assert torch.equal(source, target)
    assert max(most) == FLIGHTS_MAX


def test_the_fence_orders_the_rest_and_the_stream_waits_not_the_host(device: LazyDevice) -> None:
    """After it nothing is left to order; a thread that looks for the end waits for all of it."""
    source, target = pair(7 * FLIGHT_BYTES)
    made = DeferredDeviceCopies([write(source, target)])
    assert made.order_rest(time.monotonic() + WAIT_S)
    assert (device.ordered, device.arrived, device.waits) == (7, 0, [])
    made.hold_current()
    assert [who for who, _ in device.waits] == ["stream"]
    made.work()
    assert torch.equal(source, target)


def test_a_fence_past_its_deadline_says_so_and_drop_leaves_the_rest(device: LazyDevice) -> None:
    """One flight is ordered, and the end comes with it."""
    source, target = pair(5 * FLIGHT_BYTES)
    made = DeferredDeviceCopies([write(source, target)])
    assert not made.order_rest(0.0)
    made.drop()
    made.work()
    assert device.arrived == 1
    assert torch.equal(target[FLIGHT_BYTES:], torch.zeros(4 * FLIGHT_BYTES, dtype=torch.uint8))


def test_memory_that_is_gone_ends_the_copy_for_all(device: LazyDevice) -> None:
    """Found by a fence or by the thread: the reason reaches the end, and nothing is taken for a whole copy."""
    pairs = [pair(FLIGHT_BYTES), pair(FLIGHT_BYTES)]
    made = DeferredDeviceCopies([write(*one) for one in pairs])
    ends: list[str] = []
    copy = late(pairs, made, ends)
    pairs[1][0].untyped_storage().resize_(0)
    made.order_rest(time.monotonic() + WAIT_S)
    assert not copy.ended.is_set()
    copy.work()
    assert copy.ended.is_set()
    assert len(ends) == 1
    assert "freed or resized" in ends[0]
    with pytest.raises(RuntimeError, match="freed or resized"):
        made.work()


@pytest.mark.parametrize("is_changed_before", [False, True])
def test_a_change_behind_the_fence_is_no_change(device: LazyDevice, is_changed_before: bool) -> None:
    """The counters are looked at when the sources are released, though the copies arrive later."""
    pairs = [pair(3 * FLIGHT_BYTES)]
    made = DeferredDeviceCopies([write(*one) for one in pairs])
    ends: list[str] = []
    copy = late(pairs, made, ends)
    if is_changed_before:
        pairs[0][0].add_(1)
    made.order_rest(time.monotonic() + WAIT_S)
    assert copy.release() == ""
    made.hold_current()
    pairs[0][0].add_(1)
    assert copy.release() == ""
    copy.work()
    assert [end.partition(" was changed")[0] for end in ends] == ["tensor 0" if is_changed_before else ""]


def test_a_copy_that_no_process_began_ends_when_it_is_stopped(device: LazyDevice) -> None:
    """No thread has it that would end it, and its slots are free."""
    pairs = [pair(3 * FLIGHT_BYTES)]
    ends: list[str] = []
    copy = late(pairs, DeferredDeviceCopies([write(*one) for one in pairs]), ends)
    copy.stop("it could not be started")
    assert copy.ended.is_set()
    assert ends == ["it could not be started"]
    assert device.ordered == 0


def test_a_thread_chooses_the_device_before_it_orders_or_waits(
    device: LazyDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else CUDA would make a context on device 0 for it."""
    chosen: list[object] = []

    @contextlib.contextmanager
    def choose(one: object) -> Iterator[None]:
        chosen.append(one)
        yield
        chosen.pop()

    monkeypatch.setattr(torch.cpu, "device", choose, raising=False)
    seen = []
    device.before_copies = lambda: seen.append(list(chosen))
    source, target = pair(3 * FLIGHT_BYTES)
    DeferredDeviceCopies([write(source, target)]).work()
    assert torch.equal(source, target)
    assert seen
    assert all(one == [source.device] for one in seen)


def test_a_stopped_copy_ends_when_what_was_ordered_has_arrived(device: LazyDevice) -> None:
    """Before that the slots are not free: the device still writes into them."""
    pairs = [pair(9 * FLIGHT_BYTES)]
    made = DeferredDeviceCopies([write(*one) for one in pairs])
    ends: list[str] = []
    copy = late(pairs, made, ends)
    assert not made.order_rest(0.0)
    copy.stop("enough")
    assert not copy.ended.is_set()
    thread = threading.Thread(target=copy.work)
    thread.start()
    thread.join(WAIT_S)
    assert (device.ordered, device.arrived, ends) == (1, 1, ["enough"])


def test_a_copy_that_no_process_wants_any_more_orders_nothing(device: LazyDevice) -> None:
    """The step was given up meanwhile."""
    pairs, ends = [pair(3 * FLIGHT_BYTES)], list[str]()
    late(pairs, DeferredDeviceCopies([write(*one) for one in pairs]), ends, is_wanted=False).work()
    assert (ends, device.ordered) == (["it was given up while it was copied"], 0)


def test_a_copy_that_is_interrupted_anywhere_ends_and_is_not_taken_for_whole(device: LazyDevice) -> None:
    """By a signal's handler that raises, say between taking a flight and ordering it."""
    for at in itertools.count(1):
        ends: list[str] = []
        pairs = [pair(3 * FLIGHT_BYTES)]
        copy = late(pairs, DeferredDeviceCopies([write(*one) for one in pairs]), ends)
        interrupted = interrupt(copy.work, at)
        copy.work()
        assert copy.ended.is_set(), interrupted
        assert ends != [""] or torch.equal(*pairs[0]), interrupted
        if interrupted is None:
            break
    assert at > 20


def test_sources_that_cannot_be_compared_are_not_submitted(device: LazyDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not known to be of one moment: the step is given up, and the copy ends."""

    def broken(self: WatchedSource) -> bool:
        raise RuntimeError("bad")

    pairs, ends = [pair(FLIGHT_BYTES)], list[str]()
    copy = late(pairs, DeferredDeviceCopies([write(*one) for one in pairs]), ends)
    monkeypatch.setattr(WatchedSource, "is_changed", broken)
    copy.work()
    assert ends == ["its sources could not be compared: RuntimeError('bad')"]
    assert copy.ended.is_set()


@pytest.mark.parametrize("is_foreach", [False, True])
def test_an_optimizer_that_torch_counts_shows_in_parameters_and_moments(is_foreach: bool) -> None:
    """One counter for a parameter and what state_dict() returns of it."""
    model = torch.nn.Linear(200, 200)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.0, foreach=is_foreach)
    model(torch.ones(1, 200)).sum().backward()
    optimizer.step()
    moments = list(optimizer.state[model.weight].values())[1:]
    tensors = (model.state_dict()["weight"], *moments)
    watched = [WatchedSource((one,), one.untyped_storage()) for one in tensors]
    optimizer.step()
    assert [one.is_changed() for one in watched] == [True] * 3


def test_steady_memory_is_that_of_dense_tensors_for_each_reader() -> None:
    """A parameter's detached view and a part of it are; what is another's, beyond its end, or on the host is not."""
    weight = torch.nn.Parameter(torch.ones(200, 200))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    weight.grad = torch.ones(200, 200)
    optimizer.step()
    momentum = optimizer.state[weight]["momentum_buffer"]
    gaps = torch.ones(400, 200)[::2]
    memory = OptimizerMemory([*optimizer_tensors(optimizer), gaps])

    def owners(tensor: torch.Tensor, nbytes: int) -> tuple[torch.Tensor, ...]:
        start = tensor.storage_offset() * 4
        flat = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage(), start, (tensor.nbytes,), (1,))
        return memory.owners_of(TensorSource(nbytes, None, flat))

    assert owners(weight.detach(), 160_000)[-1] is weight
    assert owners(weight.detach()[10:], 152_000)[-1] is weight
    assert owners(momentum, 160_000)[-1] is momentum
    assert owners(weight.detach(), 160_004) == ()
    assert owners(gaps, 160_000) == ()
    assert owners(weight.clone(), 160_000) == ()
    assert memory.owners_of(TensorSource(160_000, weight.data_ptr(), weight)) == ()
    memory = OptimizerMemory(weight)  # one tensor, not its rows
    assert owners(weight, 160_000)[-1] is weight


# -- test device copy ---------------------------------------------------------------------------------
# Copies out of device memory: in order, in bounded flights, each byte in its place (R11).


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
        source, tuple((target.data_ptr() + at, at, min(piece_bytes, source.numel() - at)) for at in starts)
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
        "behind the current stream",
        "event 0",
        "event 1",
        "wait 0",
        "event 2",
        "wait 1",
        "event 3",
        "wait 2",
        "wait 3",
    ]


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
