"""How long does it take to place the copies of 100,000 hosts in 2,500 racks, and how does that grow?

Three replicas in different racks of 40, with a remainder. Processor seconds of the thread that places: what else runs
on the machine adds to them as little as can be.
"""

from __future__ import annotations

import gc
import time
from collections import Counter

from benchmarks.report import targets
from benchmarks.report.harness import Options, Record
from placement import Host, Placement, Topology, place

RACKS, HOSTS_A_RACK, REPLICAS = (625, 2500), 40, 3


def run(options: Options) -> list[Record]:
    """Return the seconds of a placement by the number of hosts."""
    return [measure(RACKS, options)]


def measure(racks: tuple[int, ...], options: Options) -> Record:
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
    check(placement, topology)
    return took_s


def check(placement: Placement, topology: Topology) -> None:
    """Raise RuntimeError unless every host has its copies in other racks, and all hold equally many."""
    guests = Counter(target for held in placement.targets.values() for target in held)
    rack = {host.host_id: host.labels["rack"] for host in topology.hosts.values()}
    is_apart = all(
        len({rack[owner], *(rack[target] for target in held)}) == REPLICAS for owner, held in placement.targets.items()
    )
    if placement.unmet or not is_apart or set(guests.values()) != {REPLICAS - 1}:
        raise RuntimeError(f"the placement is wrong: {placement.unmet[:3]}; no number is reported")
