"""How long does it take to plan the restore of 131,072 hosts of which 128 are lost, and in how much memory?

One rank a host with 64 chunks, two copies on pairs of neighbours, one commit fact. The lost hosts' ranks are placed
again and get their shards from the neighbours; as the second case whole pairs are lost, of a step that is on durable
storage too.
"""

from __future__ import annotations

import gc
import time
import tracemalloc
from collections import Counter

from benchmarks.report import targets
from benchmarks.report.harness import Options, Record
from placement import Host, Placement, Topology, place
from recovery.inventory import CommitFact, Copy, DurableMarker, Inventory, ShardId, ShardSpec, StepId
from recovery.lineage import Span
from recovery.planner import RecoveryPlan, what_if

HOSTS = (32768, 65536, 131072)
LOST = 128
CHUNKS, CHUNK_BYTES = 64, 4 << 20
JOB = "train"
STEP = StepId(1, 10)


def run(options: Options) -> list[Record]:
    """Return the seconds and the peak memory of a plan by the number of hosts."""
    return [measure(HOSTS, LOST, options)]


def measure(sizes: tuple[int, ...], lost_count: int, options: Options) -> Record:
    """Return one record for clusters of these sizes, which take turns."""
    seconds: dict[str, list[float]] = {}
    peaks: dict[int, float] = {}
    for hosts_count in sizes:
        inventory, hosts = survivors(hosts_count)
        apart = hosts[:: hosts_count // lost_count][:lost_count]
        pairs = hosts[:lost_count]
        for number in range(options.warmups + options.rounds):
            for what, lost, verdict in (("", apart, "peer"), (", whole pairs", pairs, "mixed")):
                took_s = planned(inventory, hosts, lost, verdict)
                if number >= options.warmups:
                    seconds.setdefault(f"{hosts_count:,} hosts{what}", []).append(took_s)
        tracemalloc.start()
        planned(inventory, hosts, apart, "peer")
        peaks[hosts_count] = tracemalloc.get_traced_memory()[1] / hosts_count
        tracemalloc.stop()
    record = Record("planner", 0, seconds)
    small, large = sizes[0], sizes[-1]
    for what in ("", ", whole pairs"):
        record.figure(
            f"{large:,} hosts, {lost_count} lost{what}",
            seconds[f"{large:,} hosts{what}"],
            "s",
            None if what else targets.PLANNER,
        )
    record.figure(f"peak memory per host, {large:,} hosts", [peaks[large]], "bytes")
    growth = [peaks[large] / peaks[small]]
    record.figure(f"peak memory per host, {large:,} / {small:,} hosts", growth, "", targets.PLANNER_MEMORY)
    return record


def survivors(hosts_count: int) -> tuple[Inventory, list[str]]:
    """Return what all hosts hold of one committed step, and the hosts; `lose` takes the dead ones away."""
    hosts = [f"host-{number:06d}" for number in range(hosts_count)]
    specs = {
        rank: ShardSpec(f"{rank:032x}", CHUNKS * CHUNK_BYTES, CHUNK_BYTES, CHUNKS, hosts_count)
        for rank in range(hosts_count)
    }
    held = {rank: (hosts[rank], hosts[rank ^ 1]) for rank in range(hosts_count)}
    copies = tuple(
        Copy(ShardId(JOB, STEP.attempt, STEP.step, rank), specs[rank], host)
        for rank, pair in held.items()
        for host in pair
    )
    commit = CommitFact(STEP, hosts_count, {rank: spec.digest for rank, spec in specs.items()}, held)
    return Inventory(JOB, copies, (commit,), (DurableMarker(STEP, hosts_count, specs),)), hosts


def planned(inventory: Inventory, hosts: list[str], lost: list[str], verdict: str) -> float:
    """Return the processor seconds of one plan, after a look at what it says."""
    gc.collect()
    begun_s = time.process_time()
    plan = what_if(
        inventory, (Span(STEP.attempt, None),), lost, world_size=len(hosts), rank_hosts=dict(enumerate(hosts))
    )
    took_s = time.process_time() - begun_s
    check(plan, hosts, lost, verdict)
    return took_s


def check(plan: RecoveryPlan, hosts: list[str], lost: list[str], verdict: str) -> None:
    """Raise RuntimeError unless every byte is planned once, from a host that lives."""
    nbytes = sum(transfer.nbytes for transfer in plan.transfers)
    dead = set(lost)
    is_dead = any(transfer.source in dead for transfer in plan.transfers)
    if plan.step != STEP or plan.verdict != verdict or nbytes != len(hosts) * CHUNKS * CHUNK_BYTES or is_dead:
        raise RuntimeError(f"the plan is wrong: {plan.verdict}, {nbytes} bytes, {plan.why}; no number is reported")


# -- placement ----------------------------------------------------------------------------------------
# How long does it take to place the copies of 100,000 hosts in 2,500 racks, and how does that grow?
#
# Three replicas in different racks of 40, with a remainder. Processor seconds of the thread that places: what else
# runs on the machine adds to them as little as can be.


RACKS, HOSTS_A_RACK, REPLICAS = (625, 2500), 40, 3


def run_placement(options: Options) -> list[Record]:
    """Return the seconds of a placement by the number of hosts."""
    return [measure_placement(RACKS, options)]


def measure_placement(racks: tuple[int, ...], options: Options) -> Record:
    """Return one record for clusters of so many racks, which take turns."""
    seconds: dict[str, list[float]] = {}
    topologies = {count: topology_of(count) for count in racks}
    for number in range(options.warmups + options.rounds):
        for topology in topologies.values():
            took_s = placed(topology)
            if number >= options.warmups:
                seconds.setdefault(f"{len(topology.hosts):,} hosts", []).append(took_s)
    record = Record("placement", 0, seconds)
    small, large = (f"{len(topologies[count].hosts):,} hosts" for count in (racks[0], racks[-1]))
    record.figure(f"{large}, {REPLICAS} replicas", seconds[large], "s", targets.PLACEMENT)
    record.ratio(f"{large} / {small}", large, small, targets.PLACEMENT_GROWTH)
    return record


def topology_of(racks: int) -> Topology:
    """Return hosts in racks of one size."""
    return Topology.of(
        Host(f"h{rack:05}-{slot:03}", {"rack": f"r{rack:05}"}) for rack in range(racks) for slot in range(HOSTS_A_RACK)
    )


def placed(topology: Topology) -> float:
    """Return the thread's processor seconds of one placement, after a look at it."""
    gc.collect()
    gc.freeze()  # what the process holds besides is not looked at by the collector meanwhile
    try:
        begun_s = time.thread_time()
        placement = place(topology, replicas=REPLICAS)
        took_s = time.thread_time() - begun_s
    finally:
        gc.unfreeze()
    check_placement(placement, topology)
    return took_s


def check_placement(placement: Placement, topology: Topology) -> None:
    """Raise RuntimeError unless every host has its copies in other racks, and all hold equally many."""
    guests = Counter(target for held in placement.targets.values() for target in held)
    rack = {host.host_id: host.labels["rack"] for host in topology.hosts.values()}
    is_apart = all(
        len({rack[owner], *(rack[target] for target in held)}) == REPLICAS for owner, held in placement.targets.items()
    )
    if placement.unmet or not is_apart or set(guests.values()) != {REPLICAS - 1}:
        raise RuntimeError(f"the placement is wrong: {placement.unmet[:3]}; no number is reported")
