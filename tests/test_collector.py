"""The cyclic collector stands still while a put blocks training (R11), and is left as it was."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from memstore.api import connect
from memstore.errors import UnsupportedState
from memstore.shell.collector import collector_paused
from memstore.store import Store
from memstore.testing.processes import ProcessCluster

TENSORS = 3000  # some forty young generations, so that older ones are certain without the pause


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    monkeypatch.setenv("MEMSTORE_HOST", "h1")
    with (
        ProcessCluster(tmp_path, {"h1": {}}, arena_bytes=64 << 20) as cluster,
        connect("collected", rank=0, world_size=1, config=cluster.config) as opened,
    ):
        yield opened


@pytest.mark.parametrize("is_enabled", [True, False])
def test_the_collector_is_left_as_it_was(is_enabled: bool) -> None:
    try:
        gc.enable() if is_enabled else gc.disable()
        with pytest.raises(ZeroDivisionError), collector_paused():
            _ = gc.isenabled() or 1 / 0
        assert gc.isenabled() == is_enabled
    finally:
        gc.enable()


def test_a_put_of_many_tensors_looks_at_no_old_object(store: Store) -> None:
    state = {f"layer.{number}": torch.full((4,), float(number)) for number in range(TENSORS)}
    store.put(0, state).wait("committed")
    generations: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        generations.append(info["generation"])

    gc.collect()
    gc.callbacks.append(note)
    try:
        ticket = store.put(1, state)
        looked_at = max(generations, default=0)  # at its end perhaps once at the youngest
    finally:
        gc.callbacks.remove(note)
    assert looked_at == 0
    assert gc.isenabled()
    ticket.wait("committed")
    with pytest.raises(UnsupportedState):
        store.put(2, {"a": object()})
    assert gc.isenabled()


def test_nothing_of_a_put_or_a_get_waits_for_the_collector(store: Store) -> None:
    """A training that runs without one must not gather plans, which refer to every tensor that was put."""
    state = {"a": torch.ones(1 << 16), "b": [torch.zeros(4), {"c": np.ones(3)}]}
    gc.collect()
    gc.disable()
    try:
        store.put(1, state).wait("committed")
        store.put(2, state, overlap=[state["a"]])
        store.fence()
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
    assert kept == []
