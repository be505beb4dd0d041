"""Ray Train replaces one worker and keeps the others; the names of Ray that this needs are there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

ray = pytest.importorskip("ray")
pytest.importorskip("ray.train.v2")

from ray.train import FailureConfig, RunConfig, ScalingConfig  # noqa: E402
from ray.train.torch import TorchTrainer  # noqa: E402

from memstore.adapters.ray_train import InPlaceTorchConfig  # noqa: E402
from memstore.adapters.ray_train_names import NAMES, missing  # noqa: E402
from memstore.testing.clusters.embedded import EmbeddedCluster  # noqa: E402
from memstore.testing.ranks.in_place_job import STEPS, RankEnd, end_of, train_worker  # noqa: E402

pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.timeout(600)]
RANKS = 3


def test_each_private_name_of_ray_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another Ray is met by the ordinary restart and a warning; here it fails by name."""
    assert missing() == []
    monkeypatch.setitem(NAMES, ("ray.train.backend", "Backend", "no_such_switch"), "nothing")
    assert missing() == ["ray.train.backend.Backend.no_such_switch (nothing)"]
    assert InPlaceTorchConfig().backend_cls.__name__ == "_TorchBackend"


@pytest.fixture(scope="module")
def cluster() -> Iterator[EmbeddedCluster]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TRAIN_V2_ENABLED", "1")
        patch.setenv("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.5")
        with EmbeddedCluster({"h1": {}, "h2": {}}, cpus_per_host=3) as made:
            yield made


def fit(cluster: EmbeddedCluster, folder: Path, faults: list[tuple[int, int, str]]) -> list[RankEnd]:
    """Train a new job; return what each rank returned."""
    job = folder.name
    arguments = {"store_name": cluster.config.store, "job": job, "faults": faults, "folder": str(folder)}
    TorchTrainer(
        train_worker, train_loop_config=arguments, torch_config=InPlaceTorchConfig(),
        scaling_config=ScalingConfig(num_workers=RANKS, resources_per_worker={"CPU": 1}),
        run_config=RunConfig(storage_path=str(folder), name=job, failure_config=FailureConfig(max_failures=2)),
    ).fit()  # fmt: skip
    return [end_of(folder, rank) for rank in range(RANKS)]


@pytest.fixture(scope="module")
def unbroken(cluster: EmbeddedCluster, tmp_path_factory: pytest.TempPathFactory) -> list[dict[int, str]]:
    """By rank, each step's loss of a run without a fault."""
    return [end.losses for end in fit(cluster, tmp_path_factory.mktemp("unbroken"), [])]


@pytest.mark.parametrize("faults", [[(0, 1, "exit")], [(0, 0, "stop")]], ids=["killed", "frozen"])
def test_the_others_keep_their_processes_and_no_loss_changes(
    cluster: EmbeddedCluster, unbroken: list[dict[int, str]], tmp_path: Path, faults: list[tuple[int, int, str]]
) -> None:
    """Of a run that lost a rank and of one that lost none, each step has the same loss, bit for bit."""
    lost = {rank for _, rank, _ in faults}
    for rank, end in enumerate(fit(cluster, tmp_path, faults)):
        assert (end.generation, end.is_first_here) == (1, rank in lost)
        assert max(end.losses) == STEPS - 1
        assert end.losses.items() <= unbroken[rank].items()
