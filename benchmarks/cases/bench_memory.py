"""How much memory does a host use of what it reserved, and how much beside the arena?

A rank on one host, copies on the others: fifty puts, each waited for until it is committed. Meanwhile a peer reads a
step, the host with the copies is lost and repair makes them again, and the rank comes back, gets its step and goes on.
What is used and reserved comes with the heartbeats (every 0.1 s here); a restart's first put reserves again.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ray

from benchmarks.report import targets
from benchmarks.report.harness import MIB, Options, Record, Took, require
from benchmarks.rigs import gpt_tensors, rig
from benchmarks.rigs.stopwatch import anonymous_bytes, cpu_seconds, private_bytes
from memstore.client.connect import connect
from memstore.core.wire.calls import AskStatus
from memstore.errors import MemstoreError
from memstore.shell.on_ray.actors import NAMESPACE, RayMembership, controller_name
from memstore.testing.clusters.embedded import EmbeddedCluster
from memstore.testing.clusters.processes import ProcessCluster

STATE_BYTES = 64 * MIB
PUTS, READ_AT, LOSE_AT, RESTART_AT = 50, 10, 20, 35
SPARE = "spare"
PUT = "a put until committed"
REPAIR_S = 60.0


class Sampler:
    """Looks at the cluster until closed. `peaks` are by host: used over reserved, and what is not the arena."""

    def __init__(self, cluster: ProcessCluster) -> None:
        self.cluster = cluster
        self.used: dict[str, float] = {}
        self.reserved: dict[str, float] = {}
        self.holder_bytes = self.rank_bytes = 0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._is_over.wait(0.05):
            try:
                rows = self.cluster.ask(AskStatus(), timeout_s=2.0).hosts
                pids = [holder.pid for holder in list(self.cluster.holders.values()) if holder.poll() is None]
                self.holder_bytes = max([self.holder_bytes, *(anonymous_bytes(pid) for pid in pids)])
            except (MemstoreError, OSError):
                continue  # a host is being lost just now
            self.rank_bytes = max(self.rank_bytes, anonymous_bytes(os.getpid()))
            for row in rows:
                host, stats = row.host, row.stats
                if row.status == "live" and stats is not None and stats.reserved_bytes:
                    self.used[host] = max(self.used.get(host, 0.0), float(stats.used_bytes))
                    # The larger of shares and use: the least of it is what was reserved.
                    seen = float(stats.reserved_bytes)
                    self.reserved[host] = min(self.reserved.get(host, seen), seen)

    def close(self) -> None:
        """Stop looking."""
        self._is_over.set()
        self._thread.join(10.0)


def run(options: Options) -> list[Record]:
    """Return the peak of use over reservation, and the memory beside the arena; always one round."""
    state = gpt_tensors.gpt_state(min(options.nbytes, STATE_BYTES))
    nbytes = gpt_tensors.total_nbytes(state)
    twin = gpt_tensors.empty_like(state)  # what is read goes there: a new state would count as the rank's growth
    gpt_tensors.wipe(twin)
    before_bytes = anonymous_bytes(os.getpid())
    labels = {host: {"rack": f"r-{host}", "memstore": "replica"} for host in (rig.NEAR, rig.FAR, SPARE)}
    with tempfile.TemporaryDirectory() as folder:
        cluster = ProcessCluster(
            Path(folder), labels, arena_bytes=8 * nbytes + 64 * MIB, chunk_bytes=options.chunk_bytes, replicas=2
        )
        with cluster:
            sampler = Sampler(cluster)
            try:
                lives = (range(RESTART_AT), range(RESTART_AT, PUTS))
                took = [each for steps in lives for each in _life(cluster, state, twin, steps)]
            finally:
                sampler.close()
    record = Record("memory", nbytes, {PUT: [each.wall_s for each in took]})
    record.cpu_seconds[PUT] = [each.cpu_s or 0.0 for each in took]
    peaks = {host: sampler.used[host] / sampler.reserved[host] for host in sampler.used}
    record.figure("peak used / reserved, worst host", [max(peaks.values())], "", targets.MEMORY)
    record.figure("peak used, all hosts / bytes of the state", [sum(sampler.used.values()) / nbytes], "")
    record.figure("a holder's memory beside the arena", [float(sampler.holder_bytes)], "bytes")
    grown = float(sampler.rank_bytes - before_bytes)
    record.figure("what the rank's own memory grew by, the states it read apart", [grown], "bytes")
    return [record]


def _life(cluster: ProcessCluster, state: Any, twin: Any, steps: range) -> list[Took]:
    """One attempt of the rank: get if there is something, then put these steps."""
    took: list[Took] = []
    with rig.on_host(rig.NEAR), connect(rig.JOB, rank=0, world_size=1, config=cluster.config) as store:
        got = store.get(into=twin)
        if got is not None:
            require(got.step == steps.start - 1 and gpt_tensors.is_same(twin, state), "the restored step")
        for step in steps:
            gpt_tensors.touch(state)
            took.append(rig.put_committed(cluster, store, step, state))
            if step == READ_AT:
                rig.read_at(SPARE, cluster.config, step, into=twin)
                require(gpt_tensors.is_same(twin, state), f"step {step} read on a third host")
                gpt_tensors.wipe(twin)
            if step == LOSE_AT:
                _lose_a_copy(cluster)
    return took


def _lose_a_copy(cluster: ProcessCluster) -> None:
    """Lose the host with the second copy, and wait for the repair."""
    job = cluster.job(rig.JOB)
    if job is None:
        raise MemstoreError("the benchmark's job is gone")
    lost = next(host for host in job["targets"][rig.NEAR])
    cluster.lose_host(lost)
    _wait(lambda: cluster.host_status().get(lost) == "dead", f"{lost} to be dead")
    _wait(lambda: (cluster.job(rig.JOB) or {"missing_copies": 1})["missing_copies"] == 0, "the repair")


def _wait(is_done: Callable[[], bool], what: str) -> None:
    limit_s = time.monotonic() + REPAIR_S
    while not is_done():
        if time.monotonic() > limit_s:
            raise MemstoreError(f"waited {REPAIR_S:g} s for {what}")
        time.sleep(0.05)


# -- idle ---------------------------------------------------------------------------------------------
# What do a holder and a controller cost that have nothing to do?
#
# A store of two hosts without a job, as plain processes and under Ray. Beside Ray's actors one without a line of ours:
# that is what a process of Ray's costs before our code begins.


BARE = "an actor of Ray's that does nothing"
QUIET_S, IDLE_S = 40.0, 60.0  # a controller looks for new hosts more rarely after half a minute


def run_idle(options: Options) -> list[Record]:
    """Return a record for each process: its processor time in one stretch, and its memory then."""
    with rig.two_hosts(options, replicas=2) as cluster:
        require(cluster.controller is not None, "a controller")
        holder, _, controller = rig.pids_of(cluster)
        found = _idle({"a holder": holder, "the controller": controller})
    if not options.with_ray:
        return found

    class Nothing:  # here, so that its process imports no module for it
        def pid(self) -> int:
            return os.getpid()

    with EmbeddedCluster({host: {"rack": host, "memstore": "replica"} for host in (rig.NEAR, rig.FAR)}) as hosts:
        actor = ray.remote(num_cpus=0)(Nothing).remote()
        controller_actor = ray.get_actor(controller_name(hosts.config.store), namespace=NAMESPACE)
        pids = {
            "a holder under Ray": RayMembership(hosts.config.store).hosts()[rig.FAR]["pid"],
            "the controller under Ray": ray.get(controller_actor.describe.remote())["pid"],
            BARE: ray.get(actor.pid.remote()),
        }
        return found + _idle(pids)


def _idle(pids: Mapping[str, int]) -> list[Record]:
    time.sleep(QUIET_S)
    before_s = {pid: cpu_seconds([pid]) for pid in pids.values()}
    time.sleep(IDLE_S)
    percent = {pid: 100 * (cpu_seconds([pid]) - before_s[pid]) / IDLE_S for pid in pids.values()}
    found = []
    for name, pid in pids.items():
        record = Record(name, 0, {})
        cpu, memory = (None, None) if name == BARE else (targets.IDLE_CPU, targets.IDLE_MEMORY)
        record.figure("processor, idle", [percent[pid]], "percent", cpu)
        record.figure("memory of its own, idle", [float(private_bytes(pid))], "bytes", memory)
        found.append(record)
    return found
