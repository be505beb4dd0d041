"""The cyclic collector stands still while a put blocks training (R11), and is left as it was."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from memstore.client.connect import connect
from memstore.client.store import Store
from memstore.errors import ManifestMismatch, UnsupportedState
from memstore.shell.codec.interpreter import copying, waiting
from memstore.testing.clusters.processes import ProcessCluster

WAIT_S = 60.0
TENSORS = 3000  # some forty young generations, so that older ones are certain without the pause


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    monkeypatch.setenv("MEMSTORE_HOST", "h1")
    with (
        ProcessCluster(tmp_path, {"h1": {}}, arena_bytes=64 << 20) as cluster,
        connect("collected", rank=0, world_size=1, config=cluster.config) as opened,
    ):
        yield opened


def looked_at(call: Callable[[], Any]) -> int:
    """The oldest generation that the collector looked at meanwhile; at its end, or when it waits, the youngest."""
    generations: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        generations.append(info["generation"])

    gc.collect()
    gc.callbacks.append(note)
    try:
        call()
        return max(generations, default=0)
    finally:
        gc.callbacks.remove(note)


@pytest.mark.parametrize("is_enabled", [True, False])
def test_the_collector_is_left_as_it_was(is_enabled: bool) -> None:
    try:
        gc.enable() if is_enabled else gc.disable()
        with pytest.raises(ZeroDivisionError), copying():
            _ = gc.isenabled() or 1 / 0
        assert gc.isenabled() == is_enabled
    finally:
        gc.enable()


def test_a_put_of_many_tensors_looks_at_no_old_object(store: Store) -> None:
    state = {f"layer.{number}": torch.full((4,), float(number)) for number in range(TENSORS)}
    store.put(0, state).wait("committed")
    assert looked_at(lambda: store.put(1, state)) == 0
    assert gc.isenabled()
    store.flush()
    with pytest.raises(UnsupportedState):
        store.put(2, {"a": object()})
    assert gc.isenabled()


def test_a_get_of_many_tensors_looks_at_no_old_object(store: Store) -> None:
    """Into tensors that are there, and into new ones; an error leaves the collector on (R27)."""
    state = {f"layer.{number}": torch.full((4,), float(number)) for number in range(TENSORS)}
    store.put(0, state).wait("committed")
    for into in (state, None):
        assert looked_at(lambda into=into: store.get(0, rank=0, into=into)) == 0
        assert gc.isenabled()
    with pytest.raises(ManifestMismatch):
        store.get(0, rank=0, into={"another": torch.zeros(4)})
    assert gc.isenabled()


def test_the_collector_runs_again_when_the_last_of_two_threads_is_through() -> None:
    """And while the only one waits for others; a forked child, in which no other thread goes on, has it at once."""
    begun, may_end = threading.Event(), threading.Event()

    def other() -> None:
        with copying():
            begun.set()
            assert may_end.wait(WAIT_S)

    with ThreadPoolExecutor(1) as pool:
        with copying():
            with waiting():
                assert gc.isenabled()
            done = pool.submit(other)
            assert begun.wait(WAIT_S)
            with waiting():
                assert not gc.isenabled()
        assert not gc.isenabled()
        child = os.fork()
        if not child:
            os._exit(0 if gc.isenabled() else 1)
        assert os.waitpid(child, 0)[1] == 0
        may_end.set()
        done.result(WAIT_S)
    assert gc.isenabled()


def test_nothing_of_a_put_or_a_get_waits_for_the_collector(store: Store) -> None:
    """A training that runs without one must not gather plans, which refer to every tensor that was put."""
    state = {"a": torch.ones(1 << 16), "b": [torch.zeros(4), {"c": np.ones(3)}]}
    gc.collect()
    gc.freeze()  # what other tests left, and let go of only now, is not looked at
    gc.disable()
    try:
        store.put(1, state).wait("committed")
        store.put(2, state, overlap=[state["a"]])
        store.wait_before_step()
        store.flush()
        for into in (None, state):
            assert store.get(2, rank=0, into=into) is not None
        with pytest.raises(UnsupportedState):
            store.put(3, {"a": state["a"], "b": object()})
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        kept = [item for item in gc.garbage if type(item).__module__.startswith(("memstore", "torch"))]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
        gc.unfreeze()
    assert kept == []
