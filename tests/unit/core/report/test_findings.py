"""What `memstore doctor` finds: planted misconfigurations by name, and nothing on a good cluster."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import chain
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memstore.config import GIB, MIB, Config
from memstore.core.report.findings import (
    ClusterFacts,
    Finding,
    HostFacts,
    MeasuredLink,
    cleaning_line,
    findings,
    rounds_of_links,
)

VERSIONS = {"memstore": "0.1.0", "python": "3.11", "ray": "2.60.0", "torch": "2.13.0"}


def good_host(number: int) -> HostFacts:
    """Return a machine of 256 GiB with nothing wrong, in one of two racks."""
    return HostFacts(
        host=f"h{number}",
        node=f"node{number}",
        labels={"host": f"h{number}", "rack": f"r{number % 2}"},
        machine=f"boot{number}",
        addresses=[f"10.0.0.{number}"],
        versions=VERSIONS,
        memory_bytes=256 * GIB,
        available_bytes=200 * GIB,
        ray_store_bytes=30 * GIB,
        huge_bytes=0,
        shmem_enabled="never",
        numa_nodes=2,
        arena_fs="tmpfs",
        arena_fs_bytes=128 * GIB,
        arena_fs_free_bytes=127 * GIB,
        arena_limit_bytes=100 * GIB,
        arena_limit_why="half of the memory of this machine",
        uid=1000,
        is_ipc_removed=False,
        cleaning_line="",
        descriptors=65536,
        memlock_bytes=8 * MIB,
        clock_offset_s=0.002,
        clock_error_s=0.001,
        port_problem="",
        tls_problem="",
        durable_problem="",
    )


GOOD = ClusterFacts(
    hosts=[good_host(number) for number in (1, 2, 3, 4)],
    config=Config(durable="/ckpt", tls_dir="/tls"),
    links=[MeasuredLink(a, b, 2e9) for a, b in (("h1", "h2"), ("h2", "h1"), ("h3", "h4"), ("h4", "h3"))],
    gcs_storage="rocksdb",
    idle_timeout_s=3600.0,
    is_running=True,
    problems={"note": 3},
)


def of_host(**seen: Any) -> ClusterFacts:
    """Return the good cluster with something else seen on h2."""
    return replace(GOOD, hosts=[replace(host, **seen) if host.host == "h2" else host for host in GOOD.hosts])


def of_all(**seen: Any) -> ClusterFacts:
    """Return the good cluster with something else seen on every host."""
    return replace(GOOD, hosts=[replace(host, **seen) for host in GOOD.hosts])


def with_link(bytes_per_s: float | None, problem: str = "") -> ClusterFacts:
    """Return the good cluster with one more link."""
    return replace(GOOD, links=[*GOOD.links, MeasuredLink("h1", "h3", bytes_per_s, problem)])


LABELS = {"host": "h2"}
#: name of the misconfiguration -> facts, level, what was examined, words of the sentence and of the remedy
PLANTED: dict[str, tuple[ClusterFacts, str, str, str, str]] = {
    "a host is silent": (of_host(silence="no answer within 15 s"), "FAIL", "answer", "within 15 s", "ray status"),
    "no room for a chunk": (
        of_host(arena_problem="arena_bytes=1 has no room; do one of: a smaller one"),
        "FAIL",
        "arena memory",
        "has no room",
        "a smaller one",
    ),
    "memory is taken": (
        replace(of_host(available_bytes=GIB), is_running=False),
        "WARN",
        "arena memory",
        "1.0 GiB",
        "end",
    ),
    "little memory": (of_host(arena_limit_bytes=200 * MIB), "WARN", "arena memory", "200 MiB", "--arena-bytes"),
    "Ray takes most": (
        of_host(ray_store_bytes=180 * GIB),
        "WARN",
        "Ray's object store",
        "180 GiB",
        "--object-store-memory=",
    ),
    "memory in hugetlb": (of_host(huge_bytes=128 * GIB), "WARN", "hugetlb", "128 GiB", "vm.nr_hugepages=0"),
    "64 MB /dev/shm": (of_host(arena_fs_bytes=64 * MIB), "FAIL", "arena_dir", "container's default", "--shm-size"),
    "small tmpfs": (of_host(arena_fs_bytes=512 * MIB), "WARN", "arena_dir", "512 MiB", "remount,size="),
    "arena on a disk": (of_host(arena_fs="ext4"), "WARN", "arena_dir", "no memory file system", "/dev/shm"),
    "RemoveIPC": (of_host(is_ipc_removed=True), "WARN", "RemoveIPC", "user 1000", "enable-linger"),
    "tmpfiles.d cleans": (
        of_host(cleaning_line="d /dev/shm - - - 10d"),
        "WARN",
        "tmpfiles.d",
        "10d",
        "x /dev/shm/memstore-*",
    ),
    "few descriptors": (of_host(descriptors=1024), "FAIL", "open files", "1,024", "ulimit -n 65536"),
    "not many descriptors": (of_host(descriptors=4096), "WARN", "open files", "4,096", "LimitNOFILE=65536"),
    "clock is off": (of_host(clock_offset_s=-3.0), "WARN", "clock", "-3.000 s", "timedatectl"),
    "clock of another day": (of_host(clock_offset_s=9e4), "FAIL", "clock", "+90000.000 s", "chronyd"),
    "no such interface": (
        of_host(addresses=None, interface_problem="interface='ib0' matches no address"),
        "FAIL",
        "interface",
        "ib0",
        "--interface",
    ),
    "loopback": (of_host(addresses=["127.0.0.1"]), "FAIL", "interface", "no other machine reaches", "--interface"),
    "port is taken": (of_host(port_problem="port 7777 of 10.0.0.2 cannot be had"), "FAIL", "port", "7777", "--port N"),
    "no TLS key": (of_host(tls_problem="/tls/key.pem: No such file"), "FAIL", "TLS", "key.pem", "0600"),
    "durable not writable": (
        of_host(durable_problem="/ckpt: EROFS"),
        "FAIL",
        "durable storage",
        "EROFS",
        "mount /ckpt",
    ),
    "a durable folder of its own": (
        of_host(durable_unseen=["h1", "h3", "h4"]),
        "FAIL",
        "durable storage",
        "/ckpt there is another place: the files of h1, h3, h4",
        "mount /ckpt",
    ),
    "two nodes are one host": (
        of_host(host="h1", machine="boot1"),
        "WARN",
        "host id",
        "2 Ray nodes",
        "--labels host=NAME",
    ),
    "an id on two machines": (of_host(host="h1"), "FAIL", "host id", "claimed by 2 machines", "--labels host=NAME"),
    "two hosts of one machine": (
        of_host(machine="boot1"),
        "WARN",
        "machine",
        "h1, h2 lie on one machine",
        "one Ray node",
    ),
    "one port for two hosts": (
        replace(
            of_host(addresses=["10.0.0.1"], machine="boot1"),
            config=GOOD.config.with_fields({"port": 7777, "replicas": 2}),
        ),
        "FAIL",
        "shared port",
        "h1, h2 have one address, and port 7777",
        "without --port",
    ),
    "another memstore": (
        of_host(versions={**VERSIONS, "memstore": "0.2.0"}),
        "FAIL",
        "version of memstore",
        "0.2.0 on h2",
        "install memstore 0.1.0",
    ),
    "another torch": (
        of_host(versions={**VERSIONS, "torch": "2.6.0"}),
        "WARN",
        "version of torch",
        "2.6.0 on h2",
        "install torch 2.13.0",
    ),
    "torch is missing": (
        of_host(versions={**VERSIONS, "torch": None}),
        "WARN",
        "version of torch",
        "absent on h2",
        "install torch",
    ),
    "another Python": (
        of_host(versions={**VERSIONS, "python": "3.12"}),
        "FAIL",
        "version of python",
        "3.12 on h2",
        "install python 3.11",
    ),
    "a label is missing": (
        of_host(labels=LABELS),
        "WARN",
        "label rack",
        "no label rack on h2, which 3 other hosts have",
        "--labels rack=NAME",
    ),
    "no labels": (of_all(labels={}), "WARN", "labels", "no host has a label zone or rack", "ray start --labels"),
    "one rack only": (of_all(labels={"rack": "r1"}), "WARN", "label rack", "takes all copies", "another rack"),
    "fewer hosts than copies": (
        replace(GOOD, config=Config(replicas=8)),
        "WARN",
        "hosts",
        "4 hosts for replicas=8",
        "ray start",
    ),
    "no GCS fault tolerance": (
        replace(GOOD, gcs_storage="memory"),
        "WARN",
        "GCS fault tolerance",
        "in memory",
        "RAY_gcs_storage=rocksdb",
    ),
    "idle hosts are ended": (
        replace(GOOD, idle_timeout_s=300.0),
        "WARN",
        "autoscaler",
        "300 s",
        "idle_timeout_minutes: 30",
    ),
    "a link is cut": (
        with_link(None, "timed out"),
        "FAIL",
        "link",
        "h3 cannot be reached from h1: timed out",
        "firewall",
    ),
    "a slow link": (with_link(0.5e9), "WARN", "link", "500 MB/s, the median link 2,000 MB/s", "ethtool"),
    "a host without a holder": (
        replace(GOOD, without_holder={"node2": "no room"}),
        "FAIL",
        "holder",
        "h2 has no holder: no room",
        "memstore up",
    ),
    "other settings": (
        replace(GOOD, store_problem="it runs otherwise. Stop it"),
        "FAIL",
        "store",
        "runs otherwise",
        "Stop it",
    ),
    "status has problems": (replace(GOOD, problems={"degraded": 2}), "WARN", "store", "2 degraded", "memstore status"),
    "a job has stopped": (replace(GOOD, problems={"stopped": 1}), "WARN", "store", "1 stopped", "memstore status"),
    "a step is lost": (
        replace(GOOD, problems={"unrecoverable": 1}),
        "FAIL",
        "store",
        "1 unrecoverable",
        "memstore status",
    ),
}


def wrong(facts: ClusterFacts) -> list[Finding]:
    """Return the findings that are not OK."""
    return [row for row in findings(facts) if row.level != "OK"]


def test_a_good_cluster_has_no_finding() -> None:
    """Before `up` and after, also where a kernel, Ray or systemd shows little; all that is examined is said."""
    assert wrong(GOOD) == []
    assert wrong(replace(GOOD, is_running=False)) == []
    bare = [HostFacts(host=host.host, node=host.node, labels=host.labels) for host in GOOD.hosts]
    assert wrong(ClusterFacts(hosts=bare)) == []
    assert {row.subject for row in findings(GOOD)} >= {case[2] for case in PLANTED.values()} - {
        "labels",
        "host id",
        "shared port",
    }


@pytest.mark.parametrize("name", PLANTED)
def test_a_misconfiguration_is_found_by_name(name: str) -> None:
    """It alone, with its values, the limit, and one remedy."""
    facts, level, subject, what, remedy = PLANTED[name]
    row, *others = wrong(facts)
    assert [other.subject for other in others] == (["machine"] if name == "one port for two hosts" else [])
    assert (row.level, row.subject) == (level, subject), row
    assert what in row.what, row
    assert remedy in row.remedy, row
    assert findings(facts)[0] == row, "the worst comes first"


def test_the_worst_comes_first() -> None:
    facts = replace(of_host(descriptors=1024, clock_offset_s=-3.0), gcs_storage="memory")
    assert [row.level for row in wrong(facts)] == ["FAIL", "WARN", "WARN"]


def test_an_uncertain_clock_is_not_blamed() -> None:
    """A round trip of 8 s tells nothing about a difference of 3 s."""
    assert wrong(of_host(clock_offset_s=3.0, clock_error_s=4.0)) == []


def test_who_lacks_the_file_of_one_host_is_not_blamed() -> None:
    """Of two hosts with folders of their own it is unknown which is right: both are named."""
    assert wrong(of_host(durable_unseen=["h1"])) == []
    alone = [replace(good_host(at), durable_unseen=[f"h{3 - at}"]) for at in (1, 2)]
    rows = wrong(replace(GOOD, hosts=alone))
    assert [(row.subject, row.host) for row in rows] == [("durable storage", "h1"), ("durable storage", "h2")]


def test_a_chosen_size_is_not_called_small() -> None:
    facts = of_host(arena_limit_bytes=200 * MIB)
    assert wrong(replace(facts, config=GOOD.config.with_fields({"arena_bytes": 200 * MIB}))) == []


def test_a_trial_on_one_machine_warns_of_that_alone() -> None:
    """Loopback is the right network there."""
    facts = of_all(machine="boot", addresses=["127.0.0.1"])
    assert [row.subject for row in wrong(facts)] == ["machine"]


@given(st.lists(st.sampled_from(["r1", "r2", "r3"]), max_size=40))
def test_links_are_measured_in_a_ring_and_no_host_twice_at_once(racks: list[str]) -> None:
    """Each host has two neighbours, so that a thousand hosts take three rounds."""
    hosts = [HostFacts(host=f"h{at}", node="", labels={"rack": rack}) for at, rack in enumerate(racks)]
    rounds = rounds_of_links(hosts, ("rack",))
    assert len(rounds) <= 3
    for pairs in rounds:
        assert len({*chain.from_iterable(pairs)}) == 2 * len(pairs)
    ends = Counter(chain.from_iterable(chain.from_iterable(rounds)))
    expected = {0: 0, 1: 0, 2: 1}.get(len(hosts), 2)
    assert [ends[at] for at in range(len(hosts))] == [expected] * len(hosts)


def test_neighbours_lie_in_other_racks() -> None:
    """As copies do: h0 to h3 in two racks, two by two."""
    hosts = [HostFacts(host=f"h{at}", node="", labels={"rack": f"r{at // 2}"}) for at in range(4)]
    pairs = chain.from_iterable(rounds_of_links(hosts, ("rack",)))
    assert all(hosts[a].labels != hosts[b].labels for a, b in pairs)


FOLDER = "/dev/shm/memstore-1000"
SHM = "q /dev/shm 1777 root root 10d"


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        ([SHM], SHM),
        (["# a comment", "", SHM], SHM),
        ([SHM, "x /dev/shm/memstore-*"], ""),
        (["X /dev/shm/memstore-1000", SHM], ""),
        (["q /dev/shm 1777 root root -"], ""),
        (["d /dev/shm"], ""),
        (["d /dev/shm2 - - - 10d", "d /tmp - - - 10d"], ""),
        (["e! / - - - 1d"], "e! / - - - 1d"),
    ],
)
def test_a_line_that_ages_the_arena_is_found(lines: list[str], found: str) -> None:
    """As systemd-tmpfiles reads it: what is excluded, or has no age, stays."""
    assert cleaning_line(lines, FOLDER) == found
