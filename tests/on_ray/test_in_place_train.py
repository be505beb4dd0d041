"""Ray Train replaces one worker and keeps the others; the names of Ray that this needs are there."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("ray.train.v2")

import ray_train_in_place
from ray.train.v2.api.exceptions import TrainingFailedError
from ray_train_in_place import RANKS

from memstore.adapters.ray_train import NAMES, SPARE_NAMES, InPlaceTorchConfig, bundle_for_worker, spares_of
from memstore.inplace.reuse import missing
from memstore.testing.clusters.embedded import EmbeddedCluster
from memstore.testing.faults.processes import wait_gone, with_start_times
from memstore.testing.ranks.in_place_job import (
    ALWAYS,
    STEPS,
    Announced,
    InPlaceRankEnd,
    announced,
    train_beside_spares,
    train_worker,
)

pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.timeout(600)]


def test_each_private_name_of_ray_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another Ray is met by the ordinary restart and a warning; here it fails by name."""
    assert missing({**NAMES, **SPARE_NAMES}) == []
    monkeypatch.setitem(NAMES, ("ray.train.backend", "Backend", "no_such_switch"), "nothing")
    assert missing(NAMES) == ["ray.train.backend.Backend.no_such_switch (nothing)"]
    assert InPlaceTorchConfig().backend_cls.__name__ == "_TorchBackend"


def test_without_a_private_name_of_ray_there_are_no_spares(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning names it; the rest of the recovery stays."""
    monkeypatch.setitem(SPARE_NAMES, ("ray.train.backend", "Backend", "no_such_switch"), "nothing")
    assert spares_of(None, 1, ()) is None
    assert "no spares, because Ray" in caplog.text
    assert "ray.train.backend.Backend.no_such_switch (nothing)" in caplog.text
    assert InPlaceTorchConfig(spares=1).backend_cls.__name__ == "InPlaceBackend"


def test_a_new_worker_gets_a_bundle_that_no_other_rank_is_in() -> None:
    """The lost worker's own, else an empty one, else one that a spare waits in."""
    places = (0, 1, 2, None)  # of 3 ranks, of which rank 0 was lost
    for own, second, third, spare in product(places, repeat=4):
        if len({own, second, third} - {None}) + (own, second, third).count(None) < 3:
            continue  # two ranks in one bundle
        if spare is not None and spare in (second, third):
            continue
        bundle = bundle_for_worker(own, (None, second, third), [spare])
        assert bundle in {0, 1, 2} - {second, third}
        assert bundle != spare or not {0, 1, 2} - {second, third, spare}
        assert own in (None, spare, bundle)


@pytest.fixture(scope="module")
def cluster() -> Iterator[EmbeddedCluster]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ray_train_in_place.ENVIRONMENT.items():
            patch.setenv(name, value)
        with EmbeddedCluster({"h1": {}, "h2": {}}, cpus_per_host=3) as made:
            yield made


def fit(
    cluster: EmbeddedCluster, folder: Path, faults: list[tuple[int, int, str]], spares: int = 0, **more: Any
) -> list[InPlaceRankEnd]:
    """Train a new job; return what each rank returned."""
    function = partial(train_beside_spares, Announced(str(folder))) if spares else train_worker
    return ray_train_in_place.fit(cluster, folder, faults, function, InPlaceTorchConfig(spares=spares), **more)


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


@pytest.mark.parametrize(
    ("lost", "kills_spares", "by_spares"),
    [([1], False, 1), ([1], True, 0), ([1, 2], False, 1)],
    ids=["killed", "spare-killed-first", "two-killed"],
)
def test_a_spare_takes_the_place_of_a_lost_rank(
    cluster: EmbeddedCluster,
    unbroken: list[dict[int, str]],
    tmp_path: Path,
    lost: list[int],
    kills_spares: bool,
    by_spares: int,
) -> None:
    """Its process was there before the loss; without one a new process comes; none is left when the run is over."""
    faults = [(0, rank, "exit") for rank in lost]
    ends = fit(cluster, tmp_path, faults, 1, processes=RANKS + 1, kills_spares=kills_spares)
    early = set(msgspec.json.decode((tmp_path / "early.json").read_bytes()))
    assert len(early) == RANKS + 1
    assert [end.is_first_here for end in ends] == [rank in lost for rank in range(RANKS)]
    assert sum(ends[rank].pid in early for rank in lost) == by_spares
    for rank, end in enumerate(ends):
        assert max(end.losses) == STEPS - 1
        assert end.losses.items() <= unbroken[rank].items()
    wait_gone(with_start_times(announced(tmp_path)))


def test_a_bug_that_comes_again_at_one_step_ends_the_job(cluster: EmbeddedCluster, tmp_path: Path) -> None:
    """After three generations, not after all restarts that are allowed; the error has the user's traceback."""
    words = "(?s)failed after step 11 in the same way in 3 generations.*a bug of the user's"
    with pytest.raises(TrainingFailedError, match=words):
        fit(cluster, tmp_path, [(ALWAYS, 1, "raise")], max_failures=20)
