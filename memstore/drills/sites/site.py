"""The cluster on which a drill is played: its own embedded one, or a running one, where it may break less."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from memstore.admin.cluster import ask, join_ray
from memstore.cli.output import size_text
from memstore.config import Config
from memstore.core.wire.calls import AskStatus
from memstore.core.wire.codec import Request
from memstore.core.wire.replies import Status
from memstore.core.wire.status_rows import JobRow
from memstore.drills.model.catalogue import PLACES, RAY_NAMESPACES
from memstore.drills.ranks.ranks import Rank, RankPool
from memstore.errors import DrillError, MemstoreError
from memstore.shell.arena.folder import arena_folder
from memstore.shell.arena.lock import is_alive
from memstore.shell.on_ray.actors import NAMESPACE, RayMembership, controller_name, live_nodes
from memstore.testing.clusters.embedded import EmbeddedCluster
from memstore.testing.clusters.namespaces import NamespaceRig
from memstore.testing.faults.arena_files import (
    arena_identity,
    check_destroyed,
    check_silent,
    destroy_arena,
    holder_process,
    secret_of,
)
from memstore.testing.faults.processes import Process, kill, memory_available, process_of, wait_gone

P = ParamSpec("P")
R = TypeVar("R")
POLL_S = 0.05
ASK_S = 5.0
VERB_S = 30.0
REMOTE_S = 60.0
WAIT_S = 60.0


class RemoteFaults:
    """An actor that runs faults on the machine of its node."""

    def do(self, work: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Run one function of `memstore.testing.faults`."""
        return work(*args, **options)


class Site:
    """A running store that is reached through Ray. `is_own`: the drill started it."""

    is_own = False

    def __init__(self, config: Config, address: str | None = None) -> None:
        join_ray(
            address, may_create=False
        )  # a new Ray cluster would have no store, and would stay on the user's machine
        self.config = config
        self.pool = RankPool()
        self.unreachable_hosts: set[str] = set()  # hosts whose holder cannot answer
        self._remote_faults: dict[str, Any] = {}

    def close(self) -> None:
        """Kill the processes that the drill started."""
        self.pool.close()
        for actor in self._remote_faults.values():
            ray.kill(actor)
        self._remote_faults.clear()

    # -- looking ------------------------------------------------------------------------------

    def ask(self, request: Request[R], timeout_s: float = VERB_S) -> R:
        """Ask the controller, through a host that is not in `unreachable_hosts`."""
        return ask(request, config=self.config, timeout_s=timeout_s, avoid=self.unreachable_hosts)

    def status(self) -> Status:
        """Return the controller's status; raise TransportError while no controller answers."""
        return self.ask(AskStatus(), timeout_s=ASK_S)

    def job(self, name: str) -> JobRow:
        """Return the status of one job; raise DrillError if the store has no such job."""
        for row in self.status().jobs:
            if row.job == name:
                return row
        raise DrillError(f"the store does not know job {name!r}")

    def racks(self) -> dict[str, list[str]]:
        """Return the live hosts by their `rack` label; hosts without that label are left out."""
        found: dict[str, list[str]] = {}
        for row in self.status().hosts:
            if row.status == "live" and "rack" in row.labels:
                found.setdefault(row.labels["rack"], []).append(row.host)
        return found

    def on_probation(self) -> list[str]:
        """Return the hosts on probation: they died several times lately, so repair gives them no second copy (R29)."""
        return [row.host for row in self.status().hosts if row.is_on_probation]

    def live_hosts(self) -> list[str]:
        """Return the live hosts in the order of their names."""
        return sorted(row.host for row in self.status().hosts if row.status == "live")

    def record(self, host: str) -> dict[str, Any]:
        """Return what a host's holder has registered: address, port, node, pid."""
        found = RayMembership(self.config.store).hosts().get(host)
        if found is None:
            raise DrillError(f"host {host!r} has no holder: the store has {', '.join(self.live_hosts())}")
        return found

    def nodes(self) -> dict[str, str]:
        """Return host -> Ray node of its holder."""
        return {host: str(r["node"]) for host, r in RayMembership(self.config.store).hosts().items()}

    def folder(self, host: str) -> str:
        """Return the path of a host's arena folder, on that host."""
        return str(arena_folder(self.config.arena_dir, store=self.config.store, host=host))

    def places(self) -> list[str]:
        """Return the live hosts in the order in which they get ranks."""
        return self.live_hosts()

    def wait_for(self, what: str, check: Callable[[], Any], timeout_s: float = WAIT_S) -> Any:
        """Poll until `check` returns something true, and return that; a MemstoreError counts as not yet.

        Raises:
            DrillError: `timeout_s` has passed; names `what` and the last error.
        """
        deadline_s, last = time.monotonic() + timeout_s, ""
        while time.monotonic() < deadline_s:
            try:
                found = check()
                if found:
                    return found
            except MemstoreError as exc:
                last = f"; last error: {type(exc).__name__}: {exc}"
            time.sleep(POLL_S)
        raise DrillError(f"waited {timeout_s:g} s in vain for {what}{last}")

    def wait_hosts_live(self, hosts: list[str]) -> None:
        """Wait until all of the hosts are live."""
        self.wait_for(f"hosts {', '.join(hosts)} to be live", lambda: set(hosts) <= set(self.live_hosts()))

    # -- breaking -----------------------------------------------------------------------------

    def do(self, host: str, work: Callable[P, R], *args: P.args, **options: P.kwargs) -> R:
        """Run one function of `memstore.testing.faults` on the machine of a host; return its result."""
        if host not in self._remote_faults:
            self._remote_faults[host] = (
                ray.remote(RemoteFaults)
                .options(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(self.nodes()[host], soft=False))
                .remote()
            )
        try:
            found: R = ray.get(self._remote_faults[host].do.remote(work, *args, **options), timeout=REMOTE_S)
            return found
        except ray.exceptions.RayTaskError as exc:
            raise DrillError(f"{work.__name__} on {host}: {exc.cause if exc.cause is not None else exc}") from exc
        except ray.exceptions.RayError as exc:
            raise DrillError(f"{work.__name__} on {host} did not answer: {str(exc).splitlines()[0]}") from exc

    def reach(self, hosts: list[str]) -> None:
        """Start the actors for faults on the hosts now, so that no fault has to wait for the start of a process."""
        for host in hosts:
            self.do(host, memory_available)

    def controller_process(self) -> tuple[str, Process]:
        """Return a host on the controller's machine, and the controller's process."""
        actor = ray.get_actor(controller_name(self.config.store), namespace=NAMESPACE)
        described = ray.get(actor.describe.remote(), timeout=REMOTE_S)
        host = next((h for h, node in self.nodes().items() if node == described["node"]), None)
        if host is None:
            raise DrillError("the controller's node has no holder: the drill cannot reach its process")
        return host, self.do(host, process_of, int(described["pid"]))

    def may_lose(self, hosts: list[str]) -> bool:
        """Return whether all of these hosts may be lost."""
        return True

    def lose_memory(self, host: str, ranks: list[Rank]) -> int:
        """Kill the holder and the drill's ranks of a host, and destroy its arena; return the bytes that were lost.

        The store starts a new holder with an empty arena.
        """
        folder, record = self.folder(host), self.record(host)
        secret = self.do(host, secret_of, folder)
        victims = [self.do(host, holder_process, folder), *((r.pid, r.start) for r in ranks if r.host == host)]
        before = self.do(host, arena_identity, folder)
        self.do(host, kill, victims)
        self.do(host, wait_gone, victims)
        nbytes = self.do(host, destroy_arena, folder)
        self.do(host, check_destroyed, folder, before)
        self.do(host, check_silent, host, record, self.config, secret)
        return nbytes

    def lose_host(self, host: str, ranks: list[Rank]) -> str:
        """Destroy a host as far as this site may, and check that it is gone; return what was done, as text."""
        nbytes = self.lose_memory(host, ranks)
        return f"SIGKILL to the holder and the drill's ranks of {host}, arena file destroyed ({size_text(nbytes)} gone)"

    def end_drill(self, hosts: list[str]) -> None:
        """Wait after a drill until the hosts that were live before it are live again."""
        if hosts:
            self.wait_hosts_live(hosts)


class EmbeddedSite(Site):
    """An embedded cluster: raylets on this machine. Every host but Ray's head may be lost as a whole."""

    is_own = True

    def __init__(self, cluster: EmbeddedCluster, pool: RankPool | None = None) -> None:
        super().__init__(cluster.config)
        self.cluster = cluster
        self.pool = pool or self.pool
        self.heals_at_once = True  # replace lost hosts after each drill; else only when `heal` is called
        self.lost: dict[str, dict[str, str]] = {}
        self.late: dict[str, dict[str, str]] = {}  # labels of the host that was left out when Ray was started again
        self.headless: list[Process] = []  # raylets and holders of the other hosts when Ray's head died
        self.left_behind: list[Process] = []  # all processes of the other hosts at that moment

    @property
    def head(self) -> str:
        """Return the host of Ray's head and of this driver."""
        return next(iter(self.cluster.labels))

    @property
    def links(self) -> NamespaceRig:
        """Return what cuts the hosts' links; raise DrillError if the hosts have none."""
        if self.cluster.rig is None:
            raise DrillError(f"the hosts of this cluster have no links to cut: it needs {PLACES[RAY_NAMESPACES]}")
        return self.cluster.rig

    def do(self, host: str, work: Callable[P, R], *args: P.args, **options: P.kwargs) -> R:
        """Run one function of `memstore.testing.faults` here: all hosts are on this machine."""
        return work(*args, **options)

    def places(self) -> list[str]:
        """Return the live hosts, the head last: it cannot be lost; so a job with few ranks has none on it."""
        return sorted(self.live_hosts(), key=lambda host: (host == self.head, host))

    def may_lose(self, hosts: list[str]) -> bool:
        """Return whether the head, with the driver and the GCS, is not among the hosts."""
        return self.head not in hosts

    def lose_host(self, host: str, ranks: list[Rank]) -> str:
        """Kill every process of a host's raylet and destroy its arena; check that all of it is gone."""
        folder, record = self.folder(host), self.record(host)
        secret, victims = secret_of(folder), self.cluster.node_processes(host)
        strangers = [r.pid for r in ranks if r.host == host and (r.pid, r.start) not in victims]
        if strangers:
            raise DrillError(f"ranks {strangers} on {host} are not below its raylet: killing it would not kill them")
        before = arena_identity(folder)
        self.lost[host] = dict(self.cluster.labels[host])
        self.pool.forget(host)
        done = self.cluster.lose_host(host)
        wait_gone(victims)
        check_destroyed(folder, before)
        check_silent(host, record, self.config, secret)
        gone = size_text(done["nbytes"])
        return f"SIGKILL to all {len(victims)} processes of {host}, arena file destroyed ({gone} gone)"

    def wait_given_up(self, node: str) -> None:
        """Wait until Ray's head has declared a node dead; its raylet ends when it learns that."""
        self.wait_for(f"Ray to give node {node[:12]} up", lambda: node not in {n["NodeID"] for n in live_nodes()})

    def replace_raylet(self, host: str, left: list[Process]) -> None:
        """Kill what a raylet has left behind, and start Ray again on its host; the new holder adopts the arena."""
        kill(left)  # workers outlive a killed raylet by a minute or more
        wait_gone(left)
        self.pool.forget(host)
        self.cluster.replace_raylet(host)
        self.wait_hosts_live([host])

    def end_ray(self) -> int:
        """Kill every process of every host at once; return how many. Until `start_ray` no store answers."""
        victims = self.cluster.kill_everything()
        self._forget_ranks()
        return len(victims)

    def end_head(self) -> int:
        """Kill every process of Ray's head; return how many. The other raylets end by themselves a while later."""
        others = [host for host in self.cluster.labels if host != self.head]
        holders = [holder_process(self.folder(host)) for host in others]
        self.headless = [*map(self.cluster.raylet, others), *holders]
        self.left_behind = [victim for host in others for victim in self.cluster.node_processes(host)]
        victims = self.cluster.kill_head()
        self._forget_ranks()
        wait_gone(victims)
        return len(victims)

    def start_head(self) -> list[int]:
        """Start a head that ended again; return the pids of raylets and holders of other hosts that ended meanwhile."""
        self.cluster.start_head()
        self.wait_hosts_live(list(self.cluster.labels))
        return [pid for pid, start in self.headless if not is_alive(pid, start)]

    def wait_ray_ended(self, limit_s: float) -> float:
        """Wait until raylets and holders of the other hosts have ended by themselves; return the seconds."""
        started_s = time.monotonic()
        wait_gone(self.headless, limit_s)
        took_s = time.monotonic() - started_s
        kill(self.left_behind)  # Ray's agents outlive their raylet
        self.cluster.kill_everything()  # no process is left; this clears the cluster's own list of nodes
        return took_s

    def start_ray(self, *, without: str = "") -> None:
        """Start Ray and the store again on the same hosts, except one if it is named."""
        if without:
            self.late = {without: self.cluster.labels.pop(without)}
        self.cluster.start()
        self.wait_hosts_live(list(self.cluster.labels))

    def join_late(self, host: str) -> None:
        """Let the host join that `start_ray` left out; do nothing if it has joined already."""
        labels = self.late.pop(host, None)
        if labels is not None:
            self.cluster.add_node(host, labels)
            self.wait_hosts_live([host])

    def _forget_ranks(self) -> None:
        for host in self.cluster.labels:
            self.pool.forget(host)

    def end_drill(self, hosts: list[str]) -> None:
        """Replace the lost hosts if `heals_at_once`, and wait until all others are live."""
        if self.heals_at_once:
            self.heal()
        super().end_drill([host for host in hosts if host not in self.lost])

    def heal(self) -> None:
        """Add new machines with the names and labels of the lost ones."""
        for host, labels in list(self.lost.items()):
            destroy_arena(self.folder(host))
            self.cluster.add_node(host, labels)
            del self.lost[host]
        self.wait_hosts_live(list(self.cluster.labels))
