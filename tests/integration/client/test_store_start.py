"""A silent Ray: a process that starts, finds or stops a store gives up at a deadline and says for which host it waited
(R4, R20).
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray
from click.testing import CliRunner

import memstore
import memstore.client.connect
from memstore.admin.cluster import create_local_ray, ensure_started, remove_leftovers, stores_on_ray
from memstore.cli import main
from memstore.client.store_start import StoreStart, begin_start
from memstore.config import Config
from memstore.errors import MemstoreError, PeerTimeout, PeerUnreachable
from memstore.shell.arena.lock import ArenaLock
from memstore.shell.on_ray.reach import wait_for_gcs, wants_token
from memstore.testing.clusters.embedded import EmbeddedCluster
from memstore.testing.clusters.processes import ProcessCluster
from memstore.testing.clusters.store_name import scratch_store_name

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
