"""The cluster of network drills: hosts in network namespaces, with processes that run without Ray.

Ray declares a silent raylet dead and kills its ranks; so with Ray every cut would be a killed host. Here only the store
reacts to the cut. The peers of one host, VIA, reach it through a proxy that can change bytes. The controller has a host
of its own, and there is a spare host for its successor. Read `scenes_network.py` next.
"""

from __future__ import annotations

import contextlib
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from memstore.config import MIB, Config
from memstore.core.cluster.facts import StepCommitted
from memstore.core.journal.records import entries_of
from memstore.drills.ranks.ranks import ForkedPool, Rank
from memstore.drills.sites.site import P, R, Site
from memstore.errors import DrillError
from memstore.shell.arena.journal_file import JOURNAL_NAME, read_records
from memstore.testing.clusters.namespaces import NamespaceRig, enter
from memstore.testing.clusters.processes import ProcessCluster, kill
from memstore.testing.clusters.scratch import racks
from memstore.testing.faults.fault_proxy import FaultProxy
from memstore.testing.ranks.rank_process import LOG_VARIABLE, RankNursery

VIA, HEAD, SPARE = "via", "head", "spare"
CHUNK_BYTES = MIB // 4
PROBE_S = 0.3
SEND_S = 10.0
T = TypeVar("T")


class NamespacesSite(Site):
    """A store whose hosts are network namespaces, with plain processes as holders, controller and ranks."""

    is_own = True

    def __init__(self, cluster: ProcessCluster, rig: NamespaceRig, nursery: RankNursery) -> None:
        self.config: Config = cluster.config
        self.cluster, self.rig = cluster, rig
        self.pool = ForkedPool(nursery, rig.namespace)
        self.unreachable_hosts: set[str] = set()
        self.controller_host, self.spare_host = HEAD, SPARE
        self.old_controller: Any = None  # its process, once another controller has taken over

    def close(self) -> None:
        """Kill the idle ranks."""
        self.pool.close()

    def do(self, host: str, work: Callable[P, R], *args: P.args, **options: P.kwargs) -> R:
        """Run one function of `memstore.testing.faults` here: all hosts are on this machine."""
        return work(*args, **options)

    def nodes(self) -> dict[str, str]:
        """Return nothing: there are no Ray nodes."""
        return {}

    def record(self, host: str) -> dict[str, Any]:
        """Return what a host's holder has registered: address and port."""
        address, port = self.cluster.announced(host)()
        return {"address": address, "port": port}

    def places(self) -> list[str]:
        """Return the live hosts without VIA; a drill that needs VIA adds it."""
        return [host for host in self.live_hosts() if host != VIA]

    def may_lose(self, hosts: list[str]) -> bool:
        """Return True: no process outside the drill depends on a host of this site."""
        return True

    def lose_host(self, host: str, ranks: list[Rank]) -> str:
        """Raise DrillError: network drills cut links and leave memory alone."""
        raise DrillError(f"{host} is not lost by a drill of the network")

    def end_drill(self, hosts: list[str]) -> None:
        """Repair what the drill left broken, and wait until the hosts are live."""
        self.heal()
        super().end_drill(hosts)

    # -- the network --------------------------------------------------------------------------

    @property
    def proxy(self) -> FaultProxy:
        """Return the proxy through which peers reach VIA."""
        return self.cluster.proxies[VIA]

    def reaches(self, target: str, source: str) -> bool:
        """Return whether a datagram from `source` arrives at `target`; the other direction is not tried."""
        with in_namespace(self.rig.namespace(target), _datagram_socket) as listener:
            listener.bind((self.rig.address(target), 0))
            listener.settimeout(PROBE_S)
            with in_namespace(self.rig.namespace(source), _datagram_socket) as sender:
                try:
                    sender.sendto(b"?", listener.getsockname())
                    return listener.recv(16) == b"?"
                except OSError:  # the sender's kernel refuses (blackhole route), or nothing arrives in time
                    return False

    def check_silent_between(self, target: str, source: str) -> None:
        """Raise DrillError if a datagram from `source` arrives at `target`: then the fault did not take effect."""
        if self.reaches(target, source):
            raise DrillError(f"{target} still receives from {source}: the fault did not take effect")

    def bits_per_s(self, source: str, target: str, nbytes: int) -> float:
        """Send `nbytes` from one host to another over TCP; return the rate."""
        with in_namespace(
            self.rig.namespace(target), lambda: socket.create_server((self.rig.address(target), 0))
        ) as at:
            address = at.getsockname()
            with in_namespace(self.rig.namespace(source), lambda: socket.create_connection(address, SEND_S)) as out:
                end, _ = at.accept()
                with end:
                    end.settimeout(SEND_S)
                    started_s, left = time.monotonic(), nbytes
                    sender = threading.Thread(target=out.sendall, args=(bytes(nbytes),), daemon=True)
                    sender.start()
                    while left:
                        got = len(end.recv(min(left, 65536)))
                        if not got:
                            raise DrillError(f"the connection from {source} to {target} ended {left} bytes early")
                        left -= got
                    took_s = time.monotonic() - started_s
                    sender.join(timeout=SEND_S)
        return nbytes * 8 / took_s

    def heal(self) -> None:
        """Repair all links, connect every controller to the membership, and end a controller that was replaced."""
        self.rig.heal_all()
        self.unreachable_hosts.clear()
        self.connect_membership()
        if self.old_controller is not None:
            kill(self.old_controller)
            self.old_controller = None

    # -- controllers --------------------------------------------------------------------------

    def cut_membership(self) -> None:
        """Cut the controller off from the membership, which elects controllers; the next one reaches it (R17)."""
        way = self.cluster.controller_way
        if way is not None:
            way.unlink(missing_ok=True)

    def connect_membership(self) -> None:
        """Connect every controller to the membership again."""
        for number in range(2):
            way = self.cluster.folder / f"way{number}"
            if not way.is_symlink():
                way.symlink_to(self.cluster.folder)

    def elect_spare(self) -> None:
        """Start a controller on the spare host, as Ray does when the first one's node is lost."""
        self.old_controller = self.cluster.controller
        way = self.cluster.folder / ("way1" if self.cluster.controller_way == self.cluster.folder / "way0" else "way0")
        if not way.is_symlink():
            way.symlink_to(self.cluster.folder)
        self.cluster.controller_way = way
        self.controller_host, self.spare_host = self.spare_host, self.controller_host
        self.cluster.start_controller(on_host=self.controller_host)

    def commits(self, hosts: list[str]) -> list[StepCommitted]:
        """Return the commits that are recorded in the journals of some hosts."""
        found = []
        for host in hosts:
            entries = entries_of(host, read_records(Path(self.folder(host)) / JOURNAL_NAME))
            found += [entry.fact for entry in entries if isinstance(entry.fact, StepCommitted)]
        return found


def in_namespace(namespace: str, make: Callable[[], T]) -> T:
    """Make a socket in a network namespace. A thread enters the namespace for it, so that the caller's stays as it is.

    Raises:
        DrillError: the socket could not be made within 2 * SEND_S.
    """
    made: list[T] = []
    problems: list[Exception] = []

    def work() -> None:
        try:
            enter(namespace)
            made.append(make())
        except (OSError, DrillError) as exc:
            problems.append(exc)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(timeout=2 * SEND_S)
    if not made:
        raise DrillError(f"no socket in {namespace}: {problems or 'nothing happened'}")
    return made[0]


def _datagram_socket() -> socket.socket:
    return socket.socket(socket.AF_INET, socket.SOCK_DGRAM)


@contextlib.contextmanager
def namespaces_site(hosts_count: int, *, arena_bytes: int) -> Iterator[NamespacesSite]:
    """Open a site with hosts h1, h2, ... by turns in two racks, VIA in the second, and product settings. Needs root."""
    labels = racks(hosts_count) | {VIA: {"rack": "r2"}}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="memstore-drill-")))
        nursery = stack.enter_context(RankNursery())
        nursery.env[LOG_VARIABLE] = str(folder / "ranks.log")  # faults make a rank's link log warnings
        rig = stack.enter_context(NamespaceRig([*labels, HEAD, SPARE]))
        cluster = ProcessCluster(
            folder,
            labels,
            arena_bytes=arena_bytes,
            rig=rig,
            controller_host=HEAD,
            proxied=[VIA],
            chunk_bytes=CHUNK_BYTES,
            detect=Config.detect,
        )
        cluster.controller_way = folder / "way0"
        cluster.controller_way.symlink_to(folder)
        site = NamespacesSite(stack.enter_context(cluster), rig, nursery)
        yield stack.enter_context(contextlib.closing(site))
