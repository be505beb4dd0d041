"""Stores of one user on one machine: listed, and named where a mistyped name would begin or read an empty one."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import memstore
import memstore.shell.rank.admin_link
from memstore.admin.stores import ASK_S, others_here, stores_here
from memstore.cli import main
from memstore.config import Config
from memstore.errors import PeerUnreachable, RecoveryError
from memstore.shell.rank.holder_link import HolderLink
from memstore.testing.clusters.processes import ProcessCluster


@pytest.fixture
def arena_dir(request: pytest.FixtureRequest) -> Iterator[Path]:
    """A folder for arenas of this test's stores alone."""
    folder = Path("/dev/shm") / f"memstore-stores-p{os.getpid()}"
    folder.mkdir()
    yield folder
    shutil.rmtree(folder)


def test_other_stores_are_listed_and_those_that_know_the_job_named(
    tmp_path: Path, arena_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEMSTORE_HOST", "h1")
    with (
        ProcessCluster(tmp_path / "a", {"h1": {}, "h2": {}}, arena_dir=str(arena_dir)) as live,
        ProcessCluster(tmp_path / "b", {"h3": {}}, arena_dir=str(arena_dir)) as left,
    ):
        with memstore.connect("train", rank=0, world_size=1, config=live.config.with_fields({"replicas": 1})) as store:
            store.get()
            store.put(7, {"a": 1}).wait("committed", 20)
        left.kill_all()
        names = {live.config.store: True, left.config.store: False}
        found = {store.store: store for store in stores_here(live.config)}
        assert {name: store.is_live for name, store in found.items()} == names
        assert found[live.config.store].jobs == {"train": 7}
        listed = " ".join(CliRunner().invoke(main, ["stores", "--arena-dir", str(arena_dir)]).stdout.split())
        words = f"not known until `memstore up --store {left.config.store} --arena-dir {arena_dir}` adopts it"
        assert words in listed
        assert found[live.config.store].hosts == ["h1", "h2"]
        assert found[live.config.store].nbytes > 0

        wrong = Config(store="defualt", arena_dir=str(arena_dir))
        assert f"job 'train' has history in store {live.config.store}: is store='defualt' mistyped?" in others_here(
            wrong, "train"
        )
        assert others_here(wrong, "other").startswith("other stores here: ")
        with pytest.raises(PeerUnreachable, match=f"has history in store {live.config.store}"):
            memstore.reader("train", config=wrong)

        monkeypatch.setenv("MEMSTORE_HOST", "h4")
        with ProcessCluster(tmp_path / "c", {"h4": {}}, arena_dir=str(arena_dir)) as empty:
            with memstore.reader("train", config=empty.config) as reader:
                for ask in (reader.steps, reader.get):
                    with pytest.raises(RecoveryError, match=f"no job .* has history in store {live.config.store}"):
                        ask()
            with memstore.reader("other", config=empty.config) as reader, pytest.raises(RecoveryError) as caught:
                reader.get()
            assert live.config.store not in str(caught.value)
            there = ["--store", empty.config.store, "--arena-dir", str(arena_dir)]
            for verb in (
                "ls train",
                "pin train 7 best",
                "rm train --yes",
                "events train",
                "plan train",
                "verify train",
            ):
                refused = CliRunner().invoke(main, [*verb.split(), *there])
                (command,) = re.findall(r"it is in store .* on this machine: `memstore (.*)`", refused.stderr)
                assert (refused.exit_code, live.config.store in command) == (1, True), verb
            shown = CliRunner().invoke(main, command.split())
            assert shown.stdout.startswith("train · attempt 1"), shown.output
            assert "it is in store" not in CliRunner().invoke(main, ["ls", "other", *there]).stderr
            wrong_name = CliRunner().invoke(main, ["ls", "--store", "defualt", "--arena-dir", str(arena_dir)]).stderr
            assert "other stores here: " in wrong_name
            assert f"{live.config.store} (live: train at step 7)" in wrong_name

        where = ["stores", "--arena-dir", str(arena_dir)]
        rows = json.loads(CliRunner().invoke(main, [*where, "--json"]).stdout)["stores"]
        assert {row["store"]: row["is_live"] for row in rows} == names
        shown = CliRunner().invoke(main, where).stdout
        assert "train (7)" in shown
        assert "left over" in shown


def test_a_folder_whose_name_no_store_can_have_is_passed_over(arena_dir: Path) -> None:
    """A user's copy of a store's folder fails neither `memstore stores` nor a connect that lists the others."""
    config = Config(arena_dir=str(arena_dir))
    root = arena_dir / f"memstore-{os.getuid()}"
    for name in ("default (copy)", "left"):
        (root / name / "h1").mkdir(parents=True)
    assert [store.store for store in stores_here(config)] == ["left"]


def test_stores_that_hang_are_asked_beside_the_others_within_one_limit(
    tmp_path: Path, arena_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each holder is connected to while all others still wait for that; those that are stopped cost one limit."""
    met, limits = threading.Barrier(4), []

    def meet(*place: Any, **how: Any) -> HolderLink:
        met.wait(20)
        limits.append(how["connect_s"])
        return HolderLink(*place, **how)

    with (
        ProcessCluster(tmp_path / "a", {"h1": {}, "h2": {}}, arena_dir=str(arena_dir)) as hangs,
        ProcessCluster(tmp_path / "b", {"h3": {}}, arena_dir=str(arena_dir), detect=60) as too,
        ProcessCluster(tmp_path / "c", {"h4": {}}, arena_dir=str(arena_dir)) as answers,
    ):
        monkeypatch.setenv("MEMSTORE_HOST", "h4")
        with memstore.connect(
            "train", rank=0, world_size=1, config=answers.config.with_fields({"replicas": 1})
        ) as store:
            store.get()
            store.put(7, {"a": 1}).wait("committed", 20)
        for cluster, host in ((hangs, "h1"), (hangs, "h2"), (too, "h3")):
            cluster.signal_holder(host, signal.SIGSTOP)
        monkeypatch.setattr(memstore.shell.rank.admin_link, "HolderLink", meet)
        found = {store.store: (store.is_live, store.jobs) for store in stores_here(answers.config)}
        assert found[answers.config.store] == (True, {"train": 7})
        assert found[hangs.config.store] == found[too.config.store] == (True, {})
        assert all(0 < limit_s <= ASK_S for limit_s in limits)
