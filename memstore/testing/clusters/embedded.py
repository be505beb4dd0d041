"""Several hosts on one machine: one raylet per host, with `host` and `rack` labels, and a store on top.

The demo, drills and tests use it. Losing a host means the same as on real machines: every process of its raylet is
killed and checked to be gone, and its arena is destroyed. With a `NamespaceRig` every host but the head also has a
network of its own, with links to cut.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

import ray
from ray import cluster_utils

import memstore.admin.cluster as store_cluster
from memstore.config import Config
from memstore.errors import DrillError
from memstore.shell.rank.admin_link import store_root
from memstore.testing.clusters.cluster import Cluster
from memstore.testing.clusters.namespaces import NamespaceRig
from memstore.testing.clusters.scratch import scratch_store_name
from memstore.testing.faults.arena_files import arena_nbytes
from memstore.testing.faults.processes import (
    Process,
    descendants,
    kill,
    process_of,
    raylet_of,
    wait_gone,
    with_start_times,
)

MIB = 1 << 20
OBJECT_STORE_BYTES = 80 * MIB  # Ray's minimum is 75 MiB; bulk bytes never go through it
JOIN_S = 60.0
GLOO_DEVICE = "GLOO_SOCKET_IFNAME"  # without it gloo takes the address of the hostname, which is loopback here
# With its default settings Ray needs 12 to 65 s to notice a dead raylet, too long for drills and the demo.
FAST_HEALTH = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 1500,
    "health_check_failure_threshold": 3,
}


class EmbeddedCluster(Cluster):
    """Raylets by host id and a started store; the first host is Ray's head and carries the driver."""

    def __init__(
        self,
        hosts: Mapping[str, Mapping[str, str]],
        *,
        cpus_per_host: int = 2,
        gpus_per_host: int = 0,
        config: Config | None = None,
        has_store: bool = True,
        rig: NamespaceRig | None = None,
        ray_settings: Mapping[str, Any] | None = None,
    ) -> None:
        """Prepare a cluster; `start` begins it.

        Args:
            gpus_per_host: For Ray; all hosts have the same ones.
            rig: Has a namespace for every host but the first, Ray's head; None for loopback.
            ray_settings: Ray's own settings for the whole cluster.
        """
        self.rig = rig
        self.labels = {host: {"host": host, **labels} for host, labels in hosts.items()}
        self.cpus_per_host, self.gpus_per_host = cpus_per_host, gpus_per_host
        self.config = config or Config(
            store=scratch_store_name("e"),
            arena_bytes=256 * MIB,
            chunk_bytes=MIB,
            interface="127.0.0.1" if rig is None else str(rig.network),
        )
        self.has_store = has_store
        self.ray_settings = {**FAST_HEALTH, **(ray_settings or {})}
        self.nodes: dict[str, Any] = {}  # nodes of cluster_utils, or in a rig processes of `ray start`
        self.cluster: Any = None
        self._outer_address: str | None = os.environ.get("RAY_ADDRESS")

    def start(self) -> None:
        """Start the raylets, connect this process, start the store."""
        os.environ.pop("RAY_ADDRESS", None)
        self.cluster = cluster_utils.Cluster()
        head, *others = self.labels
        self.add_node(head)
        self._connect()
        for host in others:  # one after the other, because raylets that start at once take the same socket name
            self.add_node(host)
        # What is started from here on finds this cluster, and no other one that runs on this machine.
        os.environ["RAY_ADDRESS"] = self.address
        if self.has_store:
            store_cluster.start(self.config)

    def _connect(self) -> None:
        ray.init(address=self.address, namespace="memstore", log_to_driver=False, logging_level="ERROR")

    @property
    def address(self) -> str:
        """The address of the Ray cluster."""
        return str(self.cluster.address)

    def add_node(self, host: str, labels: Mapping[str, str] | None = None, *, gcs_port: int | None = None) -> None:
        """Let a machine join Ray; the store's supervisor gives it a holder by itself (R3)."""
        if labels is not None:
            self.labels[host] = {"host": host, **labels}
        is_head = host == next(iter(self.labels))
        extra: dict[str, Any] = {"_system_config": self.ray_settings, "include_dashboard": False} if is_head else {}
        if gcs_port is not None:
            extra["gcs_server_port"] = gcs_port
        if self.rig is not None and not is_head:
            self.nodes[host] = self._start_in_namespace(self.rig, host)
            self._wait_joined(self.rig.address(host))
            return
        if self.rig is not None:
            extra.update(node_ip_address=self.rig.root_address, env_vars={GLOO_DEVICE: self.rig.root_device})
        self.nodes[host] = self.cluster.add_node(
            num_cpus=self.cpus_per_host,
            num_gpus=self.gpus_per_host,
            object_store_memory=OBJECT_STORE_BYTES,
            labels=self.labels[host],
            **extra,
        )

    def _start_in_namespace(self, rig: NamespaceRig, host: str) -> subprocess.Popen[Any]:
        """Start a raylet on a host of the rig; it logs into Ray's own folder."""
        argv = [
            sys.executable,
            "-m",
            "ray.scripts.scripts",
            "start",
            f"--address={self.address}",
            "--block",
            f"--node-ip-address={rig.address(host)}",
            f"--num-cpus={self.cpus_per_host}",
            f"--num-gpus={self.gpus_per_host}",
            "--disable-usage-stats",
            f"--object-store-memory={OBJECT_STORE_BYTES}",
            "--labels",
            ",".join(f"{key}={value}" for key, value in self.labels[host].items()),
        ]
        quiet = subprocess.DEVNULL
        # If some raylets used Ray's token authentication and others did not, the cluster would not form.
        env = {"RAY_AUTH_MODE": "disabled", **os.environ, GLOO_DEVICE: rig.device}
        return rig.popen(host, argv, stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True, env=env)

    def _wait_joined(self, address: str) -> None:
        """Wait until Ray counts a raylet alive; cluster_utils does that for its own."""
        deadline_s = time.monotonic() + JOIN_S
        while address not in {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}:
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"the raylet at {address} did not join within {JOIN_S:g} s")
            time.sleep(0.05)

    def node_processes(self, host: str) -> list[Process]:
        """Return the raylet of a host and all processes below it."""
        if self.rig is not None and host in self.rig.hosts:
            return with_start_times(self.rig.processes(host))
        infos = self.nodes[host].all_processes.values()
        return with_start_times(descendants([p.process.pid for each in infos for p in each]))

    def kill_processes(self, host: str) -> list[Process]:
        """Send SIGKILL to every process of a host at once; return them."""
        victims = self.node_processes(host)
        kill(victims)
        return victims

    def raylet(self, host: str) -> Process:
        """Return the raylet of a host; DrillError if it is gone."""
        if self.rig is not None and host in self.rig.hosts:
            return raylet_of(self.rig.processes(host), host)
        return process_of(self.nodes[host].all_processes["raylet"][0].process.pid)

    def replace_raylet(self, host: str) -> None:
        """Replace a host's raylet after its death: kill what is left of it, start a new one over the same memory."""
        victims = self.kill_processes(host)
        node = self.nodes.pop(host)
        with contextlib.suppress(Exception):  # such as of a raylet in a namespace, of which cluster_utils does not know
            self.cluster.remove_node(node, allow_graceful=False)
        wait_gone(victims)
        self.add_node(host)

    def kill_head(self) -> list[Process]:
        """Send SIGKILL to every process of Ray's head, and disconnect from Ray; return them."""
        _check_outlives_raylet(os.getppid())
        victims = self.kill_processes(next(iter(self.labels)))
        with contextlib.suppress(Exception):
            ray.shutdown()
        return victims

    def start_head(self) -> None:
        """Start Ray's head again where it was, after `kill_head`, and connect this process."""
        head, port = next(iter(self.labels)), int(self.address.rpartition(":")[2])
        self.cluster.remove_node(self.nodes.pop(head), allow_graceful=False)
        self.add_node(head, gcs_port=port)
        self._connect()

    def kill_everything(self) -> list[Process]:
        """Send SIGKILL to every process of every host, Ray's head included; return them. The hosts' memory stays."""
        _check_outlives_raylet(os.getppid())
        victims = [victim for host in self.nodes for victim in self.node_processes(host)]
        kill(victims)  # all at once: reading /proc between two hosts would let the others live on for a while
        with contextlib.suppress(Exception):
            ray.shutdown()
        with contextlib.suppress(Exception):
            self.cluster.shutdown()
        self.nodes.clear()
        wait_gone(victims)
        return victims

    def lose_host(self, host: str) -> dict[str, Any]:
        """Kill a machine: kill its processes, check that they are gone, destroy its memory; return what was done."""
        if host == next(iter(self.labels)):
            raise ValueError(f"{host} is Ray's head and carries this driver: lose another host")
        nbytes = arena_nbytes(self.arena(host))
        victims = self.kill_processes(host)
        node = self.nodes.pop(host)
        self.labels.pop(host)
        with contextlib.suppress(Exception):
            self.cluster.remove_node(node, allow_graceful=False)
        wait_gone(victims)
        shutil.rmtree(self.arena(host))
        return {"host": host, "processes": len(victims), "nbytes": nbytes}

    def stop(self) -> None:
        """Stop everything and remove every arena."""
        with contextlib.suppress(Exception):
            if ray.is_initialized() and self.has_store:
                store_cluster.stop(config=self.config, keep_data=False, force=True)
        victims = [v for host in list(self.nodes) for v in self.node_processes(host)]
        with contextlib.suppress(Exception):
            ray.shutdown()
        os.environ.pop("RAY_ADDRESS", None)
        if self._outer_address is not None:
            os.environ["RAY_ADDRESS"] = self._outer_address
        if self.cluster is not None:
            with contextlib.suppress(Exception):
                self.cluster.shutdown()
        kill(victims)
        self.nodes.clear()
        shutil.rmtree(store_root(self.config), ignore_errors=True)


def _check_outlives_raylet(parent: int) -> None:
    """Refuse to kill this process's raylet where Ray would end this process too, without a word.

    Ray takes a process whose parent is pid 1 for the worker of a raylet that died.
    """
    if parent == 1:
        raise DrillError(
            f"the parent of this process ({os.getpid()}) is pid 1, and Ray ends such a process when its raylet dies;"
            " start it by a shell that is not pid 1 itself, as in `sh -c 'sh -c \"COMMAND; exit\"; exit'`"
        )
