"""Hosts with different key files write no step that cannot be read (R31)."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from memstore.core.durable.paths import MARKER, other_key
from memstore.shell.durable.codec import key_name
from memstore.testing.clusters.processes import ProcessCluster, wait_for
from memstore.testing.ranks.fleet import Fleet
from memstore.testing.ranks.rank_process import RankNursery, together

TWO_RACKS = {"h0": {"rack": "r0", "memstore": "replica"}, "h1": {"rack": "r1", "memstore": "replica"}}
KEY_FILE = "/proc/self/cwd/key"  # of each holder's own working folder: another file at the same path on every host


def put_key(folder: Path, key: bytes) -> None:
    """Replace a host's key file."""
    fresh = folder / "fresh"
    fresh.write_bytes(key)
    fresh.chmod(0o600)
    fresh.rename(folder / "key")


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[ProcessCluster]:
    """Two hosts whose holders have working folders of their own, with a key file in each."""
    cluster = ProcessCluster(tmp_path / "cluster", TWO_RACKS, recovery_grace_s=0.5)
    for host in TWO_RACKS:
        folder = cluster.working_folders[host] = tmp_path / host
        folder.mkdir()
    (tmp_path / "durable").mkdir()
    return cluster


def fleet_of(cluster: ProcessCluster, nursery: RankNursery, **fields: object) -> Fleet:
    """A job that writes every second step to the durable folder, encrypted."""
    durable = cluster.folder.parent / "durable"
    return Fleet(cluster, nursery, durable=str(durable), durable_every=1, durable_key_file=KEY_FILE, **fields)


def lose_all_memory(cluster: ProcessCluster, fleet: Fleet, ranks: list) -> None:  # type: ignore[type-arg]
    """Both hosts lose their RAM; empty ones take their places."""
    fleet.kill(ranks)
    for host in TWO_RACKS:
        cluster.lose_host(host)
        cluster.start_holder(host)
    cluster.wait_live(*TWO_RACKS)


def test_two_hosts_with_different_keys_write_under_one_and_say_so(
    cluster: ProcessCluster, nursery: RankNursery
) -> None:
    """One host writes all slices of a step, the other is named with its key; with one key everywhere it comes back."""
    keys = {host: secrets.token_bytes(32) for host in TWO_RACKS}
    for host, key in keys.items():
        put_key(cluster.working_folders[host], key)
    with cluster:
        fleet = fleet_of(cluster, nursery)
        ranks = fleet.begin(["h0", "h1"], last_step=0)
        assert ranks[0].call("wait", step=0, level="durable")["level"] == "durable"
        (job,) = cluster.status()["jobs"]
        marker = next((cluster.folder.parent / "durable").rglob(MARKER)).read_text()
        names = {host: key_name(key).hex() for host, key in keys.items()}
        (host,) = [host for host, name in names.items() if f'"{name}"' in marker]
        (other,) = names.keys() - {host}
        assert f"host {other} wrote nothing of step 0: {other_key(names[host], names[other])}" in job["durable_problem"]
        lose_all_memory(cluster, fleet, ranks)
        for folder in cluster.working_folders.values():
            put_key(folder, keys[host])
        ranks, got = fleet.resume(["h0", "h1"])
        assert (got["step"], got["verdict"]) == (0, "durable")


def test_a_step_of_single_copies_is_refused_under_two_keys(cluster: ProcessCluster, nursery: RankNursery) -> None:
    """No host can write all of it: it has no marker, and the problem names a host, both keys, and the remedy."""
    keys = [secrets.token_bytes(32) for _ in TWO_RACKS]
    for folder, key in zip(cluster.working_folders.values(), keys, strict=True):
        put_key(folder, key)
    with cluster:
        fleet = fleet_of(cluster, nursery, replicas=1)
        fleet.begin(["h0", "h1"], last_step=0)
        wait_for(lambda: cluster.status()["jobs"][0]["durable_problem"], "the refused write")
        (job,) = cluster.status()["jobs"]
        assert all(key_name(key).hex() in job["durable_problem"] for key in keys)
        assert "a new key belongs on every host" in job["durable_problem"]
        assert not list((cluster.folder.parent / "durable").rglob(MARKER))


def test_a_key_replaced_host_by_host_leaves_every_marked_step_readable(
    cluster: ProcessCluster, nursery: RankNursery
) -> None:
    """Between the two replacements steps go on under one key; after the second, under the new one."""
    old, new = secrets.token_bytes(32), secrets.token_bytes(32)
    for folder in cluster.working_folders.values():
        put_key(folder, old)
    with cluster:
        fleet = fleet_of(cluster, nursery, durable_keep=9)
        ranks = fleet.begin(["h0", "h1"], last_step=0)
        assert ranks[0].call("wait", step=0, level="durable")["level"] == "durable"
        for step in range(1, 6):
            if step in (2, 4):
                put_key(cluster.working_folders["h0" if step == 2 else "h1"], new)
            together(ranks, "train", first=step, last=step)
            assert ranks[0].call("wait", step=step, level="durable")["level"] == "durable"
        folder = cluster.folder.parent / "durable" / "train" / "1"
        for step in range(6):
            names = {path.name.rpartition(".")[2] for path in (folder / str(step)).glob("rank-*")}
            (marked,) = [key for key in (old, new) if key_name(key).hex() in (folder / str(step) / MARKER).read_text()]
            assert key_name(marked).hex() in names
        assert key_name(new).hex() in (folder / "5" / MARKER).read_text()
        lose_all_memory(cluster, fleet, ranks)
        ranks, got = fleet.resume(["h0", "h1"])
        assert (got["step"], got["verdict"]) == (5, "durable")
