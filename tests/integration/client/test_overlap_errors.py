"""An overlapped put in which something raises: its room is not lost, and no torn step is submitted (R11)."""

from __future__ import annotations

import _thread
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from overlap_case import WAIT_S, WIDTH, arrive, hold, one_device_rank, one_host, stored

from memstore.client import overlapped_copy as overlap_module
from memstore.client.connect import connect
from memstore.client.put import Put
from memstore.client.store import Store
from memstore.errors import ConfigError, UnsupportedState
from memstore.shell.codec import encode
from memstore.shell.device import deferred_copy
from memstore.shell.native import extension
from memstore.testing.clusters.processes import ProcessCluster, wait_for


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessCluster]:
    with one_host(tmp_path_factory.mktemp("overlap_errors")) as running:
        yield running


@pytest.fixture
def store(cluster: ProcessCluster) -> Iterator[Store]:
    with one_device_rank(cluster) as joined:
        yield joined


@pytest.fixture
def weight() -> torch.Tensor:
    return torch.ones(WIDTH, WIDTH)


def raising(error: BaseException) -> Any:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return fail


def check_that_nothing_is_lost(store: Store, step: int, weight: torch.Tensor) -> None:
    """No slot is in a copy's hand, and the next overlapped put commits."""
    wait_for(lambda: not store._link.leases.in_copy, "all slots to be given back", WAIT_S)
    ticket = store.put(step, {"w": weight}, overlap=[weight])
    store.wait_before_step()
    ticket.wait("committed", WAIT_S)
    assert torch.equal(stored(store, step)["w"], weight)


def test_an_interrupted_fence_fails_the_step_and_loses_no_room(
    store: Store, weight: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while the rest is ordered."""
    hold(store)
    ticket = store.put(1, {"w": weight}, overlap=[weight])
    with monkeypatch.context() as patch:
        patch.setattr(deferred_copy, "copy_out", raising(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            store.wait_before_step()
    arrive(store)
    assert ticket.level == "failed"
    assert "interrupted" in ticket.reason
    del store.puts.overlap._start  # from now on the thread copies again
    check_that_nothing_is_lost(store, 2, weight)


def test_an_error_before_the_copy_starts_gives_the_room_back(
    store: Store, weight: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the bytes that are copied at once and the thread."""
    with monkeypatch.context() as patch:
        patch.setattr(overlap_module, "DeferredCopy", raising(OSError("bad")))
        with pytest.raises(OSError, match="bad"):
            store.put(0, {"w": weight}, overlap=[weight])
    check_that_nothing_is_lost(store, 1, weight)


def test_without_a_thread_to_be_had_the_caller_copies(
    store: Store, weight: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit of processes is reached: nothing overlaps, everything is stored, once."""
    store.put(0, {"w": weight})  # the first put takes its room in a thread
    with monkeypatch.context() as patch:
        refused = {"start_new_thread": raising(RuntimeError("can't start new thread"))}
        patch.setattr(overlap_module, "_thread", SimpleNamespace(**vars(_thread) | refused))
        ticket = store.put(1, {"w": weight}, overlap=[weight])
        store.wait_before_step()
    ticket.wait("committed", WAIT_S)
    check_that_nothing_is_lost(store, 2, weight)


def test_an_error_at_the_end_of_a_copy_is_logged(
    store: Store, weight: torch.Tensor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What was to be done with a copied state raises: that is logged, and training goes on."""
    with monkeypatch.context() as patch:
        patch.setattr(Put, "complete", raising(OSError("bad")))
        ticket = store.put(0, {"w": weight}, overlap=[weight])
        store.wait_before_step()
        wait_for(lambda: "an overlapped copy failed" in caplog.text, "the error to be logged", WAIT_S)
        assert (ticket.level, ticket.reason) == ("failed", "it could not be submitted: OSError('bad')")
    check_that_nothing_is_lost(store, 1, weight)


def test_a_step_that_shows_as_torn_after_its_commit_is_retired(
    cluster: ProcessCluster, weight: torch.Tensor, caplog: pytest.LogCaptureFixture
) -> None:
    """An operation was queued when the copy ended, and its counter rises only now."""
    with one_device_rank(cluster) as store:
        check_that_it_is_retired(store, cluster, weight, caplog)


def check_that_it_is_retired(
    store: Store, cluster: ProcessCluster, weight: torch.Tensor, caplog: pytest.LogCaptureFixture
) -> None:
    """The step before is what is restored."""
    store.put(0, {"w": weight}).wait("committed", WAIT_S)
    ticket = store.put(1, {"layer": {"w": weight}}, overlap=[weight])
    ticket.wait("committed", WAIT_S)
    weight.add_(1)
    store.wait_before_step()
    assert "state['layer']['w'] was changed before the fence" in ticket.reason
    assert ticket.level == "committed"
    assert "step 1 is torn and will not be restored: state['layer']['w']" in caplog.text
    wait_for(lambda: ticket.reason in [s.retired for s in store.steps() if s.step == 1], "the step retired", WAIT_S)
    store.close()
    with connect(store.job, rank=0, world_size=1, config=cluster.config) as again:
        got = again.get()
        assert got is not None
        assert got.step == 0
        assert torch.equal(got.state["w"], weight - 1)


@pytest.mark.parametrize("is_hooked_first", [True, False])
def test_a_compiled_step_waits_as_well(store: Store, weight: torch.Tensor, is_hooked_first: bool) -> None:
    """The tracer leaves torch's hooks in front of the step, also one that came after the first compiled step."""
    weight.requires_grad_().grad = torch.ones_like(weight)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    if is_hooked_first:
        store.wait_before_step(optimizer)
    step = torch.compile(optimizer.step, backend="eager")
    step()
    step()
    store.wait_before_step(optimizer)
    hold(store)
    for number in range(2):
        expected = weight.detach().clone()
        ticket = store.put(number, {"w": weight}, overlap=True)
        step()
        arrive(store)
        ticket.wait("committed", WAIT_S)
        assert torch.equal(stored(store, number)["w"].detach(), expected)
        assert torch.equal(weight.detach(), expected - 1)


def test_close_finishes_although_the_overlap_raises(
    cluster: ProcessCluster, weight: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job is left, the link is down, and no optimizer is held any more."""
    monkeypatch.setenv("MEMSTORE_HOST", "h1")
    store = connect("closing", rank=0, world_size=1, config=cluster.config)
    optimizer = torch.optim.SGD([weight])
    store.wait_before_step(optimizer)
    with monkeypatch.context() as patch:
        patch.setattr(store.puts.overlap, "wait", raising(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            store.close()
    assert store._link.closed.is_set()
    assert not optimizer._optimizer_step_pre_hooks  # type: ignore[attr-defined]


def test_two_optimizers_that_step_at_once_tear_nothing(
    store: Store, weight: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both threads wait for one copy; the first has written by the time that the second is awake."""
    hold(store)
    ticket = store.put(0, {"w": weight}, overlap=[weight])
    late, _ = store.puts.overlap._late or (None, None)
    assert late is not None
    real, asleep, awake = late.flights.hold_current, threading.Event(), threading.Event()

    def hold_long() -> None:
        asleep.set()
        assert awake.wait(WAIT_S)
        real()

    monkeypatch.setattr(late.flights, "hold_current", hold_long)
    other = threading.Thread(target=store.wait_before_step)
    other.start()
    assert asleep.wait(WAIT_S)
    monkeypatch.undo()
    store.wait_before_step()
    weight.add_(1)
    awake.set()
    other.join(WAIT_S)
    arrive(store)
    ticket.wait("committed", WAIT_S)
    assert [step.retired for step in store.steps() if step.step == 0] == [""]


class Wrapped(torch.optim.Optimizer):
    """As accelerate wraps an optimizer: one by type, without its hooks."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer


def test_what_cannot_overlap_is_refused_by_type(store: Store, weight: torch.Tensor) -> None:
    """Else nothing would be copied late, or nothing would wait for it; what cannot be stored is refused as ever."""
    with pytest.raises(ConfigError, match=r"step\(Wrapped\) needs a torch.optim.Optimizer.* that this one wraps"):
        store.wait_before_step(Wrapped(torch.optim.SGD([weight])))
    with pytest.raises(ConfigError, match="one of them is of type str"):
        store.put(0, {"w": weight}, overlap={"w": weight})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="one of them is of type int"):
        store.put(0, {"w": weight}, overlap=5)  # type: ignore[arg-type]
    sparse = weight.to_sparse()
    with pytest.raises(UnsupportedState, match="sparse"):
        store.put(0, {"w": sparse}, overlap=[sparse])
    check_that_nothing_is_lost(store, 0, weight)


def test_a_put_of_a_known_step_is_a_fence(store: Store, weight: torch.Tensor) -> None:
    """It returns the ticket there is, when what it names may be written."""
    ticket = store.put(0, {"w": weight}, overlap=[weight])
    assert store.put(0, {"w": weight}) is ticket
    weight.add_(1)
    ticket.wait("committed", WAIT_S)


def test_a_dcp_load_of_a_step_into_what_is_being_copied_is_a_fence(store: Store, weight: torch.Tensor) -> None:
    """The load writes the tensors that the copy reads."""
    dcp.save({"w": weight}, storage_writer=store.dcp_writer(0), no_dist=True)
    weight.add_(1)
    ticket = store.put(1, {"w": weight}, overlap=[weight])
    dcp.load({"w": weight}, storage_reader=store.dcp_reader(step=0), no_dist=True)
    assert torch.equal(weight, torch.ones(WIDTH, WIDTH))
    ticket.wait("committed", WAIT_S)
    assert torch.equal(stored(store, 1)["w"], torch.full((WIDTH, WIDTH), 2.0))


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
