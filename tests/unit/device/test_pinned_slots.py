"""Slots registered as pinned memory: each once, as they are leased, until the mapping is closed (R9, R11)."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from memstore.shell.arena.arena import Arena
from memstore.shell.arena.mapping import ArenaMapping
from memstore.shell.device import pinned_memory
from memstore.shell.device.pinned_memory import PinnedSlots, cuda_runtime
from memstore.shell.rank.arena_view import RankMapping
from memstore.testing.clusters.scratch import scratch_folder

CHUNK = 1 << 20
DEVICE = 3


class Driver:
    """What of CUDA's runtime is called: refuses overlapping ranges, and everything beyond a limit, or has failed."""

    def __init__(self) -> None:
        self.pinned: dict[int, int] = {}
        self.calls: list[tuple[int, int, int, int]] = []
        self.limit_bytes = 1 << 40
        self.unpinned_from: set[int] = set()
        self.threads: set[int] = set()
        self.has_failed = False
        self._device = -1

    @contextlib.contextmanager
    def device(self, index: int) -> Iterator[None]:
        if self.has_failed:
            raise RuntimeError("an illegal memory access was encountered")
        self._device = index
        yield
        self._device = -1

    def cudart(self) -> Driver:
        return self

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.threads.add(threading.get_ident())
        self.calls.append((self._device, address, nbytes, flags))
        if any(at < address + nbytes and address < at + size for at, size in self.pinned.items()):
            return 712
        if sum(self.pinned.values()) + nbytes > self.limit_bytes:
            return 2
        self.pinned[address] = nbytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        self.threads.add(threading.get_ident())
        self.unpinned_from.add(self._device)
        return 0 if self.pinned.pop(address, None) else 713


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    monkeypatch.setattr(pinned_memory, "cuda_runtime", lambda: made)
    return made


@pytest.fixture
def arena() -> Iterator[Path]:
    with scratch_folder() as path:
        made = Arena.open(path, limit_bytes=64 * CHUNK, chunk_bytes=CHUNK)
        made.grow(16)
        yield path
        made.close()


def identity(arena: Path) -> str:
    mapping = ArenaMapping.open(arena)
    mapping.close()
    return mapping.identity


def test_slots_are_registered_once_in_ranges_of_neighbours(arena: Path, driver: Driver) -> None:
    """From the given device's context, for all of them; what is known is passed over."""
    mapping = ArenaMapping.open(arena)
    pinned = PinnedSlots(mapping)
    pinned.add([0, 1, 2, 7], DEVICE)
    pinned.add([2, 3, 7], DEVICE)
    assert [(address - mapping.address(0), nbytes) for _, address, nbytes, _ in driver.calls] == [
        (0, 3 * CHUNK),
        (7 * CHUNK, CHUNK),
        (3 * CHUNK, CHUNK),
    ]
    assert {(device, flags) for device, _, _, flags in driver.calls} == {(DEVICE, pinned_memory.REGISTER_PORTABLE)}
    pinned.close()
    assert not driver.pinned
    assert driver.unpinned_from == {DEVICE}
    pinned.add([9], DEVICE)
    assert not driver.pinned
    mapping.close()


def test_a_refusal_is_logged_once_and_nothing_more_is_asked(
    arena: Path, driver: Driver, caplog: pytest.LogCaptureFixture
) -> None:
    """What was pinned before stays pinned until the end."""
    driver.limit_bytes = 3 * CHUNK
    mapping = ArenaMapping.open(arena)
    pinned = PinnedSlots(mapping)
    with caplog.at_level(logging.WARNING):
        pinned.add([0, 1], DEVICE)
        pinned.add([4, 5], DEVICE)
        pinned.add([8, 9], DEVICE)
    assert len(driver.calls) == 2
    assert [record.message.count("error 2") for record in caplog.records] == [1]
    assert list(driver.pinned) == [mapping.address(0)]
    pinned.close()
    assert not driver.pinned
    mapping.close()


def test_slots_are_leased_though_the_device_has_failed(
    arena: Path, driver: Driver, caplog: pytest.LogCaptureFixture
) -> None:
    """Training learns of it by itself; the link thread goes on, and so does the end."""
    mapping = RankMapping(arena, identity(arena))
    mapping.pin_for(DEVICE, lambda work: work())
    assert mapping.prefault([0]) == 1
    driver.has_failed = True
    with caplog.at_level(logging.WARNING):
        assert mapping.prefault([2, 3]) == 2
        mapping.close()
    assert [record.message.count("illegal memory access") for record in caplog.records] == [1, 1]


def test_a_rank_pins_what_it_has_entered_before_and_from_then_on(arena: Path, driver: Driver) -> None:
    """Nothing until its state is found on a GPU; then all, by the thread that enters pages; nothing after the end."""
    mapping = RankMapping(arena, identity(arena))
    queue: list[Callable[[], None]] = []
    mapping.prefault([0, 1])
    mapping.prefault([1, 5])
    assert not driver.calls
    mapping.pin_for(DEVICE, queue.append)
    mapping.pin_for(DEVICE, queue.append)
    assert not driver.calls
    while queue:
        queue.pop(0)()
    mapping.prefault([5, 6])
    start = mapping.open().address(0)
    assert {address - start: nbytes for address, nbytes in driver.pinned.items()} == {
        0: 2 * CHUNK,
        5 * CHUNK: CHUNK,
        6 * CHUNK: CHUNK,
    }
    mapping.pin_at([start + 9 * CHUNK + 17, start - 1], DEVICE)
    assert driver.pinned[start + 9 * CHUNK] == CHUNK
    mapping.close()
    assert not driver.pinned


def test_unpinning_is_not_done_by_the_thread_that_closes(arena: Path, driver: Driver) -> None:
    """CUDA would keep a refusal as this thread's last error, and torch raise it from the next kernel."""
    mapping = RankMapping(arena, identity(arena))
    worker = threading.Thread(target=mapping.pin, args=([0, 1], DEVICE))
    worker.start()
    worker.join()
    mapping.close()
    assert not driver.pinned
    assert threading.get_ident() not in driver.threads


def test_without_cuda_nothing_is_asked_of_it(arena: Path) -> None:
    """Nor is CUDA initialised by asking."""
    if torch.cuda.is_initialized():
        pytest.skip("CUDA is in use in this process")
    mapping = RankMapping(arena, identity(arena))
    mapping.pin_for(DEVICE, lambda work: work())
    mapping.prefault([0, 1])
    mapping.close()
    assert cuda_runtime() is None
    assert not torch.cuda.is_initialized()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_a_leased_slot_is_pinned_memory_to_torch(arena: Path) -> None:
    """Registered in place, so that a copy into it needs no staging; plain memory again after the end."""
    torch.cuda.init()
    mapping = RankMapping(arena, identity(arena))
    view = torch.frombuffer(mapping.view(2), dtype=torch.uint8)
    assert not view.is_pinned()
    worker = threading.Thread(target=mapping.pin, args=([2], torch.cuda.current_device()))
    worker.start()
    worker.join()
    assert view.is_pinned()
    source = torch.randint(0, 255, (CHUNK,), dtype=torch.uint8, device="cuda")
    view.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(view, source.cpu())
    mapping.close()
    assert not view.is_pinned()
