"""Trainings that write before the fence what autograd does not count: a step commits as it was put, or fails (R11).

Each runs freely, as people wrote it; the oracle clones the state in front of the put and compares what was committed.
"""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from overlap_case import WAIT_S, hold, is_same, one_host, one_rank, stored
from torch import nn

from memstore.client.store import Store
from memstore.errors import CommitError
from memstore.testing.clusters.processes import ProcessCluster

STEPS = 24
STEADY_WIDTH = 256


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessCluster]:
    with one_host(tmp_path_factory.mktemp("unseen"), arena_bytes=2 << 30) as running:
        yield running


@pytest.fixture
def store(cluster: ProcessCluster) -> Iterator[Store]:
    with one_rank(cluster) as joined:
        yield joined


class Loop:
    """Tensors, the optimizer that is fenced, and the write that follows every put."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.tensors: list[torch.Tensor] = [nn.Parameter(torch.rand(STEADY_WIDTH, STEADY_WIDTH)) for _ in range(6)]
        self.tensors.append(nn.Parameter(torch.rand(2048, 2048)))
        self.fenced: torch.optim.Optimizer = torch.optim.SGD(self.tensors, lr=0.01)
        self.number = 0

    def write(self) -> None:
        """Write past the version counters."""
        raise NotImplementedError

    def state(self) -> dict[str, torch.Tensor]:
        return {str(number): tensor.data for number, tensor in enumerate(self.tensors)}

    def step(self) -> None:
        for tensor in self.tensors:
            tensor.grad = torch.full_like(tensor, 0.1)
        self.fenced.step()


class Clamped(Loop):
    """A critic with clipped weights: about one in a thousand is beyond the bound."""

    def step(self) -> None:
        super().step()
        for tensor in self.tensors:
            flat = tensor.data.view(-1)
            flat[torch.randint(1, flat.numel(), (flat.numel() // 1000,))] = 2.0

    def write(self) -> None:
        for tensor in self.tensors:
            tensor.data.clamp_(-1.0, 1.0)


class Rows(Loop):
    """Dead codes of a codebook, revived."""

    def write(self) -> None:
        self.tensors[-1].data[1000:1090] += 1


class NumpyRows(Loop):
    """A view that was taken long before."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = [tensor.detach().numpy()[100:140] for tensor in self.tensors]

    def write(self) -> None:
        for rows in self.rows:
            rows += 1


class Padded(Loop):
    """An optimizer that was not fenced, of an embedding whose first row stays zero."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1000, 128, padding_idx=0)
        self.unfenced = torch.optim.Adam(self.embedding.parameters(), fused=True)
        self.tensors = [self.embedding.weight, *self.tensors]
        self.fenced = torch.optim.SGD(self.tensors, lr=0.0)

    def write(self) -> None:
        self.number += 1
        self.embedding(torch.tensor([0, 1 + self.number, 500, 999])).sum().backward()
        self.unfenced.step()


LOOPS = [Clamped, Rows, NumpyRows, Padded]


@pytest.mark.parametrize("make", LOOPS)
def test_no_step_of_a_free_run_is_committed_as_anything_but_what_was_put(
    store: Store, make: Callable[[], Loop]
) -> None:
    """At every point of the copy thread's work."""
    loop = make()
    store.wait_before_step(loop.fenced)
    outcomes = []
    for step in range(STEPS):
        loop.step()
        expected = {name: tensor.clone() for name, tensor in loop.state().items()}
        ticket = store.put(step, loop.state(), overlap=True)
        versions = [tensor._version for tensor in loop.tensors]
        loop.write()
        assert [tensor._version for tensor in loop.tensors] == versions
        store.wait_before_step()
        try:
            ticket.wait("committed", WAIT_S)
        except CommitError:
            assert "was changed before the fence" in ticket.reason or ticket.level == "skipped"
            outcomes.append(ticket.level)
        else:
            assert is_same(stored(store, step), expected), f"step {step} after {outcomes}"
            outcomes.append("committed")
    assert store.put(STEPS, loop.state()).wait("committed", WAIT_S)


@pytest.mark.parametrize("make", LOOPS)
def test_a_write_before_the_copy_fails_the_step_by_name(store: Store, make: Callable[[], Loop]) -> None:
    """The copy is held until the fence, so that the slots take what was written."""
    loop = make()
    loop.step()
    store.wait_before_step(loop.fenced)
    hold(store)
    ticket = store.put(0, loop.state(), overlap=True)
    loop.write()
    store.wait_before_step()
    with pytest.raises(CommitError, match=r"state\['\d'\] was changed before the fence"):
        ticket.wait("committed", WAIT_S)
    assert ticket.level == "failed"


@pytest.mark.parametrize("size", ["0", "1 << 20"])
def test_training_outlives_storage_that_is_freed_right_after_the_put(
    cluster: ProcessCluster, size: str, tmp_path: Path
) -> None:
    """As offloading does it, in the middle of moves: the step fails by name or is whole, and the process lives."""
    program = textwrap.dedent("""
        import faulthandler, json, sys, torch
        faulthandler.enable()
        from memstore.client.connect import connect
        from memstore.config import Config
        from memstore.errors import CommitError
        weight, small = torch.rand(16 << 20), torch.ones(64 << 10)
        kept = weight.clone()
        levels = []
        with connect(sys.argv[2], rank=0, world_size=1, config=Config(**json.loads(sys.argv[1]))) as store:
            for step in range(6):
                ticket = store.put(step, {"w": weight, "small": small}, overlap=[weight, small])
                weight.untyped_storage().resize_(SIZE)
                store.wait_before_step()
                try:
                    ticket.wait("committed", 60)
                except CommitError:
                    assert "state['w']" in ticket.reason or ticket.level == "skipped", ticket
                else:
                    assert torch.equal(store.get(step, rank=0).state["w"], kept)
                levels.append(ticket.level)
                weight.untyped_storage().resize_(kept.nbytes)
                weight.copy_(kept)
            store.put(6, {"w": weight, "small": small}).wait("committed", 60)
        print(*levels)
    """).replace("SIZE", size)
    fields: dict[str, Any] = {"store": cluster.config.store, "connect_timeout_s": WAIT_S, "stall_budget_s": WAIT_S}
    done = subprocess.run(
        [sys.executable, "-c", program, json.dumps(fields), f"resized{size[0]}"], env=cluster.env("h1"),
        capture_output=True, text=True, timeout=4 * WAIT_S, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert set(done.stdout.split()) <= {"failed", "committed", "skipped"}
