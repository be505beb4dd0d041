"""DeepSpeed's own engine with its checkpoints in memory: killed whole and started again it trains as if unbroken."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from framework_runs import check_goes_on, run

from memstore.testing.clusters.processes import ProcessCluster

pytest.importorskip("deepspeed", minversion="0.19.8", reason="pip install deepspeed==0.19.8")
pytestmark = [pytest.mark.slow, pytest.mark.drill, pytest.mark.timeout(900)]
PROGRAM = "deepspeed_program.py"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessCluster]:
    folder = tmp_path_factory.mktemp("deepspeed")
    with ProcessCluster(folder, {"h1": {}, "h2": {}}, replicas=2) as started:
        yield started


@pytest.mark.parametrize(
    ("stage", "kind", "loses"),
    [("1", "bf16", ""), ("2", "bf16", ""), ("3", "bf16", ""), ("1", "fp32", ""), ("3", "bf16", "h2")],
)
def test_zero_goes_on_where_it_was_killed(
    cluster: ProcessCluster, tmp_path: Path, stage: str, kind: str, loses: str
) -> None:
    """Losses, rates and batches are those of the unbroken run: weights, moments, schedule and each rank's buffers."""
    options = {"ZERO": stage, "TYPE": kind}
    unbroken = run(cluster, PROGRAM, "", tmp_path, **options)
    check_goes_on(cluster, PROGRAM, tmp_path, unbroken, f"zero{stage}-{kind}{loses}", loses=loses, **options)
    if loses:
        cluster.start_holder(loses)
        cluster.wait_live(loses)
