"""Looks at every host of a Ray cluster from an actor there, and lets neighbours measure their links (D303).

Collects what `memstore/core/report/findings.py` judges, and decides nothing itself. A host that does not answer in time
is among the facts as silent; the others are looked at all the same.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import platform
import pwd
import re
import resource
import secrets
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from memstore.config import MIB, Config
from memstore.core.report.findings import ClusterFacts, HostFacts, MeasuredLink, cleaning_line, rounds_of_links
from memstore.distribution import VERSION, installed_versions
from memstore.errors import MemstoreError
from memstore.shell.arena.folder import arena_folder, check_folder, check_root
from memstore.shell.arena.lock import is_held, owner
from memstore.shell.arena.memory_limits import arena_limit, measure, meminfo_bytes
from memstore.shell.durable.tier import files_from_url
from memstore.shell.identity import HOST_LABEL, local_identity, resolve_interfaces
from memstore.shell.net.tls import Tls
from memstore.shell.on_ray.actors import gcs_storage, live_nodes

Key = TypeVar("Key")
LINK_BYTES, LINK_S = 64 * MIB, 0.5  # each way, whichever comes first: with three rounds of pairs it takes seconds
LINK_WAIT_S = 3.0  # for a connection, a silent end, a clock
CLOCK_TRIES = 3  # the quickest call counts
_TOKEN_BYTES, _RATE, _PIECE = 16, struct.Struct("!d"), 1 << 20
_IDLE = re.compile(r'idle_timeout_minutes"?\s*:\s*([\d.]+)')


# -- the whole cluster ---------------------------------------------------------------------------------


def examine(config: Config, *, limit_s: float) -> ClusterFacts:
    """Return what all hosts of the joined Ray cluster show within `limit_s`, and within half of that of storage."""
    nodes, token = {node["NodeID"]: node for node in live_nodes()}, secrets.token_bytes(_TOKEN_BYTES)
    labels = {node: _labels(found) for node, found in nodes.items()}
    on_machine, stores = Counter[str](), Counter[str]()
    for found in nodes.values():
        on_machine[found["NodeManagerAddress"]] += 1
        stores[found["NodeManagerAddress"]] += int(found["Resources"].get("object_store_memory", 0))
    actors = {
        node: ray.remote(Examiner)
        .options(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False))
        .remote(config.start_fields(), labels[node], on_machine[place], stores[place], token)
        for node, place in ((node, found["NodeManagerAddress"]) for node, found in nodes.items())
    }
    known = {field.name for field in fields(HostFacts)}  # a host with another version may show more, or less
    try:
        looks, silent = _gathered({node: actor.look.remote() for node, actor in actors.items()}, limit_s)
        seen = [HostFacts(node=node, **{k: v for k, v in look.items() if k in known}) for node, look in looks.items()]
        hosts = [replace(host, **_clock(actors[host.node])) for host in seen]
        links = _links(hosts, actors, config, limit_s)
        if config.durable is not None:
            hosts = _with_durable(hosts, actors, config.durable, limit_s / 2)
    finally:
        for actor in actors.values():
            ray.kill(actor)
    for node, why in silent.items():
        name = labels[node].get(HOST_LABEL, nodes[node]["NodeManagerHostname"])
        hosts.append(HostFacts(host=name, node=node, labels=labels[node], silence=why))
    hosts.sort(key=lambda host: (host.host, host.node))
    idle = [look["idle_timeout_s"] for look in looks.values() if look.get("idle_timeout_s") is not None]
    return ClusterFacts(
        hosts=hosts,
        config=config,
        links=links,
        gcs_storage=gcs_storage() or None,
        idle_timeout_s=min(idle, default=None),
    )


def _labels(node: Mapping[str, Any]) -> dict[str, str]:
    """Return the labels that a person gave a node."""
    return {key: value for key, value in (node.get("Labels") or {}).items() if not key.startswith("ray.io/")}


def _gathered(calls: Mapping[Key, Any], limit_s: float) -> tuple[dict[Key, Any], dict[Key, str]]:
    """Return what each call answered within the limit, and of the others why not."""
    answers: dict[Key, Any] = {}
    problems: dict[Key, str] = {}
    ready = set(ray.wait(list(calls.values()), num_returns=len(calls), timeout=limit_s)[0]) if calls else set()
    for key, call in calls.items():
        try:
            if call not in ready:
                raise TimeoutError(f"no answer within {limit_s:g} s")
            answers[key] = ray.get(call)
        except Exception as error:
            lines = str(getattr(error, "cause", None) or error).strip().splitlines() or [type(error).__name__]
            is_traceback = isinstance(error, ray.exceptions.RayActorError)  # of its start; what is wrong comes last
            problems[key] = lines[-1] if is_traceback else " ".join(lines)
    return answers, problems


def _clock(actor: Any) -> dict[str, Any]:
    """Return a host's clock less ours, and how far that may be off: half of the quickest call's round trip."""
    found: dict[str, Any] = {}
    with contextlib.suppress(Exception):  # a host that has gone since has no clock
        for _ in range(CLOCK_TRIES):
            begun_s = time.time()
            theirs_s = ray.get(actor.clock.remote(), timeout=LINK_WAIT_S)
            error_s = (time.time() - begun_s) / 2
            if not found or error_s < found["clock_error_s"]:
                found = {"clock_offset_s": theirs_s - begun_s - error_s, "clock_error_s": error_s}
    return found


def _links(hosts: Sequence[HostFacts], actors: Mapping[str, Any], config: Config, limit_s: float) -> list[MeasuredLink]:
    """Let each host dial its neighbour in the ring, and measure both ways."""
    able = [host for host in hosts if host.addresses]
    listening, problems = _gathered({host.node: actors[host.node].listen.remote() for host in able}, limit_s)
    found: list[MeasuredLink] = []
    for pairs in rounds_of_links(able, config.failure_domains):
        ends = {(able[a].node, able[b].node): (able[a].host, able[b].host) for a, b in pairs}
        calls = {(a, b): actors[a].measure.remote(listening[b]) for a, b in ends if b in listening}
        rates, silent = _gathered(calls, limit_s)
        for (a, b), (name_a, name_b) in ends.items():
            problem = problems.get(b) or silent.get((a, b))
            for there, back, why in rates.get((a, b), [(None, None, problem)]):
                found.append(MeasuredLink(name_a, name_b, there, why))
                found += [MeasuredLink(name_b, name_a, back)] if back is not None else []
    return found


def _with_durable(hosts: Sequence[HostFacts], actors: Mapping[str, Any], url: str, limit_s: float) -> list[HostFacts]:
    """Let each host write, read and remove a file there; between that each looks whose files it sees."""
    names = {host.node: f"doctor-{secrets.token_hex(8)}" for host in hosts}
    _, failed = _gathered({node: actors[node].probe.remote(url, name, True) for node, name in names.items()}, limit_s)
    wrote = [host for host in hosts if host.node not in failed]
    seen, blind = _gathered({host.node: actors[host.node].probes.remote(url) for host in wrote}, limit_s)
    calls = {host.node: actors[host.node].probe.remote(url, names[host.node], False) for host in wrote}
    problems = {**_gathered(calls, limit_s)[1], **blind, **failed}
    found = []
    for host in hosts:
        here = seen.get(host.node, names.values())
        unseen = [other.host for other in wrote if names[other.node] not in here]
        found.append(replace(host, durable_problem=problems.get(host.node, ""), durable_unseen=unseen))
    return found


# -- one host -----------------------------------------------------------------------------------------


class Examiner:
    """Sees one host as its holder would: in a process that its raylet starts, with that one's limits and variables."""

    def __init__(
        self, fields: dict[str, Any], labels: dict[str, str], hosts_on_machine: int, ray_store_bytes: int, token: bytes
    ) -> None:
        self.config = Config().with_fields(fields)
        self.identity = local_identity(labels, os.environ)
        self.hosts_on_machine, self.ray_store_bytes, self.token = hosts_on_machine, ray_store_bytes, token
        self.folder = arena_folder(self.config.arena_dir, store=self.config.store, host=self.identity.host_id)
        self.addresses: list[str] = []
        self.is_port_free = False
        self.listening: list[socket.socket] = []

    def look(self) -> dict[str, Any]:
        """Return the fields of `HostFacts` that this host can see by itself."""
        return {
            "host": self.identity.host_id,
            "labels": dict(self.identity.labels),
            "machine": self.identity.machine,
            "versions": versions(),
            "uid": os.geteuid(),
            "is_ipc_removed": is_ipc_removed(Path("/"), os.geteuid()),
            "cleaning_line": cleaning_line(tmpfiles_lines(Path("/")), str(self.folder.parent.parent)),
            "shmem_enabled": _chosen(Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")),
            "numa_nodes": len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or None,
            "descriptors": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
            "memlock_bytes": None if (locked := resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]) < 0 else locked,
            "idle_timeout_s": idle_timeout_s(Path("/proc")),
            **self._memory(),
            **self._network(),
        }

    def clock(self) -> float:
        """Return this machine's time."""
        return time.time()

    def _memory(self) -> dict[str, Any]:
        """Return what memory there is, what of it an arena may take, and on which file system."""
        found: dict[str, Any] = {"huge_bytes": meminfo_bytes(Path("/proc")).get("Hugetlb")}
        try:
            where = self.config.arena_dir
            limits = measure(
                where,
                hosts_on_machine=self.hosts_on_machine,
                ray_object_store_bytes=self.ray_store_bytes,
                folder=self.folder,
            )
            memory = limits.cgroup_limit_bytes or limits.ram_total_bytes
            free = [limits.ram_total_bytes - limits.ram_used_bytes, memory - (limits.cgroup_used_bytes or 0)]
            found |= {
                "memory_bytes": min(memory, limits.ram_total_bytes),
                "available_bytes": min(*free, limits.fs_free_bytes) + limits.held_bytes,
                "ray_store_bytes": limits.ray_object_store_bytes,
                "arena_fs": file_system(where),
                "arena_fs_bytes": limits.fs_total_bytes,
                "arena_fs_free_bytes": limits.fs_free_bytes,
            }
            if self.folder.exists():
                check_folder(self.folder)
            else:
                check_root(self.folder.parent.parent.parent)
            limit = arena_limit(self.config, self.folder, hosts_on_machine=self.hosts_on_machine)
            found |= {"arena_limit_bytes": limit.nbytes, "arena_limit_why": limit.why}
        except (MemstoreError, OSError) as error:
            found["arena_problem"] = str(error)
        return found

    def _network(self) -> dict[str, Any]:
        """Return the addresses for copies, and what is wrong with the port and TLS's files."""
        try:
            self.addresses = resolve_interfaces(self.config.interface)
        except MemstoreError as error:
            return {"interface_problem": str(error)}
        problem = ""
        for address in self.addresses:
            try:
                with _listener(address, self.config.port):
                    self.is_port_free = True
            except OSError as error:
                self.is_port_free = False
                if not self._has_our_holder():
                    problem = f"port {self.config.port} of {address} cannot be had: {error.strerror}"
        found: dict[str, Any] = {"addresses": self.addresses, "port_problem": problem}
        if self.config.tls_dir is not None:
            try:
                Tls.load(self.config)
                found["tls_problem"] = ""
            except MemstoreError as error:
                found["tls_problem"] = str(error)
        return found

    def _has_our_holder(self) -> bool:
        with contextlib.suppress(MemstoreError, OSError):
            holding = owner(self.folder)
            return is_held(self.folder) and holding is not None and holding.address.endswith(f":{self.config.port}")
        return False

    # -- links and storage ---------------------------------------------------------------------

    def listen(self) -> list[tuple[str, int]]:
        """Accept neighbours from now on, on every network; return where. The port is a holder's if that is free."""
        for address in self.addresses:
            try:
                listening = _listener(address, self.config.port if self.is_port_free else 0)
            except OSError:  # another host of this machine was quicker
                listening = _listener(address, 0)
            self.listening.append(listening)
            threading.Thread(target=self._serve, args=(listening,), daemon=True).start()
        return [listening.getsockname()[:2] for listening in self.listening]

    def close(self) -> None:
        """Listen no more."""
        for listening in self.listening:
            listening.shutdown(socket.SHUT_RDWR)  # wakes its thread
            listening.close()

    def _serve(self, listening: socket.socket) -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            with connection, contextlib.suppress(OSError, EOFError):
                connection.settimeout(LINK_WAIT_S)
                if hmac.compare_digest(_read(connection, _TOKEN_BYTES), self.token):
                    connection.sendall(_RATE.pack(_receive(connection)))
                    _send(connection)

    def measure(self, ends: Sequence[tuple[str, int]]) -> list[tuple[float | None, float | None, str]]:
        """Return for each network of a neighbour the bytes/s there and back, or why it cannot be reached."""
        found: list[tuple[float | None, float | None, str]] = []
        for address, port in ends:
            try:
                with socket.create_connection((address, port), timeout=LINK_WAIT_S) as connection:
                    connection.sendall(self.token)
                    _send(connection)
                    connection.shutdown(socket.SHUT_WR)
                    (there,) = _RATE.unpack(_read(connection, _RATE.size))
                    found.append((there, _receive(connection), ""))
            except (OSError, EOFError) as error:
                found.append((None, None, f"{address} port {port}: {error}"))
        return found

    def probe(self, url: str, name: str, is_kept: bool) -> None:
        """Write a file to durable storage and read it back; remove it, unless it is to be kept."""
        files_from_url(url).probe(name, is_kept=is_kept)

    def probes(self, url: str) -> set[str]:
        """Return the names of the files that hosts have written so."""
        return files_from_url(url).probes()


def _listener(address: str, port: int) -> socket.socket:
    return socket.create_server((address, port), family=socket.AF_INET6 if ":" in address else socket.AF_INET)


def _send(connection: socket.socket) -> None:
    piece, until_s = bytes(_PIECE), time.monotonic() + LINK_S
    for _ in range(LINK_BYTES // _PIECE):
        connection.sendall(piece)
        if time.monotonic() > until_s:
            return


def _receive(connection: socket.socket) -> float:
    """Return the bytes/s that came until the other end had sent all."""
    room, count, begun_s = bytearray(_PIECE), 0, time.monotonic()
    while got := connection.recv_into(room):
        begun_s = begun_s if count else time.monotonic()
        count += got
    return count / max(1e-6, time.monotonic() - begun_s)


def _read(connection: socket.socket, nbytes: int) -> bytes:
    found = b""
    while len(found) < nbytes:
        data = connection.recv(nbytes - len(found))
        if not data:
            raise EOFError("the other end hung up")
        found += data
    return found


def versions() -> dict[str, str | None]:
    """Return the versions that hosts must share, of packages that are installed here."""
    python = ".".join(platform.python_version_tuple()[:2])
    return {"memstore": VERSION, "python": python, **installed_versions()}


def file_system(folder: str) -> str | None:
    """Return the type of the file system in which a folder lies, such as "tmpfs"."""
    real, found = os.path.realpath(folder), ("", "")
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mounts").read_text(encoding="utf-8", errors="replace").splitlines():
            _, at, kind, *_ = line.split(" ")
            at = at.replace("\\040", " ")
            if (real + "/").startswith(at.rstrip("/") + "/") and len(at) >= len(found[0]):  # of two, the last is on top
                found = at, kind
    return found[1] or None


def is_ipc_removed(root: Path, uid: int) -> bool | None:
    """Say whether systemd removes a user's files in /dev/shm when the last session ends; None where it does not run."""
    if not (root / "run/systemd/system").exists():
        return None
    with contextlib.suppress(KeyError):
        if (root / "var/lib/systemd/linger" / pwd.getpwuid(uid).pw_name).exists():
            return False
    said = "yes"
    for path in (*sorted(root.glob("*/systemd/logind.conf")), *_drop_ins(root, "systemd/logind.conf.d")):
        said = (re.findall(r"^\s*RemoveIPC\s*=\s*(\S+)", _text(path), re.MULTILINE) or [said])[-1]
    return said.lower() in ("yes", "true", "on", "1")


def tmpfiles_lines(root: Path) -> list[str]:
    """Return the lines of tmpfiles.d by which systemd cleans; none where it does not run."""
    if not (root / "run/systemd/system").exists():
        return []
    return [line for path in _drop_ins(root, "tmpfiles.d") for line in _text(path).splitlines()]


def _drop_ins(root: Path, folder: str) -> Iterator[Path]:
    """Yield the files of a folder of systemd's: one in /etc takes the place of its namesake in /run and /usr/lib."""
    chosen = {path.name: path for top in ("usr/lib", "run", "etc") for path in (root / top / folder).glob("*.conf")}
    yield from (chosen[name] for name in sorted(chosen))


def idle_timeout_s(proc: Path) -> float | None:
    """Return after which time the autoscaler of this machine, if one runs with a cluster file, ends an idle host."""
    for path in proc.glob("[0-9]*/cmdline"):
        words = _text(path).split("\0")
        if any(word.endswith("monitor.py") for word in words):
            files = [word.partition("=")[2] for word in words if word.startswith("--autoscaling-config=")]
            found = _IDLE.search(_text(Path(files[0]).expanduser())) if files else None
            if found:
                return 60 * float(found[1])
    return None


def _chosen(path: Path) -> str | None:
    """Return the word in brackets of a kernel's setting, as "never" of `always [never]`."""
    found = re.search(r"\[(\w+)\]", _text(path))
    return found[1] if found else None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
