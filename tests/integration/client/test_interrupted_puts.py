"""A put that a signal's handler ends by an exception, wherever it was: no slot is lost, and no lock held (R8, R11)."""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from interruption import SWALLOWED, interrupt
from overlap_case import WAIT_S, WIDTH, arrive, hold, on_device_of, one_host, one_rank, stored

from memstore.client.rehearsal import FirstRehearsal, Rehearsal
from memstore.client.store import Store
from memstore.errors import LoadError, RecoveryError
from memstore.shell.device import deferred_copy
from memstore.shell.tensors import slot_stream
from memstore.testing.clusters.processes import ProcessCluster, wait_for


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessCluster]:
    with one_host(tmp_path_factory.mktemp("interrupted")) as running:
        yield running


@pytest.fixture
def store(cluster: ProcessCluster) -> Iterator[Store]:
    with one_rank(cluster) as joined:
        yield joined


def time_is_over(*_: Any) -> None:
    raise TimeoutError("time is over")


@pytest.fixture(params=["function", "partial", "method"])
def handler(request: pytest.FixtureRequest) -> Iterator[Callable[..., None]]:
    """What handles SIGUSR1 by raising, in the ways in which one may be written; the one before comes back."""

    class Limit:
        def over(self, signum: int, frame: Any) -> None:
            self.deeper()

        def deeper(self) -> None:
            raise TimeoutError("time is over")

    before = signal.getsignal(signal.SIGUSR1)
    yield {"function": time_is_over, "partial": partial(time_is_over, "x"), "method": Limit().over}[request.param]
    signal.signal(signal.SIGUSR1, before)


@pytest.fixture
def two_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every move is worth a thread of its own."""
    monkeypatch.setattr(slot_stream, "THREAD_BYTES", 1)
    monkeypatch.setattr(slot_stream, "THREADS_MAX", 2)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)


@pytest.mark.parametrize("is_overlapped", [False, True], ids=["at once", "overlapped"])
@pytest.mark.usefixtures("two_threads")
def test_a_put_may_be_interrupted_anywhere(cluster: ProcessCluster, store: Store, is_overlapped: bool) -> None:
    """The next put has all the room, the commit has what was put, and what was set for the copy is set back."""
    if is_overlapped:
        on_device_of(store)
    weights = {n: torch.full((WIDTH, WIDTH), float(n)) for n in range(2)}

    def put(step: int) -> Any:
        weight = weights[step % 2]
        state = {"w": weight, "step": step, "gathered": torch.ones(4, 4)[:, ::2]}
        ticket = store.put(step, state, overlap=[weight] if is_overlapped else False)
        store.wait_before_step()
        return ticket

    for step in range(5):  # as many as are kept, and more
        put(step).wait("committed", WAIT_S)
    kept: list[BaseException] = []  # and what it holds on to
    for at in itertools.count(1):
        step = 2 * at + 4
        interrupted = interrupt(lambda: put(step), at)  # noqa: B023
        if interrupted is None:
            break
        kept.append(interrupted)
        assert torch.is_grad_enabled(), interrupted
        assert put(step + 1).wait("committed", WAIT_S).level == "committed", interrupted
        with contextlib.suppress(RecoveryError):
            assert torch.equal(stored(store, step)["w"], weights[0]), interrupted
        assert torch.equal(stored(store, step + 1)["w"], weights[1]), interrupted
    assert at > 100
    kept.clear()
    put(step + 1).wait("committed", WAIT_S)
    leases = store._link.leases

    def is_free() -> bool:
        (host,) = cluster.host_rows()
        return len(leases.free) == len(leases.held()) == host["stats"]["leased_slots"] > 0

    wait_for(is_free, "all that is leased to be free", WAIT_S)
    assert gc.isenabled()


@pytest.mark.usefixtures("two_threads")
def test_what_a_handler_raises_in_a_fence_reaches_who_called_it(store: Store) -> None:
    """An Exception as well, which is swallowed where it is the store's own: a time limit by alarm() must end training.

    What orders the copies and what judges them is interrupted; nothing is lost by it.
    """
    on_device_of(store)
    hold(store)
    weights = [torch.full((WIDTH, WIDTH), float(n)) for n in range(2)]
    where: list[str] = []
    for at in itertools.count(1):
        store.put(2 * at, {"w": weights[0]}, overlap=[weights[0]])
        interrupted = interrupt(store.wait_before_step, at)
        arrive(store)
        if interrupted is None:
            break
        assert SWALLOWED not in str(interrupted)
        where.append(str(interrupted))
        ticket = store.put(2 * at + 1, {"w": weights[1]}, overlap=[weights[1]])
        store.wait_before_step()
        arrive(store)
        assert ticket.wait("committed", WAIT_S).level == "committed", interrupted
        assert torch.equal(stored(store, 2 * at + 1)["w"], weights[1]), interrupted
    assert at > 30
    assert any("deferred_copy" in place for place in where)


@pytest.mark.parametrize("place", ["copy_out", "is_changed"])
def test_a_time_limit_by_a_signal_ends_a_fence(
    store: Store, place: str, monkeypatch: pytest.MonkeyPatch, handler: Callable[..., None]
) -> None:
    """A real signal, whose handler raises what libraries raise for their own."""
    on_device_of(store)
    hold(store)
    weight = torch.ones(WIDTH, WIDTH)
    ticket = store.put(1, {"w": weight}, overlap=[weight])
    signal.signal(signal.SIGUSR1, handler)
    holder: Any = {"copy_out": deferred_copy, "is_changed": deferred_copy.WatchedSource}[place]
    with monkeypatch.context() as patch:
        patch.setattr(holder, place, lambda *_: signal.raise_signal(signal.SIGUSR1))
        with pytest.raises(TimeoutError, match="time is over"):
            store.wait_before_step()
    store.wait_before_step()
    arrive(store)
    assert ticket.level == "failed"
    after = store.put(2, {"w": weight}, overlap=[weight])
    store.wait_before_step()
    arrive(store)
    assert after.wait("committed", WAIT_S).level == "committed"


@pytest.mark.parametrize("first", range(1, 42, 10))
def test_a_first_put_may_be_interrupted(cluster: ProcessCluster, first: int) -> None:
    """It claims room, which threads of the store answer and follow: none stands still, and the next put has it."""
    weight = torch.ones(WIDTH, WIDTH)
    for at in itertools.count(first, 40):
        with one_rank(cluster) as store:
            interrupted = interrupt(lambda: store.put(1, {"w": weight}), at)
            assert store.put(2, {"w": weight}).wait("committed", WAIT_S).level == "committed", interrupted
            if interrupted is None:
                break
    assert at > 100


def test_a_put_that_begins_a_rehearsal_may_be_interrupted() -> None:
    """It runs in a thread beside the training: close() finds it over wherever its start was ended by an exception."""
    for at in itertools.count(1):
        rehearsal, begun = FirstRehearsal("job", "module:build"), threading.Event()

        def rehearse(*_: Any, begun: threading.Event = begun) -> Rehearsal:
            begun.set()
            return Rehearsal()

        interrupted = interrupt(lambda: rehearsal.begin(1, rehearse), at)  # noqa: B023
        assert rehearsal.wait(WAIT_S), interrupted
        if interrupted is None:
            break
    assert begun.is_set()


@pytest.mark.parametrize(("of_rank", "first"), [(None, 1), (0, 2)])
@pytest.mark.usefixtures("two_threads")
def test_a_get_may_be_interrupted_anywhere(store: Store, of_rank: int | None, first: int) -> None:
    """The next get and put find no lock held and all the room."""
    weight = torch.arange(WIDTH * WIDTH, dtype=torch.float32).reshape(WIDTH, WIDTH)
    state = {"w": torch.zeros(WIDTH, WIDTH)}
    store.put(1, {"w": weight}).wait("committed", WAIT_S)
    interrupted: BaseException | None
    for at in itertools.count(first, 3):
        try:
            interrupted = interrupt(lambda: store.get(1, rank=of_rank, into=state, timeout_s=WAIT_S), at)
        except LoadError as exc:  # says that the state is half written
            interrupted = exc
        state["w"].zero_()
        store.get(1, rank=of_rank, into=state, timeout_s=WAIT_S)
        assert torch.equal(state["w"], weight), interrupted
        if interrupted is None:
            break
    assert at > 100
    for step in range(2, 8):
        store.put(step, {"w": weight}).wait("committed", WAIT_S)


def test_a_rank_whose_handler_raises_again_and_again_goes_on(tmp_path: Path) -> None:
    """Hundreds of exceptions of a timer around put; with the timer off all is as ever, and threads end."""
    program = textwrap.dedent("""
        import gc, json, random, signal, sys, threading
        import torch
        from memstore.client.connect import connect
        from memstore.config import Config

        class Interrupted(Exception):
            pass

        is_armed = False

        def on_alarm(*_):
            if is_armed:
                raise Interrupted

        draw = random.Random(int(sys.argv[2]))
        store = connect("timer", rank=0, world_size=1, config=Config(**json.loads(sys.argv[1])))
        weights = [torch.full((1 << 20,), float(n)) for n in range(4)]
        levels = []

        def put(step):
            weight = weights[step % 4]
            return store.put(step, {"w": weight})

        put(0).wait("committed", 60)
        signal.signal(signal.SIGALRM, on_alarm)
        count, step = 0, 0
        while count < 400:
            step += 1
            signal.setitimer(signal.ITIMER_REAL, draw.uniform(1e-5, 6e-3), draw.uniform(1e-5, 2e-3))
            try:
                is_armed = True
                levels.append(put(step))
                is_armed = False
            except Interrupted:
                is_armed = False
                count += 1
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        skipped = [t.reason for t in levels if "no free slots" in t.reason]
        last = [put(step + n).wait("committed", 60).step for n in range(1, 9)]
        is_right = all(torch.equal(store.get(n, rank=0).state["w"], weights[n % 4]) for n in last[-2:])
        store.close()
        left = [t.name for t in threading.enumerate() if t.name.startswith("memstore")]
        print(json.dumps([count, skipped, is_right, left, gc.isenabled()]))
    """)
    with ProcessCluster(tmp_path, {"h1": {}, "h2": {}}, arena_bytes=128 << 20, keep_steps=2) as cluster:
        fields = {"store": cluster.config.store, "connect_timeout_s": WAIT_S, "stall_budget_s": 20.0, "keep_steps": 2}
        done = subprocess.run(
            [sys.executable, "-c", program, json.dumps(fields), "1"],
            env=cluster.env("h1"),
            capture_output=True,
            text=True,
            timeout=2 * WAIT_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        assert json.loads(done.stdout) == [400, [], True, [], True]
