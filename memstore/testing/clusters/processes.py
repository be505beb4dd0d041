"""A store of plain processes on one machine, without Ray: holders and a controller that can be killed for real.

Each holder and the controller is a process of its own. They find one another through a folder of small files
(`DirectoryMembership`). Tests, drills of the core, and machines without Ray use it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Literal

from memstore.config import Config
from memstore.core.arena.slot_table import SlotState
from memstore.core.cluster.facts import HostsJoined
from memstore.core.format.manifest import decode_manifest
from memstore.core.journal.records import entries_of
from memstore.shell.arena.journal_file import read_records
from memstore.shell.rank.admin_link import store_root
from memstore.testing.clusters.cluster import Cluster
from memstore.testing.clusters.namespaces import NamespaceRig
from memstore.testing.clusters.nursery import ForkedProcess, Nursery
from memstore.testing.clusters.scratch import scratch_store_name
from memstore.testing.faults.arena_files import slot_records
from memstore.testing.faults.fault_proxy import FaultProxy

log = logging.getLogger("memstore")
START_S = 120.0  # a guard against hangs
POLL_S = 0.02
StartedProcess = subprocess.Popen[bytes] | ForkedProcess
shared_nursery: Callable[[], Nursery] | None = None
"""Returns what forks the processes of all clusters; None: each process is a program that imports all modules again."""


def wait_for(
    condition: Callable[[], Any], what: str, timeout_s: float = START_S, *, seen: Callable[[], object] = str
) -> Any:
    """Poll until `condition()` is true and return its value; after the limit raise AssertionError.

    The error names `what` and shows `seen()`. The limit ends a wait that would never end: it may be far longer than
    what is waited for takes.
    """
    deadline_s = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline_s:
            raise AssertionError(f"waited {timeout_s:g} s in vain for {what} {seen()}".rstrip())
        time.sleep(POLL_S)


class ProcessCluster(Cluster):
    """Holders by host id and one controller, each a process."""

    def __init__(
        self,
        folder: Path,
        hosts: Mapping[str, Mapping[str, str]],
        *,
        arena_bytes: int | Literal["auto"] = 64 << 20,
        durable_gate: Path | None = None,
        rig: NamespaceRig | None = None,
        controller_host: str = "",
        proxied: Collection[str] = (),
        **config: Any,
    ) -> None:
        """Prepare the processes; entering the context starts them.

        Args:
            folder: Where the processes find one another and write their logs.
            hosts: The labels of each host.
            rig: Has a namespace for every host, where its processes run; None for loopback.
            controller_host: The host of the rig on which the controller runs; "" for this machine's own end.
            proxied: Hosts whose peers reach them through `proxies[host]`; the controller dials them directly.
            config: Fields of Config.
        """
        self.folder = folder
        self.rig, self.controller_host = rig, controller_host
        self.proxied = list(proxied)
        self.proxies: dict[str, FaultProxy] = {}
        self.durable_gate = durable_gate  # durable writes wait until this file is there
        self.secret = secrets.token_bytes(32)
        fields = {
            "chunk_bytes": 64 << 10,
            "detect": 2.0,
            "interface": "127.0.0.1" if rig is None else str(rig.network),
            **config,
        }
        self.config = Config(store=scratch_store_name(), arena_bytes=arena_bytes, **fields)
        self.working_folders: dict[str, Path] = {}  # host -> working folder, for holders that need files of their own
        self.labels = {host: dict(labels) for host, labels in hosts.items()}
        self.holders: dict[str, StartedProcess] = {}
        self.started_s: dict[str, float] = {}  # host -> when its newest holder was started
        self.replaced: list[StartedProcess] = []  # holders beside which a successor was started
        self.controller: StartedProcess | None = None
        self.settle_s = 5.0
        self.environ: dict[str, dict[str, str]] = {}  # host, or "" for the controller -> of its next process
        self.controller_way: Path | None = None  # another path to the folder, for the next controllers
        self.niceness: int | None = None  # of the next processes, in this one's session; None: in their own
        folder.mkdir(parents=True, exist_ok=True)

    def start(self) -> None:
        """Start the controller and every holder, and wait until they serve."""
        address = "127.0.0.1" if self.rig is None else self.rig.root_address
        self.proxies = {host: FaultProxy(self.announced(host), address=address) for host in self.proxied}
        self.start_controller()
        for host in self.labels:
            self.start_holder(host)
        self.wait_live(*self.labels)

    def __exit__(self, *raised: object) -> None:
        if any(raised):
            log.error("the cluster's logs:\n%s", self.logs())
        self.stop()

    def stop(self) -> None:
        """Kill every process and remove every arena."""
        for process in [*self.holders.values(), *self.replaced, self.controller]:
            if process is not None:
                kill(process)
        for proxy in self.proxies.values():
            proxy.close()
        shutil.rmtree(store_root(self.config), ignore_errors=True)

    def _spawn(self, role: str, on_host: str, **arguments: Any) -> StartedProcess:
        spec = {
            "role": role,
            "parent": os.getpid(),
            "membership": str(self.folder),
            "secret": self.secret.hex(),
            "config": self.config.start_fields(),
            **arguments,
        }
        path = self.folder / f"{role}-{on_host if role == 'holder' else ''}.log"
        environ = self.environ.get(on_host if role == "holder" else "", {})
        if shared_nursery is not None and self.rig is None and not environ and self.niceness is None:
            spec |= {"log": str(path), "folder": str(self.working_folders.get(on_host, ""))}
            nursery = shared_nursery()
            pid, channel = nursery.fork(os.environ)
            with channel:
                channel.sendall(json.dumps(spec).encode())
            return ForkedProcess(nursery, pid)
        nice = [] if self.niceness is None else ["nice", "-n", str(self.niceness)]
        with path.open("ab") as log:
            process = subprocess.Popen(
                [*self._prefix(on_host), *nice, sys.executable, "-m", "memstore.testing.clusters.process_main"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=self.niceness is None,
                env={**os.environ, **environ},
                cwd=self.working_folders.get(on_host),
            )
        if process.stdin is not None:
            with process.stdin as stdin:  # as an argument every user of the machine could read the secret
                stdin.write(json.dumps(spec).encode())
        return process

    def start_controller(self, *, on_host: str = "", membership: Path | None = None) -> None:
        """Start a controller, by default where the first one ran; its term outranks an older one (R17).

        `membership` is another path to the folder, so that a test can take it away from this controller alone.
        """
        if self.controller is not None:
            self.replaced.append(self.controller)
        self.controller = self._spawn(
            "controller",
            on_host or self.controller_host,
            settle_s=self.settle_s,
            membership=str(membership or self.controller_way or self.folder),
        )

    def start_holder(self, host: str) -> None:
        """Start a holder on a host; it adopts the arena that is there."""
        proxy = self.proxies.get(host)
        self.started_s[host] = time.monotonic()
        self.holders[host] = self._spawn(
            "holder",
            host,
            host=host,
            peer_address=None if proxy is None else [proxy.address, proxy.port],
            labels=self.labels[host],
            hosts_on_machine=len(self.labels),
            durable_gate=str(self.durable_gate or ""),
        )

    def _prefix(self, host: str) -> list[str]:
        return [] if self.rig is None or not host else self.rig.prefix(host)

    def namespace(self, host: str) -> str:
        """Return the path of the network namespace of a host's processes; "" for this process's own."""
        return "" if self.rig is None else self.rig.namespace(host)

    def announced(self, host: str) -> Callable[[], tuple[str, int]]:
        """Return a function that says where a host's holder listens now."""

        def record() -> tuple[str, int]:
            found = json.loads((self.folder / "hosts" / host).read_text())
            return str(found["address"]), int(found["port"])

        return record

    def add_host(self, host: str, labels: Mapping[str, str]) -> None:
        """Add a machine, and start its holder."""
        self.labels[host] = dict(labels)
        self.start_holder(host)

    def kill_holder(self, host: str, sig: signal.Signals = signal.SIGKILL) -> None:
        """Kill the holder's process; the host's memory stays."""
        process = self.holders.pop(host)
        process.send_signal(sig)
        process.wait(timeout=START_S)

    def kill_controller(self) -> None:
        """Kill the controller's process."""
        if self.controller is not None:
            kill(self.controller)
            self.controller = None

    def forget_membership(self) -> None:
        """Remove announcements and terms, as a fresh start of the whole Ray cluster does."""
        for name in ("hosts", "terms"):
            shutil.rmtree(self.folder / name)

    def kill_all(self) -> None:
        """Send SIGKILL to every holder and the controller; the hosts' memory stays."""
        for process in [*self.holders.values(), self.controller]:
            if process is not None:
                process.kill()
        for host in list(self.holders):
            self.kill_holder(host)
        self.kill_controller()

    def replace_holder(self, host: str) -> StartedProcess:
        """Start a successor beside a holder that still runs; return the old process."""
        old = self.holders[host]
        self.start_holder(host)
        self.replaced.append(old)
        return old

    def lose_host(self, host: str) -> None:
        """Lose a machine: its holder is killed, its memory destroyed, its announcement left behind."""
        self.kill_holder(host)
        shutil.rmtree(self.arena(host))

    def signal_holder(self, host: str, sig: signal.Signals) -> None:
        """Send a signal such as SIGSTOP to the holder."""
        self.holders[host].send_signal(sig)

    def manifests(self, host: str) -> dict[str, bytes]:
        """Return the manifests of a host by file name, without those that go while they are read."""
        found = {}
        for path in sorted((self.arena(host) / "manifests").iterdir()):
            with contextlib.suppress(FileNotFoundError):
                found[path.name] = path.read_bytes()
        return found

    def inventory(self, host: str) -> dict[str, Any]:
        """Return what a host stores, read from its files: manifests, journal, and slots that hold bytes."""
        folder = self.arena(host)
        table = slot_records(folder)
        used = table[(table["state"] == SlotState.SEALED) | (table["state"] == SlotState.RECEIVING)]
        return {
            "manifests": self.manifests(host),
            "journal": (folder / "journal").read_bytes(),
            "slots": sorted(zip(used["state"].tolist(), used["nbytes"].tolist(), used["digest"].tolist(), strict=True)),
        }

    def joined(self, host: str) -> set[str]:
        """Return the hosts that have joined, as a host's journal says."""
        facts = [entry.fact for entry in entries_of(host, read_records(self.arena(host) / "journal"))]
        return {joined for fact in facts if isinstance(fact, HostsJoined) for joined in fact.labels}

    def settled_inventory(self, manifests_count: int) -> dict[str, Any]:
        """Return the inventory of every host that runs, once each has this many manifests and no slot but theirs.

        By then older steps are dropped, slots of half-received shards are given back, and every journal knows which
        hosts joined, which the controller records once a tick.
        """

        def settled() -> dict[str, Any]:
            if not all(set(self.holders) <= self.joined(host) for host in self.holders):
                return {}
            found = {host: self.inventory(host) for host in self.holders}
            is_settled = all(
                len(one["manifests"]) == manifests_count
                and not any(n.startswith(".") for n in one["manifests"])
                and all(state == SlotState.SEALED for state, _, _ in one["slots"])
                and {digest for _, _, digest in one["slots"]} == _named(one["manifests"])
                for one in found.values()
            )
            return found if is_settled and found == {host: self.inventory(host) for host in self.holders} else {}

        inventory: dict[str, Any] = wait_for(settled, f"{manifests_count} manifests on every host")
        return inventory

    def running(self) -> list[str]:
        """Return the hosts whose holder runs."""
        return [host for host, process in self.holders.items() if process.poll() is None]

    def wait_live(self, *hosts: str) -> None:
        """Wait until the controller counts these hosts live, each with the holder that was started last."""

        def are_live() -> bool:
            live = {row["host"]: row["up_s"] for row in self.host_rows() if row["status"] == "live"}
            return all(host in live and live[host] <= time.monotonic() - self.started_s[host] for host in hosts)

        wait_for(are_live, f"live hosts {hosts}")

    def logs(self) -> str:
        """Return all logs, for a failing test."""
        return "\n".join(f"== {p.name}\n{p.read_text()[-4000:]}" for p in sorted(self.folder.glob("*.log")))


def _named(manifests: dict[str, bytes]) -> set[bytes]:
    """Return the digests of all chunks that manifests name."""
    return {chunk.digest for data in manifests.values() for chunk in decode_manifest(data).chunks}


def kill(process: StartedProcess) -> None:
    """Kill and reap a process that this one started."""
    if process.poll() is None:
        process.kill()
    process.wait(timeout=START_S)


# -- process rights -----------------------------------------------------------------------------------
# What the system lets this process do.


CAP_SYS_NICE = 23


def may_lower_nice() -> bool:
    """Return whether this process may lower nice values: many containers forbid it to root as well."""
    [line] = [each for each in Path("/proc/self/status").read_text().splitlines() if each.startswith("CapEff:")]
    return bool(int(line.split()[1], 16) >> CAP_SYS_NICE & 1)
