"""torchtitan's own Trainer with its steps in memory: killed whole and started again it trains as if unbroken."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from framework_runs import Trained, check_goes_on, run, two_hosts

from memstore.testing.clusters.processes import ProcessCluster

pytest.importorskip(
    "torchtitan", minversion="0.3.0", reason="pip install torchtitan==0.3.0 in an environment of its own"
)
pytestmark = [pytest.mark.slow, pytest.mark.drill, pytest.mark.timeout(900)]
PROGRAM = "torchtitan_program.py"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessCluster]:
    with two_hosts(tmp_path_factory.mktemp("titan")) as started:
        yield started


@pytest.fixture(scope="module")
def unbroken(cluster: ProcessCluster, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return run(cluster, PROGRAM, "", tmp_path_factory.mktemp("unbroken"))


@pytest.mark.parametrize("mode", ["disabled", "async", "async_with_pinned_mem"])
def test_fsdp2_goes_on_where_it_was_killed(
    cluster: ProcessCluster, tmp_path: Path, unbroken: Trained, mode: str
) -> None:
    """In each of torchtitan's modes of saving: losses, norms and batches are those of the unbroken run."""
    check_goes_on(cluster, PROGRAM, tmp_path, unbroken, mode, ASYNC=mode)


def test_it_goes_on_when_a_host_is_lost(tmp_path: Path, unbroken: Trained) -> None:
    """A host is gone with its memory: both ranks go on where the other one is."""
    with two_hosts(tmp_path / "store") as cluster:
        check_goes_on(cluster, PROGRAM, tmp_path, unbroken, "lost", loses="h2")


@pytest.mark.parametrize(("option", "value"), [("TP", "2"), ("WORKERS", "2")])
def test_tensor_parallel_and_loader_workers_go_on(
    cluster: ProcessCluster, tmp_path: Path, option: str, value: str
) -> None:
    """Two ranks share every layer; the texts are read by processes beside each rank."""
    unbroken = run(cluster, PROGRAM, "", tmp_path, **{option: value})
    check_goes_on(cluster, PROGRAM, tmp_path, unbroken, option.lower(), **{option: value})


def test_the_last_model_alone_is_a_file_and_no_step(cluster: ProcessCluster, tmp_path: Path) -> None:
    """torchtitan's default ends with the weights alone: they go to its folder, the newest step stays a whole one."""
    run(cluster, PROGRAM, "model", tmp_path, LAST="model")
    assert list(tmp_path.glob("assets-0/out/checkpoint/step-16/.metadata"))
    found = cluster.job("model")
    assert found is not None
    assert found["committed_step"] == 15
