"""Megatron's own save_checkpoint and load_checkpoint with the manager: killed whole it trains on as if unbroken.

GPTModel, DistributedOptimizer, schedules and random states are Megatron's. Where it is not installed,
test_adapter_megatron.py makes its calls.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from framework_runs import check_goes_on, run, two_hosts

from memstore.testing.clusters.processes import ProcessCluster

WANTED = "pip install nvidia-resiliency-ext, and megatron-core==0.19.2 with its module megatron.training"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.drill,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not all(map(find_spec, ("nvidia_resiliency_ext", "megatron"))), reason=WANTED),
]
PROGRAM = "megatron_program.py"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessCluster]:
    with two_hosts(tmp_path_factory.mktemp("megatron")) as started:
        yield started


@pytest.mark.parametrize("options", [{"ALGO": "fully_parallel"}, {"ALGO": "atomic"}, {"TP": "2"}, {"PP": "2"}], ids=str)
def test_it_goes_on_where_it_was_killed(cluster: ProcessCluster, tmp_path: Path, options: dict[str, str]) -> None:
    """Data parallel by both ways of local checkpoints, tensor parallel, pipeline parallel: losses, norms, batches."""
    unbroken = run(cluster, PROGRAM, "", tmp_path, **options)
    check_goes_on(cluster, PROGRAM, tmp_path, unbroken, "-".join(map("".join, options.items())).lower(), **options)


def test_it_goes_on_when_a_host_is_lost(tmp_path: Path) -> None:
    """A host is gone with its memory: both ranks go on where the other one is."""
    with two_hosts(tmp_path / "store") as cluster:
        check_goes_on(cluster, PROGRAM, tmp_path, run(cluster, PROGRAM, "", tmp_path), "lost", loses="h2")
