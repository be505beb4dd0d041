"""assign_ranks() with real ranks: FSDP2 on hosts dealt out again restores locally and trains on alike (R27)."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from repository import ROOT

from memstore.testing.clusters.processes import ProcessCluster

WORLD = 2
DEADLINE_S = 240.0  # a rank imports all of FSDP, for which a loaded machine takes a minute; only a hang takes longer
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

# A rank: `launched` is its launcher's number. "renumber" has the process group started again, "init" starts it with
# the logical rank.
RANK_SCRIPT = """
import json, sys
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
import memstore
from memstore.adapters.torch import reassign_ranks

launched, world, path, mode, job, first, last, fields = json.loads(sys.argv[1])
if mode == "renumber":
    dist.init_process_group("cpu:gloo", store=dist.FileStore(path, world), rank=launched, world_size=world)
store = memstore.connect(job, rank=launched, world_size=world, attempt=path, config=memstore.Config(**fields))
if mode == "init":
    order = store.assign_ranks()
    dist.init_process_group("cpu:gloo", store=dist.FileStore(path, world), rank=store.rank, world_size=world)
else:
    order = reassign_ranks(store)
assert dist.get_rank() == store.rank == order.index(launched)
mesh = init_device_mesh("cpu", (world,))
torch.manual_seed(0)
model = fully_shard(torch.nn.Sequential(torch.nn.Linear(33, 64), torch.nn.Linear(64, 33)), mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
state = {"model": model, "optim": optimizer, "rank": store.rank}
got = store.get(into=state)
losses = []
for step in range(first, last):
    torch.manual_seed(1000 * step + store.rank)
    x = torch.randn(8, 33)
    loss = (model(x) - x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
    if step < 3:  # what comes after is lost with the process
        store.put(step, state)
store.flush()
print(json.dumps({"rank": store.rank, "order": order, "losses": losses, **({} if got is None else {
    "step": got.step, "own": got.state["rank"], "verdict": got.source, "moved": list(got.ranks_moved),
    "moved_bytes": got.moved_bytes})}))
store.close()
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessCluster]:
    folder = tmp_path_factory.mktemp("mesh")
    with ProcessCluster(folder, {f"h{n}": {} for n in range(WORLD)}, replicas=1) as started:
        yield started


def launch(
    cluster: ProcessCluster, tmp_path: Path, job: str, hosts: Sequence[int], first: int, last: int, mode: str
) -> list[dict[str, Any]]:
    """Start rank n on the n-th host named; return what they print, by their launcher's number."""
    fields = {**cluster.config.store_fields(), "replicas": 1}
    fields = {name: value for name, value in fields.items() if value is not None}
    rendezvous = str(tmp_path / f"{job}-{first}")
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK_SCRIPT, json.dumps([n, WORLD, rendezvous, mode, job, first, last, fields])],
            env=cluster.env(f"h{host}") | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE, text=True,
        )
        for n, host in enumerate(hosts)
    ]  # fmt: skip
    try:
        outputs = [rank.communicate(timeout=DEADLINE_S)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0] * WORLD
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def by_rank(rows: list[dict[str, Any]]) -> list[list[float]]:
    return [row["losses"] for row in sorted(rows, key=lambda row: row["rank"])]


@pytest.mark.long
@pytest.mark.parametrize("mode", ["renumber", "init"])
def test_ranks_handed_out_again_restore_locally_and_train_on_alike(
    cluster: ProcessCluster, tmp_path: Path, mode: str
) -> None:
    """The hosts change places: renumbered, every rank restores what its host has, and the losses are as if unbroken."""
    before = launch(cluster, tmp_path, mode, (0, 1), 0, 6, mode)
    after = launch(cluster, tmp_path, mode, (1, 0), 3, 6, mode)
    assert [row["order"] for row in before] == [[0, 1]] * WORLD
    assert [row["order"] for row in after] == [[1, 0]] * WORLD
    assert [row["rank"] for row in after] == [row["own"] for row in after] == [1, 0]
    assert [(row["step"], row["verdict"], row["moved"], row["moved_bytes"]) for row in after] == [
        (2, "local", [], 0)
    ] * 2
    assert by_rank(after) == [losses[3:] for losses in by_rank(before)]
