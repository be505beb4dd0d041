"""put(overlap=True): copied while training goes on, whole and of one moment, or its step fails by name (R11, R12)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from overlap_case import WAIT_S, WIDTH, Training, hold, is_same, one_host, one_rank, stored

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
    with one_rank(cluster) as joined:
        yield joined


@pytest.mark.parametrize("is_held", [False, True], ids=["by the thread", "at the fence"])
def test_what_is_stored_is_the_state_at_the_put(store: Store, is_held: bool) -> None:
    """BatchNorm, RNG and plain objects change at once, parameters and moments behind the fence; none of it shows."""
    training = Training()
    store.wait_before_step(training.optimizer)
    if is_held:
        hold(store)
    for step in range(3):
        expected = training.copy()
        ticket = store.put(step, training.state(), overlap=True)
        training.seen = 1000 + step
        training.forward_backward()
        training.optimizer.step()
        ticket.wait("committed", WAIT_S)
        assert is_same(stored(store, step), expected)
        assert not is_same(training.copy(), expected)


def test_the_fence_waits_and_counts_as_stall(store: Store) -> None:
    """Until the optimizer steps nothing of the held copy is submitted; the wait is in the ticket (R11)."""
    training = Training()
    store.wait_before_step(training.optimizer)
    hold(store)
    ticket = store.put(0, training.state(), overlap=True)
    blocked_s = ticket.stall_s
    training.forward_backward()
    assert ticket.level == "pending"
    training.optimizer.step()
    assert ticket.wait("committed", WAIT_S).stall_s > blocked_s


@pytest.mark.parametrize("how", ["in place", "fused", "through .data", "resized"])
def test_a_tensor_changed_before_the_fence_fails_its_step_by_name(store: Store, how: str) -> None:
    """The slots do not hold what was put, or the storage is gone; the next step is put as ever (R12)."""
    training = Training()
    store.wait_before_step(training.optimizer)
    hold(store)
    weight = training.model[2].weight
    ticket = store.put(0, training.state(), overlap=True)
    training.forward_backward()
    if how == "in place":
        with torch.no_grad():
            weight[3, 4] += 1
    elif how == "fused":
        other = torch.optim.SGD([weight], lr=0.1, fused=True)
        version = weight._version
        other.step()
        assert weight._version == version  # torch does not count it, so the bytes have to tell
    elif how == "through .data":
        weight.data.mul_(2)
    else:
        kept = weight.detach().clone()
        weight.untyped_storage().resize_(0)
    store.wait_before_step()
    if how == "resized":
        weight.untyped_storage().resize_(kept.nbytes)
        weight.data.copy_(kept)
    with pytest.raises(CommitError, match=r"state\['model'\]\['2.weight'\]"):
        ticket.wait("committed", WAIT_S)
    assert ticket.level == "failed"
    training.optimizer.step()
    expected = training.copy()
    store.put(1, training.state(), overlap=True)
    store.wait_before_step()
    store.flush(timeout_s=WAIT_S)
    assert is_same(stored(store, 1), expected)


@pytest.mark.parametrize("check", ["whole", "sampled"])
def test_a_change_after_the_copy_and_before_the_fence(cluster: ProcessCluster, check: str) -> None:
    """The slots hold what was put; with samples alone the operation may have been at work when the copy ended."""
    training = Training()
    with one_rank(cluster, overlap_check=check) as store:
        hold(store)
        store.wait_before_step(training.optimizer)
        expected = training.copy()
        ticket = store.put(0, training.state(), overlap=True)
        late, room = store.puts.overlap._late or (None, None)
        assert late is not None
        assert room is not None
        if check == "sampled":
            store.puts.submit = lambda *_: None  # type: ignore[method-assign]  # so that nothing commits it
        late.work()
        with torch.no_grad():
            training.model[0].weight.add_(1)
        training.optimizer.step()
        if check == "sampled":
            assert ticket.level == "failed"
            assert "['0.weight']" in ticket.reason
            room.abandon()
        else:
            ticket.wait("committed", WAIT_S)
            assert is_same(stored(store, 0), expected)


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
    ticket.wait("committed", WAIT_S)
    assert is_same(stored(store, 0), expected)


def test_tensors_given_by_hand_wait_for_a_fence_called_by_hand(store: Store) -> None:
    """For what steps without torch's hook."""
    with pytest.raises(ConfigError, match=r"\(int\) needs a torch\.optim\.Optimizer"):
        store.wait_before_step(3)  # type: ignore[arg-type]
    weight = torch.ones(WIDTH, WIDTH)
    hold(store)
    ticket = store.put(0, {"w": weight}, overlap=[weight])
    store.wait_before_step()
    weight.zero_()
    ticket.wait("committed", WAIT_S)
    assert torch.equal(stored(store, 0)["w"], torch.ones(WIDTH, WIDTH))


def test_a_fence_that_waits_in_vain_fails_the_step_and_lets_training_go_on(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread is in the middle of a move: its slots come back when it is out, and the next put has room (R11)."""
    training = Training()
    entered, go = threading.Event(), threading.Event()

    def stuck(*move: int) -> None:
        entered.set()
        assert go.wait(WAIT_S)

    from memstore.shell.device import deferred_copy

    monkeypatch.setattr(deferred_copy, "copy_own", stuck)
    ticket = store.put(0, training.state(), overlap=training.model.parameters())
    assert entered.wait(WAIT_S)
    taken = set(store._link.in_copy)
    monkeypatch.undo()
    store.puts.overlap._join_in = lambda *_: None  # type: ignore[method-assign]
    store.wait_before_step(timeout_s=0.01)
    assert store._link.in_copy == taken  # still under the thread's hand
    go.set()
    with pytest.raises(CommitError, match=r"0\.01 s at the fence"):
        ticket.wait("committed", WAIT_S)
    store.put(1, training.state()).wait("committed", WAIT_S)
    assert ticket.level == "failed"


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
    ticket.wait("committed", WAIT_S)
    assert is_same(stored(store, 0), expected)


def test_a_step_that_the_scaler_leaves_out_leaves_the_copy_to_the_next_put(store: Store) -> None:
    """GradScaler found an infinity: no step, no fence. The next put is one."""
    training = Training()
    store.wait_before_step(training.optimizer)
    hold(store)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    first = store.put(0, training.state(), overlap=True)
    scaler.scale(training.model(torch.randn(8, WIDTH)).sum() * float("inf")).backward()
    scaler.step(training.optimizer)
    assert first.level == "pending"
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
    hold(store)
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
    hold(store)
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
    ticket.wait("committed", WAIT_S)
    assert is_same(stored(store, 0), expected)


def test_a_forked_child_leaves_the_store_at_once_with_anything_left_to_copy(store: Store) -> None:
    """At the fork another thread is submitting a put: in the child no thread will release its lock (R8)."""
    training = Training()
    store.wait_before_step(training.optimizer)
    hold(store)
    ticket = store.put(0, training.state(), overlap=True)
    (room,) = store.puts._open
    is_held, is_forked = threading.Event(), threading.Event()

    def submit() -> None:
        with room.lock:
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
    ticket.wait("committed", WAIT_S)


def test_a_process_that_ends_in_mid_copy_ends(cluster: ProcessCluster, tmp_path: Path) -> None:
    """No close, no fence: the copy is given up, and the interpreter frees what it read without a crash."""
    program = textwrap.dedent("""
        import json, sys, torch
        from memstore.client.connect import connect
        from memstore.config import Config
        from memstore.shell.device import deferred_copy
        deferred_copy.in_pieces.__defaults__ = (4096,)  # so many moves that the end comes in the middle of them
        weight = torch.ones(4 << 20)
        store = connect("ends", rank=0, world_size=1, config=Config(**json.loads(sys.argv[1])))
        ticket = store.put(0, {"w": weight}, overlap=[weight])
        print(ticket.level, flush=True)
    """)
    fields = {"store": cluster.config.store, "connect_timeout_s": WAIT_S}
    done = subprocess.run(
        [sys.executable, "-c", program, json.dumps(fields)], env=cluster.env("h1"), capture_output=True, text=True,
        timeout=2 * WAIT_S, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout.strip()) == (0, "pending"), done.stderr[-2000:]


def test_a_torn_step_fails_on_all_ranks(cluster: ProcessCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other rank's part is given up as well, and both put again from the next step (R12)."""
    monkeypatch.setenv("MEMSTORE_HOST", "h1")

    def join(rank: int) -> Store:
        return connect("both", rank=rank, world_size=2, attempt="launch", config=cluster.config)

    with ThreadPoolExecutor(2) as pool:
        stores = list(pool.map(join, range(2), timeout=WAIT_S))
        weight = torch.ones(WIDTH, WIDTH)
        hold(stores[0])
        tickets = list(pool.map(lambda s: s.put(0, {"w": weight}, overlap=[weight]), stores, timeout=WAIT_S))
        stores[1].wait_before_step()
        weight.add_(1)
        stores[0].wait_before_step()
        for ticket in tickets:
            with pytest.raises(CommitError):
                ticket.wait("committed", WAIT_S)
        assert [ticket.level for ticket in tickets] == ["failed", "skipped"]
        for ticket in pool.map(lambda s: s.put(1, {"w": weight}), stores, timeout=WAIT_S):
            ticket.wait("committed", WAIT_S)
        list(pool.map(Store.close, stores, timeout=WAIT_S))
    with reader("both", config=cluster.config) as source:
        assert [step.step for step in source.steps() if step.committed] == [1]
