"""Hosts with a network between them that breaks: cut, split, deaf on one side, slow (R11, R17, R18, R28; F15-F18)."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from stalls import put_within
from variants import later

from memstore.inplace import watchdog
from memstore.testing.clusters.namespaces import NamespaceRig, available
from memstore.testing.clusters.processes import ProcessCluster, wait_for
from memstore.testing.nemesis.load_meter import LoadMeter
from memstore.testing.ranks.fleet import Fleet
from memstore.testing.ranks.rank_process import RankNursery, RankProcess, together

pytestmark = [pytest.mark.root, pytest.mark.skipif(available() is not None, reason=str(available()))]


HOSTS = ("h0", "h1", "h2", "h3")
BUDGET_S = 0.2
STALL_MAX_S = BUDGET_S + 0.5  # half a second for two busy cores


@pytest.fixture(scope="module")
def rig() -> Iterator[NamespaceRig]:
    """Four hosts and a head node for the controller."""
    with NamespaceRig([*HOSTS, "head"]) as rig:
        yield rig


@pytest.fixture
def whole_rig(rig: NamespaceRig) -> Iterator[NamespaceRig]:
    """The rig, healed afterwards."""
    yield rig
    rig.heal_all()


def cluster_on(rig: NamespaceRig, folder: Path, *hosts: str) -> ProcessCluster:
    """A store on some hosts of the rig, each a rack of its own, the controller on the head."""
    labels = {host: {"rack": f"r{host}", "memstore": "replica"} for host in hosts}
    return ProcessCluster(folder, labels, rig=rig, controller_host="head")


def begun(fleet: Fleet, *hosts: str) -> tuple[list[RankProcess], int]:
    """Start a job; return its ranks and its first committed step."""
    ranks, _ = fleet.resume(hosts)
    return ranks, fleet.put_until_committed(ranks, first=0)


def put_within_budget(ranks: list[RankProcess], meter: LoadMeter, first: int, count: int) -> None:
    """Put step after step: none raises, none blocks beyond the budget."""
    for step in range(first, first + count):
        put_within(ranks, meter, step, STALL_MAX_S)


def is_whole(cluster: ProcessCluster, job: str = "train") -> bool:
    """True once the newest committed step has all its copies."""
    row = cluster.job(job)
    return row is not None and row["copies"] == 2 and not row["degraded"]


def test_a_cut_host_holds_up_nothing_and_comes_back(
    whole_rig: NamespaceRig, tmp_path: Path, nursery: RankNursery, load_meter: LoadMeter
) -> None:
    """A host's cable is pulled: puts go on within the budget, nothing is committed without it, all is after (F15)."""
    with cluster_on(whole_rig, tmp_path, "h0", "h1") as cluster:
        fleet = Fleet(cluster, nursery, stall_budget_s=BUDGET_S)
        ranks, last = begun(fleet, "h0", "h1")
        whole_rig.cut("h1")
        wait_for(lambda: dead_in(cluster, "h1"), "the cut host to be dead")
        put_within_budget(ranks, load_meter, last + 1, 6)
        assert cluster.job("train")["committed_step"] == last
        whole_rig.heal("h1")
        cluster.wait_live("h0", "h1")
        step = fleet.put_until_committed(ranks, first=last + 7)
        wait_for(lambda: is_whole(cluster), "full redundancy")
        fleet.kill(ranks)
        _, got = fleet.resume(["h0", "h1"])
        assert got["step"] == step


def test_a_minority_that_lost_the_membership_commits_nothing(
    whole_rig: NamespaceRig, tmp_path: Path, nursery: RankNursery, load_meter: LoadMeter
) -> None:
    """Half and half: the side without the membership commits nothing, the other elects and commits, all meet (R17)."""
    with cluster_on(whole_rig, tmp_path, *HOSTS) as cluster:
        way = tmp_path / "way"
        way.symlink_to(cluster.folder)
        first = cluster.controller
        cluster.start_controller(membership=way)
        old = cluster.controller
        assert first is not None
        assert old is not None
        first.wait(timeout=120)
        cluster.wait_live(*HOSTS)
        fleets = [Fleet(cluster, nursery, job=job, stall_budget_s=BUDGET_S) for job in ("left", "right")]
        (left, last_left), (right, last_right) = begun(fleets[0], "h0", "h1"), begun(fleets[1], "h2", "h3")
        way.unlink()
        whole_rig.partition(["head", "h0", "h1"], ["h2", "h3"])
        put_within_budget(left, load_meter, last_left + 1, 1)
        wait_for(lambda: dead_in(cluster, "h2", "h3"), "the old controller to lose the other half")
        put_within_budget(left, load_meter, last_left + 2, 3)
        assert "committed" not in levels_in_time(left, last_left + 4)
        cluster.start_controller(on_host="h2")
        right_step = fleets[1].put_until_committed(right, first=last_right + 1)
        put_within_budget(left, load_meter, last_left + 5, 3)
        assert "committed" not in levels_in_time(left, last_left + 7)
        assert old.poll() is None
        way.symlink_to(cluster.folder)
        whole_rig.heal_all()
        old.wait(timeout=120)
        cluster.wait_live(*HOSTS)
        left_step = fleets[0].put_until_committed(left, first=last_left + 8)
        for fleet, ranks, hosts, step in (
            (fleets[0], left, ("h0", "h1"), left_step),
            (fleets[1], right, ("h2", "h3"), right_step),
        ):
            wait_for(lambda job=fleet.job: is_whole(cluster, job), f"full redundancy of {fleet.job}")
            fleet.kill(ranks)
            _, got = fleet.resume(hosts)
            assert got["step"] == step


def levels_in_time(ranks: list[RankProcess], step: int) -> set[str]:
    """The levels of a step after more time than a commit takes."""
    return {reply["level"] for reply in together(ranks, "settle", step=step, timeout_s=1.5)}


def dead_in(cluster: ProcessCluster, *hosts: str) -> bool:
    """True if the controller counts these hosts dead."""
    return all(cluster.host_status().get(host) == "dead" for host in hosts)


@pytest.mark.parametrize("unreachable", ["h0", *later("h1")])
def test_peers_of_which_one_is_deaf_commit_after_it_is_healed(
    whole_rig: NamespaceRig, tmp_path: Path, nursery: RankNursery, load_meter: LoadMeter, unreachable: str
) -> None:
    """Packets between two hosts vanish one way while both still reach the controller: no harm, no commit lost (F16)."""
    with cluster_on(whole_rig, tmp_path, "h0", "h1") as cluster:
        fleet = Fleet(cluster, nursery, stall_budget_s=BUDGET_S)
        ranks, last = begun(fleet, "h0", "h1")
        whole_rig.block("h0" if unreachable == "h1" else "h1", unreachable, one_way=True)
        put_within_budget(ranks, load_meter, last + 1, 8)
        assert not cluster.host_events("host_dead")
        whole_rig.heal_all()
        step = fleet.put_until_committed(ranks, first=last + 9)
        wait_for(lambda: is_whole(cluster), "full redundancy")
        fleet.kill(ranks)
        _, got = fleet.resume(["h0", "h1"])
        assert got["step"] == step


def test_a_slow_link_costs_steps_but_no_time(
    whole_rig: NamespaceRig, tmp_path: Path, nursery: RankNursery, load_meter: LoadMeter
) -> None:
    """At 10 Mbit/s steps are passed over, puts keep their budget, commits go on and no host is taken for dead
    (F18).
    """
    with cluster_on(whole_rig, tmp_path, "h0", "h1") as cluster:
        fleet = Fleet(cluster, nursery, stall_budget_s=BUDGET_S, kib=1024)
        ranks, last = begun(fleet, "h0", "h1")
        whole_rig.shape("h1", 10_000_000)
        try:
            put_within_budget(ranks, load_meter, last + 1, 10)
            step = fleet.put_until_committed(ranks, first=last + 11)
            assert not cluster.host_events("host_dead")
        finally:
            whole_rig.unshape("h1")
        wait_for(lambda: is_whole(cluster), "full redundancy")
        fleet.kill(ranks)
        _, got = fleet.resume(["h0", "h1"])
        assert got["step"] >= step


def test_a_cable_pulled_in_mid_put_harms_no_put(whole_rig: NamespaceRig, tmp_path: Path, nursery: RankNursery) -> None:
    """The link goes down while a rank copies: its put returns, the step is committed once the link is back (R11)."""
    with cluster_on(whole_rig, tmp_path, "h0", "h1") as cluster:
        fleet = Fleet(cluster, nursery)
        ranks = fleet.begin(["h0", "h1"], last_step=2)
        ranks[1].begin("put", step=3, hold=True)
        ranks[1].finish()
        whole_rig.cut("h1")
        ranks[1].begin("go")
        assert ranks[1].finish()["level"] in ("pending", "sealed")
        ranks[0].call("put", step=3)
        whole_rig.heal("h1")
        assert {reply["level"] for reply in together(ranks, "wait", step=3)} == {"committed"}
        fleet.kill(ranks)
        _, got = fleet.resume(["h0", "h1"])
        assert got["step"] == 3


def test_links_that_clog_one_by_one_and_clear_in_another_order_converge(
    whole_rig: NamespaceRig, tmp_path: Path, nursery: RankNursery, load_meter: LoadMeter
) -> None:
    """Every cable is pulled, the controller's too, with puts in between, and put back shuffled: all is whole (F17)."""
    chance = random.Random(17)
    with cluster_on(whole_rig, tmp_path, "h0", "h1", "h2") as cluster:
        fleet = Fleet(cluster, nursery, stall_budget_s=BUDGET_S)
        ranks, last = begun(fleet, "h0", "h1", "h2")
        links = ["h0", "h1", "h2", "head"]
        for turn in (whole_rig.cut, whole_rig.heal):
            chance.shuffle(links)
            for host in links:
                turn(host)
                put_within_budget(ranks, load_meter, last + 1, 2)
                last += 2
        cluster.wait_live("h0", "h1", "h2")
        step = fleet.put_until_committed(ranks, first=last + 1)
        wait_for(lambda: is_whole(cluster), "full redundancy")
        fleet.kill(ranks)
        _, got = fleet.resume(["h0", "h1", "h2"])
        assert got["step"] == step


# -- two networks -------------------------------------------------------------------------------------
# Hosts with two networks: copies use both, and one that falls silent costs no step (R13, R28).


TWO_HOSTS = ("h0", "h1")
STATE_KIB = 16 << 10
CHANGED_BYTES = STATE_KIB * 1024 // 4  # a step changes more of its state than that
COMMIT_S = 25.0  # less than the silence that ends a connection of a host with one network
DEVICES = ("eth0", "eth1")


@pytest.fixture(scope="module")
def two_rig() -> Iterator[NamespaceRig]:
    """Two hosts with two links each, and a head node for the controller."""
    with NamespaceRig([*TWO_HOSTS, "head"], second_link=True) as two_rig:
        yield two_rig


@pytest.fixture
def cluster(two_rig: NamespaceRig, tmp_path: Path) -> Iterator[ProcessCluster]:
    """A store on both hosts, whose holders listen on both networks; the controller is dialled on the first."""
    labels = {host: {"rack": f"r{host}"} for host in TWO_HOSTS}
    networks = (str(two_rig.network), str(two_rig.second_network))
    made = ProcessCluster(
        tmp_path, labels, rig=two_rig, controller_host="head", interface=networks, arena_bytes=256 << 20
    )
    with made as cluster:
        yield cluster
    for host in TWO_HOSTS:
        two_rig.heal_second(host)


def sent(two_rig: NamespaceRig, host: str) -> dict[str, int]:
    return {device: two_rig.sent_bytes(host, device) for device in DEVICES}


def test_copies_travel_over_both_networks(cluster: ProcessCluster, two_rig: NamespaceRig, nursery: RankNursery) -> None:
    """Connections are spread over them, so each carries a good part of the bytes."""
    fleet = Fleet(cluster, nursery, kib=STATE_KIB)
    before = sent(two_rig, "h0")
    ranks = fleet.begin(TWO_HOSTS, 2)
    after = sent(two_rig, "h0")
    shares = [after[device] - before[device] for device in DEVICES]
    assert sum(shares) > CHANGED_BYTES
    assert min(shares) > sum(shares) / 5
    fleet.kill(ranks)


def test_a_network_that_falls_silent_costs_no_step(
    cluster: ProcessCluster, two_rig: NamespaceRig, nursery: RankNursery
) -> None:
    """The second network is cut while copies use it: they go on over the first, and so do the reads of a moved rank."""
    fleet = Fleet(cluster, nursery, kib=STATE_KIB)
    ranks = fleet.begin(TWO_HOSTS, 1)
    two_rig.cut_second("h1")
    together(ranks, "put", step=2)
    settled = together(ranks, "settle", step=2, timeout_s=COMMIT_S)
    assert [reply["level"] for reply in settled] == ["committed", "committed"]
    before = sent(two_rig, "h0")
    step = fleet.put_until_committed(ranks, first=3)
    after = sent(two_rig, "h0")
    assert after["eth0"] - before["eth0"] > CHANGED_BYTES, "the copies did not travel over the network that is left"
    fleet.kill(ranks)
    _, got = fleet.resume([*reversed(TWO_HOSTS)])  # each rank's bytes lie on the other host, and here as a copy
    assert got["step"] == step


def test_the_first_network_may_fail_for_copies_too(
    cluster: ProcessCluster, two_rig: NamespaceRig, nursery: RankNursery
) -> None:
    """Copies that began on it go on over the second while heartbeats, which need the first, are not lost yet."""
    fleet = Fleet(cluster, nursery, kib=STATE_KIB)
    ranks = fleet.begin(TWO_HOSTS, 1)
    two_rig.block("h0", "h1")  # between the two alone: the controller reaches both
    try:
        before = sent(two_rig, "h0")
        together(ranks, "put", step=2)
        settled = together(ranks, "settle", step=2, timeout_s=COMMIT_S)
        assert [reply["level"] for reply in settled] == ["committed", "committed"]
        assert two_rig.sent_bytes("h0", "eth1") - before["eth1"] > CHANGED_BYTES
    finally:
        two_rig.unblock("h0", "h1")
    fleet.kill(ranks)


# -- cut lifelines ------------------------------------------------------------------------------------
# A host that is cut off loses its ranks; one whose processes do not run for a while does not.


HANG_S = 2.0
LISTEN = """
import sys, time
from memstore.inplace.lifelines import Lifelines
lifelines = Lifelines("run", float(sys.argv[1]))
print(lifelines.port, flush=True)
while True:
    for rank, end in lifelines.take_lost({0: 1, 1: 1}, time.monotonic()).items():
        print(rank, end.name, flush=True)
    time.sleep(0.05)
"""
RANK = """
import os, subprocess, sys, time
argv = [sys.executable, "-I", "-S", sys.argv[1], str(os.getpid()), *sys.argv[2:]]
watchdog = subprocess.Popen(argv, stdin=subprocess.PIPE)
while True:
    watchdog.stdin.write(b".")
    watchdog.stdin.flush()
    time.sleep(0.05)
"""


class Listener:
    """The process that replaces lost ranks, on host `c`."""

    def __init__(self, cut_rig: NamespaceRig) -> None:
        self.rig = cut_rig
        self.process = cut_rig.popen(
            "c", [sys.executable, "-c", LISTEN, str(HANG_S)], stdout=subprocess.PIPE, text=True
        )
        self.port = int(self.process.stdout.readline())

    def start_rank(self, host: str, rank: int) -> None:
        """Start a rank with its watchdog on a host, and wait until they are connected."""
        arguments = (self.rig.address("c"), self.port, "run", rank, 1, 60.0)
        self.rig.popen(host, [sys.executable, "-c", RANK, watchdog.__file__, *map(str, arguments)])
        port = f":{self.port:04X} "

        def is_connected() -> bool:
            pids = self.rig.processes(host)
            return any(f"{port}01" in line for pid in pids for line in open(f"/proc/{pid}/net/tcp"))

        wait_for(is_connected, f"the watchdog of rank {rank}")

    def next_lost(self) -> str:
        """Return the next rank that is lost, and how."""
        return str(self.process.stdout.readline())


@pytest.fixture
def cut_rig() -> Iterator[NamespaceRig]:
    with NamespaceRig(["a", "b", "c"]) as made:
        yield made


@pytest.mark.parametrize("direction", ["both", "from-host", "to-host"])
def test_the_ranks_of_a_host_that_is_cut_off_are_lost(cut_rig: NamespaceRig, direction: str) -> None:
    """A link that loses only one direction is cut all the same. No other host's rank is lost."""
    listener = Listener(cut_rig)
    listener.start_rank("a", 0)
    listener.start_rank("b", 1)
    if direction == "both":
        cut_rig.cut("a")
    else:
        cut_rig.block(*(("a", "c") if direction == "from-host" else ("c", "a")), one_way=True)
    assert listener.next_lost() == "0 SILENT\n"
    cut_rig.cut("b")
    assert listener.next_lost() == "1 SILENT\n"


def test_a_host_whose_processes_do_not_run_is_not_lost(cut_rig: NamespaceRig) -> None:
    """They are starved, or stopped for a while: the host's kernel answers for them."""
    listener = Listener(cut_rig)
    listener.start_rank("a", 0)
    listener.start_rank("b", 1)
    for pid in cut_rig.processes("a"):
        os.kill(pid, signal.SIGSTOP)
    cut_rig.cut("b")
    assert listener.next_lost() == "1 SILENT\n"
    cut_rig.kill("a")
    assert listener.next_lost() == "0 BROKEN\n"


def test_a_host_that_is_cut_off_for_a_moment_is_not_lost(cut_rig: NamespaceRig) -> None:
    """The kernel may have ended the connection; the watchdog makes another one."""
    listener = Listener(cut_rig)
    listener.start_rank("a", 0)
    cut_rig.cut("a")
    listener.start_rank("b", 1)
    cut_rig.heal("a")
    cut_rig.cut("b")
    assert listener.next_lost() == "1 SILENT\n"
