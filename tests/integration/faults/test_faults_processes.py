"""Processes that are killed, frozen or all started again: every committed step stays restorable (R2, R8, R16, R17)."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from stalls import put_within

from memstore.core.wire.calls import VerifyStore
from memstore.testing.clusters.processes import ProcessCluster, wait_for
from memstore.testing.nemesis.load_meter import LoadMeter
from memstore.testing.ranks.fleet import Fleet
from memstore.testing.ranks.rank_process import RankNursery, RankProcess, together

# -- faults kills -------------------------------------------------------------------------------------
# SIGKILL of a rank, a holder, the controller, or several: every committed step stays restorable (R2, R8, R16, R17).


LATER = [("controller", True), ("holder", False), ("controller", False)]
TWO_RACKS = {"h0": {"rack": "r0", "memstore": "replica"}, "h1": {"rack": "r1", "memstore": "replica"}}


def test_a_rank_killed_in_mid_copy_loses_only_its_own_step(tmp_path: Path, nursery: RankNursery) -> None:
    """SIGKILL between two bytes of a put: the step before it comes back whole, and the dead rank's slots are free."""
    with ProcessCluster(tmp_path, TWO_RACKS) as cluster:
        fleet = Fleet(cluster, nursery)
        ranks = fleet.begin(["h0", "h1"], last_step=2)
        ranks[1].begin("put", step=3, hold=True)
        assert ranks[1].finish()["at"] == "mid-copy"
        ranks[0].call("put", step=3)
        ranks[1].kill()
        ranks[0].kill()
        ranks, got = fleet.resume(["h0", "h1"])
        assert (got["step"], got["verdict"]) == (2, "local")
        assert together(ranks, "train", first=3, last=8)[0]["level"] == "committed"
        verify = cluster.ask(VerifyStore()).found
        assert all(answer.damaged == 0 and answer.chunks > 0 for answer in verify.values())


@pytest.mark.parametrize(
    ("victims", "has_ranks"),
    [
        ("holder", True),
        ("holder and controller", True),
        ("holder and controller", False),
        *(pytest.param(*row, marks=pytest.mark.long) for row in LATER),
    ],
)
def test_committed_steps_survive_a_kill(tmp_path: Path, nursery: RankNursery, victims: str, has_ranks: bool) -> None:
    """SIGKILL of a holder, the controller or both, with the ranks or under them: then nothing raises, commits go on."""
    with ProcessCluster(tmp_path, TWO_RACKS) as cluster:
        fleet = Fleet(cluster, nursery, stall_budget_s=0.5)
        ranks = fleet.begin(["h0", "h1"], last_step=3)
        if "controller" in victims:
            cluster.kill_controller()
        if "holder" in victims:
            cluster.kill_holder("h0")
        if has_ranks:
            assert all(reply["level"] != "failed" for reply in together(ranks, "put", step=4))
        else:
            fleet.kill(ranks)
        if "holder" in victims:
            cluster.start_holder("h0")
        if "controller" in victims:
            cluster.start_controller()
        step = fleet.put_until_committed(ranks, first=5) if has_ranks else 3
        cluster.wait_live("h0", "h1")
        fleet.kill(ranks)
        ranks, got = fleet.resume(["h0", "h1"])
        assert (got["step"], got["verdict"], got["steps_lost"]) == (step, "local", 0)
        together(ranks, "train", first=step + 1, last=step + 2)


def test_a_put_in_mid_copy_outlives_its_holder(tmp_path: Path, nursery: RankNursery) -> None:
    """The holder dies and is replaced while a rank copies: its lease is confirmed, and the step commits (R8)."""
    with ProcessCluster(tmp_path, TWO_RACKS) as cluster:
        fleet = Fleet(cluster, nursery, stall_budget_s=30)
        ranks = fleet.begin(["h0", "h1"], last_step=1)
        ranks[0].begin("put", step=2, hold=True)
        ranks[0].finish()
        cluster.kill_holder("h0")
        cluster.start_holder("h0")
        cluster.wait_live("h0")
        ranks[1].call("put", step=2)
        ranks[0].begin("go")
        assert ranks[0].finish()["level"] in ("pending", "sealed", "replicated", "committed")
        assert ranks[0].call("wait", step=2)["level"] == "committed"
        fleet.kill(ranks)
        _, got = fleet.resume(["h0", "h1"])
        assert got["step"] == 2


def test_a_submitted_step_is_sent_again_to_the_next_holder(tmp_path: Path, nursery: RankNursery) -> None:
    """A submission that found no holder is not lost: the next one seals it and the step commits (R8, R11)."""
    with ProcessCluster(tmp_path, TWO_RACKS) as cluster:
        fleet = Fleet(cluster, nursery)
        ranks = fleet.begin(["h0", "h1"], last_step=0)
        cluster.kill_holder("h0")
        together(ranks, "put", step=1)
        cluster.start_holder("h0")
        assert together(ranks, "wait", step=1)[0]["level"] == "committed"


def test_nothing_remains_of_a_cluster(tmp_path: Path, nursery: RankNursery) -> None:
    """After the last exit no process, socket or shared memory file is left."""
    with ProcessCluster(tmp_path, TWO_RACKS) as cluster:
        fleet = Fleet(cluster, nursery)
        ranks = fleet.begin(["h0", "h1"], last_step=1)
        pids = [p.pid for p in [*cluster.holders.values(), cluster.controller] if p is not None]
        root = cluster.arena("h0").parent
        assert (root / "h0" / "holder.sock").exists()
        fleet.kill(ranks)
    assert not root.exists()
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)


# -- faults freeze ------------------------------------------------------------------------------------
# Processes that stop and wake later: a rank in mid-copy, a holder in mid-service (R2, R8, R11, R21, R28).


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


# -- faults restart -----------------------------------------------------------------------------------
# Everything killed at once and started again, one host late, terms forgotten (R16, R17, R23, R24).


THREE = {f"h{i}": {"rack": f"r{i}", "memstore": "replica"} for i in range(3)}


def kill_everything(fleet: Fleet, ranks: list) -> None:  # type: ignore[type-arg]
    """Ranks, holders and controller die at once; Ray's memory of them too; the hosts' memory stays."""
    fleet.cluster.kill_all()
    fleet.kill(ranks)
    fleet.cluster.forget_membership()


def test_the_newest_step_waits_for_a_host_that_comes_up_late(tmp_path: Path, nursery: RankNursery) -> None:
    """After a full restart the host with the only copy of a shard is late: get waits for it and takes no older step."""
    with ProcessCluster(tmp_path / "cluster", THREE, recovery_grace_s=20) as cluster:
        (tmp_path / "durable").mkdir()
        fleet = Fleet(cluster, nursery, replicas=1, durable=str(tmp_path / "durable"), durable_every=1000)
        ranks = fleet.begin(["h0", "h1"], last_step=0)
        wait_for(lambda: cluster.job("train")["durable_step"] == 0, "a durable step that an early get could choose")
        together(ranks, "train", first=1, last=5)
        kill_everything(fleet, ranks)
        cluster.start_holder("h0")
        cluster.start_holder("h2")
        cluster.start_controller()
        cluster.wait_live("h0", "h2")
        ranks = fleet.launch(["h0", "h2"])
        for rank in ranks:
            rank.begin("get")
        wait_for(lambda: "get waits for hosts h1" in cluster.logs(), "the get to wait for h1")
        cluster.start_holder("h1")
        got = [rank.finish() for rank in ranks]
        fleet.check(got)
        assert (got[0]["step"], got[0]["steps_lost"]) == (5, 0)
        assert got[0]["bytes_by_tier"]["durable"] == 0
        together(ranks, "train", first=6, last=7)


def test_a_late_host_is_given_up_after_the_grace(tmp_path: Path, nursery: RankNursery) -> None:
    """The late host never comes: after recovery_grace_s the older durable step is restored, and the steps lost said."""
    with ProcessCluster(tmp_path / "cluster", THREE, recovery_grace_s=1.0) as cluster:
        (tmp_path / "durable").mkdir()
        fleet = Fleet(cluster, nursery, replicas=1, durable=str(tmp_path / "durable"), durable_every=1000)
        ranks = fleet.begin(["h0", "h1"], last_step=0)
        wait_for(lambda: cluster.job("train")["durable_step"] == 0, "the durable step")
        together(ranks, "train", first=1, last=5)
        kill_everything(fleet, ranks)
        cluster.start_holder("h0")
        cluster.start_controller()
        cluster.wait_live("h0")
        _, got = fleet.resume(["h0", "h0"])
        assert (got["step"], got["verdict"], got["steps_lost"]) == (0, "durable", 5)


def test_forgotten_terms_are_outranked(tmp_path: Path, nursery: RankNursery) -> None:
    """A fresh cluster's controller starts below the terms in the journals: it takes a higher one and serves (R17)."""
    with ProcessCluster(tmp_path, {"h0": THREE["h0"], "h1": THREE["h1"]}) as cluster:
        fleet = Fleet(cluster, nursery)
        for last in (2, 4):  # a second controller, so that the journals hold more than one term
            if last == 2:
                ranks = fleet.begin(["h0", "h1"], last_step=2)
            else:
                ranks, _ = fleet.resume(["h0", "h1"])
                together(ranks, "train", first=3, last=4)
            term = cluster.status()["term"]
            cluster.kill_controller()
            cluster.start_controller()
            wait_for(lambda: cluster.status()["term"] > term, "a higher term")  # noqa: B023
            fleet.kill(ranks)
        kill_everything(fleet, [])
        for host in ("h0", "h1"):
            cluster.start_holder(host)
        cluster.start_controller()
        cluster.wait_live("h0", "h1")
        ranks, got = fleet.resume(["h0", "h1"])
        assert (got["step"], got["verdict"]) == (4, "local")
        together(ranks, "train", first=5, last=6)
        # And the facts of this cluster are distinguished from those of the one before.
        kill_everything(fleet, ranks)
        for host in ("h0", "h1"):
            cluster.start_holder(host)
        cluster.start_controller()
        cluster.wait_live("h0", "h1")
        _, got = fleet.resume(["h0", "h1"])
        assert (got["step"], got["attempt"]) == (6, 3)


def test_a_late_host_with_a_higher_term_joins(tmp_path: Path, nursery: RankNursery) -> None:
    """The one host that remembers the highest term comes last: the controller goes above it and keeps serving (R17)."""
    with ProcessCluster(tmp_path, {"h0": THREE["h0"], "h1": THREE["h1"]}) as cluster:
        fleet = Fleet(cluster, nursery)
        ranks = fleet.begin(["h0", "h1"], last_step=2)
        cluster.kill_holder("h0")
        cluster.settle_s = 1.0  # three controllers wait in vain for a host that is not there
        for _ in range(2):
            cluster.kill_controller()
            cluster.start_controller()
            cluster.wait_live("h1")
        ranks[0].kill()
        kill_everything(fleet, ranks)
        cluster.start_holder("h0")
        cluster.start_controller()
        cluster.wait_live("h0")
        cluster.start_holder("h1")
        cluster.wait_live("h0", "h1")
        ranks, got = fleet.resume(["h0", "h1"])
        assert got["step"] == 2
        together(ranks, "train", first=3, last=4)
