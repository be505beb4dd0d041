"""A job on real holders whose durable storage is a cloud's: all holders write, and it comes back (R31)."""

from __future__ import annotations

import itertools
import secrets
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from stalls import put_within

from memstore.core.durable.paths import MARKER, other_key
from memstore.core.durable.states import WRITES_AT_ONCE
from memstore.shell.durable.codec import key_name
from memstore.testing.clusters.processes import ProcessCluster, wait_for
from memstore.testing.faults.object_servers import HttpFaults
from memstore.testing.nemesis.load_meter import LoadMeter
from memstore.testing.ranks.fleet import Fleet
from memstore.testing.ranks.rank_process import RankNursery, together

pytest.importorskip("obstore")
TWO_RACKS = {"h0": {"rack": "r0", "memstore": "replica"}, "h1": {"rack": "r1", "memstore": "replica"}}
KIB = 2048  # 32 chunks a rank, so 16 slices


@pytest.fixture
def faults(http_faults: HttpFaults, monkeypatch: pytest.MonkeyPatch) -> Iterator[HttpFaults]:
    """The way to the server, for the holders that a test starts."""
    for name, value in http_faults.environment().items():
        monkeypatch.setenv(name, value)
    yield http_faults
    http_faults.clear()


@pytest.fixture
def url(faults: HttpFaults) -> str:
    return f"{faults.url}/checkpoints"


def put_names(faults: HttpFaults) -> list[str]:
    """The objects that were put, in order."""
    return [path.split("checkpoints/")[1] for method, path, _, _ in list(faults.seen) if method == "PUT"]


def test_all_holders_gone_the_step_comes_back_from_the_cloud(
    tmp_path: Path, nursery: RankNursery, faults: HttpFaults, url: str
) -> None:
    """Put, committed, durable; every holder, journal and controller is gone; the bucket alone gives the step back."""
    with ProcessCluster(tmp_path / "one", TWO_RACKS) as cluster:
        fleet = Fleet(cluster, nursery, job="cloud-whole", kib=KIB, durable=url, durable_every=1000)
        ranks = fleet.begin(["h0", "h1"], last_step=0)
        assert ranks[0].call("wait", step=0, level="durable")["level"] == "durable"
        fleet.kill(ranks)
    names = put_names(faults)
    slices = Counter(name for name in names if "/rank-" in name)
    assert len(slices) > 4
    assert set(slices.values()) == {1}, "every byte once"
    assert names[-1] == "cloud-whole/1/0/marker"
    with ProcessCluster(tmp_path / "two", TWO_RACKS) as cluster:
        fleet = Fleet(cluster, nursery, job="cloud-whole", kib=KIB, durable=url, durable_every=1000)
        ranks, got = fleet.resume(["h0", "h1"])
        assert (got["step"], got["verdict"]) == (0, "durable")
        together(ranks, "train", first=1, last=2)
    assert sum(bool(span) for method, path, span, _ in faults.seen if method == "GET" and "/rank-" in path) > 16


def test_a_server_that_fails_now_and_then_costs_retries_only(
    tmp_path: Path, nursery: RankNursery, faults: HttpFaults, url: str
) -> None:
    """Some of the first requests end in a 500 or a closed connection: the step is durable, puts never waited."""
    faults.add("PUT", "/rank-", kind="status", times=2)
    faults.add("PUT", "/rank-1", kind="hang-up", times=2)
    faults.add("PUT", "marker", kind="status", status=503)
    with ProcessCluster(tmp_path, TWO_RACKS) as cluster:
        fleet = Fleet(cluster, nursery, job="cloud-flaky", durable=url, durable_every=1000)
        ranks = fleet.begin(["h0", "h1"], last_step=0)
        assert ranks[0].call("wait", step=0, level="durable")["level"] == "durable"
        assert [rule.times for rule in faults.rules] == [0, 0, 0]


def test_a_full_bucket_shows_in_status_and_a_later_step_becomes_durable(
    tmp_path: Path, nursery: RankNursery, faults: HttpFaults, url: str
) -> None:
    """While every PUT is refused commits go on and status names the bucket; with room the next due step is written."""
    with ProcessCluster(tmp_path, TWO_RACKS) as cluster:
        fleet = Fleet(cluster, nursery, job="cloud-full", durable=url, durable_every=1)
        quota = b"<Error><Code>QuotaExceeded</Code></Error>"  # with 403: other than a 507 it is not tried again
        full = faults.add("PUT", "/rank-", kind="status", status=403, body=quota, times=1 << 30)
        ranks = fleet.begin(["h0", "h1"], last_step=0)
        problem = wait_for(lambda: cluster.job("cloud-full")["durable_problem"], "the problem in status")
        assert f"{url}/cloud-full/" in problem
        assert "lower durable_keep" in problem
        together(ranks, "train", first=1, last=3)
        full.times = 0
        steps = itertools.count(4)  # how many it takes depends on the patience that abandoned writes have left (R31)

        def train_on() -> bool:
            step = next(steps)
            together(ranks, "train", first=step, last=step)
            return cluster.job("cloud-full")["durable_step"] is not None

        wait_for(train_on, "a durable step", timeout_s=90)


def test_what_a_dead_holder_owed_is_written_by_the_other(
    tmp_path: Path, nursery: RankNursery, faults: HttpFaults, url: str
) -> None:
    """One holder is killed with PUTs under way: the other writes its slices, and the step becomes durable (R31)."""
    with ProcessCluster(tmp_path, TWO_RACKS, detect=1.0) as cluster:
        fleet = Fleet(cluster, nursery, job="cloud-dead", kib=KIB, durable=url, durable_every=1000)
        held = faults.add("PUT", "/rank-", kind="wait", times=1 << 30)
        ranks = fleet.begin(["h0", "h1"], last_step=0)
        wait_for(lambda: len(put_names(faults)) >= 8, "both holders to write")  # four at once each
        cluster.kill_holder("h1")
        held.times = 0
        held.gate.set()
        wait_for(lambda: cluster.job("cloud-dead")["durable_step"] == 0, "the durable step", timeout_s=60)
        assert cluster.job("cloud-dead")["durable_abandoned"] == 0
        del ranks


def test_commits_go_on_while_every_write_hangs(
    tmp_path: Path, nursery: RankNursery, faults: HttpFaults, url: str, load_meter: LoadMeter
) -> None:
    """A hung write whose step made way for the next one keeps no slot: put after put commits (R12, R31)."""
    hung = faults.add("PUT", "/rank-", kind="wait", times=1000)
    with ProcessCluster(tmp_path, TWO_RACKS) as cluster:
        fleet = Fleet(cluster, nursery, job="cloud-hung", durable=url, durable_every=1)
        ranks = fleet.begin(["h0", "h1"], last_step=0)
        wait_for(lambda: hung.times < 1000, "a write that hangs")
        for step in range(1, 6):
            put_within(ranks, load_meter, step, 1.0)
            together(ranks, "wait", step=step)
        assert cluster.job("cloud-hung")["durable_step"] is None
        faults.clear()
        wait_for(lambda: cluster.job("cloud-hung")["durable_step"] is not None, "a durable step")


def test_storage_that_hangs_holds_up_no_job_with_another(
    tmp_path: Path, nursery: RankNursery, faults: HttpFaults, url: str
) -> None:
    """All writers of both hosts hang in one job's storage: the steps of another job become durable in theirs (R31)."""
    hung = faults.add("PUT", "/cloud-stuck/", kind="wait", times=1000)
    durable = tmp_path / "durable"
    durable.mkdir()
    with ProcessCluster(tmp_path / "cluster", TWO_RACKS, arena_bytes=128 << 20) as cluster:
        Fleet(cluster, nursery, job="cloud-stuck", kib=KIB, durable=url, durable_every=1).begin(
            ["h0", "h1"], last_step=0
        )
        wait_for(lambda: hung.times <= 1000 - 2 * WRITES_AT_ONCE, "all writers to hang")
        other = Fleet(cluster, nursery, job="other", durable=str(durable), durable_every=1)
        ranks = other.begin(["h0", "h1"], last_step=0)
        assert ranks[0].call("wait", step=0, level="durable")["level"] == "durable"
        assert cluster.job("cloud-stuck")["durable_step"] is None


# -- test faults durable keys -------------------------------------------------------------------------
# Hosts with different key files write no step that cannot be read (R31).


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
