"""put(overlap=True) of device memory: ordered late; at the fence the step's stream waits, the host does not (R11)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from lazy_device import LazyDevice
from overlap_case import WAIT_S, Training, hold, is_same, one_device_rank, one_host, one_rank, stored
from torch import nn

from memstore.client.store import Store
from memstore.errors import CommitError
from memstore.shell.codec import match, verified_stream
from memstore.shell.device import deferred_copy
from memstore.shell.device.deferred_copy import DeferredCopy
from memstore.shell.device.side_stream import DeviceWrite, flights
from memstore.shell.tensors.memory import leaf_of_tensor
from memstore.testing.clusters.processes import ProcessCluster

FLIGHT_BYTES = 100 << 10


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessCluster]:
    with one_host(tmp_path_factory.mktemp("overlap_device")) as running:
        yield running


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> LazyDevice:
    def small(writes: list[DeviceWrite]) -> Any:
        return flights(writes, FLIGHT_BYTES)

    monkeypatch.setattr(deferred_copy, "flights", small)
    return LazyDevice(monkeypatch, deferred_copy, "copy_out")


@pytest.fixture
def store(cluster: ProcessCluster, device: LazyDevice) -> Iterator[Store]:
    """Plans every tensor as if it lay on a device: to be copied by that device, not by the host."""
    with one_device_rank(cluster) as joined:
        yield joined


def under_way(store: Store) -> DeferredCopy:
    late = store.puts.overlap._late
    assert late is not None
    return late[0]


def test_what_is_stored_is_the_state_at_the_put(store: Store, device: LazyDevice) -> None:
    """The copy thread and the fence between them, whichever comes first; the next put waits for the end."""
    training = Training()
    store.wait_before_step(training.optimizer)
    for step in range(3):
        expected = training.copy()
        ticket = store.put(step, training.state(), overlap=True)
        training.forward_backward()
        training.optimizer.step()
        ticket.wait("committed", WAIT_S)
        assert is_same(stored(store, step), expected)
        assert not is_same(training.copy(), expected)
    assert device.ordered == device.arrived > 0


def test_at_the_fence_the_stream_waits_and_the_host_goes_on(store: Store, device: LazyDevice) -> None:
    """All is ordered, nothing is submitted; that happens once the copies have arrived, after the step's writes."""
    training = Training()
    store.wait_before_step(training.optimizer)
    hold(store)
    expected = training.copy()
    ticket = store.put(0, training.state(), overlap=True)
    assert device.ordered == 0
    training.forward_backward()
    training.optimizer.step()
    copy = under_way(store)
    assert {who for who, _ in device.waits} == {"stream"}
    assert not copy.ended.is_set()
    assert ticket.level == "pending"
    copy.work()
    ticket.wait("committed", WAIT_S)
    assert is_same(stored(store, 0), expected)
    assert store.puts.overlap._late is None


def test_a_tensor_changed_before_the_fence_fails_its_step_by_name(store: Store) -> None:
    """Seen by its counter alone; the change of the step itself is none."""
    training = Training()
    store.wait_before_step(training.optimizer)
    hold(store)
    ticket = store.put(0, training.state(), overlap=True)
    with torch.no_grad():
        training.model[2].weight[3, 4] += 1
    training.optimizer.step()
    under_way(store).work()
    with pytest.raises(CommitError, match=r"state\['model'\]\['2.weight'\]"):
        ticket.wait("committed", WAIT_S)
    expected = training.copy()
    ticket = store.put(1, training.state(), overlap=True)
    training.optimizer.step()
    under_way(store).work()
    ticket.wait("committed", WAIT_S)
    assert is_same(stored(store, 1), expected)


def test_a_copy_that_does_not_arrive_fails_its_step_and_keeps_its_slots_until_it_does(
    store: Store, device: LazyDevice
) -> None:
    """The device still writes into them; then they are free, and the next put has room."""
    training = Training()
    store.wait_before_step(training.optimizer)
    hold(store)
    ticket = store.put(0, training.state(), overlap=True)
    copy, taken = under_way(store), set(store._link.leases.in_copy)
    store.puts.overlap.wait(0.01)
    assert store._link.leases.in_copy == taken
    worker = threading.Thread(target=copy.work)
    worker.start()
    worker.join(WAIT_S)
    with pytest.raises(CommitError, match=r"0\.01 s at the fence"):
        ticket.wait("committed", WAIT_S)
    assert not store._link.leases.in_copy
    assert device.ordered == device.arrived


def test_a_get_fills_device_memory_straight_from_the_slots(
    cluster: ProcessCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No byte by way of other host memory; a process that counts versions sees that the tensors were written."""
    device = LazyDevice(monkeypatch, verified_stream, "copy_in")
    training = Training()
    with one_rank(cluster) as joined:
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
def test_a_training_on_a_gpu_is_stored_as_it_was(cluster: ProcessCluster) -> None:
    """Real streams: many steps, each put compared; restored into live tensors, too."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 512), nn.BatchNorm1d(512), nn.Linear(512, 512)).cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    batch = torch.randn(8, 512, device="cuda")
    model(batch).square().mean().backward()
    optimizer.step()  # makes the moments: a step whose state has grown is skipped
    with one_rank(cluster) as joined:
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
