"""Stores of one user on one machine: listed, and named where a mistyped name would begin or read an empty one."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from link_site import WAIT_S, Site, state, together

import memstore
import memstore.client.connect
import memstore.shell.rank.admin_link
from memstore.admin.stores import ASK_S, others_here, stores_here
from memstore.cli import main
from memstore.client.connect import connect
from memstore.client.store import Store
from memstore.config import Config
from memstore.core.wire.handshake import ProbeIdentity
from memstore.errors import CommitError, ConfigError, FencedError, PeerUnreachable, RecoveryError
from memstore.shell.arena.folder import make_folder, open_file
from memstore.shell.net.listener import connect_tcp, connect_unix
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


# -- test open files ----------------------------------------------------------------------------------
# Opening files of the arena folder when the process or the machine has no descriptor left.


@contextlib.contextmanager
def no_descriptor_left() -> Iterator[int]:
    """Let this process open no further file; yields its limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
        yield lowest
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_too_many_open_files_is_said_with_the_limit(tmp_path: Path) -> None:
    """A process without descriptors left gets the limit and `ulimit -n`, not that a file has a wrong mode."""
    folder = make_folder(tmp_path, store="s", host="h")
    with no_descriptor_left() as limit, pytest.raises(ConfigError, match=rf"limit of {limit} open files.*ulimit -n"):
        open_file(folder, "slots", os.O_RDWR | os.O_CREAT)


def test_a_connection_without_a_descriptor_is_one_that_failed(tmp_path: Path) -> None:
    """So a rank tries again: of another error the thread that brings its link back would end, and the link with it."""
    with no_descriptor_left():
        with pytest.raises(PeerUnreachable, match="Too many open files"):
            connect_unix(tmp_path / "holder.sock", timeout_s=1.0)
        with pytest.raises(PeerUnreachable, match="Too many open files"):
            connect_tcp("127.0.0.1", 9, secret=None, store="s", identity=ProbeIdentity(), timeout_s=1.0)


# -- test store agree ---------------------------------------------------------------------------------
# store.agree_on_step(): the collective decision of get() without its bytes (R27).


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


# -- test connect twice -------------------------------------------------------------------------------
# A process that connects to a job again, as a notebook's cell that is run twice does (R20, D133).


def test_the_store_of_before_says_so_and_the_new_one_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under the same launch key it is the same attempt; holders speak to the newer link alone."""
    site = Site(tmp_path, ["a", "b"], monkeypatch)
    try:
        former, beside = site.connect("launch")
        together(*[lambda each=each: each.put(1, state(1)).wait("committed", WAIT_S) for each in (former, beside)])
        under_way = former.put(2, state(2))  # the other rank does not put it, so it is never committed
        store, second = site.connect("launch")
        assert store.attempt == former.attempt
        with pytest.raises(CommitError, match="connected to the job again"):
            under_way.wait("durable")
        for call in (lambda: former.put(3, state(3)), former.get):
            with pytest.raises(FencedError, match="this process has connected to the job again"):
                call()
        former.close()
        together(*[lambda each=each: each.put(3, state(3)).wait("committed", WAIT_S) for each in (store, second)])
        got = store.get(rank=0)
        assert got is not None
        assert got.step == 3
    finally:
        site.close()


def test_a_single_rank_goes_on_from_the_newest_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each connect() of it is a launch of its own, so that get() is asked before the first put."""
    site = Site(tmp_path, ["a"], monkeypatch)
    site.place.host = "a"

    def connect() -> Store:
        site.stores.append(memstore.client.connect.connect("job", rank=0, world_size=1, config=site.config))
        return site.stores[-1]

    try:
        former = connect()
        former.put(1, state(1)).wait("committed", WAIT_S)
        store = connect()
        assert store.attempt == former.attempt + 1
        got = store.get()
        assert got is not None
        assert got.step == 1
        with pytest.raises(FencedError, match="attempt 2 was opened"):
            former.put(2, state(2))
    finally:
        site.close()
