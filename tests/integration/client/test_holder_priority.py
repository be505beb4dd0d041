"""A holder that stands behind its rank for a core, as Ray starts it beside torchrun, on real processes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import memstore
from memstore.testing.clusters.process_rights import may_lower_nice
from memstore.testing.clusters.processes import ProcessCluster, wait_for


def test_a_holder_comes_forward_to_its_rank_or_status_says_why_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the system forbids it a put beside busy cores is committed many times later: the remedy is named."""
    monkeypatch.setenv("MEMSTORE_HOST", "h0")
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    cluster = ProcessCluster(tmp_path, {"h0": {}}, replicas=1)
    cluster.niceness = 4
    with cluster:
        holder = cluster.holders["h0"].pid
        assert os.getpriority(os.PRIO_PROCESS, holder) == nice + 4

        def outcome() -> str:
            if os.getpriority(os.PRIO_PROCESS, holder) == nice:
                return "forward"
            problems = cluster.status()["problems"]
            return next((row["remedy"] for row in problems if row["kind"] == "holder_nice"), "")

        with memstore.connect("job", rank=0, world_size=1, config=cluster.config) as store:
            store.put(0, {"weights": torch.ones(9)}).wait("committed")
            found = wait_for(outcome, "the holder to come forward, or the status to say why not")
        assert found == "forward" if may_lower_nice() else "RAY_worker_niceness=0" in found
        cluster.kill_holder("h0")
        cluster.niceness = 0  # the remedy: what starts it has the nice value of ranks
        cluster.start_holder("h0")
        cluster.wait_live("h0")
        with memstore.connect("job", rank=0, world_size=1, config=cluster.config) as store:
            assert store.get() is not None
            store.put(1, {"weights": torch.ones(9)}).wait("committed")
            holder = cluster.holders["h0"].pid
            assert outcome() == "forward"
