"""With NCCL, too, a lost or frozen rank is replaced, the others keep their processes, and no loss changes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

ray = pytest.importorskip("ray")

from memstore.inplace.ray_actors import InPlaceGroup  # noqa: E402
from memstore.testing.clusters.embedded import EmbeddedCluster  # noqa: E402
from memstore.testing.ranks import in_place_job  # noqa: E402
from memstore.testing.ranks.in_place_job import SharedGpu  # noqa: E402

pytestmark = [
    pytest.mark.ray,
    pytest.mark.gpu,
    pytest.mark.long,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]
RANKS = 3
Faults = dict[tuple[int, int], str]


@pytest.fixture(scope="module")
def cluster() -> Iterator[EmbeddedCluster]:
    """Two hosts that share the GPU."""
    with EmbeddedCluster({"h1": {}, "h2": {}}, cpus_per_host=4, gpus_per_host=1) as made:
        yield made


def group(**more: Any) -> InPlaceGroup:
    """Return ranks that have a quarter of the GPU each."""
    options = {"scheduling_strategy": "SPREAD", "num_gpus": 0.25}
    return InPlaceGroup(RANKS, actor_options=options, backend="nccl", **more)


def run(cluster: EmbeddedCluster, job: str, faults: Faults, **more: Any) -> list[in_place_job.InPlaceRankEnd]:
    """Train a new job; return what each rank returned."""
    return group(**more).run(in_place_job.train, cluster.config.store, job, faults, SharedGpu())


@pytest.fixture(scope="module")
def unbroken(cluster: EmbeddedCluster) -> list[dict[int, str]]:
    """By rank, each step's loss of a run without a fault."""
    return [end.losses for end in run(cluster, "unbroken", {})]


CASES: dict[str, tuple[Faults, dict[str, Any]]] = {
    "killed": ({(0, 1): "exit"}, {}),
    "rank-0-killed": ({(0, 0): "exit"}, {}),
    "spare": ({(0, 1): "exit"}, {"spares": 1}),
    "frozen": ({(0, 2): "stop"}, {"hang_after_s": 3.0}),
    "replacement-killed": ({(0, 1): "exit", (1, 1): "exit"}, {}),
    "two-killed": ({(0, 1): "exit", (0, 2): "exit"}, {}),
}


@pytest.mark.parametrize("name", CASES)
def test_the_others_keep_their_processes_and_no_loss_changes(
    cluster: EmbeddedCluster, unbroken: list[dict[int, str]], name: str
) -> None:
    """What an aborted all-reduce leaves in the weights is never stored: all losses are those of the unbroken run."""
    faults, more = CASES[name]
    ends = run(cluster, name, faults, **more)
    lost = {rank for _, rank in faults}
    assert [end.is_first_here for end in ends] == [rank in lost for rank in range(RANKS)]
    assert ends[0].generation >= 1 + max(number for number, _ in faults)
    for end, losses in zip(ends, unbroken, strict=True):
        assert max(end.losses) == in_place_job.STEPS - 1
        assert end.losses.items() <= losses.items()


def test_fsdp_goes_on_with_its_tensors_on_the_gpu(cluster: EmbeddedCluster) -> None:
    """A rank dies in a backward; the others keep parameters and moments where they lie."""
    ends = {
        job: group(hang_after_s=10.0).run(in_place_job.train_again, cluster.config.store, job, 1, at, SharedGpu())
        for job, at in (("fsdp-unbroken", ()), ("fsdp-broken", ("backward",)))
    }
    for rank, (end, other) in enumerate(zip(ends["fsdp-broken"], ends["fsdp-unbroken"], strict=True)):
        assert (end.generation, end.restored_step) == (1, in_place_job.REUSE_FAULT_AT - 1)
        assert end.losses == {
            step: other.losses[step] for step in range(in_place_job.REUSE_FAULT_AT, in_place_job.REUSE_STEPS)
        }
        assert end.kept_count == (0 if rank == 1 else end.tensors_count)
