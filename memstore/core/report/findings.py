"""What `memstore doctor` finds on a cluster: each examination judges what was seen. Pure (D303).

What could not be seen is None and gives no finding. `problems.py` says what ails a store that runs.
"""

from __future__ import annotations

import fnmatch
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

from memstore.config import MIB, STREAMS, Config
from memstore.core.cluster.text import plural
from memstore.core.cluster.text import size_text as size
from memstore.core.report.problems import DESCRIPTORS_GOOD

Level = Literal["OK", "WARN", "FAIL"]
Row = tuple[Level, str, str, str]  # subject, what, remedy; the remedy counts where it is not OK
MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs", "hugetlbfs")
DOCKER_SHM_BYTES = 64 * MIB  # Docker's and containerd's default: nobody has chosen it
ARENA_SMALL_BYTES = 1024 * MIB  # two copies of two versions of 256 MiB: a smaller state needs no store
RAY_SHARE = 0.4  # of the memory; Ray takes 0.3 by itself, and what an arena may have is half of the rest
HUGE_SHARE = 0.25  # of the memory in hugetlb pages, where no arena can lie
DESCRIPTORS_BASE = 1024  # for ranks, files and Ray's own
DESCRIPTORS_PER_HOST = 4 * STREAMS  # to and from it, and as many again while a repair runs
DESCRIPTORS_LOW = 8192  # no holder of 400 hosts comes near it
CLOCK_WARN_S = 1.0  # events of several hosts are read in the order of their times
CLOCK_FAIL_S = 900.0  # object stores refuse what is signed so far from their time; certificates begin late
LINK_SHARE = 3  # a link that has less than a third of the median is another network, or a broken cable
IDLE_SHORT_S = 1800.0  # between `down` and `up` of an upgrade; an autoscaler's default is 300
SYSTEM_UIDS = 1000  # systemd spares the files of system users
SHOWN = 5  # names in one sentence
ENLARGE = "enlarge arena_dir (`mount -o remount,size=...`, docker --shm-size, a larger emptyDir)"


@dataclass(frozen=True, kw_only=True)
class HostFacts:
    """All that was seen on one host; None where it could not be seen."""

    host: str  # id of its holder; if it is silent, of its Ray node
    node: str
    labels: Mapping[str, str] = field(default_factory=dict)
    silence: str = ""  # why nothing was seen
    machine: str | None = None
    addresses: Sequence[str] | None = None  # for copies
    interface_problem: str | None = None
    versions: Mapping[str, str | None] = field(default_factory=dict)  # by package
    memory_bytes: int | None = None  # of the machine, or of its cgroup where that has less
    available_bytes: int | None = None
    ray_store_bytes: int | None = None
    huge_bytes: int | None = None
    shmem_enabled: str | None = None
    numa_nodes: int | None = None
    arena_fs: str | None = None
    arena_fs_bytes: int | None = None
    arena_fs_free_bytes: int | None = None
    arena_limit_bytes: int | None = None
    arena_limit_why: str = ""
    arena_problem: str | None = None
    uid: int | None = None
    is_ipc_removed: bool | None = None  # by systemd, when the user's last session ends
    cleaning_line: str | None = None  # of tmpfiles.d; "" if no line ages the arena
    descriptors: int | None = None
    memlock_bytes: int | None = None
    clock_offset_s: float | None = None  # to the machine that asks
    clock_error_s: float = 0.0
    port_problem: str | None = None  # "" if the port is free, or our own holder's
    tls_problem: str | None = None
    durable_problem: str | None = None  # "" if it was written, read and removed
    durable_unseen: Sequence[str] = ()  # hosts whose files are not there


@dataclass(frozen=True)
class MeasuredLink:
    """What one host received from another on one network; None and the problem where nothing came."""

    source: str
    target: str
    bytes_per_s: float | None
    problem: str = ""


@dataclass(frozen=True, kw_only=True)
class ClusterFacts:
    """All that was seen of a Ray cluster, and of the store on it if one runs."""

    hosts: Sequence[HostFacts]
    config: Config = field(default_factory=Config)  # the running store's, else what `up` would be given
    links: Sequence[MeasuredLink] = ()
    gcs_storage: str | None = None  # "memory", "redis" or "rocksdb"
    idle_timeout_s: float | None = None  # of Ray's autoscaler
    is_running: bool = False
    store_problem: str = ""  # why it does not answer, or runs with other settings
    without_holder: Mapping[str, str] = field(default_factory=dict)  # Ray node -> why
    problems: Mapping[str, int] = field(default_factory=dict)  # severity -> rows of `memstore status`


@dataclass(frozen=True)
class Finding:
    """What one examination found; `host` is "" for the whole cluster."""

    level: Level
    subject: str
    host: str
    what: str
    remedy: str = ""


def findings(facts: ClusterFacts) -> list[Finding]:
    """Return what every examination found, the worst first, in the order of the examinations."""
    seen = [host for host in facts.hosts if not host.silence]
    rows = [(host.host, row) for host in facts.hosts for row in _answer(host)]
    rows += [(host.host, row) for of_host in HOST_EXAMINATIONS for host in seen for row in of_host(host, facts)]
    rows += [("", row) for of_cluster in CLUSTER_EXAMINATIONS for row in of_cluster(facts, seen)]
    found = [Finding(row[0], row[1], host, row[2], "" if row[0] == "OK" else row[3]) for host, row in rows]
    return sorted(found, key=lambda row: ("FAIL", "WARN", "OK").index(row.level))


def rounds_of_links(hosts: Sequence[HostFacts], levels: Sequence[str]) -> list[list[tuple[int, int]]]:
    """Return pairs of hosts in a ring, as rounds in which no host is in two pairs; neighbours in other racks if any.

    >>> rounds_of_links([HostFacts(host=n, node=n) for n in "abcde"], ())
    [[(0, 1), (2, 3)], [(1, 2), (3, 4)], [(4, 0)]]
    """
    domains = [tuple(host.labels.get(level, "") for level in levels) for host in hosts]
    before = Counter[tuple[str, ...]]()
    places = []
    for at, domain in enumerate(domains):
        places.append((before[domain], domain, at))
        before[domain] += 1
    order = [at for _, _, at in sorted(places)]
    pairs = list(zip(order, order[1:] + order[:1], strict=True))[: None if len(order) > 2 else len(order) - 1]
    last = [pairs.pop()] if len(pairs) > 1 and len(pairs) % 2 else []
    return [each for each in (pairs[::2], pairs[1::2], last) if each]


def cleaning_line(lines: Iterable[str], folder: str) -> str:
    """Return the line of tmpfiles.d by which systemd ages what lies in `folder`; "" if none does, or one spares it.

    >>> cleaning_line(["q /tmp 1777 root root 10d"], "/tmp/memstore-0")
    'q /tmp 1777 root root 10d'
    >>> cleaning_line(["q /tmp 1777 root root 10d", "x /tmp/memstore-*"], "/tmp/memstore-0")
    ''
    """
    found = ""
    for line in lines:
        kind, path, *rest = [*line.split(), "", ""]
        if kind[:1] in ("x", "X") and fnmatch.fnmatch(folder, path):
            return ""
        is_above = path and (folder + "/").startswith(path.rstrip("/") + "/")
        if kind[:1] in ("d", "D", "e", "v", "q", "Q", "C") and is_above and len(rest) > 3 and rest[3] not in ("-", ""):
            found = line.strip()
    return found


def _level(bad: Level, is_bad: object) -> Level:
    return bad if is_bad else "OK"


def _few(names: Iterable[str]) -> str:
    listed = sorted(names)
    return ", ".join(listed[:SHOWN]) + (f" and {len(listed) - SHOWN} more" if len(listed) > SHOWN else "")


# -- one host -----------------------------------------------------------------------------------------


def _answer(host: HostFacts) -> Iterator[Row]:
    what = f"its Ray node {host.node[:12]} does not show what it is: {host.silence}" if host.silence else "it answers"
    remedy = (
        "`ray status`, raylet.out in /tmp/ray/session_latest/logs there, the same memstore as here; start Ray again"
    )
    yield _level("FAIL", host.silence), "answer", what, remedy


def _memory(host: HostFacts, facts: ClusterFacts) -> Iterator[Row]:
    remedy = f"end what else takes the memory, {ENLARGE}, or `memstore up --arena-bytes SIZE`"
    limit, total, free = host.arena_limit_bytes, host.memory_bytes, host.available_bytes
    if host.arena_problem is not None:
        what, _, better = host.arena_problem.partition("; do one of: ")
        yield "FAIL", "arena memory", what, better or remedy
    elif limit is not None and total is not None and free is not None:
        what = f"its arena may take {size(limit)} ({host.arena_limit_why}); {size(free)} of {size(total)} are available"
        is_short = limit > free and not facts.is_running
        is_chosen = facts.config.arena_bytes != "auto" or (host.arena_fs_bytes or limit) < ARENA_SMALL_BYTES
        is_small = limit < ARENA_SMALL_BYTES and not is_chosen
        yield _level("WARN", is_short or is_small), "arena memory", what, remedy
    if host.ray_store_bytes is not None and total:
        what = f"Ray's object store may take {size(host.ray_store_bytes)} of {size(total)} (limit {RAY_SHARE:.0%})"
        remedy = f"`ray start --object-store-memory={total // 10}` on that host"
        yield _level("WARN", host.ray_store_bytes > RAY_SHARE * total), "Ray's object store", what, remedy
    if host.huge_bytes is not None and total:
        what = (
            f"hugetlb pages have {size(host.huge_bytes)} of {size(total)} (limit {HUGE_SHARE:.0%}), where no arena lies"
        )
        remedy = "`sysctl -w vm.nr_hugepages=0`, unless a program there asks for them"
        yield _level("WARN", host.huge_bytes > HUGE_SHARE * total), "hugetlb", what, remedy
    if host.shmem_enabled is not None:
        yield "OK", "huge pages", f"shmem_enabled is {host.shmem_enabled}: an arena takes pages of any size", ""
    if host.numa_nodes is not None:
        yield "OK", "NUMA", plural(host.numa_nodes, "NUMA node"), ""


def _arena_dir(host: HostFacts, facts: ClusterFacts) -> Iterator[Row]:
    total, free = host.arena_fs_bytes, host.arena_fs_free_bytes
    if host.arena_fs is None or total is None or free is None:
        return
    what = f"arena_dir {facts.config.arena_dir} is on {host.arena_fs}, {size(total)} with {size(free)} free"
    if host.arena_fs not in MEMORY_FILE_SYSTEMS:
        remedy = "`memstore up --arena-dir /dev/shm`, or mount a tmpfs there"
        yield "WARN", "arena_dir", f"{what}: no memory file system, puts wait for a disk", remedy
    elif total <= DOCKER_SHM_BYTES:
        yield "FAIL", "arena_dir", f"{what}: a container's default of {size(DOCKER_SHM_BYTES)}", ENLARGE
    else:
        what += f" (limit: {size(ARENA_SMALL_BYTES)} in all)"
        yield _level("WARN", total < ARENA_SMALL_BYTES), "arena_dir", what, ENLARGE


def _cleaners(host: HostFacts, facts: ClusterFacts) -> Iterator[Row]:
    where = facts.config.arena_dir
    if host.is_ipc_removed is not None and host.uid is not None and where.startswith("/dev/shm"):
        is_bad = host.is_ipc_removed and host.uid >= SYSTEM_UIDS
        what = f"systemd {'removes' if is_bad else 'keeps'} what user {host.uid} has in /dev/shm after its last session"
        remedy = "`loginctl enable-linger`, or RemoveIPC=no in /etc/systemd/logind.conf and a restart of systemd-logind"
        yield _level("WARN", is_bad), "RemoveIPC", what, remedy
    if host.cleaning_line is not None:
        what = f"systemd-tmpfiles removes old files of {where}: {host.cleaning_line}"
        what = what if host.cleaning_line else f"no line of tmpfiles.d ages what lies in {where}"
        remedy = f"a line `x {where}/memstore-*` in /etc/tmpfiles.d/memstore.conf"
        yield _level("WARN", host.cleaning_line), "tmpfiles.d", what, remedy


def _limits(host: HostFacts, facts: ClusterFacts) -> Iterator[Row]:
    if host.descriptors is not None:
        needed = DESCRIPTORS_BASE + DESCRIPTORS_PER_HOST * len(facts.hosts)
        what = (
            f"a process may open {host.descriptors:,} files; a holder here needs {needed:,} (limit {DESCRIPTORS_LOW:,})"
        )
        remedy = (
            f"`ulimit -n {DESCRIPTORS_GOOD}` or LimitNOFILE={DESCRIPTORS_GOOD} for what starts Ray there, then again"
        )
        level: Level = "FAIL" if host.descriptors < needed else "WARN"
        yield _level(level, host.descriptors < max(needed, DESCRIPTORS_LOW)), "open files", what, remedy
    if host.memlock_bytes is not None:
        yield "OK", "memlock", f"a process may lock {size(host.memlock_bytes)}; an arena is not locked", ""
    if host.clock_offset_s is not None:
        away_s = abs(host.clock_offset_s) - host.clock_error_s
        what = f"its clock is {host.clock_offset_s:+.3f} s (± {host.clock_error_s:.3f} s) from ours"
        what += f" (limit {CLOCK_WARN_S:g} s)"
        level = "FAIL" if away_s > CLOCK_FAIL_S else "WARN"
        yield _level(level, away_s > CLOCK_WARN_S), "clock", what, "`timedatectl set-ntp true` there, or start chronyd"


def _network(host: HostFacts, facts: ClusterFacts) -> Iterator[Row]:
    config, remedy = facts.config, "`memstore up --interface NAME` with a network that every host has"
    if host.interface_problem is not None:
        yield "FAIL", "interface", host.interface_problem, remedy
    elif host.addresses is not None:
        is_far = len({each.machine for each in facts.hosts if each.machine}) > 1
        is_bad = is_far and any(address.startswith("127.") or address == "::1" for address in host.addresses)
        what = f"copies go to {', '.join(host.addresses)}{', which no other machine reaches' if is_bad else ''}"
        yield _level("FAIL", is_bad), "interface", what, remedy
    if host.port_problem is not None:
        what = host.port_problem or (f"port {config.port} is free, or its holder's" if config.port else "any free port")
        remedy = "`memstore up --port N` with one that is free on every host, or end the process that has it"
        yield _level("FAIL", host.port_problem), "port", what, remedy
    if host.tls_problem is not None:
        remedy = f"put cert.pem, key.pem (mode 0600) and ca.pem into {config.tls_dir} there"
        yield _level("FAIL", host.tls_problem), "TLS", host.tls_problem or "certificate and key fit", remedy


def _durable(host: HostFacts, facts: ClusterFacts) -> Iterator[Row]:
    if host.durable_problem is not None:
        what = (
            re.split("[:;] create ", host.durable_problem)[0]
            or f"it writes, reads and removes files of {facts.config.durable}"
        )
        wrote_count = sum(each.durable_problem == "" for each in facts.hosts)
        is_alone = 2 * len(host.durable_unseen) >= max(2, wrote_count)  # the others, which lack its file, are right
        if is_alone:
            what = (
                f"{facts.config.durable} there is another place: the files of {_few(host.durable_unseen)} are not in it"
            )
        remedy = f"mount {facts.config.durable} there as on the other hosts, with the rights of the user that runs Ray"
        if "://" in str(facts.config.durable):
            remedy = "start Ray there with the credentials in its environment, with the right to put, get, list, delete"
        yield _level("FAIL", host.durable_problem or is_alone), "durable storage", what, remedy


# -- the cluster --------------------------------------------------------------------------------------


def _identity(facts: ClusterFacts, seen: Sequence[HostFacts]) -> Iterator[Row]:
    """Judge whether each host is a machine of its own."""
    label = "`ray start --labels host=NAME` on each, with a name of its own"
    ids, machines = _by(seen, lambda host: host.host), _by(seen, lambda host: host.machine)
    for name, same in ids.items():
        where = {host.machine for host in same}
        what = (
            f"host {name} is {len(same)} Ray nodes ({_few(host.node[:12] for host in same)}) of one machine: one holder"
        )
        if len(where) > 1:
            yield "FAIL", "host id", f"host {name} is claimed by {len(where)} machines: one of them is refused", label
        elif len(same) > 1:
            yield "WARN", "host id", what, label
    shared = [names for same in machines.values() if len(names := {host.host for host in same}) > 1]
    for names in shared:
        what = f"{_few(names)} lie on one machine: they are lost together, and share its memory"
        yield "WARN", "machine", what, "one Ray node on each machine; to try the store on one machine it is fine"
    ends = _by(seen, lambda host: f"{host.machine} {host.addresses[0]}" if host.addresses else None)
    for names in [found for same in ends.values() if len(found := {host.host for host in same}) > 1]:
        what = f"{_few(names)} have one address, and port {facts.config.port} is for one holder"
        if facts.config.port:
            yield "FAIL", "shared port", what, "`memstore up` without --port: each holder takes a free one"
    if machines and not shared:
        yield "OK", "machine", f"{plural(len(ids), 'host')} on {plural(len(machines), 'machine')}", ""


def _by(hosts: Iterable[HostFacts], key: Callable[[HostFacts], str | None]) -> dict[str, list[HostFacts]]:
    found: dict[str, list[HostFacts]] = {}
    for host in hosts:
        name = key(host)
        if name is not None:
            found.setdefault(name, []).append(host)
    return found


def _versions(facts: ClusterFacts, seen: Sequence[HostFacts]) -> Iterator[Row]:
    """Judge each package of which hosts have another version than most."""
    for package in sorted({package for host in seen for package in host.versions}):
        having = _by(seen, lambda host, package=package: host.versions.get(package) or "absent")  # type: ignore[misc]
        usual = max(having, key=lambda version: len(having[version]))
        subject, level = f"version of {package}", _level("WARN" if package == "torch" else "FAIL", len(having) > 1)
        other = [f"{v} on {_few(h.host for h in having[v])}" for v in sorted(having) if v != usual]
        what = f"{package} is {usual} on {plural(len(having[usual]), 'host')}"
        remedy = f"install {package} {usual} there, as on the other hosts, and start Ray there again"
        yield level, subject, ", ".join([what, *other]), remedy


def _labels(facts: ClusterFacts, seen: Sequence[HostFacts]) -> Iterator[Row]:
    """Judge the failure domains that the labels give."""
    hosts, asked = facts.hosts, facts.config.failure_domains
    levels = [level for level in asked if any(level in host.labels for host in hosts)]
    remedy = f"`ray start --labels {','.join(f'{level}=NAME' for level in levels or asked)}` on each host"
    if asked and not levels and len(hosts) > 1:
        yield "WARN", "labels", f"no host has a label {' or '.join(asked)}: both copies may lie in one rack", remedy
    for level in levels:
        names = {host.labels[level] for host in hosts if level in host.labels}
        without = [host.host for host in hosts if level not in host.labels]
        if without:
            what = f"no label {level} on {_few(without)}, which {plural(len(hosts) - len(without), 'other host')} have"
            yield "WARN", f"label {level}", what, remedy
        else:
            is_one = level == levels[-1] and len(names) == 1 < len(hosts)
            what = f"{len(hosts)} hosts in {plural(len(names), level)}{': its loss takes all copies' if is_one else ''}"
            yield (
                _level("WARN", is_one),
                f"label {level}",
                what,
                f"hosts in another {level}, or `memstore up --durable URL`",
            )
    what = f"{plural(len(hosts), 'host')} for replicas={facts.config.replicas}"
    is_few = len(hosts) < facts.config.replicas
    yield _level("WARN", is_few), "hosts", what, "more hosts: `ray start --address=HEAD:6379`"


def _ray(facts: ClusterFacts, seen: Sequence[HostFacts]) -> Iterator[Row]:
    """Judge whether Ray outlives its head, and keeps hosts that are idle."""
    if facts.gcs_storage is not None:
        is_bad = facts.gcs_storage == "memory"
        what = f"Ray's GCS keeps its state in {facts.gcs_storage}"
        what += ": if the head is lost, raylets end after 60 s" if is_bad else ": the head may be restarted"
        remedy = "start the head with RAY_gcs_storage=rocksdb and RAY_gcs_storage_path=DIR, or with RAY_REDIS_ADDRESS"
        yield _level("WARN", is_bad), "GCS fault tolerance", what, remedy
    if facts.idle_timeout_s is not None:
        limit = f"{IDLE_SHORT_S:g}"
        what = f"the autoscaler ends a host without a holder after {facts.idle_timeout_s:g} s (limit {limit} s)"
        remedy = (
            f"idle_timeout_minutes: {IDLE_SHORT_S / 60:g} in the cluster file (KubeRay: idleTimeoutSeconds: {limit})"
        )
        yield _level("WARN", facts.idle_timeout_s < IDLE_SHORT_S), "autoscaler", what, remedy


def _links(facts: ClusterFacts, seen: Sequence[HostFacts]) -> Iterator[Row]:
    """Judge what hosts sent one another."""
    speeds = [link.bytes_per_s for link in facts.links if link.bytes_per_s is not None]
    usual = median(speeds) if speeds else 0.0
    for link in facts.links:
        ends = f"{link.source} to {link.target}"
        if link.bytes_per_s is None:
            remedy = "open the port between hosts (firewall, NetworkPolicy), or `memstore up --interface NAME`"
            yield "FAIL", "link", f"{link.target} cannot be reached from {link.source}: {link.problem}", remedy
        else:
            what = f"{ends} carries {link.bytes_per_s / 1e6:,.0f} MB/s, the median link {usual / 1e6:,.0f} MB/s"
            remedy = "compare `ethtool` on both with other hosts, and see what else sends there (`ss -ti`)"
            yield _level("WARN", link.bytes_per_s * LINK_SHARE < usual), "link", what, remedy


def _store(facts: ClusterFacts, seen: Sequence[HostFacts]) -> Iterator[Row]:
    """Judge a store that runs: what `status` says is named, not repeated."""
    if not facts.is_running:
        return
    hosts = {host.node: host.host for host in facts.hosts}
    for node, why in sorted(facts.without_holder.items()):
        what = f"{hosts.get(node, node[:12])} has no holder: {why}"
        yield "FAIL", "holder", what, "`memstore up` again, once what it says is mended"
    if not facts.without_holder:
        yield "OK", "holder", "every host has one", ""
    if facts.store_problem:
        what, _, remedy = facts.store_problem.partition(". ")
        yield "FAIL", "store", what, remedy or "`memstore events` says what it does"
        return
    rows = {severity: count for severity, count in facts.problems.items() if severity != "note"}
    counts = ", ".join(f"{count} {severity}" for severity, count in sorted(rows.items())) or "none"
    level: Level = "FAIL" if rows.keys() - {"degraded", "stopped"} else "WARN"  # a job that stopped is no sick store
    yield _level(level, rows), "store", f"problems in `memstore status`: {counts}", "`memstore status` has each remedy"


OfHost = Callable[[HostFacts, ClusterFacts], Iterator[Row]]
OfCluster = Callable[[ClusterFacts, Sequence[HostFacts]], Iterator[Row]]
HOST_EXAMINATIONS: tuple[OfHost, ...] = (_memory, _arena_dir, _cleaners, _limits, _network, _durable)
CLUSTER_EXAMINATIONS: tuple[OfCluster, ...] = (_identity, _versions, _labels, _ray, _links, _store)
