"""`memstore doctor` on a Ray cluster of this machine, with faults that are really there, before `up` and after."""

from __future__ import annotations

import json
import resource
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import memstore
import memstore.admin.cluster
from memstore.cli import main
from memstore.config import MIB, Config
from memstore.testing.clusters.embedded import EmbeddedCluster
from memstore.testing.clusters.scratch import scratch_store_name
from memstore.testing.faults.mounts import mount_problem, mount_tmpfs, unmount
from memstore.testing.faults.processes import freeze, thaw

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]
HOSTS = ("h1", "h2", "h3")
FEW = 1050  # descriptors: a holder of three hosts may need 1,072
PATIENT_S = "120"  # a loaded machine takes long to start a process
OURS = ["--interface", "127.0.0.1", "--arena-bytes", "64MiB", "--timeout-s", PATIENT_S]


@pytest.fixture(scope="module")
def cluster() -> Iterator[EmbeddedCluster]:
    """Start three hosts in two racks, without a store; a frozen raylet stays in Ray's list."""
    labels = {"h1": {"rack": "r1"}, "h2": {"rack": "r2"}, "h3": {"rack": "r1"}}
    settings = {"health_check_failure_threshold": 10_000}
    with EmbeddedCluster(labels, has_store=False, ray_settings=settings) as found:
        yield found


def doctor(*typed: str, code: int = 0) -> dict[str, Any]:
    """Return what `memstore doctor --json` prints; it must end with `code`."""
    result = CliRunner().invoke(main, ["doctor", *typed, "--json"])
    assert result.exit_code == code, result.output
    body: dict[str, Any] = json.loads(result.stdout)
    return body


def rows(body: dict[str, Any], level: str) -> set[tuple[str, str]]:
    """Return (examined, host) of the findings of a level; links depend on what else runs here."""
    found = body["findings"]
    return {(row["subject"], row["host"]) for row in found if row["level"] == level and row["subject"] != "link"}


KNOWN = {("machine", ""), ("GCS fault tolerance", "")}  # of three hosts on one machine, under a plain `ray start`


def test_a_sound_cluster_has_no_fault(cluster: EmbeddedCluster, tmp_path: Path) -> None:
    """Every host is examined, every link both ways, and durable storage keeps nothing."""
    durable = tmp_path / "ckpt"
    body = doctor("--store", scratch_store_name("d"), "--durable", str(durable), *OURS)
    assert rows(body, "WARN") == KNOWN
    assert [host["host"] for host in body["facts"]["hosts"]] == list(HOSTS)
    measured = {(link["source"], link["target"]) for link in body["facts"]["links"] if link["bytes_per_s"]}
    assert measured == {(a, b) for a in HOSTS for b in HOSTS if a != b}
    assert body["facts"]["gcs_storage"] == "memory"
    offsets_s = [abs(host["clock_offset_s"]) - host["clock_error_s"] for host in body["facts"]["hosts"]]
    assert max(offsets_s) <= 0.001, "three hosts with one clock"
    assert {("durable storage", host) for host in HOSTS} <= rows(body, "OK")
    assert list(durable.iterdir()) == []


@pytest.mark.root
@pytest.mark.skipif(mount_problem() is not None, reason=mount_problem() or "")
def test_what_is_really_wrong_is_found_and_fits_a_terminal(cluster: EmbeddedCluster, tmp_path: Path) -> None:
    """Few descriptors on one host, a label that it lacks, a tiny arena_dir, a taken port, no durable folder."""
    arenas, file = tmp_path / "arenas", tmp_path / "file"
    arenas.mkdir()
    file.write_text("x", encoding="utf-8")
    mount_tmpfs(arenas, 48 * MIB)
    cluster.add_node("h4", {})
    try:
        for pid, _ in cluster.node_processes("h4"):
            hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)[1]
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (FEW, hard))
        with socket.create_server(("127.0.0.1", 0)) as stranger:
            port = stranger.getsockname()[1]
            place = ["--arena-dir", str(arenas), "--port", str(port), "--durable", str(file / "ckpt")]
            body = doctor(*place, *OURS, code=1)
            everywhere = ("arena memory", "arena_dir", "port", "durable storage")
            faults = {(subject, host) for subject in everywhere for host in (*HOSTS, "h4")}
            assert rows(body, "FAIL") == {*faults, ("open files", "h4"), ("shared port", "")}
            assert rows(body, "WARN") == {*KNOWN, ("label rack", "")}
            command = ["doctor", *place, *OURS]
            shown = CliRunner(env={"COLUMNS": "80"}).invoke(main, command)
            assert shown.exit_code == 1
            assert max(map(len, shown.stdout.splitlines())) <= 80
            lines = CliRunner().invoke(main, command).stdout.splitlines()  # for a pipe: two lines for each fault
            assert [line.split()[0] for line in lines[1:-1:2]] == ["Remedy:"] * (len(lines) // 2)
            assert "no label rack on h4, which 3 other hosts have" in " ".join(shown.stdout.split())
    finally:
        cluster.labels.pop("h4")
        cluster.cluster.remove_node(cluster.nodes.pop("h4"), allow_graceful=True)
        unmount(arenas)


def test_a_silent_host_keeps_nobody_from_being_examined(cluster: EmbeddedCluster) -> None:
    """A raylet hangs, as on a machine that swaps, and a host has a name that no holder could take."""
    bare = cluster.cluster.add_node(num_cpus=1, env_vars={"MEMSTORE_HOST": "../h"}, labels={"rack": "r2"})
    raylet = cluster.raylet("h3")
    freeze(raylet)
    try:
        for limit_s in ("25", "50", PATIENT_S):  # a loaded machine may start an examiner later than the first
            body = doctor("--store", scratch_store_name("d"), *OURS[:-1], limit_s, code=1)
            found = [row for row in body["findings"] if (row["level"], row["subject"]) == ("FAIL", "answer")]
            silent = {row["host"]: row["what"] for row in found}
            if len(silent) == 2:
                break
    finally:
        thaw(raylet)
        cluster.cluster.remove_node(bare, allow_graceful=True)
    assert f"no answer within {limit_s} s" in silent.pop("h3")
    [(host, what)] = silent.items()
    assert host == socket.gethostname()
    assert "host (MEMSTORE_HOST) name '../h' is not allowed" in what
    assert {("arena_dir", "h1"), ("arena_dir", "h2")} <= rows(body, "OK")


def test_a_running_store_is_examined_with_its_own_settings(cluster: EmbeddedCluster) -> None:
    """It has its holders; what is asked for and is not so is a fault; words name the store."""
    config = Config(store=scratch_store_name("d"), arena_bytes=64 * MIB, interface="127.0.0.1", keep_steps=2)
    memstore.start(config)
    try:
        body = doctor("--store", config.store, "--timeout-s", PATIENT_S)
        assert {("holder", ""), ("store", "")} <= rows(body, "OK")
        assert body["facts"]["config"]["keep_steps"] == 2
        other = doctor("--store", config.store, "--arena-bytes", "32MiB", "--timeout-s", PATIENT_S, code=1)
        [row] = [row for row in other["findings"] if row["level"] == "FAIL"]
        assert "64.0 MiB runs, 32.0 MiB asked" in row["what"]
        assert f"`memstore down --store {config.store}`" in row["remedy"]
    finally:
        memstore.admin.cluster.stop(config=config, keep_data=False, force=True)
