"""One Store, used by threads and inherited by a forked child (R8, R23)."""

from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from memstore.client.connect import connect
from memstore.client.store import Store
from memstore.errors import ClosedError, PeerTimeout
from memstore.shell.rank import collective
from memstore.shell.rank.collective import take_turn
from memstore.testing.clusters.processes import ProcessCluster

WAIT_S = 60.0


def outcome_in_child(store: Store, verb: str) -> str:
    """Fork; return what the child's call came to."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(10)  # ends a child that hangs
            match verb:
                case "put":
                    store.put(9, {})
                case "get":
                    store.get(3, timeout_s=1.0)
                case "get rank":
                    store.get(3, rank=0, timeout_s=1.0)
                case "flush":
                    store.flush("durable", timeout_s=1.0)
                case "wait":
                    store.puts.steps._tickets[3].wait("durable", timeout_s=1.0)
            os.write(writing, b"nothing")
        except ClosedError as error:
            os.write(writing, str(error).encode())
        except BaseException as error:
            os.write(writing, repr(error).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        said = pipe.read().decode()
    os.waitpid(child, 0)
    return said


class Turn:
    """A lock that another thread holds at first."""

    def acquire(self, **limits: Any) -> bool:
        return "timeout" in limits

    def _is_owned(self) -> bool:
        return False


def test_the_wait_for_a_turn_counts_in_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of another thread's call is taken off this one's; a call that is alone has all of its time."""
    lock = threading.RLock()
    assert take_turn(lock, "get()", 60.0) == 60.0
    assert take_turn(lock, "get()", 60.0) == 60.0  # a signal's handler ended the call before
    lock.release()
    with pytest.raises(RuntimeError, match="un-acquired"):  # there is one hold
        lock.release()
    moments = iter([100.0, 150.0])
    monkeypatch.setattr(collective, "time", SimpleNamespace(monotonic=lambda: next(moments)))
    assert take_turn(Turn(), "get()", 60.0) == 10.0


def test_threads_get_in_turn_and_a_forked_child_is_reported_whose_store_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each thread's `into` is filled; in a child no verb waits for a link that only the parent has."""
    monkeypatch.setenv("MEMSTORE_HOST", "h1")
    with (
        ProcessCluster(tmp_path, {"h1": {}}) as cluster,
        connect("job", rank=0, world_size=1, config=cluster.config) as store,
    ):
        assert store.get() is None
        store.put(3, {"weight": torch.arange(1000.0)}).wait("committed", WAIT_S)
        states = [{"weight": torch.zeros(1000)} for _ in range(4)]
        with ThreadPoolExecutor(4) as pool:
            for got in pool.map(lambda state: store.get(3, into=state, timeout_s=WAIT_S), states):
                assert got is not None
                assert got.step == 3
        assert all(torch.equal(state["weight"], torch.arange(1000.0)) for state in states)
        with ThreadPoolExecutor(1) as pool:
            pool.submit(store._one_get.acquire).result()
            with pytest.raises(PeerTimeout, match="another thread of this process"):
                store.get(3, timeout_s=0.0)
            pool.submit(store._one_get.release).result()

        for verb in ("put", "get", "get rank", "flush"):
            said = outcome_in_child(store, verb)
            assert said.startswith(f"this Store of job 'job' is that of process {os.getpid()}, of which"), (verb, said)
        with store.puts.steps._tickets[3]._changed, ThreadPoolExecutor(1) as pool:  # in the child no thread releases it
            said = pool.submit(outcome_in_child, store, "wait").result(WAIT_S)
        assert said.startswith(f"the ticket of step 3 is that of process {os.getpid()}, of which this one"), said
        assert store.put(4, {"weight": torch.zeros(1000)}).wait("committed", WAIT_S).level == "committed"
