"""DeepSpeed's own engine with its checkpoints in memory: killed whole and started again it trains as if unbroken."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from framework_runs import check_goes_on, run, two_hosts

from memstore.testing.clusters.processes import ProcessCluster

pytest.importorskip("deepspeed", minversion="0.19.8", reason="pip install deepspeed==0.19.8")
pytestmark = [pytest.mark.slow, pytest.mark.drill, pytest.mark.timeout(900)]
PROGRAM = "deepspeed_program.py"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessCluster]:
    with two_hosts(tmp_path_factory.mktemp("deepspeed")) as started:
        yield started


@pytest.mark.parametrize(("stage", "kind"), [("1", "bf16"), ("2", "bf16"), ("3", "bf16"), ("1", "fp32")])
def test_zero_goes_on_where_it_was_killed(cluster: ProcessCluster, tmp_path: Path, stage: str, kind: str) -> None:
    """Losses, rates and batches are those of the unbroken run: weights, moments, schedule and each rank's buffers."""
    unbroken = run(cluster, PROGRAM, "", tmp_path, ZERO=stage, TYPE=kind)
    check_goes_on(cluster, PROGRAM, tmp_path, unbroken, f"zero{stage}-{kind}", ZERO=stage, TYPE=kind)


def test_it_goes_on_when_a_host_is_lost(tmp_path: Path) -> None:
    """A host is gone with its memory: both ranks go on where the other one is."""
    with two_hosts(tmp_path / "store") as cluster:
        unbroken = run(cluster, PROGRAM, "", tmp_path, ZERO="3")
        check_goes_on(cluster, PROGRAM, tmp_path, unbroken, "lost", loses="h2", ZERO="3")
