"""A put or get in the middle of another one of the same thread is refused at once; threads do not mind one another."""

from __future__ import annotations

import itertools
import re
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from memstore.client.connect import connect
from memstore.client.store import Store
from memstore.errors import ConfigError
from memstore.testing.clusters.processes import ProcessCluster

WAIT_S = 60.0
JOBS = itertools.count()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessCluster]:
    with ProcessCluster(tmp_path_factory.mktemp("nested"), {"h1": {}}, arena_bytes=64 << 20) as started:
        yield started


@pytest.fixture
def store(cluster: ProcessCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    monkeypatch.setenv("MEMSTORE_HOST", "h1")
    with connect(f"nested{next(JOBS)}", rank=0, world_size=1, config=cluster.config) as opened:
        yield opened


class Hooked:
    """A part of a state that does something while it is put, or filled."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self.work = work

    def state_dict(self) -> dict[str, Any]:
        self.work()
        return {"a": torch.ones(4)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.work()


class HookedTensor(torch.Tensor):
    """A tensor whose class does something when it is looked at."""

    work: Callable[[], Any]

    def __tensor_flatten__(self) -> Any:
        type(self).work()


def refused(inner: str, outer: str) -> Any:
    said = f"{re.escape(inner)} of job 'nested[0-9]+' was called in the middle of {re.escape(outer)}, in the same"
    return pytest.raises(ConfigError, match=said)


def test_a_put_or_a_get_within_a_put_is_refused(store: Store) -> None:
    """Even the first one, in which the outer put waits for no process; what is put afterwards is as ever."""
    state = {"a": torch.ones(4)}
    with refused("put(2)", "put(1)"):
        store.put(1, {"part": Hooked(lambda: store.put(2, state))})
    with refused("get()", "put(1)"):
        store.put(1, {"part": Hooked(store.get)})
    HookedTensor.work = staticmethod(lambda: store.put(2, state))
    with refused("put(2)", "put(1)"):
        store.put(1, {"a": torch.ones(4).as_subclass(HookedTensor)})
    with refused("flush()", "put(1)"):
        store.put(1, {"part": Hooked(store.flush)})
    assert store.put(1, state).wait("committed", WAIT_S).level == "committed"


def test_a_put_within_a_get_is_refused(store: Store) -> None:
    store.put(1, {"part": Hooked(lambda: None)}).wait("committed", WAIT_S)
    with refused("put(2)", "get()"):
        store.get(1, rank=0, into={"part": Hooked(lambda: store.put(2, {"a": torch.ones(4)}))})
    assert store.put(2, {"a": torch.ones(4)}).wait("committed", WAIT_S).level == "committed"


def test_a_signals_handler_receives_what_it_interrupts_and_the_put_goes_on(store: Store) -> None:
    """One that meets no put in its thread may put, even while the loop waits for a commit."""
    received: list[object] = []

    def handler(*_: object) -> None:
        try:
            received.append(store.put(7, {"a": torch.zeros(4)}).step)
        except ConfigError as exc:
            received.append(str(exc))

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        ticket = store.put(1, {"part": Hooked(lambda: signal.raise_signal(signal.SIGUSR1))})
        signal.raise_signal(signal.SIGUSR1)
        store.flush(timeout_s=WAIT_S)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert f"put(7) of job {store.job!r} was called in the middle of put(1)" in str(received[0])
    assert received[1:] == [7]
    assert ticket.step == 1


def test_another_threads_get_during_a_put_is_answered(store: Store) -> None:
    store.put(1, {"a": torch.ones(4)}).wait("committed", WAIT_S)
    with ThreadPoolExecutor(1) as pool:

        def read_elsewhere() -> None:
            got = pool.submit(store.get, 1, rank=0).result(WAIT_S)
            assert got is not None
            assert got.step == 1

        ticket = store.put(2, {"part": Hooked(read_elsewhere)})
    assert ticket.wait("committed", WAIT_S).level == "committed"
