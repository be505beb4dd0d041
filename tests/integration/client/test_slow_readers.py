"""Readers that stand still while a job trains: its puts have room again after `DROPPED_READ_S` (R7, R11)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from memstore.client.reader import Reader, reader
from memstore.client.restore import OpenShard
from memstore.config import Config
from memstore.core.wire.calls import ReadStep
from memstore.errors import StepDropped
from memstore.shell.rank.shard_read import ShardRead
from memstore.testing.clusters.processes import ProcessCluster
from memstore.testing.ranks.fleet import Fleet
from memstore.testing.ranks.rank_process import RankNursery, RankProcess, together
from memstore.testing.ranks.states import compare, make_state

TWO_RACKS = {"h0": {"rack": "r0"}, "h1": {"rack": "r1"}}


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[ProcessCluster]:
    with ProcessCluster(tmp_path, TWO_RACKS) as found:
        yield found


@pytest.fixture
def ranks(cluster: ProcessCluster, nursery: RankNursery) -> list[RankProcess]:
    """A job that has room for the committed step and the next one."""
    return Fleet(cluster, nursery, keep_steps=1).begin(["h0", "h1"], last_step=2)


@pytest.fixture
def here(cluster: ProcessCluster, ranks: list[RankProcess], monkeypatch: pytest.MonkeyPatch) -> Iterator[Reader]:
    """A reader on rank 0's host."""
    monkeypatch.setenv("MEMSTORE_HOST", "h0")
    config = Config(store=cluster.config.store, arena_dir=cluster.config.arena_dir)
    with reader("train", config=config) as found:
        yield found


def test_commits_go_on_while_a_reader_of_a_shard_stands_still(ranks: list[RankProcess], here: Reader) -> None:
    """A put waits for no reader longer than for a commit; the reader is informed what became of its step."""
    with ShardRead(here._tool.link, ReadStep(job="train", step=None, rank=0), 30.0) as read:
        assert read.answer().step == 2
        together(ranks, "train", first=3, last=8)  # each is waited for, and raises if it was skipped
        shard = OpenShard(read, read.manifest())
        with pytest.raises(StepDropped, match=r"step 2 .* was dropped while it was read.*pin"):
            shard.build(read.manifest().layout, None)


def test_commits_go_on_while_a_reader_of_ranges_stands_still(ranks: list[RankProcess], here: Reader) -> None:
    """The same for chunks that were staged for it alone."""
    ranges = here.ranges()
    with ranges.ask(None, 0) as known:
        nbytes, chunk_bytes = known.manifest().nbytes, known.manifest().chunk_bytes
    with ranges.ask(None, 0, [(0, nbytes)], chunk_bytes) as read:
        read.answer()
        together(ranks, "train", first=3, last=8)
        with pytest.raises(StepDropped, match=r"step 2 .* was dropped while it was read.*pin"):
            read.bytes_of([(0, nbytes)])


def test_a_reader_of_a_kept_step_is_not_hurried(ranks: list[RankProcess], here: Reader) -> None:
    """What is kept, or pinned by name, may be read for as long as it takes, and is what was put."""
    here.pin(2, "mine")
    with ShardRead(here._tool.link, ReadStep(job="train", step=2, rank=0), 30.0) as read:
        read.answer()
        together(ranks, "train", first=3, last=8)
        state = OpenShard(read, read.manifest()).build(read.manifest().layout, None)
    assert compare(state, make_state(1, "train", 1, 0, 2, 128 << 10))[1] == []
