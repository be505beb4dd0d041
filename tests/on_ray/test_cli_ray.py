"""`memstore up` and `memstore down` on a Ray cluster of this machine (R3, R5)."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import ray
from click.testing import CliRunner

import memstore
from memstore.cli import main
from memstore.config import Config
from memstore.shell.on_ray.actors import NAMESPACE, controller_name
from memstore.testing.clusters.embedded import EmbeddedCluster
from memstore.testing.clusters.processes import wait_for
from memstore.testing.clusters.scratch import scratch_store_name
from memstore.testing.faults.processes import freeze, process_of, thaw

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]


def test_up_and_down_and_what_is_left(shared_cluster: EmbeddedCluster) -> None:
    """up starts a holder per host; down keeps the arenas, which --leftovers --discard then frees without Ray."""
    name = scratch_store_name("c")
    config = Config(store=name, arena_bytes=64 << 20, interface="127.0.0.1")
    root = Path(config.arena_dir) / f"memstore-{os.getuid()}" / name

    def run(*arguments: str, code: int = 0) -> dict[str, Any]:
        result = CliRunner().invoke(main, [*arguments, "--store", name, "--json"])
        assert result.exit_code == code, result.output
        return json.loads(result.stdout) if code == 0 else {"said": result.stderr}

    start = ["up", "--arena-bytes", "64MiB", "--interface", "127.0.0.1", "--keep-steps", "2"]
    hosts = list(shared_cluster.labels)
    refused = run("up", "--arena-bytes", "1TiB", code=1)["said"]
    assert "can ever be had here" in refused, refused
    assert not root.exists() or not any(root.glob("*/arena")), "no holder of it stays"
    assert run(*start, "--wait", "4")["hosts"] == hosts  # a smaller --arena-bytes, as it was ordered
    again = run("up")
    assert again["hosts"] == hosts  # what is not given need not be the running store's
    assert [row["memory"] for row in again["bill"] if row["is_configured"]] == [6.0]
    table, _, why = CliRunner().invoke(main, ["up", "--store", name]).stderr.partition("These hosts cannot keep what ")
    assert "2 copies *" in table
    assert "8+1" not in table
    assert "8+1" in why
    assert f"--store {name}" in why
    assert run(*start)["hosts"] == hosts
    other = run("up", "--arena-bytes", "32MiB", "--interface", "127.0.0.1", code=1)["said"]
    assert "arena_bytes: 64.0 MiB runs, 32.0 MiB asked" in other
    assert f"`memstore down --store {name}`" in other
    assert [host["status"] for host in run("status", "--check")["hosts"]] == ["live"] * 4
    assert "4 of the 5 hosts asked for" in run(*start, "--wait", "5", "--timeout-s", "1", code=1)["said"]
    assert run("status")["ray"]
    assert run("status")["job_defaults"] == {"keep_steps": 2}
    assert _reader_outside(name, shared_cluster.address).startswith("RecoveryError: the store holds no job 'train'")
    kept = run("down")["kept"]
    assert [(row["host"], row["is_live"]) for row in kept] == [(host, False) for host in hosts]
    assert run(*start)["hosts"] == hosts
    assert run("down", "--discard")["kept"] == []
    run(*start)
    run("down")
    assert sorted(path.name for path in root.iterdir()) == hosts
    run("down", "--leftovers", "--discard")
    assert not root.exists()
    said = run("down", code=1)["said"]
    assert (
        f"there is no store '{name}': the Ray cluster at {shared_cluster.address} runs {shared_cluster.config.store}"
        in said
    )


@pytest.mark.long
def test_down_while_a_holder_is_being_started_leaves_none() -> None:
    """A holder that the controller has asked Ray for, and that does not run yet, ends with the store."""
    config = Config(store=scratch_store_name("c"), arena_bytes=64 << 20, interface="127.0.0.1")

    def holders() -> list[str]:
        named = [str(actor["name"]) for actor in ray.util.list_named_actors(all_namespaces=True)]
        return [name for name in named if name.startswith(f"memstore-{config.store}-") and "controller" not in name]

    with EmbeddedCluster({"h1": {}, "h2": {}}, config=config, has_store=False), ThreadPoolExecutor(1) as thread:
        up = thread.submit(memstore.start, config)
        wait_for(lambda: bool(holders()) or up.done(), "a holder's actor")
        result = CliRunner().invoke(main, ["down", "--discard", "--yes", "--store", config.store])
        assert result.exit_code == 0, result.output
        assert holders() == []
        assert isinstance(up.exception(60), Exception)  # its store was stopped


@pytest.mark.long
def test_what_ray_says_of_a_lost_host_is_not_among_the_data(tmp_path: Path) -> None:
    """Ray prints it on stdout of every connected process; the status that is asked for meanwhile is one document."""
    with EmbeddedCluster({"h1": {}, "h2": {}}) as cluster:
        described = ray.get(ray.get_actor(controller_name(cluster.config.store), namespace=NAMESPACE).describe.remote())
        controller, jobs = process_of(described["pid"]), len(ray._private.state.jobs())
        freeze(controller)  # so that the command waits, connected to Ray
        away = ["--store", cluster.config.store, "--arena-dir", str(tmp_path), "--address", cluster.address]
        with subprocess.Popen(
            [sys.executable, "-m", "memstore.cli", "status", "--json", *away],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as command:
            wait_for(lambda: len(ray._private.state.jobs()) > jobs or command.poll() is not None, "the command on Ray")
            cluster.lose_host("h2")
            assert command.stderr is not None
            words = command.stderr.readline()  # ends with the command at the latest, which waits for 10 s
            thaw(controller)
            data, more = command.communicate(timeout=120)
        assert "has been marked dead" in words, more
        assert json.loads(data)["store"] == cluster.config.store


def _reader_outside(store: str, address: str) -> str:
    """What a process learns that neither Ray nor MEMSTORE_HOST tells which of two hosts is its own (R4)."""
    reader = f"memstore.reader('train', address={address!r}, config=memstore.Config(store={store!r}))"
    command = [sys.executable, "-c", f"import memstore; {reader}.steps()"]
    env = {key: value for key, value in os.environ.items() if key not in ("MEMSTORE_HOST", "RAY_ADDRESS")}
    run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
    return run.stderr.strip().splitlines()[-1].removeprefix("memstore.errors.")


@pytest.mark.long
def test_a_job_of_another_store_of_the_cluster_is_named(shared_cluster: EmbeddedCluster, tmp_path: Path) -> None:
    """From a machine without arenas, through --address: the error names the store, and its command shows the job."""
    other = Config(store=scratch_store_name("c"), arena_bytes=64 << 20, interface="127.0.0.1", replicas=1)
    memstore.start(other)
    with memstore.connect("train", rank=0, world_size=1, config=other) as store:
        store.get()
        store.put(7, {"a": 1}).wait("committed", 20)
    away = ["--arena-dir", str(tmp_path), "--address", shared_cluster.address]
    refused = CliRunner().invoke(main, ["pin", "train", "7", "best", "--store", shared_cluster.config.store, *away])
    (command,) = re.findall(rf"it is in store {other.store} of the Ray cluster: `memstore (.*)`", refused.stderr)
    assert CliRunner().invoke(main, command.split()).stdout.startswith("train · attempt 1")
    memstore.stop(config=other, keep_data=False, force=True)
