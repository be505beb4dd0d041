"""Steps of several ranks, made in one process for tests of export and import: put, sharded, or saved through DCP.

Every rank is a thread with a store of its own. DTensors are made without any communication.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from memstore.client.connect import connect
from memstore.client.store import Store
from memstore.testing.clusters.processes import ProcessCluster

WAIT_S = 60.0
STEP = 7


def as_ranks(
    cluster: ProcessCluster, job: str, count: int, work: Callable[[Store, int], Any], **options: Any
) -> list[Any]:
    """Run `work(store, rank)` on every rank of a new attempt of the job, each on a thread; `options` are connect's."""

    def run(rank: int) -> Any:
        with connect(job, rank=rank, world_size=count, config=cluster.config, **options) as store:
            return work(store, rank)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))


def put(cluster: ProcessCluster, job: str, states: list[Any], step: int = STEP) -> None:
    """Commit one step of as many ranks as there are states."""
    as_ranks(cluster, job, len(states), lambda store, rank: store.put(step, states[rank]).wait("committed", WAIT_S))


def save(cluster: ProcessCluster, job: str, states: list[Any]) -> None:
    """Commit one step through DCP's planner and our writer; this process plays DCP's collectives."""
    planners = [DefaultSavePlanner() for _ in states]
    for rank, (planner, state) in enumerate(zip(planners, states, strict=True)):
        planner.set_up_planner(state, None, rank == 0)
    plans, metadata = planners[0].create_global_plan([planner.create_local_plan() for planner in planners])
    results: list[Any] = [None] * len(states)
    barrier = threading.Barrier(len(states))

    def work(store: Store, rank: int) -> None:
        writer = store.dcp_writer(STEP, wait=None)
        writer.set_up_storage_writer(rank == 0)
        writer.prepare_global_plan(plans)
        results[rank] = writer.write_data(planners[rank].finish_plan(plans[rank]), planners[rank]).wait()
        barrier.wait(WAIT_S)
        if rank == 0:
            writer.finish(metadata, results)
        assert writer.ticket is not None
        writer.ticket.wait("committed", WAIT_S)

    as_ranks(cluster, job, len(states), work)


def sharded(full: dict[str, torch.Tensor], rank: int, shape: tuple[int, ...], placements: list[Any]) -> dict[str, Any]:
    """Return a rank's DTensors of global tensors, on a mesh of this shape."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=math.prod(shape))
    try:
        mesh = init_device_mesh("cpu", shape)
        return {
            name: distribute_tensor(tensor.contiguous(), mesh, placements, src_data_rank=None)
            for name, tensor in full.items()
        }
    finally:
        dist.destroy_process_group()


def bits(tensor: torch.Tensor) -> bytes:
    """Return the bytes of a tensor, row by row."""
    flat = tensor.detach().resolve_conj().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def odd_tensors(seed: int) -> dict[str, torch.Tensor]:
    """Return tensors of many kinds; NaNs with payloads among them."""
    made = torch.Generator().manual_seed(seed)
    nans = torch.randint(-(1 << 31), (1 << 31) - 1, (300, 7), dtype=torch.int32, generator=made).view(torch.float32)
    return {
        "nans": nans,
        "large": torch.randn(70_001, generator=made),  # crosses chunks
        "turned": torch.randn(33, 50, generator=made).t(),
        "half": torch.randn(9, 9, generator=made).bfloat16(),
        "eight": torch.randint(0, 255, (64,), dtype=torch.uint8, generator=made).view(torch.float8_e4m3fn),
        "count": torch.tensor(12, dtype=torch.int64),
        "none": torch.empty(0, 3),
        "imaginary": torch.randn(4, 4, dtype=torch.complex64, generator=made).conj(),
    }
