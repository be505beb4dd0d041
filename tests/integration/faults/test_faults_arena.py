"""The arena's files go, or are others, under living ranks: no wrong byte is committed, and commits go on (R8, R35)."""

from __future__ import annotations

import mmap
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from cli_store import run_remedies
from variants import later

from memstore.core.wire.calls import AskStatus, VerifyStore
from memstore.shell.arena.lock import ArenaLock
from memstore.shell.rank.admin_link import Tool
from memstore.testing.clusters.processes import START_S, ProcessCluster, wait_for
from memstore.testing.ranks.fleet import Fleet
from memstore.testing.ranks.rank_process import RankNursery, fail_together, together
from memstore.testing.ranks.states import make_state, tensor_bytes

HOSTS = {"h0": {"rack": "r0", "memstore": "replica"}, "h1": {"rack": "r1", "memstore": "replica"}}


@pytest.mark.parametrize("what", ["arena", "folder", *later("slots")])
def test_a_rank_that_outlives_the_arena_writes_into_the_next_one(
    tmp_path: Path, nursery: RankNursery, what: str
) -> None:
    """A holder is killed, its files removed, another one started, twice: every step committed since has its bytes."""
    with ProcessCluster(tmp_path, HOSTS) as cluster:
        fleet = Fleet(cluster, nursery, stall_budget_s=0.5)
        ranks = fleet.begin(["h0", "h1"], last_step=2)
        step = 2
        for _ in range(2):
            cluster.kill_holder("h0")
            if what == "folder":
                shutil.rmtree(cluster.arena("h0"))
            else:
                (cluster.arena("h0") / what).unlink()
            together(ranks, "put", step=step + 1)
            cluster.start_holder("h0")
            cluster.wait_live("h0")
            step = fleet.put_until_committed(ranks, first=step + 2)
        fleet.kill(ranks)
        _, got = fleet.resume(["h0", "h1"])
        assert got["step"] == step


def test_a_put_in_mid_copy_into_a_lost_arena_is_skipped(tmp_path: Path, nursery: RankNursery) -> None:
    """The arena is another one before a put has copied: its step is skipped by all ranks, and later ones commit."""
    with ProcessCluster(tmp_path, HOSTS) as cluster:
        fleet = Fleet(cluster, nursery, stall_budget_s=0.5)
        ranks = fleet.begin(["h0", "h1"], last_step=2)
        ranks[0].begin("put", step=3, hold=True)
        assert ranks[0].finish()["at"] == "mid-copy"
        ranks[1].call("put", step=3)
        cluster.kill_holder("h0")
        shutil.rmtree(cluster.arena("h0"))
        cluster.start_holder("h0")
        cluster.wait_live("h0")
        wait_for(lambda: _leased(cluster, "h0") > 0, "new slots for the rank that copies")
        ranks[0].begin("go on")
        assert (reply := ranks[0].finish())["level"] == "skipped", reply
        step = fleet.put_until_committed(ranks, first=4)
        fleet.kill(ranks)
        _, got = fleet.resume(["h0", "h1"])
        assert got["step"] == step


def _leased(cluster: ProcessCluster, host: str) -> int:
    return sum(int(row["stats"].get("leased_slots", 0)) for row in cluster.host_rows() if row["host"] == host)


# -- files of a living holder's folder ----------------------------------------------------------------


def remove(cluster: ProcessCluster, host: str, what: str) -> None:
    """Do what systemd's RemoveIPC and cleaners do; the holder may remove files of a dropped step meanwhile."""
    path = cluster.arena(host) if what == "all" else cluster.arena(host) / what

    def unless_gone(_function: object, _path: str, error: tuple[type, BaseException, object]) -> None:
        if not isinstance(error[1], FileNotFoundError):
            raise error[1]

    shutil.rmtree(path, onerror=unless_gone) if path.is_dir() else path.unlink()


def supervise(cluster: ProcessCluster, host: str) -> None:
    """Start a successor once the holder has ended by itself, as the controller does on a Ray cluster."""
    wait_for(lambda: cluster.holders[host].poll() is not None, f"the end of the holder of {host}")
    cluster.start_holder(host)
    cluster.wait_live(host)


def removals(cluster: ProcessCluster) -> list[dict[str, Any]]:
    """Return what status says of hosts whose files were removed."""
    return [row for row in cluster.status()["problems"] if row["kind"] == "files_removed"]


@pytest.mark.parametrize(
    "what", ["all", "slots", *later("arena", "manifests", "journal", "lock", "secret", "holder.sock")]
)
def test_removed_files_of_a_living_holder_are_written_again(tmp_path: Path, nursery: RankNursery, what: str) -> None:
    """The holder notices, says why, ends, and its successor has every byte: commits go on, and all ranks restore."""
    with ProcessCluster(tmp_path, HOSTS) as cluster:
        fleet = Fleet(cluster, nursery, replicas=1, stall_budget_s=0.5)  # no other host has a copy
        ranks = fleet.begin(["h0", "h1"], last_step=2)
        remove(cluster, "h0", what)
        supervise(cluster, "h0")
        wait_for(lambda: [host for host, _ in cluster.host_events("files_lost")] == ["h0"], "the event")
        # Until the successor has said how it is, the loss is worse than a note.
        wait_for(lambda: [row["severity"] for row in removals(cluster)] == ["note"], "the successor's own word")
        [problem] = removals(cluster)
        assert problem["about"] == "h0"
        assert "RemoveIPC=no" in problem["remedy"]
        fleet.kill(ranks)
        ranks, got = fleet.resume(["h0", "h1"])
        assert (got["step"], got["verdict"]) == (2, "local")
        step = fleet.put_until_committed(ranks, first=3)
        fleet.kill(ranks)
        _, got = fleet.resume(["h0", "h1"])
        assert got["step"] == step


@pytest.mark.parametrize("what", ["all", *later("manifests", "journal", "slots")])
def test_commits_go_on_after_files_of_every_host_were_removed(tmp_path: Path, nursery: RankNursery, what: str) -> None:
    """A cleaner runs on all hosts at once, under puts: the ranks live on, and so do the steps and the journals."""
    with ProcessCluster(tmp_path, HOSTS) as cluster:
        fleet = Fleet(cluster, nursery, stall_budget_s=0.5)
        ranks = fleet.begin(["h0", "h1"], last_step=2)
        for host in HOSTS:
            remove(cluster, host, what)
        together(ranks, "put", step=3)
        for host in HOSTS:
            supervise(cluster, host)
        cluster.kill_controller()
        cluster.start_controller()
        cluster.wait_live(*HOSTS)
        step = fleet.put_until_committed(ranks, first=4)
        fleet.kill(ranks)
        _, got = fleet.resume(["h0", "h1"])
        assert (got["step"], got["steps_lost"]) == (step, 0)


def test_a_folder_that_cannot_be_written_again_is_reported(tmp_path: Path, nursery: RankNursery) -> None:
    """Something else stands in its place: status says so while the holder serves on, and repairs it once it can."""
    with ProcessCluster(tmp_path, HOSTS) as cluster:
        fleet = Fleet(cluster, nursery, replicas=1, stall_budget_s=0.5)
        ranks = fleet.begin(["h0", "h1"], last_step=2)
        folder = cluster.arena("h0")
        folder.rename(folder.with_name("away"))
        folder.write_text("in the way")

        def reported() -> list[str]:
            with Tool(cluster.arena("h1")) as tool:
                rows = tool.ask(AskStatus(), START_S).problems
            return [row.severity for row in rows if "cannot be written again: refusing" in row.cause]

        wait_for(lambda: reported() == ["degraded"], "the word in status")
        assert cluster.holders["h0"].poll() is None
        folder.unlink()
        supervise(cluster, "h0")
        shutil.rmtree(folder.with_name("away"))
        fleet.kill(ranks)
        _, got = fleet.resume(["h0", "h1"])
        assert (got["step"], got["verdict"]) == (2, "local")


def test_a_holder_whose_folder_another_one_has_ends_and_writes_nothing(tmp_path: Path) -> None:
    """It was stopped while its lock went, and another process has the new one: two never write one arena (R2)."""
    with ProcessCluster(tmp_path, HOSTS) as cluster:
        cluster.signal_holder("h0", signal.SIGSTOP)
        for name in ("lock", "journal"):
            (cluster.arena("h0") / name).unlink()
        lock = ArenaLock.take(cluster.arena("h0"), timeout_s=0.0)
        cluster.signal_holder("h0", signal.SIGCONT)
        wait_for(lambda: cluster.holders["h0"].poll() is not None, "its end")
        assert not (cluster.arena("h0") / "journal").exists()
        lock.release()


# -- faults damage ------------------------------------------------------------------------------------
# Bytes that go bad in an arena are found, repaired from a peer, and never served (R7, R30).


TWO_RACKS = {"h0": {"rack": "r0", "memstore": "replica"}, "h1": {"rack": "r1", "memstore": "replica"}}


def corrupt(cluster: ProcessCluster, host: str, rank: int, step: int) -> None:
    """Flip one byte of what a rank put at a step, in the arena of a host."""
    made = make_state(1, "train", 1, rank, step, 128 << 10)
    wanted = tensor_bytes(made["model"]["weights"]).tobytes()[4096:4160]
    with (cluster.arena(host) / "arena").open("r+b") as file, mmap.mmap(file.fileno(), 0) as view:
        at = view.find(wanted)
        if at < 0:
            raise AssertionError(f"step {step} of rank {rank} is not on {host}")
        view[at] ^= 0x40


def test_a_damaged_chunk_is_found_and_repaired_from_the_peer(tmp_path: Path, nursery: RankNursery) -> None:
    """verify finds a flipped bit, repair fetches the chunk from the peer, and the next verify finds nothing (R30)."""
    with ProcessCluster(tmp_path, TWO_RACKS, scrub_bytes_per_s=0) as cluster:
        Fleet(cluster, nursery).begin(["h0", "h1"], last_step=2)
        corrupt(cluster, "h0", rank=0, step=2)
        found = cluster.ask(VerifyStore()).found
        assert (found["h0"].damaged, found["h1"].damaged) == (1, 0)
        wait_for(lambda: cluster.job("train")["copies"] == 2, "the repair")
        again = cluster.ask(VerifyStore()).found
        assert (again["h0"].damaged, again["h1"].damaged) == (0, 0)
        assert again["h0"].chunks == found["h0"].chunks


def test_the_scrub_finds_damage_by_itself(tmp_path: Path, nursery: RankNursery) -> None:
    """Without any request the background scrub finds the flipped bit and repair replaces it (R30)."""
    with ProcessCluster(tmp_path, TWO_RACKS) as cluster:
        Fleet(cluster, nursery).begin(["h0", "h1"], last_step=2)
        corrupt(cluster, "h1", rank=0, step=2)

        def found() -> list[str]:
            return [row["about"] for row in cluster.status()["problems"] if row["kind"] == "damage_found"]

        assert wait_for(found, "the scrub to find it") == ["h1"]
        wait_for(lambda: cluster.job("train")["copies"] == 2, "the repair")
        assert "verify" in run_remedies(cluster)
        assert all(answer.damaged == 0 for answer in cluster.ask(VerifyStore()).found.values())
        cluster.kill_holder("h1")
        cluster.start_holder("h1")
        wait_for(lambda: not found(), "the row to go with the holder that it is about")


def test_a_damaged_chunk_is_never_served(tmp_path: Path, nursery: RankNursery) -> None:
    """The rank's own copy is bad, not known yet: get takes that chunk from the peer and returns the bytes put."""
    with ProcessCluster(tmp_path, TWO_RACKS, scrub_bytes_per_s=0) as cluster:
        fleet = Fleet(cluster, nursery)
        ranks = fleet.begin(["h0", "h1"], last_step=2)
        fleet.kill(ranks)
        corrupt(cluster, "h0", rank=0, step=2)
        _, got = fleet.resume(["h0", "h1"])
        assert got["step"] == 2
        assert 0 < got["bytes_by_tier"]["peer"] < got["bytes_by_tier"]["local"]


@pytest.mark.parametrize("keep_steps", [1, 2])
def test_a_step_with_no_good_copy_left_is_not_restored(tmp_path: Path, nursery: RankNursery, keep_steps: int) -> None:
    """Every copy of a chunk of the newest step is bad: an older kept step, else a RecoveryError, never wrong bytes."""
    with ProcessCluster(tmp_path, TWO_RACKS, scrub_bytes_per_s=0) as cluster:
        fleet = Fleet(cluster, nursery, keep_steps=keep_steps)
        ranks = fleet.begin(["h0", "h1"], last_step=1)
        together(ranks, "train", first=2, last=2)
        fleet.kill(ranks)
        corrupt(cluster, "h0", rank=0, step=2)
        corrupt(cluster, "h1", rank=0, step=2)
        if keep_steps == 2:
            _, got = fleet.resume(["h0", "h1"])
            assert (got["step"], got["steps_lost"]) == (1, 1)
        else:
            for failed in fail_together(fleet.launch(["h0", "h1"]), "get"):
                assert failed.error == "RecoveryError"
                assert "step 2" in failed.message


def test_damage_is_not_adopted(tmp_path: Path, nursery: RankNursery) -> None:
    """A bit flips while no holder runs: the next one drops the slot on adoption, and get still returns every byte."""
    with ProcessCluster(tmp_path, TWO_RACKS) as cluster:
        fleet = Fleet(cluster, nursery)
        ranks = fleet.begin(["h0", "h1"], last_step=2)
        fleet.kill(ranks)
        cluster.kill_holder("h0")
        corrupt(cluster, "h0", rank=0, step=2)
        cluster.start_holder("h0")
        cluster.wait_live("h0")
        _, got = fleet.resume(["h0", "h1"])
        assert got["step"] == 2
        wait_for(lambda: cluster.job("train")["copies"] == 2, "the repair")


@pytest.mark.parametrize("finder", ["verify", "scrub"])
def test_a_damaged_manifest_is_found_and_written_again(tmp_path: Path, nursery: RankNursery, finder: str) -> None:
    """It is not read: verify, or the scrub, compares it with its digest, and repair brings it again (R30)."""
    with ProcessCluster(tmp_path, TWO_RACKS, scrub_bytes_per_s=0 if finder == "verify" else 1 << 30) as cluster:
        Fleet(cluster, nursery).begin(["h0", "h1"], last_step=2)
        wait_for(lambda: len(cluster.manifests("h0")) == 2, "older steps to be dropped")
        wait_for(lambda: cluster.job("train")["copies"] == 2, "both copies")
        before = cluster.manifests("h0")
        damaged = min(before)
        with (cluster.arena("h0") / "manifests" / damaged).open("r+b") as file:
            file.seek(before[damaged].index(b"weights"))
            file.write(b"v")
        if finder == "verify":
            found = cluster.ask(VerifyStore(job="train")).found
            assert [found[host].damaged_manifests for host in ("h0", "h1")] == [1, 0]
            assert found["h0"].damaged == 0
        wait_for(lambda: cluster.manifests("h0") == before, "the manifest to be written again")
        wait_for(lambda: cluster.job("train")["missing_copies"] == 0, "the word of it")
        assert cluster.job("train")["copies"] == 2

        def events() -> list[tuple[str, int]]:
            rows = cluster.events()
            return [(event["host"], event["found"]) for event in rows if event["event"] == "scrub"]

        assert wait_for(events, "the event") == [("h0", 1)]
        assert all(row.damaged_manifests == 0 for row in cluster.ask(VerifyStore()).found.values())


def test_a_damaged_manifest_is_never_served(tmp_path: Path, nursery: RankNursery) -> None:
    """A key's name flips in the rank's own manifest: get brings the manifest from the peer, and writes it again."""
    with ProcessCluster(tmp_path, TWO_RACKS, scrub_bytes_per_s=0) as cluster:
        fleet = Fleet(cluster, nursery)
        ranks = fleet.begin(["h0", "h1"], last_step=2)
        wait_for(lambda: len(cluster.manifests("h0")) == 2, "older steps to be dropped")
        fleet.kill(ranks)
        damaged = cluster.manifests("h0")
        for name, data in damaged.items():
            at = data.index(b"weights")
            with (cluster.arena("h0") / "manifests" / name).open("r+b") as file:
                file.seek(at)
                file.write(b"v")
        _, got = fleet.resume(["h0", "h1"])  # compares every byte, and the names
        assert got["step"] == 2
        repaired = cluster.manifests("h0")
        assert [data for name, data in damaged.items() if repaired.get(name) == data], "no manifest was written again"
