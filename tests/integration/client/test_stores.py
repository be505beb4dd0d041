"""Stores: how a process starts, finds, lists or stops one, with a deadline; threads and a child that use one."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
from click.testing import CliRunner
from link_site import WAIT_S, Site, state, together

import memstore
import memstore.client.connect
import memstore.shell.rank.admin_link
from memstore.admin.cluster import create_local_ray, ensure_started, remove_leftovers, stores_on_ray
from memstore.admin.stores import ASK_S, others_here, stores_here
from memstore.cli import main
from memstore.client.connect import connect
from memstore.client.store import Store
from memstore.client.store_start import StoreStart, begin_start
from memstore.config import Config
from memstore.core.wire.handshake import ProbeIdentity
from memstore.errors import (
    ClosedError,
    CommitError,
    ConfigError,
    FencedError,
    MemstoreError,
    PeerTimeout,
    PeerUnreachable,
    RecoveryError,
)
from memstore.shell.arena.folder import make_folder, open_file
from memstore.shell.arena.lock import ArenaLock
from memstore.shell.net.listener import connect_tcp, connect_unix
from memstore.shell.on_ray.reach import wait_for_gcs, wants_token
from memstore.shell.rank import collective
from memstore.shell.rank.collective import take_turn
from memstore.shell.rank.holder_link import HolderLink
from memstore.testing.clusters.embedded import EmbeddedCluster
from memstore.testing.clusters.processes import ProcessCluster
from memstore.testing.clusters.scratch import scratch_store_name

# -- store start --------------------------------------------------------------------------------------
# A silent Ray: a process that starts, finds or stops a store gives up at a deadline and says for which host it waited
# (R4, R20).


LIMIT_S = 1.0  # Ray alone would wait for minutes, longer than a test may take
THREAD_S = 5.0


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a GCS that accepts connections and never answers, in RAY_ADDRESS."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.2", 0))  # Ray takes 127.0.0.1 for another address of the machine
        listener.listen(64)
        address = f"127.0.0.2:{listener.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address)
        yield address


@pytest.fixture
def hung(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a GCS whose HTTP/2 answers while it handles no call, in RAY_ADDRESS."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.2", 0))
        listener.listen(64)
        peers: list[socket.socket] = []

        def answer() -> None:
            with contextlib.suppress(OSError):  # the listener is closed
                while True:
                    peers.append(listener.accept()[0])
                    peers[-1].sendall(bytes(3) + b"\x04" + bytes(5))  # empty settings

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        address = f"127.0.0.2:{listener.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address)
        yield address
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(THREAD_S)
        for peer in peers:
            peer.close()


@pytest.fixture
def left(tmp_path: Path) -> Iterator[ProcessCluster]:
    """A store whose only holder was killed, with its socket gone."""
    with ProcessCluster(tmp_path, {"h1": {}}, connect_timeout_s=LIMIT_S) as cluster:
        cluster.kill_holder("h1")
        (cluster.arena("h1") / "holder.sock").unlink(missing_ok=True)
        yield cluster


def refused(call: Callable[[], Any]) -> MemstoreError:
    """Return the error of a call."""
    with pytest.raises(MemstoreError) as caught:
        call()
    return caught.value


def test_a_rank_connects_as_soon_as_its_holder_is_back(
    left: ProcessCluster, silent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray is not asked before the holder had its time, and holds up no process when it is."""
    config = left.config.with_fields({"connect_timeout_s": 300.0})  # longer than a test may take
    monkeypatch.setattr("memstore.client.connect.START_AFTER_S", 1.0)
    for delay_s in (0.3, 2.0):
        back = threading.Timer(delay_s, left.start_holder, ("h1",))
        back.start()
        with memstore.connect("train", rank=0, world_size=1, config=config) as store:
            assert store.get() is None
        back.join()
        left.kill_holder("h1")
        (left.arena("h1") / "holder.sock").unlink(missing_ok=True)


def test_a_rank_whose_holder_stays_away_has_its_error_in_time(left: ProcessCluster, silent: str) -> None:
    error = refused(lambda: memstore.connect("train", rank=0, world_size=1, config=left.config))
    assert isinstance(error, PeerUnreachable)
    assert f"within {LIMIT_S:g} s (connect_timeout_s)" in str(error)
    assert f"The Ray cluster at {silent} (from RAY_ADDRESS)" in str(error)


def test_a_rank_starts_nothing_in_a_cluster_that_merely_runs_here(
    left: ProcessCluster, silent: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Neither where its host's folder is, though that is away, nor as one of several ranks of a new store (D289)."""
    monkeypatch.delenv("RAY_ADDRESS")
    monkeypatch.setattr("memstore.shell.on_ray.reach.gcs_address", lambda _: silent)
    error = refused(lambda: memstore.connect("train", rank=0, world_size=1, config=left.config))
    assert "no Ray cluster was given to this process" in str(error)
    assert silent not in str(error)
    new = Config(store=scratch_store_name(), arena_dir=str(tmp_path / "new"), connect_timeout_s=LIMIT_S)
    error = refused(lambda: memstore.connect("train", rank=0, world_size=2, config=new))
    assert f"Ray cluster at {silent}, found on this machine" in str(error)


def test_a_rank_asks_the_cluster_in_which_its_hosts_folder_lived(
    left: ProcessCluster, silent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray's address is in the folder, so that connect() starts the store again where it was."""
    monkeypatch.delenv("RAY_ADDRESS")
    lock = ArenaLock.take(left.arena("h1"), timeout_s=THREAD_S, cluster=silent)
    try:
        error = refused(lambda: memstore.connect("train", rank=0, world_size=2, config=left.config))
    finally:
        lock.release()
    assert f"Ray cluster at {silent}, in which h1 lived" in str(error)


def test_where_no_store_was_the_silent_ray_is_named(silent: str, tmp_path: Path) -> None:
    config = Config(store=scratch_store_name(), arena_dir=str(tmp_path), connect_timeout_s=LIMIT_S)
    for call in (
        lambda: memstore.connect("train", rank=0, world_size=2, config=config),
        lambda: memstore.start(config),
        lambda: memstore.stop(config=config),
        lambda: memstore.status(address=silent, config=config),
        lambda: memstore.reader("train", address=silent, config=config),
    ):
        error = refused(call)
        assert isinstance(error, PeerTimeout | PeerUnreachable)
        assert silent in str(error)


def test_a_gcs_that_handles_no_call_is_given_up(hung: str, tmp_path: Path) -> None:
    """That it speaks HTTP/2 is not enough: ray.init() would wait for it without a limit."""
    config = Config(store=scratch_store_name(), arena_dir=str(tmp_path), connect_timeout_s=LIMIT_S)
    for call in (
        lambda: wait_for_gcs(None, LIMIT_S, lambda _: None),  # first: it is what keeps the others from hanging
        lambda: memstore.start(config),
        lambda: memstore.reader("train", address=hung, config=config),
        lambda: memstore.stop(config=config),
    ):
        assert hung in str(refused(call))


@pytest.mark.parametrize(
    ("value", "is_tls"), [("0", False), ("false", False), ("yes", False), ("1", True), ("True", True)]
)
def test_tls_is_on_for_what_ray_takes_for_on(
    hung: str, monkeypatch: pytest.MonkeyPatch, value: str, is_tls: bool
) -> None:
    """Of a server of TLS any byte is an answer; of a plain one only that to a call is."""
    monkeypatch.setenv("RAY_USE_TLS", value)
    if is_tls:
        wait_for_gcs(None, LIMIT_S, lambda _: None)
    else:
        assert hung in str(refused(lambda: wait_for_gcs(None, LIMIT_S, lambda _: None)))


def test_commands_name_the_silent_ray(silent: str, tmp_path: Path) -> None:
    where = ["--store", scratch_store_name(), "--arena-dir", str(tmp_path)]
    for typed, limit_s in ((["up", "--timeout-s", "3"], 3.0), (["down"], 5.0), (["status", "--address", silent], 5.0)):
        result = CliRunner().invoke(main, [*typed, *where])
        assert result.exit_code == 1
        said = " ".join(result.stderr.split())
        assert f"waiting for Ray's GCS at {silent}" in said
        assert f"does not answer, waited {limit_s:g} s" in said


def test_a_ray_address_of_no_process_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.2", 0))  # bound and not listening
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.2:{unused.getsockname()[1]}")
        config = Config(store=scratch_store_name(), arena_dir=str(tmp_path))
        for world_size in (1, 2):
            error = refused(partial(memstore.connect, "train", rank=0, world_size=world_size, config=config))
            assert "correct RAY_ADDRESS" in str(error)


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_rank_outside_of_ray_starts_the_store_through_a_child(shared_cluster: EmbeddedCluster) -> None:
    """Of two holders on this machine the child's Ray node tells the rank's; the rank itself has not joined Ray."""
    name = scratch_store_name()  # no other test here has a store with job "outside"
    config = Config(store=name, arena_bytes=64 << 20, interface="127.0.0.1")
    fields = f"store={name!r}, arena_bytes={64 << 20}, interface='127.0.0.1'"
    code = (
        "import sys, memstore\n"
        f"with memstore.connect('outside', rank=0, world_size=1, config=memstore.Config({fields})) as store:\n"
        "    store.put(0, {'a': 1}).wait('committed', 30)\n"
        "assert 'ray' not in sys.modules or not sys.modules['ray'].is_initialized()\n"
    )
    hosts = ", ".join(shared_cluster.labels)
    with pytest.raises(PeerTimeout, match=r"did not answer within 0\.0?[0-9]+ s"):
        memstore.start(config, timeout_s=0.1)  # its controller takes longer to start
    env = {**os.environ, "RAY_ADDRESS": shared_cluster.address}
    run = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert run.returncode == 0, run.stderr
    status = memstore.status(config=config)
    assert [host["status"] for host in status.hosts] == ["live"] * 4
    assert [(job["job"], job["committed_step"]) for job in status.jobs] == [("outside", 0)]
    del env["RAY_ADDRESS"]
    elsewhere = code.replace(name, f"{name}n").replace("world_size=1", "world_size=2, attempt='a'")
    run = subprocess.run(
        [sys.executable, "-c", elsewhere], env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert "no Ray cluster was given to this process to start store" in run.stderr
    assert f"the one at {shared_cluster.address} on this machine does not run it" in run.stderr
    with pytest.raises(PeerUnreachable, match=f"nodes on this machine are {hosts}, and this process's host is mine"):
        ensure_started(Config(store=f"{name}n"), ["mine"])
    with pytest.raises(PeerUnreachable, match=f"runs there on {hosts}, and none of them is this process's host mine"):
        ensure_started(config, ["mine"])
    running = sorted([name, shared_cluster.config.store])
    assert sorted(stores_on_ray()) == running  # nothing was started (D289)
    env["RAY_ADDRESS"] = shared_cluster.address
    mistyped = Config(store=f"{name}x")
    run = subprocess.run(
        [sys.executable, "-c", code.replace(name, mistyped.store)],
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    for each in (mistyped, config):
        memstore.stop(config=each, keep_data=False, force=True)
        remove_leftovers(each)
    assert f"store '{mistyped.store}' was not on this machine and has been started" in run.stderr
    assert f"job 'outside' has history in store {name}: is store='{mistyped.store}' mistyped?" in run.stderr
    where = f"the Ray cluster at {shared_cluster.address}"
    assert f"starting a new store '{mistyped.store}' on {where}, which runs {', '.join(running)}" in run.stderr
    assert f"has been started on {where} (from RAY_ADDRESS)" in run.stderr


def test_a_cluster_that_wants_a_token_is_reported_from_one_that_is_not_there() -> None:
    """Ray says "Failed to connect" of both; the reason is in what that was raised from."""
    deep = RuntimeError("Failed to connect to GCS. Last connection error: RPC error: InvalidAuthToken: missing")
    error = ConnectionError("Failed to connect to Ray cluster at 127.0.0.1:6379")
    assert not wants_token(error)
    error.__cause__ = deep
    assert wants_token(error)


LOCAL_RAY = """
import random
from memstore.admin.cluster import create_local_ray
random.seed(7)
create_local_ray()
drawn = random.random()
random.seed(7)
assert drawn == random.random()
"""


def test_what_ray_draws_while_it_starts_is_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray draws its ports from the numbers that a script seeded; the script's next number is the same without Ray."""
    monkeypatch.setattr(ray, "init", lambda **_: random.random())
    random.seed(7)
    create_local_ray()
    drawn = random.random()
    random.seed(7)
    assert drawn == random.random()


@pytest.mark.ray
@pytest.mark.long
def test_a_ray_cluster_of_its_own_leaves_the_seeded_random_numbers_alone() -> None:
    """A script that seeds, then connects, trains on the same numbers whether or not Ray ran before."""
    run = subprocess.run([sys.executable, "-c", LOCAL_RAY], capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr


def test_a_ray_that_ends_with_the_process_is_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """One rank without any Ray brings its own: it learns that the store ends with it, and the remedy."""

    def nowhere(_address: str | None) -> str:
        raise ConnectionError

    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setattr("memstore.shell.on_ray.reach.gcs_address", nowhere)
    monkeypatch.setattr("memstore.admin.cluster.create_local_ray", lambda: None)
    monkeypatch.setattr("memstore.client.store_start.StartInThread", lambda _config: StoreStart("nothing"))
    begin_start(Config(store="mine", arena_dir=str(tmp_path)), address=None, may_create=True, limit_s=LIMIT_S)
    assert "no Ray cluster was given to this process" in caplog.text
    assert "Both end with this process" in caplog.text
    assert f"`ray start --head`, then `memstore up --store mine --arena-dir {tmp_path}`" in caplog.text


# -- stores -------------------------------------------------------------------------------------------
# Stores of one user on one machine: listed, and named where a mistyped name would begin or read an empty one.


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


# -- store processes ----------------------------------------------------------------------------------
# One Store, used by threads and inherited by a forked child (R8, R23).


USED_WAIT_S = 60.0


def outcome_in_child(store: Store, verb: str) -> str:
    """Fork; return what the child's call came to."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(10)  # ends a child that hangs
            match verb:
                case "put":
                    store.put(9, {})
                case "get":
                    store.get(3, timeout_s=1.0)
                case "get rank":
                    store.get(3, rank=0, timeout_s=1.0)
                case "flush":
                    store.flush("durable", timeout_s=1.0)
                case "wait":
                    store.puts.steps._tickets[3].wait("durable", timeout_s=1.0)
            os.write(writing, b"nothing")
        except ClosedError as error:
            os.write(writing, str(error).encode())
        except BaseException as error:
            os.write(writing, repr(error).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        said = pipe.read().decode()
    os.waitpid(child, 0)
    return said


class Turn:
    """A lock that another thread holds at first."""

    def acquire(self, **limits: Any) -> bool:
        return "timeout" in limits

    def _is_owned(self) -> bool:
        return False


def test_the_wait_for_a_turn_counts_in_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of another thread's call is taken off this one's; a call that is alone has all of its time."""
    lock = threading.RLock()
    assert take_turn(lock, "get()", 60.0) == 60.0
    assert take_turn(lock, "get()", 60.0) == 60.0  # a signal's handler ended the call before
    lock.release()
    with pytest.raises(RuntimeError, match="un-acquired"):  # there is one hold
        lock.release()
    moments = iter([100.0, 150.0])
    monkeypatch.setattr(collective, "time", SimpleNamespace(monotonic=lambda: next(moments)))
    assert take_turn(Turn(), "get()", 60.0) == 10.0


def test_threads_get_in_turn_and_a_forked_child_is_reported_whose_store_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each thread's `into` is filled; in a child no verb waits for a link that only the parent has."""
    monkeypatch.setenv("MEMSTORE_HOST", "h1")
    with (
        ProcessCluster(tmp_path, {"h1": {}}) as cluster,
        connect("job", rank=0, world_size=1, config=cluster.config) as store,
    ):
        assert store.get() is None
        store.put(3, {"weight": torch.arange(1000.0)}).wait("committed", USED_WAIT_S)
        states = [{"weight": torch.zeros(1000)} for _ in range(4)]
        with ThreadPoolExecutor(4) as pool:
            for got in pool.map(lambda state: store.get(3, into=state, timeout_s=USED_WAIT_S), states):
                assert got is not None
                assert got.step == 3
        assert all(torch.equal(state["weight"], torch.arange(1000.0)) for state in states)
        with ThreadPoolExecutor(1) as pool:
            pool.submit(store._one_get.acquire).result()
            with pytest.raises(PeerTimeout, match="another thread of this process"):
                store.get(3, timeout_s=0.0)
            pool.submit(store._one_get.release).result()

        for verb in ("put", "get", "get rank", "flush"):
            said = outcome_in_child(store, verb)
            assert said.startswith(f"this Store of job 'job' is that of process {os.getpid()}, of which"), (verb, said)
        with store.puts.steps._tickets[3]._changed, ThreadPoolExecutor(1) as pool:  # in the child no thread releases it
            said = pool.submit(outcome_in_child, store, "wait").result(USED_WAIT_S)
        assert said.startswith(f"the ticket of step 3 is that of process {os.getpid()}, of which this one"), said
        assert store.put(4, {"weight": torch.zeros(1000)}).wait("committed", USED_WAIT_S).level == "committed"
