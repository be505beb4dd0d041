"""Admission: the numbers of a machine, what "auto" means, and refusals with remedies (R9)."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from msgspec import structs

from memstore.cli import main
from memstore.cli.bill import Terms, limit_lines
from memstore.config import Config
from memstore.core.wire.status_rows import HostRow
from memstore.errors import ConfigError
from memstore.shell.arena.folder import arena_folder
from memstore.shell.arena.memory_limits import MemoryLimits, admission, arena_limit, auto_bytes, measure, rooms
from memstore.testing.clusters.processes import ProcessCluster, wait_for
from memstore.testing.controller.holder import host_stats
from memstore.testing.fuzz.messages import blank
from memstore.testing.ranks.fleet import Fleet
from memstore.testing.ranks.rank_process import RankFailed, RankNursery

GIB = 1 << 30
LIMITS = MemoryLimits("/dev/shm", 400 * GIB, 40 * GIB, 400 * GIB, 360 * GIB, ray_threshold=1.0)


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Path]:
    """A fake proc and cgroup tree of a machine with 8 GiB, no cgroup limit and no Ray."""
    own = tmp_path / "proc" / "self"
    own.mkdir(parents=True)
    (own / "cgroup").write_text("4:memory:/a/b\n0::/x/y\n")
    (tmp_path / "proc" / "meminfo").write_text("MemTotal: 8388608 kB\nMemFree: 1 kB\nMemAvailable: 6291456 kB\n")
    (tmp_path / "shm").mkdir()
    yield tmp_path
    shutil.rmtree(tmp_path)


def measured(machine: Path, **arguments: Any) -> MemoryLimits:
    return measure(machine / "shm", cgroup_root=machine / "cgroup", proc_root=machine / "proc", **arguments)


def write_cgroup(folder: Path, limit: str, used: int, *, v2: bool, cache: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ("memory.max" if v2 else "memory.limit_in_bytes")).write_text(limit + "\n")
    (folder / ("memory.current" if v2 else "memory.usage_in_bytes")).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 1\n{'inactive_file' if v2 else 'total_inactive_file'} {cache}\n")


def test_machine_without_limits(machine: Path) -> None:
    """RAM and file system are read; no cgroup file means no cgroup limit."""
    limits = measured(machine)
    assert (limits.ram_total_bytes, limits.ram_used_bytes) == (8 * GIB, 2 * GIB)
    assert (limits.cgroup_limit_bytes, limits.ray_object_store_bytes) == (None, 0)
    assert limits.fs_total_bytes >= limits.fs_free_bytes > 0


@pytest.mark.parametrize(("v2", "no_limit"), [(True, "max"), (False, str(2**63 - 4096))])
def test_tightest_cgroup_counts(machine: Path, v2: bool, no_limit: str) -> None:
    """The cgroup above us that leaves least decides, without its reclaimable cache; "no limit" is none."""
    root = machine / "cgroup" if v2 else machine / "cgroup" / "memory"
    parent, own = (root / "x", root / "x" / "y") if v2 else (root / "a", root / "a" / "b")
    write_cgroup(own, no_limit, 5, v2=v2)
    assert measured(machine).cgroup_limit_bytes is None
    write_cgroup(own, str(4 * GIB), GIB, v2=v2)
    write_cgroup(parent, str(6 * GIB), 5 * GIB, v2=v2, cache=GIB)
    limits = measured(machine)
    assert (limits.cgroup_limit_bytes, limits.cgroup_used_bytes) == (6 * GIB, 4 * GIB)


@pytest.mark.parametrize("v2", [True, False])
def test_an_arena_that_an_earlier_container_wrote_takes_room_in_this_one(machine: Path, v2: bool) -> None:
    """Its pages are in the count of the cgroup that is gone; those that are in this one's are not counted twice."""
    folder = machine / "shm" / "memstore-0" / "default" / "h1"
    folder.mkdir(parents=True)
    (folder / "arena").write_bytes(b"x" * (8 << 20))
    held = (folder / "arena").stat().st_blocks * 512
    own = machine / "cgroup" / "x" / "y" if v2 else machine / "cgroup" / "memory" / "a" / "b"
    for shared, counted in ((0, 5 * held), (held // 2, 5 * held - held // 2), (held, 4 * held), (3 * held, 4 * held)):
        write_cgroup(own, str(4 * GIB), 4 * held, v2=v2)
        with (own / "memory.stat").open("a") as stat:
            stat.write(f"{'shmem' if v2 else 'total_shmem'} {shared}\n")
        limits = measured(machine, folder=folder)
        assert (limits.held_bytes, limits.cgroup_used_bytes) == (held, counted), shared


def test_container_cgroup_at_the_mount_root(machine: Path) -> None:
    """In a container whose own path is not mounted, the files at the mount's root are its limit."""
    write_cgroup(machine / "cgroup" / "memory", str(2 * GIB), 7, v2=False)
    assert measured(machine).cgroup_limit_bytes == 2 * GIB


def test_unlinked_object_store_is_found(machine: Path) -> None:
    """Ray's sparse, unlinked object store is found among open files, once, with what it has still to claim."""
    store = os.open(machine / "shm" / "plasmaAbC123", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.ftruncate(store, 64 << 20)
        os.posix_fallocate(store, 0, 8 << 20)
        for pid in ("10", "11"):
            (machine / "proc" / pid / "fd").mkdir(parents=True)
            (machine / "proc" / pid / "fd" / "5").symlink_to(machine / "shm" / "plasmaAbC123")
            (machine / "proc" / pid / "fd" / "6").symlink_to("/dev/null")
        limits = measured(machine)
        assert limits.ray_object_store_bytes == 64 << 20
        assert limits.ray_object_store_claim_bytes == 56 << 20
        assert measured(machine, ray_object_store_bytes=100 << 20).ray_object_store_claim_bytes == 92 << 20
        (machine / "shm" / "plasmaAbC123").unlink()
        real = measure(machine / "shm", cgroup_root=machine / "cgroup")  # the real proc, this very process
        assert real.ray_object_store_bytes == 64 << 20
    finally:
        os.close(store)


def test_auto_is_half_beside_ray_and_within_the_file_system() -> None:
    """R9: half of what the memory limit leaves beside the object store, at most 0.9 of free, per host."""
    assert auto_bytes(LIMITS) == 200 * GIB
    ray = replace(LIMITS, ray_object_store_bytes=100 * GIB, ray_object_store_claim_bytes=90 * GIB)
    assert auto_bytes(ray) == 150 * GIB
    assert auto_bytes(replace(ray, hosts_on_machine=3)) == 50 * GIB
    assert auto_bytes(replace(LIMITS, cgroup_limit_bytes=50 * GIB)) == 25 * GIB
    assert auto_bytes(replace(LIMITS, fs_free_bytes=64 << 20)) == int(0.9 * (64 << 20))
    assert auto_bytes(replace(ray, fs_free_bytes=GIB)) == 0


def test_auto_counts_the_stores_own_pages_as_free() -> None:
    """What this host's arena holds is no less its own after a restart: the limit stays what it was."""
    before = replace(LIMITS, fs_total_bytes=8 * GIB, fs_free_bytes=8 * GIB)
    after = replace(before, fs_free_bytes=3 * GIB, held_bytes=5 * GIB)
    assert auto_bytes(after) == auto_bytes(before) == int(0.9 * 8 * GIB)


@pytest.mark.parametrize("seed", range(20))
def test_the_limits_of_arenas_that_start_one_by_one_stay_within_what_is_there(seed: int) -> None:
    """Each host fills some of what it was given, then another restarts: together they never exceed 0.9 of the whole."""
    chosen = random.Random(seed)
    count, whole = chosen.randint(1, 5), chosen.randint(1, 64) << 20
    held, limit = [0] * count, [0] * count
    for _ in range(40):
        host = chosen.randrange(count)
        limit[host] = auto_bytes(
            replace(
                LIMITS,
                fs_total_bytes=whole,
                fs_free_bytes=whole - sum(held),
                hosts_on_machine=count,
                held_bytes=held[host],
                beside_bytes=tuple(held[:host] + held[host + 1 :]),
            )
        )
        assert limit[host] >= held[host], "a restart does not refuse what is stored"
        held[host] = chosen.randint(held[host], limit[host])
        assert sum(limit) <= int(0.9 * whole) + count


def test_admission_fits_to_the_byte() -> None:
    """R9: exactly the room fits, one byte more does not; claimed bytes are not asked for twice."""
    room = min(entry.room_bytes for entry in rooms(LIMITS))
    assert room == 320 * GIB  # 0.9 x 400 less 40
    assert admission(LIMITS, asked_bytes=room, claimed_bytes=0) is None
    assert admission(LIMITS, asked_bytes=room + 1, claimed_bytes=0) is not None
    assert admission(LIMITS, asked_bytes=room + GIB, claimed_bytes=GIB) is None
    full = replace(LIMITS, fs_free_bytes=0)
    assert admission(full, asked_bytes=5, claimed_bytes=5) is None


@pytest.mark.parametrize(
    ("change", "tightest", "remedy"),
    [
        ({"fs_free_bytes": 10 * GIB}, "file system /dev/shm", "enlarge /dev/shm to 490.0 GiB"),
        ({"ram_used_bytes": 350 * GIB}, "memory of this machine", "raise the memory of this machine to 500.0 GiB"),
        (
            {"cgroup_limit_bytes": 100 * GIB, "cgroup_used_bytes": 60 * GIB},
            "pod memory limit (cgroup)",
            "raise the pod memory limit (cgroup) to 177.8 GiB",
        ),
        (
            {"ray_object_store_claim_bytes": 300 * GIB, "ray_object_store_bytes": 310 * GIB},
            "memory of this machine",
            "--object-store-memory (now 310.0 GiB)",
        ),
    ],
)
def test_refusal_names_limit_numbers_and_remedy(change: dict[str, int], tightest: str, remedy: str) -> None:
    """R9: a refusal says which limit, all numbers, and what to do; following the remedy admits it."""
    text = admission(replace(LIMITS, **change), asked_bytes=100 * GIB, claimed_bytes=0)
    assert text is not None
    assert f"the {tightest} is the tightest" in text
    assert remedy in text
    assert "needs 100.0 GiB" in text
    assert "lower replicas or keep_steps, if either is above 1" in text


def test_bad_arguments(machine: Path) -> None:
    """An absent arena_dir, no meminfo and numbers out of range are ConfigErrors that name them."""
    with pytest.raises(ConfigError, match="arena_dir"):
        measure(machine / "absent", proc_root=machine / "proc")
    with pytest.raises(ConfigError, match=r"ray_threshold=1\.5"):
        measured(machine, ray_threshold=1.5)
    with pytest.raises(ConfigError, match="hosts_on_machine=0"):
        measured(machine, hosts_on_machine=0)
    (machine / "proc" / "meminfo").unlink()
    with pytest.raises(ConfigError, match="meminfo"):
        measured(machine)


# -- test arena limit ---------------------------------------------------------------------------------
# The limit of an arena on a real, small memory file system: over restarts, and what is said of it (R9).


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
        wait_for(lambda: all(s["claimed_bytes"] >= 16 * MIB for s in stats(cluster).values()), "the arenas to be full")
        before = stats(cluster)
        for host in ("h0", "h1"):
            cluster.kill_holder(host)
            cluster.start_holder(host)
            cluster.wait_live("h0", "h1")
        wait_for(lambda: all(s["claimed_bytes"] >= 16 * MIB for s in stats(cluster).values()), "their new holders")
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
    assert limit_lines(hosts, Terms()) == [
        "h0, h1: up to 50.0 MiB (0.9 of what /dev/shm has free); fits a state of 12.5 MiB per host with replicas=2, "
        "keep_steps=1",
        "warning: h0, h1: it is small",
    ]
    for given, words in (
        ({"replicas": 3}, "replicas=3, keep_steps=1"),
        ({"durable": "/d"}, "keep_steps=1, durable"),
        ({"in_flight": 2}, "keep_steps=1, in_flight=2"),
    ):
        [line, _] = limit_lines(hosts, Terms.of(given))
        assert "fits a state of 8.3 MiB per host" in line
        assert line.endswith(words)
