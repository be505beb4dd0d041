"""`store.persist()` and `memstore persist` on real processes: a step is durable because a process asked (R31)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import memstore
from memstore.cli import main
from memstore.config import Config
from memstore.testing.clusters.processes import ProcessCluster
from memstore.testing.ranks.fleet import Fleet
from memstore.testing.ranks.rank_process import RankNursery, together

HOSTS = {"h0": {"rack": "r0", "memstore": "replica"}, "h1": {"rack": "r1", "memstore": "replica"}}


def run(cluster: ProcessCluster, *arguments: str, code: int = 0) -> tuple[dict[str, Any], str]:
    """Return what `memstore persist` wrote to stdout, as JSON, and to stderr."""
    where = ["--store", cluster.config.store, "--arena-dir", cluster.config.arena_dir]
    result = CliRunner().invoke(main, ["persist", *arguments, *where, "--json"])
    assert result.exit_code == code, result.output
    return json.loads(result.stdout) if result.stdout else {}, result.stderr


def test_a_person_and_a_reader_make_the_newest_step_durable(
    tmp_path: Path, nursery: RankNursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step 0 alone is durable by the schedule; the command exits 0 once the marker of step 6 is there."""
    durable = tmp_path / "durable"
    durable.mkdir()
    with ProcessCluster(tmp_path / "cluster", HOSTS) as cluster:
        fleet = Fleet(cluster, nursery, durable=str(durable), durable_every=1000)
        ranks = fleet.begin(["h0", "h1"], last_step=0)
        ranks[0].call("wait", step=0, level="durable")
        together(ranks, "train", first=1, last=6)
        body, _ = run(cluster, "train", "--within", "60")
        assert (body["step"], body["is_durable"]) == (6, True)
        assert (durable / "train" / str(body["attempt"]) / "6" / "marker").exists()
        together(ranks, "train", first=7, last=8)
        monkeypatch.setenv("MEMSTORE_HOST", "h1")
        config = Config(store=cluster.config.store, arena_dir=cluster.config.arena_dir)
        with memstore.reader("train", config=config) as reader:
            assert reader.persist(timeout_s=60.0) == 8
        durable.rename(tmp_path / "away")
        durable.write_text("not a directory")
        body, _ = run(cluster, "train", "latest", "--within", "2", code=4)
        assert not body["is_durable"]
        assert str(durable) in body["problem"]
        assert "no committed step 99" in run(cluster, "train", "99", code=1)[1]
