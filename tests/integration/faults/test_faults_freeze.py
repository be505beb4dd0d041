"""Processes that stop and wake later: a rank in mid-copy, a holder in mid-service (R2, R8, R11, R21, R28)."""

from __future__ import annotations

import signal
from pathlib import Path

from stalls import put_within

from memstore.core.wire.calls import VerifyStore
from memstore.testing.clusters.processes import ProcessCluster, wait_for
from memstore.testing.nemesis.load_meter import LoadMeter
from memstore.testing.ranks.fleet import Fleet
from memstore.testing.ranks.rank_process import RankNursery, RankProcess, together

TWO_RACKS = {"h0": {"rack": "r0", "memstore": "replica"}, "h1": {"rack": "r1", "memstore": "replica"}}


def freeze(rank: RankProcess) -> None:
    """SIGSTOP a rank, and return when the kernel says it stands still."""
    rank.send_signal(signal.SIGSTOP)
    stat = Path(f"/proc/{rank.pid}/stat")
    wait_for(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", f"rank {rank.rank} to stop")


def all_sound(cluster: ProcessCluster) -> bool:
    """True if every sealed slot of every live host still has its digest."""
    return all(answer.damaged == 0 and answer.chunks for answer in cluster.ask(VerifyStore()).found.values())


def test_a_rank_frozen_in_mid_copy_harms_nothing_when_it_wakes(tmp_path: Path, nursery: RankNursery) -> None:
    """A rank stops in mid-copy, its holder is replaced, the arena fills, the rank wakes: all slots verify (R8)."""
    with ProcessCluster(tmp_path, TWO_RACKS) as cluster:
        fleet = Fleet(cluster, nursery)
        ranks = fleet.begin(["h0", "h1"], last_step=2)
        ranks[0].begin("put", step=3, hold=True)
        ranks[0].finish()
        freeze(ranks[0])
        cluster.kill_holder("h0")
        cluster.start_holder("h0")
        cluster.wait_live("h0")
        other = Fleet(cluster, nursery, job="other", seed=7)
        others = other.begin(["h0", "h1"], last_step=9)
        ranks[0].send_signal(signal.SIGCONT)
        ranks[0].begin("go")
        ranks[0].finish()
        together(others, "train", first=10, last=12)
        assert all_sound(cluster)
        other.kill(others)
        _, got = other.resume(["h0", "h1"])
        assert got["step"] == 12
        assert all_sound(cluster)


def test_a_fenced_rank_that_wakes_in_mid_copy_is_refused(tmp_path: Path, nursery: RankNursery) -> None:
    """The job was started again while a rank slept in mid-copy: its submission is refused, the new attempt unharmed."""
    with ProcessCluster(tmp_path, TWO_RACKS) as cluster:
        fleet = Fleet(cluster, nursery)
        old = fleet.begin(["h0", "h1"], last_step=2)
        old[0].begin("put", step=3, hold=True)
        old[0].finish()
        freeze(old[0])
        old[1].kill()
        cluster.kill_holder("h0")
        cluster.start_holder("h0")
        cluster.wait_live("h0")
        ranks, got = fleet.resume(["h0", "h1"])
        assert got["step"] == 2
        together(ranks, "train", first=3, last=6)
        old[0].send_signal(signal.SIGCONT)
        old[0].begin("go")
        old[0].finish()
        refused = old[0].fails("wait", step=3)
        assert refused.error == "CommitError"
        assert "failed" in refused.message
        assert old[0].fails("put", step=4).error == "FencedError"
        together(ranks, "train", first=7, last=9)
        assert all_sound(cluster)
        fleet.kill(ranks)
        _, got = fleet.resume(["h0", "h1"])
        assert (got["step"], got["attempt"]) == (9, 2)


def test_a_frozen_holder_is_replaced_by_killing_exactly_it(tmp_path: Path, nursery: RankNursery) -> None:
    """A successor finds a lock owner that does not answer: it kills that pid, adopts, and puts go on (R2)."""
    with ProcessCluster(tmp_path, TWO_RACKS) as cluster:
        fleet = Fleet(cluster, nursery, stall_budget_s=0.2)
        ranks = fleet.begin(["h0", "h1"], last_step=2)
        cluster.signal_holder("h0", signal.SIGSTOP)
        old = cluster.replace_holder("h0")
        assert old.wait(timeout=120) == -signal.SIGKILL
        assert cluster.holders["h1"].poll() is None
        assert cluster.controller is not None
        assert cluster.controller.poll() is None
        cluster.wait_live("h0", "h1")
        step = fleet.put_until_committed(ranks, first=3)
        assert all_sound(cluster)
        fleet.kill(ranks)
        _, got = fleet.resume(["h0", "h1"])
        assert got["step"] == step


def test_a_holder_that_answers_is_not_replaced(tmp_path: Path, nursery: RankNursery) -> None:
    """A second holder of a host gives up, and names the first one, which has the lock and is not disturbed (R2)."""
    with ProcessCluster(tmp_path, TWO_RACKS) as cluster:
        fleet = Fleet(cluster, nursery)
        ranks = fleet.begin(["h0", "h1"], last_step=1)
        first = cluster.replace_holder("h0")
        second = cluster.holders["h0"]
        assert second.wait(timeout=120) == 1
        assert first.poll() is None
        assert str(first.pid) in (tmp_path / "holder-h0.log").read_text()
        assert together(ranks, "train", first=2, last=3)[0]["level"] == "committed"


def test_a_holder_frozen_for_twenty_puts_costs_only_the_budget(
    tmp_path: Path, nursery: RankNursery, load_meter: LoadMeter
) -> None:
    """20 puts while a holder is stopped: none raises, none blocks beyond the budget, and commits resume after (R11)."""
    budget_s = 0.1
    with ProcessCluster(tmp_path, TWO_RACKS) as cluster:
        fleet = Fleet(cluster, nursery, stall_budget_s=budget_s)
        ranks = fleet.begin(["h0", "h1"], last_step=2)
        cluster.signal_holder("h0", signal.SIGSTOP)
        for step in range(3, 23):
            put_within(ranks, load_meter, step, budget_s + 0.5)  # half a second for two busy cores
        cluster.signal_holder("h0", signal.SIGCONT)
        step = fleet.put_until_committed(ranks, first=23)
        assert all_sound(cluster)
        fleet.kill(ranks)
        _, got = fleet.resume(["h0", "h1"])
        assert got["step"] == step


def test_commits_go_on_degraded_without_a_holder_that_stays_frozen(tmp_path: Path, nursery: RankNursery) -> None:
    """The peer's holder freezes for good: after dead_after_s commits go on with the copies there are, and say so."""
    hosts = {**TWO_RACKS, "h2": {"rack": "r2", "memstore": "replica"}}
    with ProcessCluster(tmp_path, hosts) as cluster:
        fleet = Fleet(cluster, nursery, stall_budget_s=0.1, replicas=3)
        ranks = fleet.begin(["h0", "h1"], last_step=2)
        cluster.signal_holder("h2", signal.SIGSTOP)
        fleet.put_until_committed(ranks, first=3)
        assert cluster.host_status()["h2"] == "dead"
        assert "2 of 3 copies" in cluster.job("train")["degraded"]
        cluster.signal_holder("h2", signal.SIGCONT)
        wait_for(lambda: not cluster.job("train")["degraded"], "the third copies")


def test_a_dead_holder_is_known_at_once_and_a_silent_one_suspected_first(tmp_path: Path, nursery: RankNursery) -> None:
    """With settings near the defaults: killed means dead at once; stopped means suspect first, dead later (R28)."""
    with ProcessCluster(tmp_path, TWO_RACKS, detect=3.0) as cluster:
        cluster.add_host("h2", {"rack": "r2"})
        cluster.wait_live("h2")

        def seen() -> list[tuple[str, str]]:
            found = cluster.host_events("host_suspect", "host_dead")
            return [event for event in found if event[0] != "h0"]

        cluster.signal_holder("h1", signal.SIGSTOP)
        cluster.kill_holder("h2")
        wait_for(lambda: ("h1", "host_dead") in seen(), "the silent host to be dead")
        assert seen() == [("h2", "host_dead"), ("h1", "host_suspect"), ("h1", "host_dead")]
        rows = {row["about"]: row for row in cluster.status()["problems"] if row["kind"] == "host_dead"}
        assert {host: row["severity"] for host, row in rows.items()} == dict.fromkeys(("h1", "h2"), "note")
        assert "a replacement that joins gets its share by itself" in rows["h2"]["remedy"]
        cluster.signal_holder("h1", signal.SIGCONT)
        cluster.start_holder("h2")
        cluster.wait_live("h1", "h2")
        assert not [row for row in cluster.status()["problems"] if row["kind"].startswith("host_")]
