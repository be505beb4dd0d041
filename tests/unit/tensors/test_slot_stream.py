"""Copies that are shared out to threads: all of them have ended when the copy has, however it ended."""

from __future__ import annotations

import _thread
import signal
import threading
from collections.abc import Callable, Sequence
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch

from memstore.shell.native.loops import Move
from memstore.shell.tensors import slot_stream
from memstore.shell.tensors.slot_stream import in_threads

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
