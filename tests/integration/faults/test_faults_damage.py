"""Bytes that go bad in an arena are found, repaired from a peer, and never served (R7, R30)."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
from cli_store import run_remedies

from memstore.core.wire.calls import VerifyStore
from memstore.testing.clusters.processes import ProcessCluster, wait_for
from memstore.testing.ranks.fleet import Fleet
from memstore.testing.ranks.rank_process import RankNursery, fail_together, together
from memstore.testing.ranks.states import make_state, tensor_bytes

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
