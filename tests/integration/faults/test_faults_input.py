"""Bad input gets one clear message, and nothing already stored is lost (R10, R19, R20, R23, R26, R27)."""

from __future__ import annotations

import itertools
import os
import socket
from dataclasses import replace
from pathlib import Path

from memstore.testing.clusters.processes import ProcessCluster, wait_for
from memstore.testing.ranks.fleet import Fleet
from memstore.testing.ranks.rank_process import RankFailed, RankNursery, RankProcess, fail_together, together

TWO_RACKS = {"h0": {"rack": "r0", "memstore": "replica"}, "h1": {"rack": "r1", "memstore": "replica"}}


def test_a_bad_put_is_refused_before_anything_is_copied(tmp_path: Path, nursery: RankNursery) -> None:
    """A step that goes back, a step that is none, an object no codec takes: typed errors, and the next put commits."""
    with ProcessCluster(tmp_path, TWO_RACKS) as cluster:
        fleet = Fleet(cluster, nursery)
        fleet.kill(fleet.begin(["h0", "h1"], last_step=3))
        ranks, _ = fleet.resume(["h0", "h1"])
        back = ranks[0].fails("put", step=1)
        assert back.error == "StepConflict"
        assert "step 1 does not follow step 3" in back.message
        assert ranks[0].fails("put", step=-1).error == "StepConflict"
        refused = ranks[0].fails("put", step=4, extra="unsupported")
        assert refused.error == "UnsupportedState"
        assert "hook" in refused.message
        together(ranks, "train", first=4, last=5)
        fleet.kill(ranks)
        assert fleet.resume(["h0", "h1"])[1]["step"] == 5


def test_a_rank_outside_its_world_is_refused(tmp_path: Path, nursery: RankNursery) -> None:
    """rank >= world_size is a ConfigError that names both; a rank that never comes is named by the others' timeout."""
    with ProcessCluster(tmp_path, TWO_RACKS) as cluster:
        fleet = Fleet(cluster, nursery, connect_timeout_s=1.0)
        ranks = fleet.spawn(["h0", "h1"])
        wrong = ranks[0].fails("connect", **fleet.connect_command(5, 2))
        assert wrong.error == "ConfigError"
        assert "5" in wrong.message
        late = ranks[0].fails("connect", **fleet.connect_command(0, 2))
        assert late.error == "GatherTimeout"
        assert "missing: rank 1" in late.message


def test_a_get_that_misses_a_rank_names_it(tmp_path: Path, nursery: RankNursery) -> None:
    """One rank never calls get(): the other gets GatherTimeout naming it, and a later get by both works (R23)."""
    with ProcessCluster(tmp_path, TWO_RACKS) as cluster:
        fleet = Fleet(cluster, nursery)
        fleet.kill(fleet.begin(["h0", "h1"], last_step=1))
        ranks = fleet.launch(["h0", "h1"])
        missed = ranks[0].fails("get", timeout_s=0.5)
        assert missed.error == "GatherTimeout"
        assert "missing: rank 1" in missed.message
        got = together(ranks, "get")
        fleet.check(got)
        assert got[0]["step"] == 1


def refused_first_put(ranks: list[RankProcess]) -> str:
    """Return the words of the CapacityError that the first put raises on every rank."""
    together(ranks, "get")
    refusals = fail_together(ranks, "put", step=0)
    assert {refusal.error for refusal in refusals} == {"CapacityError"}
    return refusals[0].message


def test_too_small_an_arena_is_refused_on_all_ranks_alike(tmp_path: Path, nursery: RankNursery) -> None:
    """What can never fit is a CapacityError with the numbers at the first put of every rank; other jobs go on (R10)."""
    with ProcessCluster(tmp_path, TWO_RACKS, arena_bytes=4 << 20) as cluster:
        small = Fleet(cluster, nursery)
        ranks = small.begin(["h0", "h1"], last_step=1)
        big = Fleet(cluster, nursery, job="big", kib=16 << 10)
        said = refused_first_put(big.launch(["h0", "h1"]))
        assert "4.0 MiB" in said
        assert "arena_bytes" in said
        together(ranks, "train", first=2, last=3)
        small.kill(ranks)
        assert small.resume(["h0", "h1"])[1]["step"] == 3


def test_a_job_beyond_its_quota_is_refused_and_what_the_error_advises_lets_it_in(
    tmp_path: Path, nursery: RankNursery
) -> None:
    """The arena has room for both. The error has the reservations; nothing of the job that keeps to its own changes."""
    with ProcessCluster(tmp_path, TWO_RACKS, arena_bytes=64 << 20, quota=["2MiB"]) as cluster:
        small = Fleet(cluster, nursery)
        ranks = small.begin(["h0", "h1"], last_step=1)
        big = Fleet(cluster, nursery, job="big", kib=1 << 10)
        others = big.launch(["h0", "h1"])
        said = refused_first_put(others)
        assert "big does not fit on h" in said
        assert "its quota is 2.0 MiB" in said
        [row] = [line.split() for line in said.partition("Reserved on this host:")[2].splitlines()[2:]]
        assert (row[0], row[-2]) == (small.job, "pid")
        assert int(row[-1]) in [rank.pid for rank in ranks]
        assert f"`memstore up --store {cluster.config.store} --quota big=SIZE`" in said
        together(ranks, "train", first=2, last=3)
        big.kill(others)
        small.kill(ranks)
        cluster.config = replace(cluster.config, quota=["2MiB", "big=16MiB"])
        for host in TWO_RACKS:
            cluster.kill_holder(host)
            cluster.start_holder(host)
        cluster.wait_live(*TWO_RACKS)
        Fleet(cluster, nursery, job="big", kib=1 << 10).begin(["h0", "h1"], last_step=1)
        assert Fleet(cluster, nursery).resume(["h0", "h1"])[1]["step"] == 3


def test_the_same_job_started_twice_is_refused(tmp_path: Path, nursery: RankNursery) -> None:
    """A second launch gets JobBusyError naming host, pid and step; takeover fences the first (R20)."""
    with ProcessCluster(tmp_path, TWO_RACKS) as cluster:
        fleet = Fleet(cluster, nursery)
        first = fleet.begin(["h0"], last_step=2)
        second = fleet.spawn(["h1"], TORCHELASTIC_RUN_ID="another")
        busy = second[0].fails("connect", **fleet.connect_command(0, 1))
        assert busy.error == "JobBusyError"
        assert all(word in busy.message for word in ("h0", str(first[0].pid), "step 2", "takeover"))
        together(first, "train", first=3, last=3)
        second[0].call("connect", **fleet.connect_command(0, 1, takeover=True))
        got = together(second, "get")
        fleet.check(got)
        assert got[0]["step"] == 3
        steps = itertools.count(99)
        wait_for(lambda: is_fenced(first[0], next(steps)), "the fence")
        together(second, "train", first=4, last=5)
        for launch in range(
            3
        ):  # each right after the death of the one before, which its launcher knows, and not the store
            newer = fleet.spawn(["h0"], TORCHELASTIC_RUN_ID=f"again-{launch}")
            fleet.kill(second)
            newer[0].call("connect", **fleet.connect_command(0, 1))
            together(newer, "get")
            second = newer


def is_fenced(rank: RankProcess, step: int) -> bool:
    """True once a put is refused; until the rank has read the word of it, it puts into an attempt that is over."""
    try:
        rank.call("put", step=step)
    except RankFailed as failed:
        return failed.error == "FencedError"
    return False


def test_putting_over_history_needs_a_get_or_a_fresh_start(tmp_path: Path, nursery: RankNursery) -> None:
    """First put without get on a job with history: refused with both ways named, the old step stays (R19)."""
    with ProcessCluster(tmp_path, TWO_RACKS) as cluster:
        fleet = Fleet(cluster, nursery)
        fleet.kill(fleet.begin(["h0", "h1"], last_step=2))
        ranks = fleet.launch(["h0", "h1"])
        for refused in fail_together(ranks, "put", step=0):
            assert refused.error == "CommitError"
            assert "get()" in refused.message
            assert "fresh=True" in refused.message
        got = together(ranks, "get")
        fleet.check(got)
        assert got[0]["step"] == 2


def test_another_world_size_is_refused_by_name(tmp_path: Path, nursery: RankNursery) -> None:
    """A job of two ranks restarted with one: WorldSizeError with both numbers; with two it restores (R27)."""
    with ProcessCluster(tmp_path, TWO_RACKS) as cluster:
        fleet = Fleet(cluster, nursery)
        fleet.kill(fleet.begin(["h0", "h1"], last_step=1))
        alone = fleet.launch(["h0"])
        refused = alone[0].fails("get")
        assert refused.error == "WorldSizeError"
        assert "2 ranks" in refused.message
        assert "has 1" in refused.message
        fleet.kill(alone)
        assert fleet.resume(["h0", "h1"])[1]["step"] == 1


def test_into_that_does_not_fit_is_refused_on_all_ranks(tmp_path: Path, nursery: RankNursery) -> None:
    """One rank's into= has another shape: every rank gets ManifestMismatch and nothing is written anywhere (R26)."""
    with ProcessCluster(tmp_path, TWO_RACKS) as cluster:
        fleet = Fleet(cluster, nursery)
        fleet.kill(fleet.begin(["h0", "h1"], last_step=1))
        ranks = fleet.launch(["h0", "h1"])
        ranks[0].begin("get", into="same")
        refused = [ranks[1].fails("get", into="other")]
        try:
            ranks[0].finish()
        except AssertionError as error:
            refused.append(error)  # type: ignore[arg-type]
        assert [r.error for r in refused] == ["ManifestMismatch", "ManifestMismatch"]
        assert "bias" in refused[0].message
        got = together(ranks, "get", into="same")
        fleet.check(got)
        assert got[0]["step"] == 1


def test_garbage_on_the_sockets_disturbs_no_process(tmp_path: Path, nursery: RankNursery) -> None:
    """Random bytes on the TCP port and on the Unix socket: the connection is dropped, training goes on."""
    with ProcessCluster(tmp_path, TWO_RACKS) as cluster:
        fleet = Fleet(cluster, nursery)
        ranks = fleet.begin(["h0", "h1"], last_step=1)
        host, _, port = next(r["address"] for r in cluster.status()["hosts"] if r["host"] == "h0").rpartition(":")
        for garbage in (os.urandom(4096), b"GET / HTTP/1.1\r\n\r\n", b"\0" * 65536):
            with socket.create_connection((host, int(port)), timeout=5) as tcp:
                _send_and_drain(tcp, garbage)
            with socket.socket(socket.AF_UNIX) as unix:
                unix.settimeout(20)
                unix.connect(str(cluster.arena("h0") / "holder.sock"))
                _send_and_drain(unix, garbage)
        assert together(ranks, "train", first=2, last=4)[0]["level"] == "committed"
        assert cluster.holders["h0"].poll() is None


def _send_and_drain(peer: socket.socket, garbage: bytes) -> None:
    """Send, say that nothing more comes, and read until the other side hangs up."""
    peer.settimeout(20)
    try:
        peer.sendall(garbage)
        peer.shutdown(socket.SHUT_WR)
        while peer.recv(65536):
            pass
    except OSError:
        return  # it hung up while we were still sending
