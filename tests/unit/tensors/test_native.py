"""The native helper against the package xxhash and copies by Python: the same bytes, the same digests."""

from __future__ import annotations

import _thread
import os
import signal
import subprocess
import sys
import threading
from array import array
from collections.abc import Callable, Sequence
from types import FrameType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from memstore.shell.codec import verified_stream
from memstore.shell.codec.encode import copy_into, plan_state
from memstore.shell.codec.verified_stream import copy_chunk
from memstore.shell.native import extension, loops
from memstore.shell.native.loops import Move, Way
from memstore.shell.tensors import slot_stream
from memstore.shell.tensors.slot_stream import SlotStream, address_of, in_threads

needs_helper = pytest.mark.skipif(not extension.is_there(), reason="the native helper is not built, or is turned off")
SIZES = (0, 1, 15, 16, 63, 64, 65, 127, 128, 129, 239, 240, 241, 4095, 4096, 4097, 4160, 8192, 16_384, 20_000, 70_000)
sizes = st.one_of(st.sampled_from(SIZES), st.integers(0, 20_000))


def noise(nbytes: int, seed: int = 1) -> np.ndarray:
    """Bytes none of which tells where it lies."""
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def table(*numbers: int) -> bytes:
    """Rows as the helper takes them."""
    return array("Q", numbers).tobytes()


@st.composite
def fillings(draw: st.DrawFn) -> tuple[int, int, list[tuple[int, int, int]], int]:
    """Draw a chunk size, a stream's length, its extents (offset, place in the source, nbytes), an odd address."""
    chunk_bytes, end, extents = draw(st.sampled_from([64, 1000, 4096, 9000, 40_000])), 0, []
    for nbytes in draw(st.lists(sizes, max_size=6)):
        offset = end + draw(st.sampled_from([0, 0, 1, 3, 48, 5000]))
        extents.append((offset, draw(st.integers(0, 70)), nbytes))
        end = offset + nbytes
    return chunk_bytes, end + draw(st.sampled_from([0, 0, 7])), extents, draw(st.integers(0, 65))


@needs_helper
@pytest.mark.parametrize("around", [False, True], ids=["plain", "around"])
@given(case=fillings())
def test_a_filled_stream_is_the_sources_and_zeros_and_has_its_digests(
    around: bool, case: tuple[int, int, list[tuple[int, int, int]], int]
) -> None:
    """Any sizes, gaps, chunk borders and addresses."""
    chunk_bytes, nbytes, extents, odd = case
    source = noise(80_000)
    memory = np.full(odd + (nbytes // chunk_bytes + 1) * (chunk_bytes + odd), 0xEE, np.uint8)
    slots = [
        memory[odd + at * (chunk_bytes + odd) :][:chunk_bytes].data for at in range(-(-nbytes // chunk_bytes))
    ]  # behind each as many bytes that are not its own
    wanted = np.zeros(nbytes, np.uint8)
    for offset, place, size in extents:
        wanted[offset : offset + size] = source[place : place + size]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loops, "LARGE_BYTES", 0)
        patch.setattr(loops, "_puts", decided(around))
        rows = [(offset, address_of(source) + place, size) for offset, place, size in extents if size]
        digests, _ = SlotStream(slots, chunk_bytes, nbytes).fill(np.array(rows, np.int64).reshape(-1, 3))
    chunks = [wanted[at : at + chunk_bytes] for at in range(0, nbytes, chunk_bytes)]
    assert [bytes(slot[: len(chunk)]) for slot, chunk in zip(slots, chunks, strict=True)] == [*map(bytes, chunks)]
    assert digests == [xxhash.xxh3_128_digest(chunk) for chunk in chunks]
    own = np.zeros(memory.size, bool)
    for at, chunk in enumerate(chunks):
        own[odd + at * (chunk_bytes + odd) :][: chunk.size] = True
    assert (memory[~own] == 0xEE).all()


def decided(around: bool) -> Way:
    """A kind of copy that was measured, with this result."""
    way = Way()
    way._calls, way._rates = loops.MEASURED_CALLS, {around: 1.0, not around: 0.0}
    return way


@needs_helper
@pytest.mark.parametrize("around", [False, True], ids=["plain", "around"])
@given(nbytes=sizes.filter(bool), odd=st.integers(0, 65), data=st.data())
def test_parts_of_a_chunk_are_copied_and_the_chunk_is_digested(
    around: bool, nbytes: int, odd: int, data: st.DataObject
) -> None:
    """Parts in any order, twice over, with gaps, or none: the digest is of the whole chunk."""
    slot = noise(odd + nbytes + 64)[odd : odd + nbytes]
    moves, targets = [], []
    for _ in range(data.draw(st.integers(0, 5))):
        start = data.draw(st.integers(0, nbytes))
        size = data.draw(st.integers(0, nbytes - start))
        skew = data.draw(st.integers(0, 65))
        targets.append((np.full(skew + size + 1, 0xEE, np.uint8), skew, start, size))
        moves.append((address_of(targets[-1][0]) + skew, address_of(slot) + start, size))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loops, "_gets", decided(around))
        digest = loops.get_chunk(address_of(slot), nbytes, moves, is_large=True)
    assert digest == xxhash.xxh3_128_digest(slot)
    for memory, skew, start, size in targets:
        assert bytes(memory) == b"\xee" * skew + bytes(slot[start : start + size]) + b"\xee"


@needs_helper
@pytest.mark.parametrize("around", [False, True], ids=["plain", "around"])
@given(nbytes=sizes, here=st.integers(0, 65), there=st.integers(0, 65))
def test_a_move_copies_its_bytes_and_no_others(around: bool, nbytes: int, here: int, there: int) -> None:
    """Head and tail of a store around the cache are what is odd."""
    source, target = noise(here + nbytes), np.full(there + nbytes + 1, 0xEE, np.uint8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loops, "_moves", decided(around))
        loops.make_moves([(address_of(target) + there, address_of(source) + here, nbytes)], is_large=True)
    assert bytes(target) == b"\xee" * there + bytes(source[here:]) + b"\xee"


@needs_helper
def test_a_slot_that_changes_after_its_copy_has_another_digest() -> None:
    """The digest is taken of the slot behind the copy, else a lost slot would pass for good (R7)."""
    slot = noise(100_000)
    before, target = xxhash.xxh3_128_digest(slot), np.empty(100_000, np.uint8)
    # The second move overwrites the slot's end while the chunk is copied, as another put would.
    end = address_of(slot) + 90_000
    moves = [(address_of(target), address_of(slot), 50_000), (end, address_of(slot) + 60_000, 10_000)]
    assert loops.get_chunk(address_of(slot), 100_000, moves, is_large=False) != before
    assert not copy_chunk(slot.data, [(address_of(target), 0, 100_000)], before)


@needs_helper
@pytest.mark.parametrize(
    ("chunks", "moves", "why"),
    [
        ((0, 8, 1), (0, 0, 9), "do not lie in it"),
        ((8, 8, 1), (0, 0, 4), "do not lie in it"),
        ((8, 8, 2), (12, 0, 4, 8, 0, 4), "in order"),
        ((8, 8, 2), (8, 0, 4), "do not lie in it"),
        ((8, 8, 0), (8, 0, 4), "of no chunk"),
        ((8, 8, 1), (8, 0, 2**64 - 1), "do not lie in it"),
        ((2**64 - 4, 8, 1), (2**64 - 4, 0, 4), "do not lie in it"),
        ((8, 8), (8, 0, 4), "whole rows"),
    ],
)
def test_a_table_that_makes_no_sense_is_refused_before_a_byte_is_copied(
    chunks: tuple[int, ...], moves: tuple[int, ...], why: str
) -> None:
    """Its addresses would be memory of another object."""
    with pytest.raises(ValueError, match=why):
        extension.built.put(table(*chunks), table(*moves), b"", False)


@pytest.mark.parametrize("kinds", [b"\2\2", b"\x08", b"\xff"])
def test_kinds_of_numbers_that_make_no_sense_are_refused(kinds: bytes) -> None:
    """There must be one that is known for each move, or none: what is looked at is what a move has copied."""
    source, slot = noise(64), np.zeros(64, np.uint8)
    head, move = (address_of(slot), 64, 1), (address_of(slot), address_of(source), 64)
    with pytest.raises(ValueError, match="a known one for each move"):
        extension.built.put(table(*head), table(*move), kinds, False)
    assert not slot.any()


def state() -> dict[str, object]:
    """Tensors of odd sizes, one over several chunks, and what is no tensor."""
    made = {f"w{size}": torch.from_numpy(noise(size, size).copy()) for size in SIZES}
    return {**made, "wide": torch.from_numpy(noise(300_000, 7).copy()), "step": 7, "text": b"x" * 500}


@pytest.mark.parametrize("threads", [1, 3])
def test_both_ways_to_copy_a_state_fill_equal_slots(monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    """With the helper or without it, and on any number of threads: the same step on two hosts is stored once."""
    monkeypatch.setattr(slot_stream, "THREAD_BYTES", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    plan = plan_state(state())
    found: list[list[bytes]] = []
    for built in (extension.built, None):
        monkeypatch.setattr(extension, "built", built)
        slots = [bytearray(b"\xee" * 65_536) for _ in range(-(-plan.nbytes // 65_536))]
        digests = copy_into(plan, [memoryview(slot) for slot in slots], 65_536)
        left = plan.nbytes % 65_536
        found.append([*map(bytes, slots[:-1]), bytes(slots[-1][:left])])
        assert digests is None or digests == [xxhash.xxh3_128_digest(chunk) for chunk in found[-1]]
        assert (digests is None) == (built is None)
    assert found[0] == found[1]


@needs_helper
def test_a_source_that_has_to_be_gathered_is_left_to_the_holder() -> None:
    """Its copy is not one pass: the holder digests such a put as a whole."""
    slot = bytearray(1 << 16)
    plan = plan_state({"w": torch.arange(64).view(8, 8)[:, ::2]})
    assert copy_into(plan, [memoryview(slot)], 1 << 16) is None
    assert copy_into(plan_state({}), [], 1 << 16) in ([], None)


@needs_helper
def test_a_signals_handler_runs_between_two_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """However large a copy is, a call is short: an exception stops it there."""
    monkeypatch.setattr(loops, "CALL_BYTES", 1000)
    calls: list[int] = []

    def put(*tables: bytes) -> bytes:
        calls.append(len(tables[0]))
        raise KeyboardInterrupt

    class Stub:
        """The helper, interrupted in its first call."""

    Stub.put = staticmethod(put)  # type: ignore[attr-defined]
    monkeypatch.setattr(extension, "built", Stub)
    slots, source = [bytearray(600) for _ in range(5)], noise(3000)
    with pytest.raises(KeyboardInterrupt):
        SlotStream([memoryview(slot) for slot in slots], 600, 3000).fill(np.array([(0, address_of(source), 3000)]))
    assert calls == [24]


def timed(monkeypatch: pytest.MonkeyPatch, seconds: dict[bool, float]) -> Callable[[bool], bool]:
    """Let a call take so long, by the way that it goes."""
    now = [0.0]
    monkeypatch.setattr(loops.time, "thread_time", lambda: now[0])

    def work(around: bool) -> bool:
        now[0] += seconds[around]
        return around

    return work


@pytest.mark.parametrize(("plain_s", "around_s", "wanted"), [(1.0, 0.5, True), (1.0, 0.99, False), (0.5, 1.0, False)])
def test_the_way_of_large_copies_is_measured_once(
    monkeypatch: pytest.MonkeyPatch, plain_s: float, around_s: float, wanted: bool
) -> None:
    """Both by turns, then the faster one; copies that fit the cache, and short ones, measure nothing."""
    work, way = timed(monkeypatch, {False: plain_s, True: around_s}), Way()
    assert not way.call(work, nbytes=1 << 20, is_large=False)
    assert not way.call(work, nbytes=100, is_large=True)
    found = [way.call(work, nbytes=1 << 20, is_large=True) for _ in range(loops.MEASURED_CALLS)]
    assert found == [False, True] * (loops.MEASURED_CALLS // 2)
    assert way.is_known
    assert way.call(work, nbytes=100, is_large=True) is wanted
    assert not way.call(work, nbytes=1 << 20, is_large=False)


def test_the_environment_turns_it_off() -> None:
    """A person who suspects it can do without, for one run."""
    program = "from memstore.shell.native import extension; print(extension.is_there())"
    found = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "MEMSTORE_NATIVE": "0"},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert found.stdout.strip() == "False"


def test_a_helper_of_another_build_is_refused_with_what_to_do() -> None:
    """It lacks functions, or takes other tables: the import says so, not a put later."""
    program = (
        "import sys, types; stale = types.ModuleType('_native'); stale.__file__ = 'stale.so'\n"
        "sys.modules['memstore.shell.native._native'] = stale\n"
        "import memstore.shell.native as native; native._native = stale\n"
        "import memstore.shell.native.extension"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    assert "ConfigError: stale.so was built from another memstore (its version is 0, this one calls 1)" in found.stderr
    assert "`make native`" in found.stderr


def test_without_it_chunks_are_copied_and_proved_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop in Python is what a machine without a compiler runs."""
    monkeypatch.setattr(extension, "built", None)
    monkeypatch.setattr(verified_stream, "MOVE_BYTES", 24)
    slot, target = noise(100), np.zeros(100, np.uint8)
    assert copy_chunk(slot.data, [(address_of(target), 0, 100)], xxhash.xxh3_128_digest(slot))
    assert (target == slot).all()
    assert not copy_chunk(slot.data, [(address_of(target), 0, 100)], bytes(16))


# -- slot stream --------------------------------------------------------------------------------------
# Copies that are shared out to threads: all of them have ended when the copy has, however it ended.


WAIT_S = 60.0
MOVES: list[Move] = [(0, 0, 8), (8, 8, 8)]


class Interrupted(Exception):
    """What a signal's handler raises in the thread that puts."""


@pytest.fixture
def two_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every move is worth a thread of its own."""
    monkeypatch.setattr(slot_stream, "THREAD_BYTES", 1)
    monkeypatch.setattr(slot_stream, "THREADS_MAX", 2)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)


@pytest.mark.usefixtures("two_threads")
def test_an_interrupted_copy_leaves_no_thread_that_writes() -> None:
    """Its slots go to another put at once: a helper that wrote on would tear that one."""
    main, begun, interrupted, is_over = threading.current_thread(), *(threading.Event() for _ in range(3))
    written: list[tuple[Move, bool]] = []

    def work(moves: Sequence[Move]) -> None:
        if threading.current_thread() is main:
            assert begun.wait(WAIT_S)
            interrupted.set()
            raise Interrupted
        begun.set()
        assert interrupted.wait(WAIT_S)
        was_over = is_over.wait(0.5)  # the copy must not end before this write
        written.extend((move, was_over) for move in moves)

    with pytest.raises(Interrupted):
        in_threads([(at, at, 8) for at in range(0, 64, 8)], work)
    is_over.set()
    assert [was_over for _, was_over in written] == [False]  # one block, and none once it was interrupted


@pytest.mark.usefixtures("two_threads")
def test_an_interrupt_while_a_thread_is_started_leaves_none_that_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread runs by then."""

    def preempt(number: int, frame: FrameType | None) -> None:
        raise Interrupted

    def started(run: Callable[..., None], args: tuple[Any, ...]) -> None:
        _thread.start_new_thread(run, args)
        assert begun.wait(WAIT_S)
        signal.raise_signal(signal.SIGUSR1)

    begun, is_over, late = threading.Event(), threading.Event(), list[bool]()

    def work(block: Sequence[Move]) -> None:
        begun.set()
        late.append(is_over.wait(0.5))  # the copy must not end before this write

    monkeypatch.setattr(slot_stream, "_thread", SimpleNamespace(**vars(_thread) | {"start_new_thread": started}))
    before = signal.signal(signal.SIGUSR1, preempt)
    try:
        with pytest.raises(Interrupted):
            in_threads(MOVES, work)
    finally:
        is_over.set()
        signal.signal(signal.SIGUSR1, before)
    assert late == [False]


@pytest.mark.usefixtures("two_threads")
def test_without_a_thread_to_be_had_the_caller_makes_all_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit of threads is reached: nothing is left out."""

    def refused(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(slot_stream, "_thread", SimpleNamespace(**vars(_thread) | {"start_new_thread": refused}))
    done: list[Move] = []
    in_threads(MOVES, done.extend)
    assert sorted(done) == MOVES


@pytest.mark.usefixtures("two_threads")
def test_a_thread_that_stands_still_leaves_its_moves_to_the_other() -> None:
    """A copy takes as long as its threads have cores for it together, not as long as the slowest one's half."""
    moves: list[Move] = [(at, at, 8) for at in range(0, 400, 8)]
    main, begun, others_done = threading.current_thread(), threading.Event(), threading.Event()
    done: list[Move] = []

    def work(block: Sequence[Move]) -> None:
        if threading.current_thread() is main:
            begun.set()
            assert others_done.wait(WAIT_S)
        else:
            assert begun.wait(WAIT_S)
        done.extend(block)
        if len(done) == len(moves) - 1:  # all but the one that the caller stands still with
            others_done.set()

    in_threads(moves, work)
    assert sorted(done) == moves


@pytest.mark.usefixtures("two_threads")
def test_an_error_in_a_helper_is_the_callers() -> None:
    """A block that a helper could not copy, as without memory for its table, must not count as copied."""
    main, raised = threading.current_thread(), threading.Event()

    def work(block: Sequence[Move]) -> None:
        if threading.current_thread() is main:
            assert raised.wait(WAIT_S)
            return
        raised.set()
        raise MemoryError

    with pytest.raises(MemoryError):
        in_threads(MOVES, work)


@pytest.mark.usefixtures("two_threads")
def test_a_stream_is_made_once_a_twice_interrupted_copy_moves_nothing() -> None:
    """The second exception cuts the wait off for a block that a helper moves; the next put may have its slots."""
    main, begun, go_on, moved = threading.current_thread(), threading.Event(), threading.Event(), list[Move]()

    def work(moves: Sequence[Move]) -> None:
        if threading.current_thread() is main:
            assert begun.wait(WAIT_S)
            raise Interrupted
        begun.set()
        assert go_on.wait(WAIT_S)
        moved.extend(moves)

    def interrupt_again(number: int, frame: FrameType | None) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGALRM, interrupt_again)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        with pytest.raises(Interrupted):
            in_threads([(at, at, 8) for at in range(0, 64, 8)], work)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert not moved
    threading.Timer(0.2, go_on.set).start()
    slot_stream.SlotStream([memoryview(bytearray(8))], 8, 8)
    assert len(moved) == 1
