"""Reads through CheckedStream: what it returns is what was put, or it raises (R7, R26)."""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import zip_longest

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lazy_device import LazyDevice

from memstore.core.format.manifest import Chunk, Manifest, chunk_digest, chunk_sizes
from memstore.errors import DigestMismatch, RecoveryError
from memstore.shell.codec import verified_stream
from memstore.shell.codec.verified_stream import REPAIR_TRIES, CheckedStream, Targets, Views
from memstore.shell.native import extension
from memstore.shell.tensors.slot_stream import address_of
from memstore.shell.threads import ProgressLog
from recovery.inventory import ShardId

CHUNK_BYTES = 64


class Slots:
    """A stream in slots, some of them bad; gives chunks, and good copies of what is asked for again."""

    def __init__(
        self, data: bytes, *, bad: Sequence[int] = (), lost: Sequence[int] = (), elsewhere: Sequence[int] = ()
    ) -> None:
        self.good = [bytearray(data[i : i + CHUNK_BYTES]) for i in range(0, len(data), CHUNK_BYTES)]
        sizes = chunk_sizes(len(data), CHUNK_BYTES)
        chunks = tuple(Chunk(chunk_digest(c), n) for c, n in zip(self.good, sizes, strict=True))
        self.manifest = Manifest(ShardId("job", 1, 2, 0), 1, b"", len(data), CHUNK_BYTES, chunks)
        self.slots = [bytearray(chunk) for chunk in self.good]
        for index in bad:
            self.slots[index][0] ^= 1
        for index in lost:
            self.slots[index] = bytearray()
        self.repaired, self.elsewhere = 0, elsewhere
        self.can_repair = REPAIR_TRIES  # how many tries before the first that brings good copies

    def take(self, wanted: Sequence[int]) -> Views:
        return [(index, memoryview(self.slots[index])) for index in wanted]

    def remote(self, wanted: Sequence[int]) -> list[int]:
        return [index for index in wanted if index in self.elsewhere]

    @contextmanager
    def fetching(self, indices: Sequence[int], targets: Targets) -> Iterator[Callable[[], list[int]]]:
        """Send what is in the slots as another host would, in another thread; lost chunks do not come."""
        coming = [index for index in indices if self.slots[index]]
        with ThreadPoolExecutor(1) as pool:
            sent = pool.map(lambda index: self._is_sent(index, targets), coming)
            there = [index for index, is_good in zip(coming, sent, strict=True) if is_good]
        yield lambda: sorted({*indices} - {*there})

    def _is_sent(self, index: int, targets: Targets) -> bool:
        data, at = memoryview(self.slots[index]), 0
        target = targets.of(index, data.nbytes)
        for view in target.views:
            view[:] = data[at : at + view.nbytes]
            at += view.nbytes
        assert at == data.nbytes
        if chunk_digest(data) != self.manifest.chunks[index].digest:
            return False
        target.finish()
        return True

    def pin(self, views: Views, device: int) -> None:
        raise AssertionError("there is no CUDA device")

    def repair(self, wanted: Sequence[int], use: Callable[[Mapping[int, memoryview]], None]) -> None:
        self.repaired += 1
        if self.repaired > self.can_repair:
            use({index: memoryview(self.good[index]) for index in wanted})
        else:
            raise RecoveryError("no host has a good copy")


def read_all(slots: Slots, ranges: Sequence[tuple[int, int]], *, devices: Sequence[bool] = ()) -> list[bytes]:
    """Read ranges the planned way; some as if to a device: torch's own cpu device has streams by name."""
    stream = CheckedStream(slots.manifest, slots)
    targets = [np.zeros(size, np.uint8) for _, size in ranges]
    for (offset, size), target, is_device in zip_longest(ranges, targets, devices[: len(ranges)], fillvalue=False):
        if is_device:
            assert stream.read_to(offset, torch.from_numpy(target))
        else:
            stream.read(offset, address_of(target), size)
    stream.settle()
    return [target.tobytes() for target in targets]


@pytest.mark.parametrize("elsewhere", [(), (0, 2)], ids=["local", "from peers"])
def test_a_long_read_is_told_up_to_its_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, elsewhere: Sequence[int]
) -> None:
    """Chunks of this host and of others count, whatever they are copied to; here every one is a line."""
    caplog.set_level(logging.INFO, "memstore")
    monkeypatch.setattr(ProgressLog, "PERIOD_S", 0.0)
    read_all(Slots(bytes(4 * CHUNK_BYTES), elsewhere=elsewhere), [(0, 100), (100, 156)], devices=[False, True])
    said = [record.message for record in caplog.records]
    assert said[-1] == "memstore job rank 0: copying step 2 out: 256 B of 256 B"
    assert len(said) == 4


@st.composite
def cases(draw: st.DrawFn) -> tuple[bytes, list[tuple[int, int]], list[int], list[int]]:
    data = draw(st.binary(min_size=1, max_size=10 * CHUNK_BYTES))
    count = -(-len(data) // CHUNK_BYTES)
    ranges = []
    for _ in range(draw(st.integers(0, 8))):
        start = draw(st.integers(0, len(data)))
        ranges.append((start, draw(st.integers(0, len(data) - start))))
    some = st.lists(st.integers(0, count - 1), unique=True)
    return data, ranges, draw(some), draw(some)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of several pieces, as the real ones are."""
    monkeypatch.setattr(verified_stream, "MOVE_BYTES", 24)


@given(cases(), st.lists(st.booleans(), max_size=8), st.sets(st.integers(0, 9)))
def test_any_reads_of_any_slots_return_what_was_put(
    case: tuple[bytes, list[tuple[int, int]], list[int], list[int]], devices: list[bool], elsewhere: set[int]
) -> None:
    """Anything that is bad or lost, here or on another host, the bytes are the stream's."""
    data, ranges, bad, lost = case
    slots = Slots(data, bad=bad, lost=lost, elsewhere=sorted(elsewhere))
    slots.can_repair = 1
    assert read_all(slots, ranges, devices=devices) == [data[start : start + size] for start, size in ranges]
    touched = {i // CHUNK_BYTES for start, size in ranges for i in range(start, start + size)}
    assert bool(slots.repaired) == bool(touched & {*bad, *lost})


def test_a_chunk_without_a_good_copy_is_an_error() -> None:
    """Bad here, and no good copy comes.

    DigestMismatch with the last cause, after a bounded number of tries.
    """
    slots = Slots(bytes(range(200)), bad=[1])
    with pytest.raises(DigestMismatch, match=r"chunks \[1\] .* no host has a good copy"):
        read_all(slots, [(0, 200)])
    assert slots.repaired == REPAIR_TRIES


def test_chunks_that_come_again_one_by_one_are_enough() -> None:
    """What is brought again comes in parts, some of which may fail: tries are counted since the last chunk."""

    class OneByOne(Slots):
        def repair(self, wanted: Sequence[int], use: Callable[[Mapping[int, memoryview]], None]) -> None:
            super().repair(wanted[:1], use)
            raise RecoveryError("the source is restarting")

    data = bytes(range(250))
    slots = OneByOne(data * 2, lost=range(8))
    slots.can_repair = 0
    assert read_all(slots, [(0, 500)]) == [data * 2]
    assert slots.repaired == 8 > REPAIR_TRIES


def test_a_chunk_that_changes_under_its_copy_is_copied_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot that others overwrite after the copy began is found by the digest after it, in every part of it."""
    data = bytes(range(200))
    slots = Slots(data)
    slots.can_repair = 0
    real = ctypes.memmove

    def overwritten(target: int, source: int, nbytes: int) -> None:
        slots.slots[2][5] = 0xEE  # before the copy: it is copied, too
        real(target, source, nbytes)

    monkeypatch.setattr(extension, "built", None)
    monkeypatch.setattr("memstore.shell.codec.verified_stream.ctypes.memmove", overwritten)
    assert read_all(slots, [(0, 200)]) == [data]
    assert slots.repaired == 1


def test_bytes_that_are_read_twice_are_digested_after_both(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot that changes between two copies of the same bytes is found, though its piece was digested in between."""
    data = bytes(range(64))
    slots = Slots(data)
    slots.can_repair = 0
    real, copies = ctypes.memmove, []

    def overwritten(target: int, source: int, nbytes: int) -> None:
        copies.append(nbytes)
        if len(copies) == 4:  # the first read takes three pieces
            slots.slots[0][5] = 0xEE
        real(target, source, nbytes)

    monkeypatch.setattr(extension, "built", None)
    monkeypatch.setattr("memstore.shell.codec.verified_stream.ctypes.memmove", overwritten)
    assert read_all(slots, [(0, 64), (0, 10)]) == [data, data[:10]]
    assert slots.repaired == 1


def test_a_device_s_copies_fly_two_at_a_time_and_are_digested_when_they_have_arrived(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A slot that others overwrite while the copy is under way is found, copied from the good one, and right then."""
    data = bytes(range(250))
    slots = Slots(data)
    slots.can_repair = 0
    monkeypatch.setattr(verified_stream, "FLIGHT_BYTES", CHUNK_BYTES)
    device = LazyDevice(monkeypatch, verified_stream, "copy_in")
    flying = []

    def overwrite() -> None:
        flying.append(device.ordered - device.arrived)
        slots.slots[3][5] = 0xEE

    device.before_copies = overwrite
    assert read_all(slots, [(10, 230)], devices=[True]) == [data[10:240]]
    assert slots.repaired == 1
    assert max(flying) == verified_stream.FLIGHTS_MAX
    assert all(who == "host" for who, _ in device.waits)


def test_a_device_s_copies_of_fetched_chunks_stand_behind_the_readers_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader may still compute with its target: copies wait for its stream, not for that of who receives (R11)."""
    streams = threading.local()
    waited: list[object] = []

    def current(device: object = None) -> torch.cpu.Stream:
        if not hasattr(streams, "own"):
            streams.own = torch.cpu.Stream()
        return streams.own  # type: ignore[no-any-return]

    class Stream(torch.cpu.Stream):
        def wait_stream(self, stream: object) -> None:
            waited.append(stream)

    monkeypatch.setattr(torch.cpu, "current_stream", current)
    monkeypatch.setattr(torch.cpu, "Stream", Stream)
    data = bytes(range(200))
    assert read_all(Slots(data, elsewhere=[0, 1, 2, 3]), [(0, 200)], devices=[True]) == [data]
    assert waited == [current()]


def test_objects_are_verified_before_they_are_used() -> None:
    """Bytes that are wanted at once come from a chunk that was digested, a bad one from its good copy."""
    data = bytes(range(200))
    slots = Slots(data, bad=[0, 1, 2, 3])
    slots.can_repair = 0
    stream = CheckedStream(slots.manifest, slots)
    assert stream.read_bytes(60, 80) == data[60:140]
    assert stream.read_bytes(0, 3) == data[:3]
    assert stream.repaired == {0, 1, 2}
    assert not stream.has_written
