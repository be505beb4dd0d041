"""A launch with a rank missing, on real processes: the ranks that wait, and status, name the missing one (R20)."""

from __future__ import annotations

import contextlib
import json
import logging
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from click.testing import CliRunner

import memstore
from memstore.cli import main
from memstore.client.store import Store
from memstore.core.wire.calls import Get
from memstore.errors import MemstoreError
from memstore.shell.rank import collective
from memstore.shell.rank.holder_link import HolderLink
from memstore.testing.clusters.processes import ProcessCluster, wait_for

LIMIT_S = 60.0


def test_who_waits_says_for_whom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """After 5 s the rank that waits logs it, status shows the launch, and once the other comes both are in."""
    monkeypatch.setenv("MEMSTORE_HOST", "h1")
    with ProcessCluster(tmp_path, {"h1": {}}, connect_timeout_s=LIMIT_S, replicas=1) as cluster:
        stores: list[Store] = []

        def join(rank: int) -> None:
            stores.append(memstore.connect("train", rank=rank, world_size=2, attempt="one", config=cluster.config))

        with caplog.at_level(logging.WARNING, "memstore"):
            ranks = [threading.Thread(target=join, args=(0,), daemon=True)]
            ranks[0].start()
            said = wait_for(lambda: [line for line in caplog.messages if "connect to job train" in line], "a word")
        assert "1 of 2 ranks have come after" in said[0]
        assert said[0].endswith("waiting for rank 1 (up to 60 s)")

        where = ["--store", cluster.config.store, "--arena-dir", cluster.config.arena_dir]

        def shown() -> str:
            return " ".join(CliRunner().invoke(main, ["status", *where]).stdout.split())

        assert "gathering 1/2" in shown()
        # The controller counts from the join's arrival, so that it may say so a little later than the rank does.
        wait_for(lambda: "a launch gathers: 1 of 2 ranks have come" in shown(), "the launch's line", seen=shown)
        [row] = json.loads(CliRunner().invoke(main, ["status", "--json", *where]).stdout)["launches"]
        assert (row["job"], row["ranks"], row["missing"]) == ("train", 1, [1])

        ranks.append(threading.Thread(target=join, args=(1,), daemon=True))
        ranks[1].start()
        for thread in ranks:
            thread.join(LIMIT_S)
        assert sorted(store.rank for store in stores) == [0, 1]
        for store in stores:
            store.close()


def launches(cluster: ProcessCluster) -> list[dict[str, Any]]:
    """What `memstore status` shows; none while the holder is not back."""
    with contextlib.suppress(MemstoreError):
        return list(cluster.status()["launches"])
    return []


def test_all_of_connect_has_one_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The holder came late: the launch gathers for what is left, not for all of connect_timeout_s again."""
    monkeypatch.setenv("MEMSTORE_HOST", "h1")
    late_s = 2.0
    with ProcessCluster(tmp_path, {"h1": {}}, connect_timeout_s=LIMIT_S, replicas=1) as cluster:
        cluster.kill_holder("h1")
        back = threading.Timer(late_s, cluster.start_holder, ("h1",))
        back.start()
        stores: list[Store] = []

        def join(rank: int) -> None:
            stores.append(memstore.connect("train", rank=rank, world_size=2, attempt="one", config=cluster.config))

        ranks = [threading.Thread(target=join, args=(rank,), daemon=True) for rank in range(2)]
        ranks[0].start()
        back.join()
        [row] = wait_for(lambda: launches(cluster), "the launch")
        assert row["left_s"] <= LIMIT_S - late_s
        ranks[1].start()
        for thread in ranks:
            thread.join(LIMIT_S)
        for store in stores:
            store.close()
        assert len(stores) == 2


def test_every_call_of_all_ranks_says_for_whom_it_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """get() and prepare() of one rank of two: the log names the other and its host; all goes on."""
    monkeypatch.setenv("MEMSTORE_HOST", "h1")
    monkeypatch.setattr(collective, "FIRST_WORD_S", 0.5)  # of connect() the test above waits for all of it
    with ProcessCluster(tmp_path, {"h1": {}}, connect_timeout_s=LIMIT_S, replicas=1) as cluster:
        stores: dict[int, Store] = {}

        def join(rank: int) -> None:
            stores[rank] = memstore.connect("train", rank=rank, world_size=2, attempt="one", config=cluster.config)

        run_together(join, join)
        for name, call in {
            "get of": lambda store: store.get(),
            "room for the puts of": lambda store: store.prepare({"x": b"1"}).wait(),
        }.items():
            with caplog.at_level(logging.WARNING, "memstore"):
                first = threading.Thread(target=call, args=(stores[0],), daemon=True)
                first.start()
                line = re.compile(
                    rf"{name} job train: 1 of 2 ranks have come after \d+ s, waiting for rank 1 on h1 \(up to "
                )
                wait_for(lambda line=line: list(filter(line.search, caplog.messages)), line.pattern)
            call(stores[1])
            first.join(LIMIT_S)
            assert not first.is_alive()
        for store in stores.values():
            store.close()


def test_a_wait_for_an_agreement_has_the_name_of_its_verb() -> None:
    """agree_on_step() asks what get() asks, without its bytes; the log and errors call it what the caller did."""
    asked = Get(job="train", attempt=1, rank=0, step=None, timeout_s=1.0)
    names = [
        collective.RollCall(cast(HolderLink, None), each, 1.0).name
        for each in (asked, msgspec.structs.replace(asked, is_agreement=True))
    ]
    assert names == ["get of", "agree_on_step of"]


def run_together(*work: Callable[[int], None]) -> None:
    """Run what each rank does, at once."""
    threads = [threading.Thread(target=each, args=(rank,), daemon=True) for rank, each in enumerate(work)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
