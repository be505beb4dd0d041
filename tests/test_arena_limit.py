"""The limit of an arena on a real, small memory file system: over restarts, and what is said of it (R9)."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from memstore.testing.fleet import Fleet
from memstore.testing.processes import ProcessCluster, wait_for
from memstore.testing.rank_process import RankNursery

MIB = 1 << 20


@contextlib.contextmanager
def memory_file_system(folder: Path, size_mib: int) -> Iterator[Path]:
    """Mount a tmpfs of that size; only root may."""
    folder.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size_mib}m", "memstore-test", str(folder)], check=False
    )
    if made.returncode:
        pytest.skip("only root can mount a file system")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def stats(cluster: ProcessCluster) -> dict[str, dict[str, Any]]:
    """What each host says of its arena."""
    return {row["host"]: {"claimed_bytes": 0, "limit_bytes": 0, **row["stats"]} for row in cluster.status()["hosts"]}


def test_a_restart_keeps_the_limit_and_a_second_job_is_admitted(tmp_path: Path, nursery: RankNursery) -> None:
    """What the store itself holds is not taken from it: two hosts that restart one after the other."""
    with (
        memory_file_system(tmp_path / "shm", 128) as shm,
        ProcessCluster(tmp_path / "store", {"h0": {}, "h1": {}}, arena_bytes="auto", arena_dir=str(shm)) as cluster,
    ):
        fleet = Fleet(cluster, nursery, kib=8192)
        fleet.begin(["h0", "h1"], last_step=2)
        wait_for(lambda: all(s["claimed_bytes"] >= 20 * MIB for s in stats(cluster).values()), "the arenas to be full")
        before = stats(cluster)
        for host in ("h0", "h1"):
            cluster.kill_holder(host)
            cluster.start_holder(host)
            cluster.wait_live("h0", "h1")
        wait_for(lambda: all(s["claimed_bytes"] >= 20 * MIB for s in stats(cluster).values()), "their new holders")
        for host, now in stats(cluster).items():
            assert abs(now["limit_bytes"] - before[host]["limit_bytes"]) < MIB, (host, before[host], now)
        second = Fleet(cluster, nursery, job="second", kib=1024)
        second.begin(["h0", "h1"], last_step=1)
        assert cluster.job("second")["committed_step"] == 1
        assert not [row for row in cluster.status()["problems"] if "over the limit" in row["cause"]]
