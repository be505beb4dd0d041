"""The cluster a drill runs on: its own embedded one, or the one that is running, where it may touch less."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from memstore.admin.cluster import ask, join_ray
from memstore.config import Config
from memstore.drills.breaking import faults
from memstore.drills.model.report import gib
from memstore.drills.ranks.ranks import Rank, RankPool
from memstore.errors import DrillError, MemstoreError
from memstore.shell.arena.folder import arena_folder
from memstore.shell.on_ray.actors import NAMESPACE, controller_name, live_nodes
from memstore.shell.on_ray.membership import RayMembership
from memstore.testing.clusters.embedded import EmbeddedCluster

POLL_S = 0.05
ASK_S = 5.0
VERB_S = 30.0
HANDS_S = 60.0
WAIT_S = 60.0


class Hands:
    """Runs a fault on the machine of its node."""

    def do(self, name: str, args: tuple[Any, ...]) -> Any:
        """Run one function of `faults.HANDS`."""
        return faults.HANDS[name](*args)


class Site:
    """A running store, reached through Ray. `is_own` says whether the drill brought it."""

    is_own = False

    def __init__(self, config: Config, address: str | None = None) -> None:
        join_ray(address, may_create=False)  # a cluster begun here would have no store, and stay a surprise
        self.config = config
        self.pool = RankPool()
        self.deaf: set[str] = set()  # hosts whose holder answers nobody: a question through it would only wait
        self._hands: dict[str, Any] = {}

    def close(self) -> None:
        """End what the drill started."""
        self.pool.close()
        for actor in self._hands.values():
            ray.kill(actor)
        self._hands.clear()

    # -- looking ------------------------------------------------------------------------------

    def ask(self, verb: str, body: dict[str, Any] | None = None, timeout_s: float = VERB_S) -> dict[str, Any]:
        """Ask the controller, through none of the hosts that a scene has put into `deaf`."""
        return ask(verb, body, config=self.config, timeout_s=timeout_s, avoid=self.deaf)

    def status(self) -> dict[str, Any]:
        """Ask the controller; TransportError while it is away."""
        return self.ask("status", timeout_s=ASK_S)

    def job(self, name: str) -> dict[str, Any]:
        """Return the status of one job; DrillError if the store does not know it."""
        for row in self.status()["jobs"]:
            if row["job"] == name:
                return dict(row)
        raise DrillError(f"the store does not know job {name!r}")

    def racks(self) -> dict[str, list[str]]:
        """Live hosts by the value of their `rack` label; hosts without one are left out."""
        found: dict[str, list[str]] = {}
        for row in self.status()["hosts"]:
            if row["status"] == "live" and "rack" in row["labels"]:
                found.setdefault(str(row["labels"]["rack"]), []).append(str(row["host"]))
        return found

    def on_probation(self) -> list[str]:
        """Hosts that died too often lately for repair to give them a second copy (R29)."""
        return [host["host"] for host in self.status()["hosts"] if host["is_on_probation"]]

    def live_hosts(self) -> list[str]:
        """Hosts that can take ranks, sorted."""
        return sorted(row["host"] for row in self.status()["hosts"] if row["status"] == "live")

    def record(self, host: str) -> dict[str, Any]:
        """Return what a host's holder announced: address, port, node, pid."""
        found = RayMembership(self.config.store).hosts().get(host)
        if found is None:
            raise DrillError(f"host {host!r} has no holder: the store has {', '.join(self.live_hosts())}")
        return found

    def nodes(self) -> dict[str, str]:
        """Host -> Ray node that carries its holder."""
        return {host: str(r["node"]) for host, r in RayMembership(self.config.store).hosts().items()}

    def folder(self, host: str) -> str:
        """The arena folder of a host, on that host."""
        return str(arena_folder(self.config.arena_dir, store=self.config.store, host=host))

    def places(self) -> list[str]:
        """Live hosts in the order in which ranks are given to them."""
        return self.live_hosts()

    def wait_for(self, what: str, check: Callable[[], Any], timeout_s: float = WAIT_S) -> Any:
        """Poll until `check` returns something true; an answer that fails to come counts as no.

        Raises:
            DrillError: it did not within `timeout_s`; names `what` and the last error.
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
        """Wait until every one of the hosts has a holder that answers."""
        self.wait_for(f"hosts {', '.join(hosts)} to be live", lambda: set(hosts) <= set(self.live_hosts()))

    # -- breaking -----------------------------------------------------------------------------

    def do(self, host: str, name: str, *args: Any) -> Any:
        """Run one of `faults.HANDS` on the machine of a host."""
        if host not in self._hands:
            self._hands[host] = (
                ray.remote(Hands)
                .options(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(self.nodes()[host], soft=False))
                .remote()
            )
        try:
            return ray.get(self._hands[host].do.remote(name, args), timeout=HANDS_S)
        except ray.exceptions.RayTaskError as exc:
            raise DrillError(f"{name} on {host}: {exc.cause if exc.cause is not None else exc}") from exc
        except ray.exceptions.RayError as exc:
            raise DrillError(f"{name} on {host} did not answer: {str(exc).splitlines()[0]}") from exc

    def reach(self, hosts: list[str]) -> None:
        """Start hands on the hosts, so that a fault waits for no process to start."""
        for host in hosts:
            self.do(host, "memory_available")

    def controller_process(self) -> tuple[str, faults.Process]:
        """A host on the controller's machine, and its process there."""
        actor = ray.get_actor(controller_name(self.config.store), namespace=NAMESPACE)
        described = ray.get(actor.describe.remote(), timeout=HANDS_S)
        host = next((h for h, node in self.nodes().items() if node == described["node"]), None)
        if host is None:
            raise DrillError("the controller's node has no holder: the drill cannot reach its process")
        return host, self.do(host, "process_of", int(described["pid"]))

    def may_lose(self, hosts: list[str]) -> bool:
        """Say whether `lose_host` may be called for all of them."""
        return True

    def lose_memory(self, host: str, ranks: list[Rank]) -> int:
        """Kill the holder and the drill's ranks of a host, destroy its arena; the store starts a new, empty one."""
        folder, record = self.folder(host), self.record(host)
        secret = self.do(host, "secret_of", folder)
        victims = [self.do(host, "holder_process", folder), *((r.pid, r.start) for r in ranks if r.host == host)]
        before = self.do(host, "arena_identity", folder)
        self.do(host, "kill", victims)
        self.do(host, "wait_gone", victims)
        nbytes = int(self.do(host, "destroy_arena", folder))
        self.do(host, "check_destroyed", folder, before)
        self.do(host, "check_silent", record, self.config, secret)
        return nbytes

    def lose_host(self, host: str, ranks: list[Rank]) -> str:
        """Lose a host as far as this site may; return what was done, in words. Checked to have taken effect."""
        nbytes = self.lose_memory(host, ranks)
        return f"SIGKILL to the holder and the drill's ranks of {host}, arena file destroyed ({gib(nbytes)} gone)"

    def end_drill(self, hosts: list[str]) -> None:
        """A drill has ended: wait until the hosts that were live before it are live again."""
        if hosts:
            self.wait_hosts_live(hosts)


class EmbeddedSite(Site):
    """An embedded cluster: raylets on this machine, of which any but the head may be lost whole."""

    is_own = True

    def __init__(self, cluster: EmbeddedCluster) -> None:
        super().__init__(cluster.config)
        self.cluster = cluster
        self.heals_at_once = True  # after each drill, else when told
        self.lost: dict[str, dict[str, str]] = {}
        self.late: dict[str, dict[str, str]] = {}  # left out when Ray was started again
        self.headless: list[faults.Process] = []  # raylets and holders of the other hosts, when Ray's head died
        self.left_behind: list[faults.Process] = []  # all that ran there

    @property
    def head(self) -> str:
        """The host that carries Ray's head and this driver."""
        return next(iter(self.cluster.labels))

    def do(self, host: str, name: str, *args: Any) -> Any:
        """All hosts are this machine."""
        return faults.HANDS[name](*args)

    def places(self) -> list[str]:
        """The head last: it cannot be lost, so fewer ranks than hosts should leave it out."""
        return sorted(self.live_hosts(), key=lambda host: (host == self.head, host))

    def may_lose(self, hosts: list[str]) -> bool:
        """Not the head: the driver and the GCS live there."""
        return self.head not in hosts

    def lose_host(self, host: str, ranks: list[Rank]) -> str:
        """Every process of the raylet, checked one by one; the arena, checked to be gone."""
        folder, record = self.folder(host), self.record(host)
        secret, victims = faults.secret_of(folder), self.cluster.node_processes(host)
        strangers = [r.pid for r in ranks if r.host == host and (r.pid, r.start) not in victims]
        if strangers:
            raise DrillError(f"ranks {strangers} on {host} are not below its raylet: killing it would not kill them")
        before = faults.arena_identity(folder)
        self.lost[host] = dict(self.cluster.labels[host])
        self.pool.forget(host)
        done = self.cluster.lose_host(host)
        faults.wait_gone(victims)
        faults.check_destroyed(folder, before)
        faults.check_silent(record, self.config, secret)
        return f"SIGKILL to all {len(victims)} processes of {host}, arena file destroyed ({gib(done['nbytes'])} gone)"

    def wait_given_up(self, node: str) -> None:
        """Wait until Ray's head calls a node dead; its raylet then ends when it hears of it."""
        self.wait_for(f"Ray to give node {node[:12]} up", lambda: node not in {n["NodeID"] for n in live_nodes()})

    def replace_raylet(self, host: str, left: list[faults.Process]) -> None:
        """Ray is started again on a host; what it had left behind is killed, and the new holder adopts the arena."""
        faults.kill(left)  # Ray lets workers live on for a minute or more after their raylet was killed
        faults.wait_gone(left)
        self.pool.forget(host)
        self.cluster.replace_raylet(host)
        self.wait_hosts_live([host])

    def end_ray(self) -> int:
        """SIGKILL to every process of every host at once; return how many. Nothing can be asked until `start_ray`."""
        victims = [victim for host in self.cluster.labels for victim in self.cluster.node_processes(host)]
        self._forget_ranks()
        self.cluster.kill_everything()
        faults.wait_gone(victims)
        return len(victims)

    def end_head(self) -> int:
        """SIGKILL to every process of Ray's head; return how many. The others run on, for want of it not for long."""
        others = [host for host in self.cluster.labels if host != self.head]
        self.headless = [*map(self.cluster.raylet, others), *(faults.holder_process(self.folder(h)) for h in others)]
        self.left_behind = [victim for host in others for victim in self.cluster.node_processes(host)]
        self._forget_ranks()
        victims = self.cluster.kill_head()
        faults.wait_gone(victims)
        return len(victims)

    def wait_ray_ended(self, limit_s: float) -> float:
        """Wait until raylets and holders of the other hosts have ended by themselves; return the seconds."""
        started_s = time.monotonic()
        faults.wait_gone(self.headless, limit_s)
        took_s = time.monotonic() - started_s
        faults.kill(self.left_behind)  # Ray's agents outlive their raylet
        self.cluster.kill_everything()  # only its books are left
        return took_s

    def start_ray(self, *, without: str = "") -> None:
        """Ray and the store are started again on the same hosts, but one."""
        if without:
            self.late = {without: self.cluster.labels.pop(without)}
        self.cluster.start()
        self.wait_hosts_live(list(self.cluster.labels))

    def join_late(self, host: str) -> None:
        """The host that `start_ray` left out joins; nothing happens if it has."""
        labels = self.late.pop(host, None)
        if labels is not None:
            self.cluster.add_node(host, labels)
            self.wait_hosts_live([host])

    def _forget_ranks(self) -> None:
        for host in self.cluster.labels:
            self.pool.forget(host)

    def end_drill(self, hosts: list[str]) -> None:
        """Replace the lost hosts, if that is wanted now."""
        if self.heals_at_once:
            self.heal()
        super().end_drill([host for host in hosts if host not in self.lost])

    def heal(self) -> None:
        """Machines with the lost ones' labels join."""
        for host, labels in list(self.lost.items()):
            faults.destroy_arena(self.folder(host))
            self.cluster.add_node(host, labels)
            del self.lost[host]
        self.wait_hosts_live(list(self.cluster.labels))
