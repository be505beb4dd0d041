"""The limit of an arena on a real, small memory file system: over restarts, and what is said of it (R9)."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from msgspec import structs

from memstore.cli import main
from memstore.cli.lifecycle import bill
from memstore.config import Config
from memstore.core.wire.status_rows import HostRow
from memstore.errors import ConfigError
from memstore.shell.arena.folder import arena_folder
from memstore.shell.arena.memory_limits import arena_limit
from memstore.testing.clusters.processes import ProcessCluster, wait_for
from memstore.testing.controller.holder import host_stats
from memstore.testing.fuzz.message_samples import blank
from memstore.testing.ranks.fleet import Fleet
from memstore.testing.ranks.rank_process import RankFailed, RankNursery

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
        assert over_limit(cluster) == []


def over_limit(cluster: ProcessCluster) -> list[dict[str, Any]]:
    """What status says of hosts that have reserved more than they may."""
    return [row for row in cluster.status()["problems"] if row["kind"] == "over_limit"]


def pages(cluster: ProcessCluster, host: str) -> int:
    """Bytes of memory behind a host's arena, as the file system counts them."""
    folder = arena_folder(cluster.config.arena_dir, store=cluster.config.store, host=host)
    return (folder / "arena").stat().st_blocks * 512


def test_rm_and_a_refused_first_put_give_their_memory_back(tmp_path: Path, nursery: RankNursery) -> None:
    """Real processes: what a job had goes with it; a host that had room for a put that another refused keeps none."""
    with ProcessCluster(tmp_path, {"h0": {}, "h1": {}}) as cluster:
        small = Fleet(cluster, nursery, job="small", kib=1024)
        for rank in small.begin(["h0", "h1"], last_step=1):
            rank.kill()
        only_small = pages(cluster, "h0")
        large = Fleet(cluster, nursery, job="large", kib=8192)
        for rank in large.begin(["h0", "h1"], last_step=1):
            rank.kill()
        assert pages(cluster, "h0") > only_small + 15 * MIB
        cluster.config = replace(cluster.config, arena_bytes=4 * MIB)
        cluster.kill_holder("h1")
        cluster.start_holder("h1")
        cluster.wait_live("h0", "h1")
        [row] = wait_for(lambda: over_limit(cluster), "a smaller limit than what is reserved")
        assert (row["about"], row["severity"]) == ("h1", "degraded")
        assert "over the limit of 4.0 MiB (arena_bytes): nothing more is admitted" in row["cause"]
        assert row["remedy"].startswith("`memstore rm` a job that is not needed")
        for job in ("large", "small"):
            wait_for(lambda job=job: cluster.job(job)["ranks_alive"] == 0, f"the end of {job}")
            result = CliRunner().invoke(main, ["rm", job, "--yes", "--store", cluster.config.store])
            assert result.exit_code == 0, result.output
            limit = only_small if job == "large" else 0
            wait_for(lambda limit=limit: pages(cluster, "h0") <= limit, f"the memory of {job}")
        wait_for(lambda: all(s["claimed_bytes"] == 0 for s in stats(cluster).values()), "status to say so")
        assert over_limit(cluster) == []

        ranks = Fleet(cluster, nursery, job="refused", kib=8192).launch(["h0", "h1"])
        for rank in ranks:
            rank.begin("put", step=0)
        for rank in ranks:
            with pytest.raises(
                RankFailed,
                match=r"(?s)CapacityError.*refused does not fit on h1.*may take 4.0 MiB.*--arena-bytes.*2 versions",
            ):
                rank.finish()
            rank.kill()
        wait_for(lambda: pages(cluster, "h0") == 0, "the memory of the refused put")


def test_an_arena_that_can_never_be_is_refused_and_a_small_one_is_warned_about(tmp_path: Path) -> None:
    """1 TiB on 64 MiB, the 64 MiB of a container's /dev/shm, none for one chunk: each with cause and remedy."""
    with memory_file_system(tmp_path / "shm", 64) as shm:
        folder = shm / "h0"
        with pytest.raises(ConfigError, match=r"arena_bytes is 1\.0 TiB, and 64\.0 MiB can ever be had.*--shm-size"):
            arena_limit(Config(arena_dir=str(shm), arena_bytes="1TiB"), folder)
        small = arena_limit(Config(arena_dir=str(shm)), folder)
        assert small.nbytes < 58 * MIB
        assert "has free" in small.why
        assert "--shm-size" in small.warning
        assert "--arena-bytes" in small.warning
        (shm / "other").write_bytes(bytes(40 * MIB))
        later = arena_limit(Config(arena_dir=str(shm), arena_bytes=48 * MIB), folder)
        assert "24.0 MiB can be had now" in later.warning
        with pytest.raises(ConfigError, match=r"has no room for one chunk of chunk_bytes.*--shm-size.*--arena-bytes"):
            arena_limit(Config(arena_dir=str(shm), chunk_bytes=32 * MIB), folder)


def test_up_prints_the_bill() -> None:
    """Limit, why, what fits, for hosts alike in one line, and the warning with its remedy."""
    stats = structs.replace(
        host_stats(limit_bytes=50 * MIB), limit_why="0.9 of what /dev/shm has free", limit_warning="it is small"
    )
    hosts = [structs.replace(blank(HostRow), host=name, status="live", stats=stats) for name in ("h0", "h1")]
    lines = bill(hosts, {"durable": "/d"})
    assert lines == [
        "h0, h1: up to 50.0 MiB (0.9 of what /dev/shm has free); fits a state of 10.0 MiB per host with replicas=2, "
        "keep_steps=1",
        "warning: h0, h1: it is small",
    ]
    assert "fits a state of 7.1 MiB per host with replicas=3, keep_steps=1" in bill(hosts, {"replicas": 3})[0]
