"""What do the seals of one step cost the catalog, on one core, and does it grow with the ranks alone?

The real catalog, 8 ranks a host, 2 copies, in a fleet of hosts that only obey
(`memstore/testing/controller/fleet.py`). Every seal is a report of its own, as holders send it; the step counts
from the first seal until every host was informed of the commit. Beside it: what a second without a put costs (a
heartbeat of every host each 0.5 s, ten ticks).
"""

from __future__ import annotations

import gc
import random
import sys
import tracemalloc

from benchmarks.report import targets
from benchmarks.report.harness import Options, Record
from memstore.core.wire.messages import HostBeat, Tick
from memstore.shell.controller.controller import collect_rarely
from memstore.testing.controller.fleet import ControllerFleet

RANKS_PER_HOST = 8
WORLDS = (4096, 8192, 16384)
TICKS_PER_S, BEATS_PER_S = 10, 2


def run(options: Options) -> list[Record]:
    """Return the seconds of a step by world size."""
    return [measure(WORLDS, options)]


def measure(worlds: tuple[int, ...], options: Options) -> Record:
    """Return one record for fleets of these many ranks, which take turns."""
    before, switch_s = gc.get_threshold(), sys.getswitchinterval()
    collect_rarely()  # as a controller's process does
    try:
        return _measure(worlds, options)
    finally:
        gc.set_threshold(*before)
        sys.setswitchinterval(switch_s)


def _measure(worlds: tuple[int, ...], options: Options) -> Record:
    fleets = {world: ControllerFleet(world // RANKS_PER_HOST, ranks_per_host=RANKS_PER_HOST) for world in worlds}
    seconds: dict[str, list[float]] = {name(world): [] for world in worlds}
    idle: dict[int, list[float]] = {world: [] for world in worlds}
    for step in range(1, options.warmups + options.rounds + 1):
        for world, fleet in fleets.items():
            order = list(range(world))
            random.Random(step).shuffle(order)
            gc.collect()
            step_s, idle_s = step_seconds(fleet, step, order), idle_seconds(fleet)
            if step > options.warmups:
                seconds[name(world)].append(step_s)
                idle[world].append(idle_s)
    record = Record("catalog", 0, seconds)
    small, large = worlds[0], worlds[-1]
    record.figure(f"a step of {large:,} ranks", seconds[name(large)], "s", targets.CATALOG)
    growth = [b / a / (large / small) for a, b in zip(seconds[name(small)], seconds[name(large)], strict=True)]
    record.figure(f"seconds per rank, {large:,} / {small:,} ranks", growth, "", targets.CATALOG_GROWTH)
    record.figure(f"a second without a put, {large:,} ranks", idle[large], "s")
    fleets.clear()
    record.figure("kept per rank, one step of two copies", [float(kept_bytes(small) / small)], "bytes")
    return record


def name(world: int) -> str:
    """The contender's name."""
    return f"{world:,} ranks"


def step_seconds(fleet: ControllerFleet, step: int, order: list[int]) -> float:
    """Return the processor seconds that one step takes the catalog."""
    fleet.handle_s = 0.0
    fleet.put(step, order)
    if step not in fleet.committed:
        raise RuntimeError(f"step {step} of {fleet.world_size} ranks was not committed; no number is reported")
    return fleet.handle_s


def idle_seconds(fleet: ControllerFleet) -> float:
    """Return the processor seconds that one second of waiting takes the catalog."""
    fleet.handle_s = 0.0
    for tick in range(TICKS_PER_S):
        fleet.now += 1.0 / TICKS_PER_S
        if tick % (TICKS_PER_S // BEATS_PER_S) == 0:
            for host in fleet.hosts:
                fleet.handle(HostBeat(host))
        fleet.handle(Tick())
    return fleet.handle_s


def kept_bytes(world: int) -> int:
    """Return the memory that one committed step adds."""
    fleet = ControllerFleet(world // RANKS_PER_HOST, ranks_per_host=RANKS_PER_HOST)
    tracemalloc.start()
    try:
        fleet.put(1)
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
