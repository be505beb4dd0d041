"""put(overlap=True) of device memory: what is a fence, and who waits for one (R11, R12)."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from overlap_case import (
    WAIT_S,
    WIDTH,
    Training,
    arrive,
    hold,
    is_same,
    on_device_of,
    one_device_rank,
    one_host,
    one_rank,
    stored,
)

from memstore.client.connect import connect
from memstore.client.reader import reader
from memstore.client.store import Store
from memstore.errors import CommitError, ConfigError, RecoveryError
from memstore.testing.clusters.processes import ProcessCluster, wait_for


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessCluster]:
    with one_host(tmp_path_factory.mktemp("overlap")) as running:
        yield running


@pytest.fixture
def store(cluster: ProcessCluster) -> Iterator[Store]:
    with one_device_rank(cluster) as joined:
        yield joined


def test_a_tensor_that_gets_other_memory_is_stored_as_it_was(store: Store) -> None:
    """`param.data = ...` frees nothing that the copy reads."""
    training = Training()
    store.wait_before_step(training.optimizer)
    hold(store)
    expected = training.copy()
    ticket = store.put(0, list(training.model.parameters()), overlap=True)
    for param in training.model.parameters():
        param.data = torch.zeros_like(param)
    store.wait_before_step()
    arrive(store)
    ticket.wait("committed", WAIT_S)
    assert is_same(stored(store, 0)[0].detach(), expected["model"]["0.weight"])


def test_only_what_a_fenced_optimizer_owns_is_copied_late(store: Store) -> None:
    """Another optimizer's parameters may change before the fence; so may everything if nothing is fenced."""
    one, other = Training(), Training()
    with pytest.raises(ConfigError, match=r"store\.wait_before_step\(optimizer\)"):
        store.put(0, one.state(), overlap=True)
    store.wait_before_step(one.optimizer)
    store.wait_before_step(one.optimizer)  # twice is once
    hold(store)
    expected = {"one": one.copy(), "other": other.copy()}
    ticket = store.put(0, {"one": one.state(), "other": other.state()}, overlap=True)
    other.forward_backward()
    other.optimizer.step()
    one.forward_backward()
    one.optimizer.step()
    arrive(store)
    ticket.wait("committed", WAIT_S)
    assert is_same(stored(store, 0), expected)


def test_a_state_in_host_memory_is_put_as_without_overlap(cluster: ProcessCluster) -> None:
    """A copy beside training would cost it more than one that it waits for; the fence has nothing to wait for."""
    with one_rank(cluster) as store:
        weight = torch.ones(WIDTH, WIDTH)
        ticket = store.put(0, {"w": weight}, overlap=[weight])
        assert store.puts.overlap._late is None
        weight.zero_()
        store.wait_before_step()
        ticket.wait("committed", WAIT_S)
        assert torch.equal(stored(store, 0)["w"], torch.ones(WIDTH, WIDTH))


def test_tensors_given_by_hand_wait_for_a_fence_called_by_hand(store: Store) -> None:
    """For what steps without torch's hook."""
    with pytest.raises(ConfigError, match=r"\(int\) needs a torch\.optim\.Optimizer"):
        store.wait_before_step(3)  # type: ignore[arg-type]
    weight = torch.ones(WIDTH, WIDTH)
    hold(store)
    ticket = store.put(0, {"w": weight}, overlap=[weight])
    store.wait_before_step()
    weight.zero_()
    arrive(store)
    ticket.wait("committed", WAIT_S)
    assert torch.equal(stored(store, 0)["w"], torch.ones(WIDTH, WIDTH))


def test_gradient_accumulation_several_optimizers_and_a_step_in_another_thread(store: Store) -> None:
    """The first step of any fenced optimizer, wherever it is taken, waits for all of the copy; backward does not."""
    one, other = Training(), Training(foreach=True)
    for training in (one, other):
        store.wait_before_step(training.optimizer)
    hold(store)
    expected = {"one": one.copy(), "other": other.copy()}
    ticket = store.put(0, {"one": one.state(), "other": other.state()}, overlap=True)
    for _ in range(3):
        one.forward_backward()
        other.forward_backward()
    assert ticket.level == "pending"
    with ThreadPoolExecutor(1) as pool:
        pool.submit(other.optimizer.step).result(WAIT_S)
    one.optimizer.step()
    arrive(store)
    ticket.wait("committed", WAIT_S)
    assert is_same(stored(store, 0), expected)


def test_a_step_that_the_scaler_leaves_out_leaves_the_copy_to_the_next_put(store: Store) -> None:
    """GradScaler found an infinity: no step, no fence. The next put is one."""
    training = Training()
    store.wait_before_step(training.optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    first = store.put(0, training.state(), overlap=True)
    scaler.scale(training.model(torch.randn(8, WIDTH)).sum() * float("inf")).backward()
    scaler.step(training.optimizer)
    second = store.put(1, training.state(), overlap=True)
    first.wait("sealed", WAIT_S)
    store.wait_before_step()
    second.wait("committed", WAIT_S)
    assert first.level in ("committed", "superseded")


def test_get_and_rewind_are_fences(store: Store) -> None:
    """get(into=) writes what a copy reads, and a rewind ends what an attempt has under way."""
    training = Training()
    store.wait_before_step(training.optimizer)
    store.put(0, training.state()).wait("committed", WAIT_S)
    training.optimizer.step()
    expected = training.copy()
    ticket = store.put(1, training.state(), overlap=True)
    with pytest.raises(RecoveryError):
        store.get(99, rank=0)  # a fence, though there is nothing to read
    ticket.wait("committed", WAIT_S)
    store.get(1, rank=0, into=training.state())
    assert is_same(stored(store, 1)["model"], expected["model"])
    store.put(2, training.state(), overlap=True)
    store.rewind(1)
    assert store.puts.overlap._late is None


def test_what_was_put_before_close_is_there_after_it(cluster: ProcessCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """close is a fence; the optimizer steps without the store from then on."""
    monkeypatch.setenv("MEMSTORE_HOST", "h1")
    store = connect("closes", rank=0, world_size=1, config=cluster.config)
    training = Training()
    store.wait_before_step(training.optimizer)
    expected = training.copy()
    store.put(0, training.state(), overlap=True)
    store.close()
    training.optimizer.step()
    with reader("closes", config=cluster.config) as source:
        wait_for(lambda: source.latest_step() == 0, "the step to be committed", WAIT_S)
        assert is_same(source.get(0, rank=0).state, expected)


def test_a_forked_child_steps_without_a_fence_and_the_parent_commits(store: Store) -> None:
    """The copy is the parent's: the child waits for nothing, not even with the parent in mid-copy (R8)."""
    training = Training()
    store.wait_before_step(training.optimizer)
    hold(store)
    expected = training.copy()
    ticket = store.put(0, training.state(), overlap=True)
    child = os.fork()
    if child == 0:
        try:
            store.wait_before_step(timeout_s=WAIT_S)
            with torch.no_grad():
                training.model[0].weight.zero_()
            os._exit(0 if store.puts.overlap._late is None else 3)
        finally:
            os._exit(4)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    training.forward_backward()
    training.optimizer.step()
    arrive(store)
    ticket.wait("committed", WAIT_S)
    assert is_same(stored(store, 0), expected)


def test_a_forked_child_leaves_the_store_at_once_with_anything_left_to_copy(store: Store) -> None:
    """At the fork another thread is submitting a put: in the child no thread will release its lock (R8)."""
    training = Training()
    store.wait_before_step(training.optimizer)
    hold(store)
    ticket = store.put(0, training.state(), overlap=True)
    (put,) = store.puts._open
    is_held, is_forked = threading.Event(), threading.Event()

    def submit() -> None:
        with put.lock:
            is_held.set()
            is_forked.wait(WAIT_S)

    thread = threading.Thread(target=submit)
    thread.start()
    is_held.wait(WAIT_S)
    child = os.fork()
    if child == 0:
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(10)  # ends a child that hangs
            store.__exit__(None, None, None)
            os._exit(0)
        finally:
            os._exit(4)
    is_forked.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    training.forward_backward()
    training.optimizer.step()
    arrive(store)
    ticket.wait("committed", WAIT_S)


def test_a_torn_step_fails_on_all_ranks(cluster: ProcessCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other rank's part is given up as well, and both put again from the next step (R12)."""
    monkeypatch.setenv("MEMSTORE_HOST", "h1")

    def join(rank: int) -> Store:
        return connect("both", rank=rank, world_size=2, attempt="launch", config=cluster.config)

    with ThreadPoolExecutor(2) as pool:
        stores = list(pool.map(join, range(2), timeout=WAIT_S))
        weight = torch.ones(WIDTH, WIDTH)
        on_device_of(stores[0])
        hold(stores[0])
        tickets = list(pool.map(lambda s: s.put(0, {"w": weight}, overlap=[weight]), stores, timeout=WAIT_S))
        stores[1].wait_before_step()
        weight.add_(1)
        stores[0].wait_before_step()
        arrive(stores[0])
        for ticket in tickets:
            with pytest.raises(CommitError):
                ticket.wait("committed", WAIT_S)
        assert [ticket.level for ticket in tickets] == ["failed", "skipped"]
        for ticket in pool.map(lambda s: s.put(1, {"w": weight}), stores, timeout=WAIT_S):
            ticket.wait("committed", WAIT_S)
        list(pool.map(Store.close, stores, timeout=WAIT_S))
    with reader("both", config=cluster.config) as source:
        assert [step.step for step in source.steps() if step.committed] == [1]
