"""store.agree_on_step(): the collective decision of get() without its bytes (R27)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from memstore.client.connect import connect
from memstore.testing.clusters.processes import ProcessCluster


def test_agree_adopts_the_newest_step_and_puts_go_on_from_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """agree_on_step() returns the step get() would, lets single shards be read, and opens the way for the next put."""
    monkeypatch.setenv("MEMSTORE_HOST", "h1")
    labels = {"memstore": "replica"}
    with ProcessCluster(tmp_path, {"h1": labels, "h2": labels}) as cluster:
        with connect("job", rank=0, world_size=1, config=cluster.config) as store:
            assert store.agree_on_step() is None
            store.put(3, {"weight": torch.ones(1000)}).wait("committed", 30)
        with connect("job", rank=0, world_size=1, config=cluster.config) as store:
            assert store.agree_on_step() == 3

            shard = store.get(3, rank=0)
            ticket = store.put(4, {"weight": torch.zeros(1000)}).wait("committed", 30)

    assert shard is not None
    assert torch.equal(shard.state["weight"], torch.ones(1000))
    assert ticket.level == "committed"


def test_a_state_that_has_shrunk_is_put_after_a_restore(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The restored step takes more room than two versions of the new state: its room stays until it may go (R10)."""
    monkeypatch.setenv("MEMSTORE_HOST", "h1")
    labels = {"memstore": "replica"}
    with ProcessCluster(tmp_path, {"h1": labels, "h2": labels}) as cluster:
        with connect("job", rank=0, world_size=1, config=cluster.config) as store:
            store.put(1, {"weight": torch.ones(300_000)}).wait("committed", 60)
        with connect("job", rank=0, world_size=1, config=cluster.config) as store:
            got = store.get()
            levels = [store.put(step, {"weight": torch.ones(30_000)}).wait("committed", 60).level for step in (2, 3)]
    assert got is not None
    assert got.step == 1
    assert levels == ["committed", "committed"]
