"""A rank is killed in place while loaders have run ahead: the committed history has each sample once, in order."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DistributedSampler
from variants import later

ray = pytest.importorskip("ray")

from memstore.inplace.ray_actors import InPlaceGroup  # noqa: E402
from memstore.testing.clusters.embedded import EmbeddedCluster  # noqa: E402
from memstore.testing.ranks.in_place_data_job import GLOBAL_BATCH, LENGTH, SEED, STEPS, IndexedSamples, train  # noqa: E402

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]
RANKS, EPOCH = 3, LENGTH // GLOBAL_BATCH  # batches in an epoch
SHARE = GLOBAL_BATCH // RANKS


def ordered(epoch: int) -> list[list[int]]:
    """Return the batches of an epoch as `SampleOrder` promises them."""
    order = torch.randperm(LENGTH, generator=torch.Generator().manual_seed(SEED + epoch)).tolist()
    return [order[k * GLOBAL_BATCH : (k + 1) * GLOBAL_BATCH] for k in range(EPOCH)]


def stateful(epoch: int) -> list[list[int]]:
    """Return the batches of an epoch as torch's DistributedSampler deals them."""
    samplers = [DistributedSampler(IndexedSamples(), RANKS, rank, seed=SEED, drop_last=True) for rank in range(RANKS)]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    shares = [list(sampler) for sampler in samplers]
    return [[sample for share in shares for sample in share[k * SHARE : (k + 1) * SHARE]] for k in range(EPOCH)]


# Of each run: its kind of loader, and (generation, rank) -> the step at which that is killed, before its put.
CASES = {
    "in-an-epoch": (ordered, {(0, 1): 10}),
    "at-an-epochs-end": (ordered, {(0, 0): 11, (1, 2): 15}),
    "before-any-commit": (ordered, {(0, 2): 0}),
    "torchdata": (stateful, {(0, 1): 10}),
}


@pytest.mark.parametrize("name", ["in-an-epoch", *later(*(name for name in CASES if name != "in-an-epoch"))])
def test_no_sample_is_doubled_and_none_is_missing(shared_cluster: EmbeddedCluster, name: str) -> None:
    """All ranks end with the samples of an unbroken run; with `SampleOrder` the workers of the others live on."""
    epoch_of, faults = CASES[name]
    if epoch_of is stateful:
        pytest.importorskip("torchdata.stateful_dataloader", reason="pip install -e '.[frameworks]'")
    group = InPlaceGroup(RANKS, actor_options={"scheduling_strategy": "SPREAD"}, hang_after_s=60.0)
    ends = group.run(train, shared_cluster.config.store, f"data-{name}", epoch_of.__name__, faults)
    unbroken = [batch for epoch in range(STEPS // EPOCH) for batch in epoch_of(epoch)]
    assert [end.trained for end in ends] == [unbroken] * RANKS
    assert {end.generation for end in ends} == {len(faults)}
    assert ends[0].first_step <= max(faults.values())
    are_kept = [bool(end.kept_worker_pids) for end in ends]
    assert are_kept == [epoch_of is ordered and (len(faults) - 1, rank) not in faults for rank in range(RANKS)]
