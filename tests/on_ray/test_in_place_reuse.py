"""A rank of FSDP2 is lost: the others go on with the tensors they have, and as their replacement does."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

ray = pytest.importorskip("ray")

from memstore.inplace.ray_actors import InPlaceGroup  # noqa: E402
from memstore.testing.clusters.embedded import EmbeddedCluster  # noqa: E402
from memstore.testing.ranks.reuse_job import FAULT_AT, STEPS, ReuseEnd, train  # noqa: E402

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]
RANKS, LOST = 3, 1


def run(shared_cluster: EmbeddedCluster, job: str, at: Sequence[str]) -> list[ReuseEnd]:
    """Train a new job; return what each rank returned."""
    group = InPlaceGroup(RANKS, actor_options={"scheduling_strategy": "SPREAD"}, hang_after_s=10.0)
    return group.run(train, shared_cluster.config.store, job, LOST, at)


def test_the_others_keep_every_tensor_and_no_loss_changes(shared_cluster: EmbeddedCluster) -> None:
    """Parameters and moments lie where they lay, and hold what the replacement's hold: all losses are equal.

    The scaler's step begins again behind its unscale_(), and dropout is on although an evaluation broke off.
    """
    at = ("backward", "clip", "evaluation")
    unbroken = run(shared_cluster, "reuse-unbroken", ())
    for rank, (end, other) in enumerate(zip(run(shared_cluster, "reuse-broken", at), unbroken, strict=True)):
        assert (end.generation, end.restored_step) == (len(at), FAULT_AT + len(at) - 1)
        assert end.losses == {step: other.losses[step] for step in range(FAULT_AT + len(at), STEPS)}
        assert end.kept_count == (0 if rank == LOST else end.tensors_count)
