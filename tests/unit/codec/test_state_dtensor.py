"""Sharded states: every rank stores its local part, and gets it back only onto the same mesh and placements."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import distribute_tensor as whole_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from memstore.errors import ManifestMismatch
from memstore.shell.codec.decode import decode_state
from memstore.shell.codec.encode import copy_into, plan_state


def stored(state: object, chunk_bytes: int = 256) -> tuple[bytes, list[memoryview], int]:
    plan = plan_state(state)
    views = [memoryview(bytearray(chunk_bytes)) for _ in range(0, plan.nbytes, chunk_bytes)]
    copy_into(plan, views, chunk_bytes)
    return plan.layout, views, chunk_bytes


def distribute_tensor(full: torch.Tensor, mesh: Any, placements: list[Any]) -> DTensor:
    return whole_tensor(full, mesh, placements, src_data_rank=None)


@pytest.fixture
def mesh() -> Iterator[Any]:
    """A mesh of one rank without sockets: its collectives do nothing, so tests look at local tensors."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    dist.destroy_process_group()


def test_dtensor_fills_its_local_part(mesh: Any) -> None:
    """The live DTensor stays the object and takes the stored shard."""
    full = torch.randn(4, 3)
    target = distribute_tensor(torch.zeros(4, 3), mesh, [Shard(0)])
    got = decode_state(*stored({"w": distribute_tensor(full, mesh, [Shard(0)])}), into={"w": target})
    assert got["w"] is target
    assert torch.equal(target.to_local(), full)


def test_a_plan_asks_a_mesh_for_its_ranks_once(mesh: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch computes them at every look; a model has a thousand DTensors on one mesh."""
    state = [distribute_tensor(torch.ones(4), mesh, [Shard(0)]) for _ in range(8)]
    real, looks = type(mesh).mesh, []

    def looked(self: Any) -> Any:
        looks.append(self)
        return real.fget(self)

    fresh = init_device_mesh("cpu", (1,), mesh_dim_names=("other",))
    state += [distribute_tensor(torch.ones(4), fresh, [Shard(0)]) for _ in range(8)]
    monkeypatch.setattr(type(mesh), "mesh", property(looked))
    plan_state(state)
    assert sum(each is fresh for each in looks) == 1
    plan_state(state)
    assert sum(each is fresh for each in looks) == 1


def test_dtensor_needs_into(mesh: Any) -> None:
    """A shard never comes back silently as a plain tensor."""
    with pytest.raises(ManifestMismatch, match="into="):
        decode_state(*stored([distribute_tensor(torch.ones(4), mesh, [Shard(0)])]))


def test_other_placement_shape_or_mesh_is_refused(mesh: Any) -> None:
    """Equal local shapes under other placements are another tensor."""
    state = [distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])]
    unnamed = init_device_mesh("cpu", (1,))
    targets = {
        "placements": distribute_tensor(torch.zeros(4, 4), mesh, [Shard(1)]),
        r"placements.*Replicate": distribute_tensor(torch.zeros(4, 4), mesh, [Replicate()]),
        "mesh names": distribute_tensor(torch.zeros(4, 4), unnamed, [Shard(0)]),
        "shape": distribute_tensor(torch.zeros(4, 5), mesh, [Shard(0)]),
        "dtensor": torch.zeros(4, 4),
    }
    for what, target in targets.items():
        with pytest.raises(ManifestMismatch, match=what):
            decode_state(*stored(state), into=[target])


def optimizer_state(mesh: Any, seed: int, steps: int) -> tuple[torch.nn.Linear, torch.optim.Adam]:
    torch.manual_seed(seed)
    model = torch.nn.Linear(4, 4, bias=False)
    model.weight = torch.nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Shard(0)]))
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    for _ in range(steps):
        model.weight.grad = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
        optimizer.step()
    return model, optimizer


def test_fresh_optimizer_gets_dtensors(mesh: Any) -> None:
    """Moments that have no place yet come back sharded, on the mesh of the parameters."""
    model, optimizer = optimizer_state(mesh, 0, 2)
    other, fresh = optimizer_state(mesh, 1, 0)
    decode_state(*stored({"m": model, "o": optimizer}), into={"o": fresh, "m": other})
    moment = fresh.state_dict()["state"][0]["exp_avg"]
    assert isinstance(moment, DTensor)
    assert moment.placements == (Shard(0),)
    assert torch.equal(moment.to_local(), optimizer.state_dict()["state"][0]["exp_avg"].to_local())
    assert torch.equal(other.weight.to_local(), model.weight.to_local())
    plain = torch.optim.Adam([torch.nn.Parameter(torch.zeros(4, 4))])
    with pytest.raises(ManifestMismatch, match="no device mesh"):
        decode_state(*stored(optimizer), into=plain)


def _rank(rank: int, meeting: str, results: Any) -> None:
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        full = torch.arange(15.0).view(5, 3)  # uneven: three rows here, two there
        state = {"w": distribute_tensor(full, mesh, [Shard(0)]), "r": distribute_tensor(full, mesh, [Replicate()])}
        target = {
            key: DTensor.from_local(
                torch.zeros_like(value.to_local()), mesh, value.placements, shape=value.shape, stride=value.stride()
            )
            for key, value in state.items()
        }
        layout, views, chunk_bytes = stored(state)
        decode_state(layout, views, chunk_bytes, into=target)
        same = torch.equal(target["w"].full_tensor(), full) and torch.equal(target["r"].to_local(), full)
        results.put((rank, same, plan_state(state["r"]).layout, plan_state(state).nbytes))
    finally:
        dist.destroy_process_group()


def test_two_ranks_keep_their_own_shards(tmp_path: Path) -> None:
    """On two real ranks each stores its rows only, and replicated tensors give equal layouts."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    ranks = [context.Process(target=_rank, args=(rank, str(tmp_path / "meeting"), results)) for rank in range(2)]
    for process in ranks:
        process.start()
    try:
        answers = sorted(results.get(timeout=120) for _ in ranks)
    finally:
        for process in ranks:
            process.join(timeout=120)
            if process.is_alive():
                process.kill()
                process.join(timeout=120)
        results.close()
    assert [same for _, same, _, _ in answers] == [True, True]
    assert answers[0][2] == answers[1][2]
    assert [nbytes for *_, nbytes in answers] == [48 + 60, 32 + 60]  # 9 and 6 floats, aligned to 16; then 15
