"""Without Ray, controller or holder: arenas of killed holders are read, salvaged, and made one whole step (R7, R37)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from memstore.cli import main
from memstore.cli.output import ExitCode
from memstore.core.format.manifest import encode_manifest, shard_digest
from memstore.shell.arena.offline import OfflineArena
from memstore.shell.arena.slot_headers import HEADER_NBYTES, RECORD_NBYTES
from memstore.shell.durable import objects
from memstore.shell.durable.tier import PartsTier, files_from_url
from memstore.testing.clusters.processes import ProcessCluster
from memstore.testing.faults import mounts
from memstore.testing.faults.arena_files import (
    flip_bit,
    flip_in_slot,
    manifests,
    sealed_slots,
    slot_records,
    tear_manifest,
)
from memstore.testing.faults.object_servers import ObjectServer
from memstore.testing.ranks.fleet import Fleet
from memstore.testing.ranks.rank_process import RankNursery, together
from recovery.inventory import ShardId

CHUNK_BYTES = 64 << 10
LAST = 2  # the newest step that is committed
KIB = (2048, 1024, 640, 2048, 130)  # twice what each rank puts: uneven shards, the last of two chunks
WIDE = {f"h{i}": {"rack": f"r{i}", "memstore": "replica"} for i in range(5)}


def run(cluster: ProcessCluster, *words: str, code: int = 0) -> Result:
    """Run a verb on the store's arenas in this process; it must exit with `code`."""
    result = CliRunner().invoke(main, [*words, "--store", cluster.config.store])
    assert result.exit_code == code, result.output
    return result


def run_json(cluster: ProcessCluster, *words: str, code: int = 0) -> dict[str, Any]:
    """Run a verb with --json."""
    body: dict[str, Any] = json.loads(run(cluster, *words, "--json", code=code).stdout)
    return body


def begin(cluster: ProcessCluster, nursery: RankNursery, count: int, **fields: Any) -> Fleet:
    """Commit steps 0 to LAST with a rank on each host, then kill ranks, holders and controller with SIGKILL."""
    fleet = Fleet(cluster, nursery, kib=KIB[:count], **fields)
    ranks = fleet.begin(list(cluster.labels)[:count], LAST)
    fleet.kill(ranks)
    cluster.kill_all()
    return fleet


def salvage_each(cluster: ProcessCluster, folder: Path, hosts: Iterator[str] | list[str]) -> list[str]:
    """Salvage each host into a folder of its own, as on machines of their own; return the folders."""
    root = cluster.arena("h0").parent
    aside, found = root.with_name(f"{root.name}-aside"), []
    aside.mkdir()
    folder.mkdir()
    for host in list(cluster.labels):
        cluster.arena(host).rename(aside / host)
    for host in hosts:
        (aside / host).rename(cluster.arena(host))
        run(cluster, "salvage", "--to", str(folder / host))
        found.append(str(folder / host))
        cluster.arena(host).rename(aside / host)
    for path in list(aside.iterdir()):
        path.rename(cluster.arena(path.name))
    aside.rmdir()
    return found


def restored(folder: Path, nursery: RankNursery, durable: Path, fleet: Fleet, count: int, **fields: Any) -> None:
    """Launch the job on a new cluster that has nothing but this durable storage; every byte must be as it was put."""
    with ProcessCluster(folder, dict(list(WIDE.items())[:count]), chunk_bytes=CHUNK_BYTES) as other:
        again = Fleet(other, nursery, kib=fleet.kib, seed=fleet.seed, durable=str(durable), **fields)
        ranks, got = again.resume(list(other.labels))
        assert (got["step"], got["verdict"]) == (LAST, "durable")
        again.kill(ranks)


@pytest.fixture
def copied(tmp_path: Path, nursery: RankNursery) -> Iterator[tuple[ProcessCluster, Fleet]]:
    """Three dead hosts with two copies of each shard."""
    hosts = dict(list(WIDE.items())[:3])
    with ProcessCluster(tmp_path / "store", hosts, chunk_bytes=CHUNK_BYTES) as cluster:
        yield cluster, begin(cluster, nursery, 3)


@pytest.fixture
def summed(tmp_path: Path, nursery: RankNursery) -> Iterator[tuple[ProcessCluster, Fleet]]:
    """Five dead hosts with one copy of each shard, and parity."""
    with ProcessCluster(tmp_path / "store", WIDE, chunk_bytes=CHUNK_BYTES) as cluster:
        yield cluster, begin(cluster, nursery, 5, parity=4)


def contents(cluster: ProcessCluster) -> dict[str, bytes]:
    """Return every file of every arena folder, and when it was changed."""
    root = cluster.arena("h0").parent
    return {str(p): p.read_bytes() + str(p.stat().st_mtime_ns).encode() for p in root.rglob("*") if p.is_file()}


def test_copies_outlive_ray_and_a_host(tmp_path: Path, nursery: RankNursery, copied: Any) -> None:
    """Status, ls and verify read what is there and change nothing; two of three hosts give the step back."""
    cluster, fleet = copied
    before = contents(cluster)
    screen = run(cluster, "status", "--offline").stdout
    assert f"train, here alone: attempt 1 step {LAST}: newest step of the lineage, committed" in screen
    body = run_json(cluster, "ls", "--offline", "train")
    rows = [row for row in body["steps"] if row["step"] == LAST]
    assert sorted(rank for row in rows for rank in row["ranks"]) == [0, 0, 1, 1, 2, 2]
    assert [(row["state"], row["world_size"]) for row in rows] == [("committed", 3)] * 3
    assert not any(host["is_held"] for host in body["hosts"].values())
    assert run_json(cluster, "verify", "--offline")["ok"]
    assert contents(cluster) == before
    folders = salvage_each(cluster, tmp_path / "out", ["h0", "h2"])
    made = run_json(cluster, "import", "train", *folders, "--durable", str(tmp_path / "durable"))
    assert (made["step"], made["is_committed"], made["decoded"]) == (LAST, True, 0)
    restored(tmp_path / "new", nursery, tmp_path / "durable", fleet, 3)


def test_parity_gives_a_missing_host_back(tmp_path: Path, nursery: RankNursery, summed: Any) -> None:
    """The folder of any one host may lack; of uneven shards what it had is decoded, bit for bit."""
    cluster, fleet = summed
    salvage_each(cluster, tmp_path / "out", list(WIDE))
    for lost in ("h0", "h3"):
        shutil.move(tmp_path / "out" / lost, tmp_path / "lost")
        durable = tmp_path / f"without-{lost}"
        made = run_json(cluster, "import", "train", str(tmp_path / "out"), "--durable", str(durable))
        assert (made["step"], made["world_size"]) == (LAST, 5)
        assert made["decoded"] > 0
        shutil.move(tmp_path / "lost", tmp_path / "out" / lost)
    restored(tmp_path / "new", nursery, durable, fleet, 5)


def test_parity_that_survives_two_losses_gives_two_missing_hosts_back(tmp_path: Path, nursery: RankNursery) -> None:
    """Chunks of two lost hosts in one row are solved for with the second row of the same chunks."""
    with ProcessCluster(tmp_path / "store", WIDE, chunk_bytes=CHUNK_BYTES) as cluster:
        fleet = begin(cluster, nursery, 5, parity=3, replicas=3)
        folders = salvage_each(cluster, tmp_path / "out", ["h1", "h2", "h4"])
        made = run_json(cluster, "import", "train", *folders, "--durable", str(tmp_path / "durable"))
        assert (made["step"], made["world_size"]) == (LAST, 5)
        assert made["decoded"] > 0
    restored(tmp_path / "new", nursery, tmp_path / "durable", fleet, 5)


def test_two_missing_hosts_are_refused_by_name(tmp_path: Path, summed: Any) -> None:
    """What lacks is named by ranks, chunks and hosts, and nothing is marked as a step."""
    cluster, _ = summed
    folders = salvage_each(cluster, tmp_path / "out", ["h0", "h1", "h2"])
    said = run(cluster, "import", "train", *folders, "--durable", str(tmp_path / "durable"), code=1).stderr
    assert "ranks 3: 7 of 17 chunks, 4: 2 of 2 chunks" in said
    assert "nothing is here of h3, h4" in said
    assert not list((tmp_path / "durable").rglob("marker"))


def flip(cluster: ProcessCluster, host: str, rank: int, chunk: int) -> None:
    """Flip a bit of a chunk of a rank's newest shard on a host."""
    folder = cluster.arena(host)
    [shard] = [m for m in manifests(folder) if m.shard == ShardId("train", 1, LAST, rank)]
    digests = [record["digest"].tobytes() for record in slot_records(folder)]
    flip_in_slot(folder, digests.index(shard.chunks[chunk].digest), 7, 3)


def test_damage_is_left_out_and_decoded(tmp_path: Path, nursery: RankNursery, summed: Any) -> None:
    """A flipped bit costs the slice that it is in: verify says where, and parity of four other hosts gives it back."""
    cluster, fleet = summed
    flip(cluster, "h1", 1, 3)
    [damaged] = run_json(cluster, "verify", "--offline", code=4)["problems"]
    assert damaged == f"h1: shard of rank 1, step {LAST} of train: 1 of 9 chunks lack"
    assert damaged.removesuffix(" lack") in run(cluster, "salvage", "--to", str(tmp_path / "out"), code=4).stderr
    made = run_json(cluster, "import", "train", str(tmp_path / "out"), "--durable", str(tmp_path / "durable"))
    assert made["decoded"] == 2  # chunks 2 and 3 are one slice
    restored(tmp_path / "new", nursery, tmp_path / "durable", fleet, 5)


@pytest.mark.parametrize("damage", ["manifest", "cut", "slots", "record"])
def test_files_that_are_torn_cost_no_step(tmp_path: Path, nursery: RankNursery, copied: Any, damage: str) -> None:
    """What a torn manifest, half an arena, or a slot table without header or record takes along, the other copy has."""
    cluster, fleet = copied
    folder = cluster.arena("h1")
    if damage == "manifest":
        tear_manifest(str(folder), "train", LAST, 1, 0.5)
    elif damage == "cut":
        used = np.flatnonzero(slot_records(folder)["state"])
        os.truncate(folder / "arena", int(used[len(used) // 2]) * CHUNK_BYTES + 100)
    elif damage == "slots":
        (folder / "slots").write_bytes(b"no table")
    else:
        slot = int(sealed_slots(slot_records(folder))[0])
        flip_bit(folder / "slots", HEADER_NBYTES + slot * RECORD_NBYTES, 6)
    body = run_json(cluster, "ls", "--offline", code=4)
    assert any(problem.startswith("h1: ") for problem in body["problems"])
    result = CliRunner().invoke(main, ["salvage", "--to", str(tmp_path / "out"), "--store", cluster.config.store])
    assert result.exit_code in (ExitCode.FINE, ExitCode.DEGRADED), result.output  # h0 may have written it before
    made = run_json(cluster, "import", "train", str(tmp_path / "out"), "--durable", str(tmp_path / "durable"))
    assert (made["step"], made["is_committed"]) == (LAST, True)
    restored(tmp_path / "new", nursery, tmp_path / "durable", fleet, 3)


def test_a_salvage_goes_on_where_it_was_killed(tmp_path: Path, copied: Any) -> None:
    """A second run writes only what lacks, a third nothing; two at once into one folder make the same files."""
    cluster, _ = copied
    out, words = tmp_path / "out", [sys.executable, "-m", "memstore.cli", "salvage", "--store", cluster.config.store]
    process = subprocess.Popen([*words, "--to", str(out)], stderr=subprocess.DEVNULL)
    while process.poll() is None and not list(out.glob("train/*/*/rank-*")):
        pass
    process.kill()
    process.wait()
    there = set(out.rglob("rank-*"))
    kept = {path: path.stat().st_ino for path in there}
    hosts = run_json(cluster, "salvage", "--to", str(out))["hosts"]
    assert {path: path.stat().st_ino for path in there} == kept
    assert sum(row["nbytes"] for row in hosts) > 0 or len(there) == len(set(out.rglob("rank-*")))
    assert [row["nbytes"] for row in run_json(cluster, "salvage", "--to", str(out))["hosts"]] == [0, 0, 0]
    both = tmp_path / "both"
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda _: subprocess.run([*words, "--to", str(both)], check=True, capture_output=True), range(2)))
    names = lambda top: {p.relative_to(top): p.read_bytes() for p in top.rglob("rank-*")}  # noqa: E731
    assert names(both) == names(out)
    assert not list(both.rglob(".tmp-*"))


def test_places_that_cannot_be_used_are_refused(tmp_path: Path, nursery: RankNursery, copied: Any) -> None:
    """A place that cannot be written, no arena, no salvage, and another run of the same name are errors by name."""
    cluster, _ = copied
    (tmp_path / "file").write_text("")
    assert "cannot be written" in run(cluster, "salvage", "--to", str(tmp_path / "file"), code=1).stderr
    assert "no arena of store 'none'" in CliRunner().invoke(main, ["status", "--offline", "--store", "none"]).stderr
    run(cluster, "salvage", "--to", str(tmp_path / "out"), "--job", "other", code=1)
    run(cluster, "salvage", "--to", str(tmp_path / "out"))
    run(cluster, "import", "train", str(tmp_path / "out"), code=2)
    with ProcessCluster(tmp_path / "again", {"h0": WIDE["h0"]}, chunk_bytes=CHUNK_BYTES) as other:
        begin(other, nursery, 1, replicas=1)
        assert "another run of job 'train'" in run(other, "salvage", "--to", str(tmp_path / "out"), code=1).stderr
        run(other, "salvage", "--to", str(tmp_path / "mine"))
        both = [str(tmp_path / "out"), str(tmp_path / "mine")]
        said = run(other, "import", "train", *both, "--durable", str(tmp_path / "durable"), code=1).stderr
        assert "another run of job 'train'" in said


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="only root reads what is another user's")
def test_root_reads_the_arenas_of_any_user(tmp_path: Path, copied: Any) -> None:
    """Of one user with such a store, whose folder is that user's; where two users have one, root is refused."""
    cluster, _ = copied
    store = cluster.config.store
    for uid, owner in ((12345, 12345), (12346, 0)):
        there = tmp_path / "shm" / f"memstore-{uid}" / store
        shutil.copytree(cluster.arena("h0"), there / "h0", ignore=shutil.ignore_patterns("*.sock"))
        for path in (there.parent, *there.parent.rglob("*")):
            os.chown(path, owner, owner)
    where = ["--arena-dir", str(tmp_path / "shm")]
    body = run_json(cluster, "verify", "--offline", *where)
    assert list(body["hosts"]) == ["h0"]
    assert [(row["step"], row["state"]) for row in body["steps"]] == [(LAST, "committed")]
    os.chown(tmp_path / "shm" / "memstore-12346", 12346, 12346)
    assert "users 12345, 12346 have a store" in run(cluster, "salvage", "--to", str(tmp_path), *where, code=1).stderr


@pytest.mark.root
@pytest.mark.skipif(mounts.mount_problem() is not None, reason=str(mounts.mount_problem()))
def test_a_full_disk_leaves_a_usable_prefix(tmp_path: Path, copied: Any) -> None:
    """Whatever was written is whole; once there is room the same command goes on with the rest."""
    cluster, _ = copied
    (disk := tmp_path / "disk").mkdir()
    mounts.mount_tmpfs(disk, 1 << 20)
    try:
        said = run(cluster, "salvage", "--to", str(disk), code=1).stderr
        assert "ENOSPC" in said
        assert "the same command goes on once there is room" in said
        assert not list(disk.rglob(".tmp-*"))
        there = {path: path.stat().st_ino for path in disk.rglob("rank-*")}
        assert there
        mounts.mount(["-o", "remount,size=16m"], "none", disk)
        run(cluster, "salvage", "--to", str(disk))
        assert {path: path.stat().st_ino for path in there} == there
        made = run_json(cluster, "import", "train", str(disk), "--durable", str(tmp_path / "durable"))
        assert made["step"] == LAST
    finally:
        mounts.unmount(disk)


def test_a_chunk_that_went_bad_in_the_folder_is_decoded(tmp_path: Path, nursery: RankNursery, summed: Any) -> None:
    """An import into the very folder completes it; what matches no digest there is written again from parity."""
    cluster, fleet = summed
    out = tmp_path / "out"
    run(cluster, "salvage", "--to", str(out))
    [shard] = [
        m for m in manifests(cluster.arena("h0")) if (m.shard.step, m.shard.rank, m.shard.is_parity) == (LAST, 0, False)
    ]
    digest = shard_digest(encode_manifest(shard))
    path = max(out.glob(f"train/1/{LAST}/rank-0.*.{digest}"), key=lambda path: path.stat().st_size)
    data = bytearray(path.read_bytes())
    data[-5] ^= 4
    path.write_bytes(data)
    made = run_json(cluster, "import", "train", str(out), "--durable", str(out))
    assert made["decoded"] == 1
    assert made["nbytes"] > shard.nbytes
    restored(tmp_path / "new", nursery, out, fleet, 5)


def test_an_object_store_takes_and_gives_it(
    object_server: ObjectServer, copied: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All hosts salvage under one URL, and the import completes it there."""
    cluster, _ = copied
    for name, value in object_server.environment().items():
        monkeypatch.setenv(name, value)
    objects._store.cache_clear()
    url = f"{object_server.url}/out"
    run(cluster, "salvage", "--to", url)
    made = run_json(cluster, "import", "train", url, "--durable", url)
    assert made["step"] == LAST
    assert PartsTier(files_from_url(url)).lacks("train", record_of(url).marker.step) == ""


def record_of(url: str) -> Any:
    """Return the one marker under a URL."""
    [record], problems = PartsTier(files_from_url(url)).marker_records("train")
    assert not problems
    return record


def test_an_uncommitted_step_is_taken_only_if_asked(tmp_path: Path, nursery: RankNursery, copied: Any) -> None:
    """Without a journal nothing is known to be committed: the step is named, and --uncommitted takes it."""
    cluster, fleet = copied
    for host in cluster.labels:
        (cluster.arena(host) / "journal").unlink()
    assert run_json(cluster, "status", "--offline", code=4)["steps"][0]["state"] == "uncommitted"
    run(cluster, "salvage", "--to", str(tmp_path / "out"), code=4)
    words = ["import", "train", str(tmp_path / "out"), "--durable", str(tmp_path / "durable")]
    assert "--uncommitted takes it" in run(cluster, *words, code=1).stderr
    assert not run_json(cluster, *words, "--uncommitted")["is_committed"]
    restored(tmp_path / "new", nursery, tmp_path / "durable", fleet, 3)


def test_a_live_holder_is_read_beside(tmp_path: Path, nursery: RankNursery) -> None:
    """A holder that lives is no hindrance; while puts replace what is read, nothing that is torn gets out."""
    hosts = dict(list(WIDE.items())[:2])
    with ProcessCluster(tmp_path / "store", hosts, chunk_bytes=CHUNK_BYTES) as cluster:
        fleet = Fleet(cluster, nursery, kib=1024)
        ranks = fleet.begin(list(hosts), LAST)
        assert run_json(cluster, "status", "--offline")["hosts"]["h0"]["is_held"]
        run(cluster, "salvage", "--to", str(tmp_path / "out"))
        with OfflineArena(cluster.arena("h0")) as arena:  # which has read the manifests, and not yet the slots
            together(ranks, "train", first=LAST + 1, last=LAST + 3)
            gone = [each for each in arena.shards if arena.copy(each, arena.is_listed).missing]
            assert gone
            assert all(map(arena.is_dropped, gone))
        for rank in ranks:
            rank.begin("train", first=LAST + 4, last=LAST + 30)
        words = ["salvage", "--to", str(tmp_path / "out"), "--store", cluster.config.store]
        result = CliRunner().invoke(main, words)
        assert result.exit_code in (ExitCode.FINE, ExitCode.DEGRADED, ExitCode.ERROR), result.output
        assert "Traceback" not in result.output
        for rank in ranks:
            rank.finish()
        together(ranks, "train", first=LAST + 31, last=LAST + 31)
        made = run_json(cluster, "import", "train", str(tmp_path / "out"), "--durable", str(tmp_path / "durable"))
        assert made["step"] >= LAST
        fleet.kill(ranks)
