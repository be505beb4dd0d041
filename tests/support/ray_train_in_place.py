"""A job under Ray Train that recovers in place, trained to its end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from memstore.adapters.ray_train import InPlaceTorchConfig
from memstore.testing.clusters.embedded import EmbeddedCluster
from memstore.testing.ranks.in_place_job import InPlaceRankEnd, end_of

RANKS = 3
ENVIRONMENT = {"RAY_TRAIN_V2_ENABLED": "1", "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5"}


def fit(
    cluster: EmbeddedCluster,
    folder: Path,
    faults: list[tuple[int, int, str]],
    function: Callable[..., None],
    in_place: InPlaceTorchConfig,
    *,
    max_failures: int = 2,
    placement: str = "PACK",
    **more: Any,
) -> list[InPlaceRankEnd]:
    """Train a new job, named as the folder; return what each rank returned.

    Args:
        faults: Generation, rank and fault, as `memstore.testing.ranks.in_place_job.train` takes them.
        function: What each rank calls.
        placement: Ray's strategy for the ranks.
        more: Further arguments of the function.
    """
    job = folder.name
    TorchTrainer(
        function,
        train_loop_config={
            "store_name": cluster.config.store,
            "job": job,
            "faults": faults,
            "folder": str(folder),
            **more,
        },
        torch_config=in_place,
        scaling_config=ScalingConfig(num_workers=RANKS, resources_per_worker={"CPU": 1}, placement_strategy=placement),
        run_config=RunConfig(
            storage_path=str(folder), name=job, failure_config=FailureConfig(max_failures=max_failures)
        ),
    ).fit()
    return [end_of(folder, rank) for rank in range(RANKS)]
