"""put(overlap=True) of device memory: what is a fence, and who waits for one (R11, R12)."""

from __future__ import annotations

import _thread
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from lazy_device import LazyDevice
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
from torch import nn

from memstore.client import overlapped_copy as overlap_module
from memstore.client.connect import connect
from memstore.client.put import Put
from memstore.client.reader import reader
from memstore.client.store import Store
from memstore.errors import CommitError, ConfigError, RecoveryError, UnsupportedState
from memstore.shell.codec import encode, match, verified_stream
from memstore.shell.device import deferred_copy
from memstore.shell.device.deferred_copy import DeferredCopy
from memstore.shell.device.side_stream import DeviceWrite, flights
from memstore.shell.native import extension
from memstore.shell.tensors.memory import leaf_of_tensor
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


# -- overlap device -----------------------------------------------------------------------------------
# put(overlap=True) of device memory: ordered late; at the fence the step's stream waits, the host does not (R11).


FLIGHT_BYTES = 100 << 10


@pytest.fixture(scope="module")
def device_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessCluster]:
    with one_host(tmp_path_factory.mktemp("overlap_device")) as running:
        yield running


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> LazyDevice:
    def small(writes: list[DeviceWrite]) -> Any:
        return flights(writes, FLIGHT_BYTES)

    monkeypatch.setattr(deferred_copy, "flights", small)
    return LazyDevice(monkeypatch, deferred_copy, "copy_out")


@pytest.fixture
def device_store(device_cluster: ProcessCluster, device: LazyDevice) -> Iterator[Store]:
    """Plans every tensor as if it lay on a device: to be copied by that device, not by the host."""
    with one_device_rank(device_cluster) as joined:
        yield joined


def under_way(device_store: Store) -> DeferredCopy:
    late = device_store.puts.overlap._late
    assert late is not None
    return late[0]


def test_what_is_stored_is_the_state_at_the_put(device_store: Store, device: LazyDevice) -> None:
    """The copy thread and the fence between them, whichever comes first; the next put waits for the end."""
    training = Training()
    device_store.wait_before_step(training.optimizer)
    for step in range(3):
        expected = training.copy()
        ticket = device_store.put(step, training.state(), overlap=True)
        training.forward_backward()
        training.optimizer.step()
        ticket.wait("committed", WAIT_S)
        assert is_same(stored(device_store, step), expected)
        assert not is_same(training.copy(), expected)
    assert device.ordered == device.arrived > 0


def test_at_the_fence_the_stream_waits_and_the_host_goes_on(device_store: Store, device: LazyDevice) -> None:
    """All is ordered, nothing is submitted; that happens once the copies have arrived, after the step's writes."""
    training = Training()
    device_store.wait_before_step(training.optimizer)
    hold(device_store)
    expected = training.copy()
    ticket = device_store.put(0, training.state(), overlap=True)
    assert device.ordered == 0
    training.forward_backward()
    training.optimizer.step()
    copy = under_way(device_store)
    assert {who for who, _ in device.waits} == {"stream"}
    assert not copy.ended.is_set()
    assert ticket.level == "pending"
    copy.work()
    ticket.wait("committed", WAIT_S)
    assert is_same(stored(device_store, 0), expected)
    assert device_store.puts.overlap._late is None


def test_a_tensor_changed_before_the_fence_fails_its_step_by_name(device_store: Store) -> None:
    """Seen by its counter alone; the change of the step itself is none."""
    training = Training()
    device_store.wait_before_step(training.optimizer)
    hold(device_store)
    ticket = device_store.put(0, training.state(), overlap=True)
    with torch.no_grad():
        training.model[2].weight[3, 4] += 1
    training.optimizer.step()
    under_way(device_store).work()
    with pytest.raises(CommitError, match=r"state\['model'\]\['2.weight'\]"):
        ticket.wait("committed", WAIT_S)
    expected = training.copy()
    ticket = device_store.put(1, training.state(), overlap=True)
    training.optimizer.step()
    under_way(device_store).work()
    ticket.wait("committed", WAIT_S)
    assert is_same(stored(device_store, 1), expected)


def test_a_copy_that_does_not_arrive_fails_its_step_and_keeps_its_slots_until_it_does(
    device_store: Store, device: LazyDevice
) -> None:
    """The device still writes into them; then they are free, and the next put has room."""
    training = Training()
    device_store.wait_before_step(training.optimizer)
    hold(device_store)
    ticket = device_store.put(0, training.state(), overlap=True)
    copy, taken = under_way(device_store), set(device_store._link.leases.in_copy)
    device_store.puts.overlap.wait(0.01)
    assert device_store._link.leases.in_copy == taken
    worker = threading.Thread(target=copy.work)
    worker.start()
    worker.join(WAIT_S)
    with pytest.raises(CommitError, match=r"0\.01 s at the fence"):
        ticket.wait("committed", WAIT_S)
    assert not device_store._link.leases.in_copy
    assert device.ordered == device.arrived


def test_a_get_fills_device_memory_straight_from_the_slots(
    device_cluster: ProcessCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No byte by way of other host memory; a process that counts versions sees that the tensors were written."""
    device = LazyDevice(monkeypatch, verified_stream, "copy_in")
    training = Training()
    with one_rank(device_cluster) as joined:
        expected = training.copy()
        joined.put(0, training.state()).wait("committed", WAIT_S)
        training.forward_backward()
        training.optimizer.step()
        weight = training.model[0].weight
        version = weight._version
        monkeypatch.setattr(match, "leaf_of_tensor", lambda one: replace(leaf_of_tensor(one), device="cpu"))
        joined.get(0, rank=0, into=training.state())
    now = training.copy()
    assert all(is_same(now[part], expected[part]) for part in ("model", "optim"))
    assert device.ordered == device.arrived > 0
    assert weight._version > version


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_a_training_on_a_gpu_is_stored_as_it_was(device_cluster: ProcessCluster) -> None:
    """Real streams: many steps, each put compared; restored into live tensors, too."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 512), nn.BatchNorm1d(512), nn.Linear(512, 512)).cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    batch = torch.randn(8, 512, device="cuda")
    model(batch).square().mean().backward()
    optimizer.step()  # makes the moments: a step whose state has grown is skipped
    with one_rank(device_cluster) as joined:
        joined.wait_before_step(optimizer)
        for step in range(6):
            expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
            ticket = joined.put(step, {"model": model.state_dict(), "optim": optimizer.state_dict()}, overlap=step > 0)
            model(batch).square().mean().backward()
            optimizer.step()
            ticket.wait("committed", WAIT_S)
            got = stored(joined, step)["model"]
            assert all(torch.equal(got[name].cuda(), tensor) for name, tensor in expected.items())
        joined.get(5, rank=0, into={"model": model.state_dict(), "optim": optimizer.state_dict()})
        assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in expected.items())


# -- overlap errors -----------------------------------------------------------------------------------
# An overlapped put in which something raises: its room is not lost, and no torn step is submitted (R11).


@pytest.fixture(scope="module")
def failing_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessCluster]:
    with one_host(tmp_path_factory.mktemp("overlap_errors")) as running:
        yield running


@pytest.fixture
def failing_store(failing_cluster: ProcessCluster) -> Iterator[Store]:
    with one_device_rank(failing_cluster) as joined:
        yield joined


@pytest.fixture
def weight() -> torch.Tensor:
    return torch.ones(WIDTH, WIDTH)


def raising(error: BaseException) -> Any:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return fail


def check_that_nothing_is_lost(failing_store: Store, step: int, weight: torch.Tensor) -> None:
    """No slot is in a copy's hand, and the next overlapped put commits."""
    wait_for(lambda: not failing_store._link.leases.in_copy, "all slots to be given back", WAIT_S)
    ticket = failing_store.put(step, {"w": weight}, overlap=[weight])
    failing_store.wait_before_step()
    ticket.wait("committed", WAIT_S)
    assert torch.equal(stored(failing_store, step)["w"], weight)


def test_an_interrupted_fence_fails_the_step_and_loses_no_room(
    failing_store: Store, weight: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while the rest is ordered."""
    hold(failing_store)
    ticket = failing_store.put(1, {"w": weight}, overlap=[weight])
    with monkeypatch.context() as patch:
        patch.setattr(deferred_copy, "copy_out", raising(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            failing_store.wait_before_step()
    arrive(failing_store)
    assert ticket.level == "failed"
    assert "interrupted" in ticket.reason
    del failing_store.puts.overlap._start  # from now on the thread copies again
    check_that_nothing_is_lost(failing_store, 2, weight)


def test_an_error_before_the_copy_starts_gives_the_room_back(
    failing_store: Store, weight: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the bytes that are copied at once and the thread."""
    with monkeypatch.context() as patch:
        patch.setattr(overlap_module, "DeferredCopy", raising(OSError("bad")))
        with pytest.raises(OSError, match="bad"):
            failing_store.put(0, {"w": weight}, overlap=[weight])
    check_that_nothing_is_lost(failing_store, 1, weight)


def test_without_a_thread_to_be_had_the_caller_copies(
    failing_store: Store, weight: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit of processes is reached: nothing overlaps, everything is stored, once."""
    failing_store.put(0, {"w": weight})  # the first put takes its room in a thread
    with monkeypatch.context() as patch:
        refused = {"start_new_thread": raising(RuntimeError("can't start new thread"))}
        patch.setattr(overlap_module, "_thread", SimpleNamespace(**vars(_thread) | refused))
        ticket = failing_store.put(1, {"w": weight}, overlap=[weight])
        failing_store.wait_before_step()
    ticket.wait("committed", WAIT_S)
    check_that_nothing_is_lost(failing_store, 2, weight)


def test_an_error_at_the_end_of_a_copy_is_logged(
    failing_store: Store, weight: torch.Tensor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What was to be done with a copied state raises: that is logged, and training goes on."""
    with monkeypatch.context() as patch:
        patch.setattr(Put, "complete", raising(OSError("bad")))
        ticket = failing_store.put(0, {"w": weight}, overlap=[weight])
        failing_store.wait_before_step()
        wait_for(lambda: "an overlapped copy failed" in caplog.text, "the error to be logged", WAIT_S)
        assert (ticket.level, ticket.reason) == ("failed", "it could not be submitted: OSError('bad')")
    check_that_nothing_is_lost(failing_store, 1, weight)


def test_a_step_that_shows_as_torn_after_its_commit_is_retired(
    failing_cluster: ProcessCluster, weight: torch.Tensor, caplog: pytest.LogCaptureFixture
) -> None:
    """An operation was queued when the copy ended, and its counter rises only now."""
    with one_device_rank(failing_cluster) as failing_store:
        check_that_it_is_retired(failing_store, failing_cluster, weight, caplog)


def check_that_it_is_retired(
    failing_store: Store, failing_cluster: ProcessCluster, weight: torch.Tensor, caplog: pytest.LogCaptureFixture
) -> None:
    """The step before is what is restored."""
    failing_store.put(0, {"w": weight}).wait("committed", WAIT_S)
    ticket = failing_store.put(1, {"layer": {"w": weight}}, overlap=[weight])
    ticket.wait("committed", WAIT_S)
    weight.add_(1)
    failing_store.wait_before_step()
    assert "state['layer']['w'] was changed before the fence" in ticket.reason
    assert ticket.level == "committed"
    assert "step 1 is torn and will not be restored: state['layer']['w']" in caplog.text
    wait_for(
        lambda: ticket.reason in [s.retired for s in failing_store.steps() if s.step == 1], "the step retired", WAIT_S
    )
    failing_store.close()
    with connect(failing_store.job, rank=0, world_size=1, config=failing_cluster.config) as again:
        got = again.get()
        assert got is not None
        assert got.step == 0
        assert torch.equal(got.state["w"], weight - 1)


@pytest.mark.parametrize("is_hooked_first", [True, False])
def test_a_compiled_step_waits_as_well(failing_store: Store, weight: torch.Tensor, is_hooked_first: bool) -> None:
    """The tracer leaves torch's hooks in front of the step, also one that came after the first compiled step."""
    weight.requires_grad_().grad = torch.ones_like(weight)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    if is_hooked_first:
        failing_store.wait_before_step(optimizer)
    step = torch.compile(optimizer.step, backend="eager")
    step()
    step()
    failing_store.wait_before_step(optimizer)
    hold(failing_store)
    for number in range(2):
        expected = weight.detach().clone()
        ticket = failing_store.put(number, {"w": weight}, overlap=True)
        step()
        arrive(failing_store)
        ticket.wait("committed", WAIT_S)
        assert torch.equal(stored(failing_store, number)["w"].detach(), expected)
        assert torch.equal(weight.detach(), expected - 1)


def test_close_finishes_although_the_overlap_raises(
    failing_cluster: ProcessCluster, weight: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job is left, the link is down, and no optimizer is held any more."""
    monkeypatch.setenv("MEMSTORE_HOST", "h1")
    failing_store = connect("closing", rank=0, world_size=1, config=failing_cluster.config)
    optimizer = torch.optim.SGD([weight])
    failing_store.wait_before_step(optimizer)
    with monkeypatch.context() as patch:
        patch.setattr(failing_store.puts.overlap, "wait", raising(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            failing_store.close()
    assert failing_store._link.closed.is_set()
    assert not optimizer._optimizer_step_pre_hooks  # type: ignore[attr-defined]


def test_two_optimizers_that_step_at_once_tear_nothing(
    failing_store: Store, weight: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both threads wait for one copy; the first has written by the time that the second is awake."""
    hold(failing_store)
    ticket = failing_store.put(0, {"w": weight}, overlap=[weight])
    late, _ = failing_store.puts.overlap._late or (None, None)
    assert late is not None
    real, asleep, awake = late.flights.hold_current, threading.Event(), threading.Event()

    def hold_long() -> None:
        asleep.set()
        assert awake.wait(WAIT_S)
        real()

    monkeypatch.setattr(late.flights, "hold_current", hold_long)
    other = threading.Thread(target=failing_store.wait_before_step)
    other.start()
    assert asleep.wait(WAIT_S)
    monkeypatch.undo()
    failing_store.wait_before_step()
    weight.add_(1)
    awake.set()
    other.join(WAIT_S)
    arrive(failing_store)
    ticket.wait("committed", WAIT_S)
    assert [step.retired for step in failing_store.steps() if step.step == 0] == [""]


class Wrapped(torch.optim.Optimizer):
    """As accelerate wraps an optimizer: one by type, without its hooks."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer


def test_what_cannot_overlap_is_refused_by_type(failing_store: Store, weight: torch.Tensor) -> None:
    """Else nothing would be copied late, or nothing would wait for it; what cannot be stored is refused as ever."""
    with pytest.raises(ConfigError, match=r"step\(Wrapped\) needs a torch.optim.Optimizer.* that this one wraps"):
        failing_store.wait_before_step(Wrapped(torch.optim.SGD([weight])))
    with pytest.raises(ConfigError, match="one of them is of type str"):
        failing_store.put(0, {"w": weight}, overlap={"w": weight})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="one of them is of type int"):
        failing_store.put(0, {"w": weight}, overlap=5)  # type: ignore[arg-type]
    sparse = weight.to_sparse()
    with pytest.raises(UnsupportedState, match="sparse"):
        failing_store.put(0, {"w": sparse}, overlap=[sparse])
    check_that_nothing_is_lost(failing_store, 0, weight)


def test_a_put_of_a_known_step_is_a_fence(failing_store: Store, weight: torch.Tensor) -> None:
    """It returns the ticket there is, when what it names may be written."""
    ticket = failing_store.put(0, {"w": weight}, overlap=[weight])
    assert failing_store.put(0, {"w": weight}) is ticket
    weight.add_(1)
    ticket.wait("committed", WAIT_S)


def test_a_dcp_load_of_a_step_into_what_is_being_copied_is_a_fence(failing_store: Store, weight: torch.Tensor) -> None:
    """The load writes the tensors that the copy reads."""
    dcp.save({"w": weight}, storage_writer=failing_store.dcp_writer(0), no_dist=True)
    weight.add_(1)
    ticket = failing_store.put(1, {"w": weight}, overlap=[weight])
    dcp.load({"w": weight}, storage_reader=failing_store.dcp_reader(step=0), no_dist=True)
    assert torch.equal(weight, torch.ones(WIDTH, WIDTH))
    ticket.wait("committed", WAIT_S)
    assert torch.equal(stored(failing_store, 1)["w"], torch.full((WIDTH, WIDTH), 2.0))


def test_device_copies_are_waited_for_when_a_host_move_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller gives the slots back, and another put takes them."""
    waited: list[str] = []

    class Ordered:
        def wait(self) -> None:
            waited.append("waited")

    monkeypatch.setattr(extension, "built", None)  # else host memory alone is copied in other calls
    monkeypatch.setattr(encode, "order_all", lambda writes: Ordered())
    monkeypatch.setattr(encode, "move_all", raising(KeyboardInterrupt()))
    plan = encode.plan_state({"w": torch.ones(4)})
    with pytest.raises(KeyboardInterrupt):
        encode.copy_into(plan, [memoryview(bytearray(plan.nbytes))], plan.nbytes)
    assert waited == ["waited"]
