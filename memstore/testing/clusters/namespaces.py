"""Hosts as network namespaces of one machine: a veth each into one bridge, with links to cut, block and slow down.

    host h0  eth0 198.18.n.11 --- p0 \\
    host h1  eth0 198.18.n.12 --- p1 -- br0 (a namespace of its own) -- root --- ms-<pid>-<n> 198.18.n.1 (this machine)

With `second_link` each host has an eth1 too, with an address in another network, and br1 joins these.

No namespace has a name. Each is kept by one process, which ends when the rig's owner ends in any way, and the links
inside go with it. `sweep` removes what outlives a killed owner: the owner's pid proves whose it was. Needs root.
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import json
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from memstore.errors import DrillError
from memstore.shell.arena.lock import is_alive, process_start_time
from memstore.testing.faults.processes import Started

COMMAND_S = 20.0
NETWORKS = list(ipaddress.IPv4Network("198.18.0.0/15").subnets(new_prefix=24))
"""For benchmarks of isolated networks (RFC 2544): no real network has these addresses."""
FIRST_HOST = 11  # 198.18.n.11; .1 is this machine's own end
HOSTS_MAX = 240
OWNER = "MEMSTORE_RIG"  # environment variable of processes in a rig: its owner, for `sweep`
CLONE_NEWNET = 0x40000000
_SWITCH = ""  # the bridge's namespace
_PROBE = """ip link add t0 type veth peer name t1 && ip link add t2 type bridge && ip link set t1 master t2 &&
tc qdisc replace dev t0 root tbf rate 1000000bit burst 16384 latency 50ms && ip route add blackhole 198.18.0.1/32"""


def available() -> str | None:
    """Say why no rig can be made here (not root, a tool or a kernel feature missing), or None."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "tc", "unshare", "nsenter") if shutil.which(tool) is None]
    if missing:
        return f"network namespaces need the tools {', '.join(missing)}"
    try:
        _run(["unshare", "--net", "sh", "-c", _PROBE])
    except DrillError as exc:
        return f"network namespaces do not work here: {exc}"
    return None


class NamespaceRig(Started):
    """One namespace per host. Several rigs can run side by side."""

    device = "eth0"

    def __init__(self, hosts: Iterable[str], *, second_link: bool = False) -> None:
        self.hosts: list[str] = []
        self._has_second = second_link
        self._wanted = list(hosts)
        self._keepers: dict[str, subprocess.Popen[bytes]] = {}
        self._started: list[subprocess.Popen[Any]] = []
        self._blocked: set[tuple[str, str]] = set()  # (from, to)
        self._shaped: set[str] = set()
        self._claims: list[socket.socket] = []
        self._link = ""
        self._owner = ""
        self.network = self.second_network = NETWORKS[0]

    def start(self) -> None:
        """Make the namespaces and their links."""
        number = self._take_network()
        self.network = NETWORKS[number]
        if self._has_second:
            self.second_network = NETWORKS[self._take_network()]
        self._link = f"ms-{os.getpid()}-{number}"
        self._owner = f"{os.getpid()}-{process_start_time(os.getpid())}-{number}"
        self._keep(_SWITCH)
        self._ip(_SWITCH, "link set lo up", "link add br0 type bridge", "link set br0 up")
        if self._has_second:
            self._ip(_SWITCH, "link add br1 type bridge", "link set br1 up")
        pid = self._keepers[_SWITCH].pid
        _run(["ip", "link", "add", self._link, "type", "veth", "peer", "name", "root", "netns", str(pid)])
        _run(["ip", "addr", "add", f"{self.root_address}/24", "dev", self._link])
        _run(["ip", "link", "set", self._link, "up"])
        self._ip(_SWITCH, "link set root master br0", "link set root up")
        for host in self._wanted:
            self.add_host(host)

    def stop(self) -> None:
        """Kill every process in the rig and remove every link; a second call does nothing."""
        for host in self.hosts:
            self.kill(host)
        for process in self._started:
            process.kill()
            process.wait(timeout=COMMAND_S)
        self._started.clear()
        if self._link and Path(f"/sys/class/net/{self._link}").exists():
            _run(["ip", "link", "delete", self._link])  # the kernel would do it later, by itself
        for keeper in self._keepers.values():
            keeper.kill()
            keeper.communicate(timeout=COMMAND_S)
        self._keepers.clear()
        self.hosts.clear()
        for claim in self._claims:
            claim.close()

    def _take_network(self) -> int:
        """Claim a network that no other rig has and no address or route of this machine touches."""
        taken = [ipaddress.IPv4Network(a, strict=False) for a in _addresses_and_routes()]
        for number in ((os.getpid() + i) % len(NETWORKS) for i in range(len(NETWORKS))):
            claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            try:
                claim.bind(f"\0memstore-rig-{number}")  # the kernel's, so it ends with its owner
            except OSError:
                claim.close()
                continue
            if any(NETWORKS[number].overlaps(network) for network in taken):
                claim.close()
                continue
            self._claims.append(claim)
            return number
        raise DrillError(f"all {len(NETWORKS)} networks of 198.18.0.0/15 are in use: end some rigs, or sweep()")

    def _keep(self, name: str) -> None:
        """Make a namespace and its keeper: a process that ends with its input, and so with this process."""
        argv = ["unshare", "--net", "env", f"{OWNER}={self._owner}", "cat"]
        keeper = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
        self._keepers[name] = keeper
        if keeper.stdin is None or keeper.stdout is None:
            raise DrillError("a namespace's keeper has no pipes")
        keeper.stdin.write(b".")  # the keeper echoes it as soon as the namespace is there
        ready, _, _ = select.select([keeper.stdout], [], [], COMMAND_S)
        if not ready or keeper.stdout.read(1) != b".":
            raise DrillError(f"no network namespace within {COMMAND_S:g} s: {available() or 'unshare says nothing'}")

    def add_host(self, host: str) -> None:
        """Add a host to the network."""
        number = len(self.hosts)
        if host in self._keepers or not host or number >= HOSTS_MAX:
            raise DrillError(f"host {host!r} is there already, has no name, or is one too many of {HOSTS_MAX}")
        self._keep(host)
        self.hosts.append(host)
        self._ip(
            _SWITCH,
            f"link add p{number} type veth peer name eth0 netns {self._keepers[host].pid}",
            f"link set p{number} master br0",
            f"link set p{number} up",
        )
        self._ip(host, "link set lo up", f"addr add {self.address(host)}/24 dev eth0", "link set eth0 up")
        if self._has_second:
            pid, address = self._keepers[host].pid, self.second_network[FIRST_HOST + number]
            self._ip(
                _SWITCH,
                f"link add q{number} type veth peer name eth1 netns {pid}",
                f"link set q{number} master br1",
                f"link set q{number} up",
            )
            self._ip(host, f"addr add {address}/24 dev eth1", "link set eth1 up")

    # -- where things are -----------------------------------------------------------------------

    @property
    def root_address(self) -> str:
        """The address of this machine in the rig's network."""
        return str(self.network[1])

    @property
    def root_device(self) -> str:
        """The network device of this machine in the rig's network; that of each host is `device`."""
        return self._link

    def address(self, host: str) -> str:
        """Return the address of a host."""
        return str(self.network[FIRST_HOST + self.hosts.index(host)])

    def namespace(self, host: str) -> str:
        """Return the path of a host's namespace, for `enter`."""
        return f"/proc/{self._keepers[host].pid}/ns/net"

    def prefix(self, host: str) -> list[str]:
        """Return the words to put before an argv so that it runs on a host, in the same process."""
        return ["nsenter", f"--net={self.namespace(host)}", "env", f"{OWNER}={self._owner}"]

    def popen(self, host: str, argv: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a process on a host; it ends with the rig."""
        process = subprocess.Popen([*self.prefix(host), *argv], **options)
        self._started.append(process)
        return process

    def processes(self, host: str) -> list[int]:
        """Return the pids of a host's processes, without the namespace's keeper."""
        inode = os.stat(self.namespace(host)).st_ino
        keeper = self._keepers[host].pid
        found = []
        for entry in os.listdir("/proc"):
            if entry.isdigit() and int(entry) != keeper:
                with contextlib.suppress(OSError):
                    if os.stat(f"/proc/{entry}/ns/net").st_ino == inode:
                        found.append(int(entry))
        return found

    def kill(self, host: str) -> list[int]:
        """Send SIGKILL to every process of a host, as if its power failed; return the pids."""
        pids = self.processes(host)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return pids

    def sent_bytes(self, host: str, device: str = "eth0") -> int:
        """Return how many bytes have left a host so far, by the counter of a network device of its."""
        return self._counters(host, device)[8]

    def received_bytes(self, host: str, device: str = "eth0") -> int:
        """Return how many bytes have come to a host so far, by the counter of a network device of its."""
        return self._counters(host, device)[0]

    def _counters(self, host: str, device: str) -> list[int]:
        lines = Path(f"/proc/{self._keepers[host].pid}/net/dev").read_text(encoding="ascii").splitlines()
        line = next(line for line in lines if line.strip().startswith(f"{device}:"))
        return [int(count) for count in line.split(":")[1].split()]

    # -- faults -------------------------------------------------------------------------------

    def cut(self, host: str) -> None:
        """Cut a host off at the switch: no packet goes in or out, and no connection is reset."""
        self._ip(_SWITCH, f"link set {self._port(host)} down")

    def heal(self, host: str) -> None:
        """Undo `cut`."""
        self._ip(_SWITCH, f"link set {self._port(host)} up")

    def cut_second(self, host: str) -> None:
        """Cut a host's second link at the switch: its own device stays up, and no connection is reset."""
        self._ip(_SWITCH, f"link set q{self.hosts.index(host)} down")

    def heal_second(self, host: str) -> None:
        """Undo `cut_second`."""
        self._ip(_SWITCH, f"link set q{self.hosts.index(host)} up")

    def block(self, source: str, target: str, *, one_way: bool = False) -> None:
        """Lose every packet from `source` to `target`, and in the other direction too unless `one_way`.

        Open connections fall silent. A new one from `source` is refused by its own kernel; one from `target` times out.
        """
        for a, b in [(source, target)] if one_way else [(source, target), (target, source)]:
            if (a, b) not in self._blocked:
                self._ip(a, f"route add blackhole {self.address(b)}/32")
                self._blocked.add((a, b))

    def unblock(self, source: str, target: str) -> None:
        """Undo `block` in both directions."""
        for a, b in {(source, target), (target, source)} & self._blocked:
            self._ip(a, f"route delete blackhole {self.address(b)}/32")
            self._blocked.discard((a, b))

    def partition(self, group_a: Iterable[str], group_b: Iterable[str]) -> None:
        """Block every pair across two groups."""
        others = list(group_b)
        for a in group_a:
            for b in others:
                self.block(a, b)

    def shape(self, host: str, rate_bits_per_s: int, *, burst_bytes: int = 16384, latency_ms: int = 50) -> None:
        """Limit a host's link in both directions; a packet that would wait longer than `latency_ms` is lost."""
        self._shaped.add(host)
        rule = f"root tbf rate {rate_bits_per_s}bit burst {burst_bytes} latency {latency_ms}ms"
        self._batch("tc", host, f"qdisc replace dev eth0 {rule}")
        self._batch("tc", _SWITCH, f"qdisc replace dev {self._port(host)} {rule}")

    def unshape(self, host: str) -> None:
        """Undo `shape`; do nothing if the link has its full speed."""
        if host in self._shaped:
            self._shaped.discard(host)
            self._batch("tc", host, "qdisc delete dev eth0 root")
            self._batch("tc", _SWITCH, f"qdisc delete dev {self._port(host)} root")

    def heal_all(self) -> None:
        """Undo every cut, block and limit of the rate."""
        for host in list(self._shaped):
            self.unshape(host)
        for source, target in list(self._blocked):
            self.unblock(source, target)
        for host in self.hosts:
            self.heal(host)

    def _port(self, host: str) -> str:
        return f"p{self.hosts.index(host)}"

    def _ip(self, name: str, *lines: str) -> None:
        self._batch("ip", name, *lines)

    def _batch(self, tool: str, name: str, *lines: str) -> None:
        argv = ["nsenter", f"--net=/proc/{self._keepers[name].pid}/ns/net", tool, "-batch", "-"]
        _run(argv, text="\n".join(lines) + "\n")


def enter(namespace: str) -> None:
    """Move the calling thread, and all that it starts later, into a namespace; for a fork with one thread."""
    with open(namespace, "rb") as file:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(file.fileno(), CLONE_NEWNET) != 0:
            raise DrillError(f"cannot enter {namespace}: {os.strerror(ctypes.get_errno())}")


def sweep() -> list[str]:
    """Remove the leftovers of rigs whose owners are dead: links by the pid in their name, processes by environment."""
    removed = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            environment = Path(f"/proc/{entry}/environ").read_bytes()
            owner = re.search(rb"(?:^|\0)" + OWNER.encode() + rb"=(\d+)-(\d+)-\d+(?:\0|$)", environment)
            if owner is not None and not is_alive(int(owner[1]), int(owner[2])):
                os.kill(int(entry), signal.SIGKILL)
                removed.append(f"process {entry}")
    for link in os.listdir("/sys/class/net"):
        named = re.fullmatch(r"ms-(\d+)-\d+", link)
        if named is not None and process_start_time(int(named[1])) is None:
            with contextlib.suppress(DrillError):  # the kernel was faster
                _run(["ip", "link", "delete", link])
            _wait_gone(Path(f"/sys/class/net/{link}"))
            removed.append(f"link {link}")
    return removed


def _wait_gone(path: Path) -> None:
    deadline_s = time.monotonic() + COMMAND_S
    while path.exists():
        if time.monotonic() > deadline_s:
            raise DrillError(f"{path} is still there after {COMMAND_S:g} s")
        time.sleep(0.02)


def _addresses_and_routes() -> list[str]:
    """Return every IPv4 network of this namespace's addresses and routes, without the default route."""
    addresses = json.loads(_run(["ip", "-json", "-4", "addr"]) or "[]")
    routes = json.loads(_run(["ip", "-json", "-4", "route"]) or "[]")
    found = [f"{a['local']}/{a['prefixlen']}" for row in addresses for a in row.get("addr_info", ())]
    return found + [row["dst"] for row in routes if row["dst"] != "default"]


def _run(argv: Sequence[str], *, text: str = "") -> str:
    """Run a command; raise DrillError with its output if it fails or takes longer than COMMAND_S."""
    try:
        done = subprocess.run(argv, input=text, text=True, capture_output=True, timeout=COMMAND_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise DrillError(f"{' '.join(argv)} {text!r}: {exc}") from exc
    if done.returncode != 0:
        raise DrillError(f"{' '.join(argv)} {text!r} failed with status {done.returncode}: {done.stderr.strip()}")
    return done.stdout
