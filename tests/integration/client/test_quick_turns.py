"""A copy that blocks training does not wait 5 ms for the interpreter at every move; the interval is left as it was."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from memstore.client.connect import connect
from memstore.core.wire.calls import ReadStep
from memstore.errors import PeerTimeout
from memstore.shell.codec import interpreter
from memstore.shell.codec.interpreter import TURN_S, copying, waiting
from memstore.shell.native import extension
from memstore.shell.rank import shard_read
from memstore.shell.rank.shard_read import ShardRead
from memstore.testing.clusters.processes import ProcessCluster

BEFORE_S = 0.005
WAIT_S = 60.0


@pytest.fixture(autouse=True)
def interval() -> Iterator[None]:
    was_s = sys.getswitchinterval()
    sys.setswitchinterval(BEFORE_S)
    yield
    left_s = sys.getswitchinterval()
    sys.setswitchinterval(was_s)
    assert left_s == pytest.approx(BEFORE_S)


def now_s() -> object:
    return pytest.approx(sys.getswitchinterval(), rel=0.01)


def test_turns_are_short_until_the_last_holder_has_let_go() -> None:
    with copying():
        with pytest.raises(ZeroDivisionError), copying():
            _ = 1 / 0
        assert now_s() == TURN_S
    assert now_s() == BEFORE_S


def test_who_waits_in_a_hold_takes_turns_as_usual() -> None:
    with waiting():
        assert now_s() == BEFORE_S
    with copying(), copying():
        with waiting():
            assert now_s() == BEFORE_S
        assert now_s() == TURN_S


def test_what_the_caller_sets_is_left_alone() -> None:
    sys.setswitchinterval(1e-6)
    with copying():
        assert now_s() == 1e-6
    with copying():
        sys.setswitchinterval(BEFORE_S)
    assert now_s() == BEFORE_S


def test_a_forked_child_has_the_interval_of_before() -> None:
    """It leaves the pass that its parent is in, and begins others, whichever thread held the lock in the parent."""
    is_held, may_end = threading.Event(), threading.Event()

    def hold() -> None:
        with interpreter._passes.lock:
            is_held.set()
            may_end.wait(WAIT_S)

    with ThreadPoolExecutor(1) as pool:
        with copying():
            pool.submit(hold)
            assert is_held.wait(WAIT_S)
            child = os.fork()
            is_right = now_s() == BEFORE_S
            may_end.set()
        if child == 0:
            with copying():
                is_right &= now_s() == TURN_S
            os._exit(0 if is_right and now_s() == BEFORE_S else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_read_that_waits_for_its_answer_leaves_other_threads_their_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a slow link that is minutes, in which nothing is copied."""
    link, waited_s = Mock(), list[float]()

    def is_answered(future: Future[Any], limit_s: float) -> bool:
        waited_s.append(sys.getswitchinterval())
        return False

    link.call_soon.return_value = Future()
    monkeypatch.setattr(shard_read, "is_answered", is_answered)
    read = ShardRead(link, ReadStep(job="job", step=None, rank=0), timeout_s=1.0)
    with pytest.raises(PeerTimeout), copying():
        read.take([0])
    assert waited_s == [pytest.approx(BEFORE_S)]


def test_every_move_of_a_put_and_a_get_is_made_in_short_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"a": torch.arange(1 << 20, dtype=torch.float32)}  # several moves
    real, seen = ctypes.memmove, []

    def observed(target: int, source: int, nbytes: int) -> None:
        seen.append(now_s() == TURN_S)
        real(target, source, nbytes)

    monkeypatch.setenv("MEMSTORE_HOST", "h1")
    monkeypatch.setattr(extension, "built", None)  # it makes its moves without the interpreter's lock
    with (
        ProcessCluster(tmp_path, {"h1": {}}, arena_bytes=64 << 20) as cluster,
        connect("turns", rank=0, world_size=1, config=cluster.config) as store,
    ):
        monkeypatch.setattr(ctypes, "memmove", observed)
        store.put(1, state).wait("committed")
        put_count = len(seen)
        got = store.get(1, rank=0, into={"a": torch.zeros(1 << 20)})
    assert got is not None
    assert torch.equal(got.state["a"], state["a"])
    assert put_count > 1
    assert len(seen) > put_count + 1
    assert all(seen)
