"""Ray Train: a lost host's worker finds no other host. The wait ends, and Ray starts all workers once there is room."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("ray.train.v2")

import ray_train_in_place

from memstore.adapters.ray_train import InPlaceTorchConfig
from memstore.testing.clusters.embedded import EmbeddedCluster
from memstore.testing.clusters.processes import wait_for
from memstore.testing.faults.processes import wait_gone, with_start_times
from memstore.testing.ranks.in_place_job import STEPS, Announced, InPlaceRankEnd, announced, train_announced_worker

pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.timeout(600)]
MEET_S = 5.0


def fit(cluster: EmbeddedCluster, folder: Path, faults: list[tuple[int, int, str]]) -> list[InPlaceRankEnd]:
    """Train a new job with one rank a host; return what each rank returned."""
    function = partial(train_announced_worker, Announced(str(folder)))
    in_place = InPlaceTorchConfig(meet_s=MEET_S)
    return ray_train_in_place.fit(
        cluster, folder, faults, function, in_place, max_failures=5, placement="STRICT_SPREAD"
    )


def test_all_workers_start_again_once_there_is_room(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks that are left end `meet_s` after the loss; with another host all go on from the committed step."""
    for name, value in ray_train_in_place.ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    with EmbeddedCluster({"h1": {}, "h2": {}, "h3": {}}, cpus_per_host=1) as cluster, ThreadPoolExecutor(1) as thread:
        unbroken = fit(cluster, tmp_path_factory.mktemp("unbroken"), [])
        go, held = tmp_path / "go", tmp_path / "go.held"
        run = thread.submit(fit, cluster, tmp_path, [(0, 0, f"hold:{go}")])
        wait_for(lambda: held.exists() or run.done(), "rank 0 to hold the others up", 120)
        survivors = with_start_times(announced(tmp_path) - {pid for pid, _ in cluster.node_processes("h3")})
        labels = dict(cluster.labels["h3"])
        cluster.lose_host("h3")
        go.touch()
        wait_gone(survivors, 120)  # it would wait for a host before it ended them
        assert not run.done()
        cluster.add_node("h3", labels)
        for rank, end in enumerate(run.result(180)):
            assert end.is_first_here
            assert max(end.losses) == STEPS - 1
            assert min(end.losses) > 0
            assert end.losses.items() <= unbroken[rank].losses.items()
