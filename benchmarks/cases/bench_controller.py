"""What does the controller send, and what does that cost it, where every host must get a message?

A real controller (`controller_rig.py`) with 2,048 hosts of 8 ranks, 2 copies: all hosts join, all ranks connect and
ask for room, a step is committed after another one, a host is suspected for a moment, it is lost and comes back, so is
a rack host by host, all ranks connect again (a fence and an inventory of every host), and a successor starts from what
the hosts have; in a fleet whose hosts all beat a rack is lost again. Counted from the event that brings it about until
every answer was taken and every byte was read at the far end; processor time is of all the controller's threads.
"""

from __future__ import annotations

import gc
import random
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import xxhash

from benchmarks.report import targets
from benchmarks.report.harness import GIB, Options, Record
from benchmarks.rigs.controller_rig import BEAT, CHUNKS, JOB, RANKS_PER_HOST, SILENCE_S, Cost, Fleet, Rig
from memstore.config import Config
from memstore.core.wire.calls import Called
from memstore.core.wire.messages import HostBeat, Tick
from memstore.shell.controller import SessionEnded, collect_rarely
from memstore.testing.controller.fleet import ControllerFleet
from memstore.testing.requests import request_of

HOSTS = 2048
RACK = 32
APART_S = 0.05  # between two hosts of a rack
BEATS_S = 10.0  # nothing but beats


def run(options: Options) -> list[Record]:
    """Return one record for a fleet of 2,048 hosts."""
    return [measure(HOSTS)]


def measure(hosts_count: int) -> Record:
    """Return the record for this many hosts."""
    before, switch_s = gc.get_threshold(), sys.getswitchinterval()
    collect_rarely()  # as a controller's process does
    try:
        costs, beating = episodes(hosts_count), all_beat(hosts_count)
    finally:
        gc.set_threshold(*before)
        sys.setswitchinterval(switch_s)
    found = record(hosts_count, costs)
    for what, (value, unit) in beating.items():
        found.figure(what, [value], unit)
    return found


def record(hosts_count: int, costs: dict[str, Cost]) -> Record:
    """Return the figures of all episodes."""
    where = f"{hosts_count:,} hosts, {hosts_count * RANKS_PER_HOST:,} ranks"
    found = Record("controller", 0, {where: [sum(cost.cpu_s for cost in costs.values())]})
    cpu = {"a commit": targets.COMMIT_CPU, "a successor starts": targets.SUCCESSOR_CPU}
    sent = {"all ranks connect": targets.CONNECT_SENT}
    a_host = costs["a commit"].sent_bytes / hosts_count
    found.figure("a commit: sent to a host", [a_host], "bytes", targets.COMMIT_SENT)
    for what, cost in costs.items():
        found.figure(f"{what}: core seconds", [cost.cpu_s], "s", cpu.get(what))
        found.figure(f"{what}: sent", [float(cost.sent_bytes)], "bytes", sent.get(what))
        found.figure(f"{what}: heard", [float(cost.received_bytes)], "bytes")
        found.figure(f"{what}: orders", [float(cost.orders)], "count")
    return found


def episodes(hosts_count: int) -> dict[str, Cost]:
    """Return what each of them cost, in the order in which they happened."""
    fleet, costs = Fleet(hosts_count), {}
    with Rig(fleet, term=1) as rig:
        costs["all hosts join"] = rig.cost(rig.start)
        costs["all ranks connect"] = rig.cost(lambda: connect(rig))
        need = {"attempt": fleet.attempt, "slots": CHUNKS}
        costs["all ranks ask for room"] = rig.cost(lambda: call(rig, "reserve", need))
        for step in (1, 2):
            seals = fleet.seals(step)
            rig.cost(lambda s=seals: rig.notify(islice(s, 2 * fleet.world_size - 1)))  # type: ignore[misc]
            costs["a commit"] = rig.cost(lambda s=seals: rig.notify(s))  # type: ignore[misc]
        costs["a host is suspected"] = rig.cost(lambda: suspect(rig, fleet.names[1]))
        costs["a host is lost"] = rig.cost(lambda: lose(rig, fleet.names[1]))
        costs["it comes back"] = rig.cost(lambda: come_back(rig, fleet.names[1]))
        rack = fleet.names[hosts_count // 2 :][: min(RACK, hosts_count // 4)]
        costs["a rack is lost host by host"] = rig.cost(lambda: in_turn(lose, rig, rack))
        costs["and comes back host by host"] = rig.cost(lambda: in_turn(come_back, rig, rack))
        costs["all ranks connect again"] = rig.cost(lambda: connect(rig))
    with Rig(fleet, term=2) as rig:
        costs["a successor starts"] = rig.cost(rig.start)
        if rig.controller.machine.jobs[JOB].newest_commit(1) != 2:
            raise RuntimeError("the successor does not know the newest commit; no number is reported")
    return costs


def all_beat(hosts_count: int) -> dict[str, tuple[float, str]]:
    """Return what a fleet costs whose hosts all beat: (value, unit) by figure."""
    fleet = Fleet(hosts_count)
    with Rig(fleet, term=1, is_beating=True) as rig:
        rig.cost(rig.start)
        rig.cost(lambda: connect(rig))
        used_s = time.process_time()
        time.sleep(BEATS_S)
        used_s = time.process_time() - used_s
        rack = fleet.names[hosts_count // 2 :][: min(RACK, hosts_count // 4)]
        lost = rig.cost(lambda: in_turn(lose, rig, rack))
        return {
            "all hosts beat: core seconds a second": (used_s / BEATS_S, "s"),
            "and a rack is lost host by host: core seconds": (lost.cpu_s, "s"),
            "hosts that seemed silent meanwhile": (float(len(rig.doubted)), "count"),
            "threads of the controller and the rig": (float(threading.active_count()), "count"),
        }


def nonce(launch: int, rank: int) -> str:
    """What a process calls itself: its pid, when it started, job and rank (`memstore/client/connect.py`)."""
    pid, start = divmod(xxhash.xxh3_64_intdigest(f"{launch}-{rank}".encode()) % 10**13, 10**8)
    return f"{100_000 + pid}-{start:08d}-{JOB}-{rank}"


def call(rig: Rig, verb: str, body: dict[str, Any]) -> None:
    """Every rank asks; RuntimeError unless each got an answer."""

    def calls() -> Iterator[tuple[str, Called]]:
        for rank in range(rig.fleet.world_size):
            more = {"job": JOB, "rank": rank, "pid": 1000 + rank, "nonce": nonce(rig.fleet.launch, rank)}
            yield rig.fleet.host_of(rank), Called(id=rank, call=request_of(verb, more, **body))

    rig.answers.clear()
    rig.notify(calls())
    rig.settle()
    errors = [answer.error for answer in rig.answers if answer.error is not None]
    if errors or len(rig.answers) != rig.fleet.world_size:
        raise RuntimeError(f"{verb}: {len(rig.answers)} answers of {rig.fleet.world_size}, errors {errors[:1]}")


def connect(rig: Rig) -> None:
    """All ranks join a launch of their own."""
    launch = rig.fleet.launch = rig.fleet.launch + 1
    call(
        rig,
        "join",
        {
            "world_size": rig.fleet.world_size,
            "key": f"k{launch}",
            "launcher": f"l{launch}",
            "fresh": False,
            "takeover": True,
            "config": Config(replicas=2).job_fields(),
        },
    )
    rig.fleet.attempt += 1


def suspect(rig: Rig, name: str) -> None:
    """A host is silent for so long that it is suspected, then it beats again."""
    state = rig.controller.machine.hosts.states[name]
    state.beat_at_s -= SILENCE_S + 1
    while state.status != "suspect":
        rig.settle()
    rig.notify([(name, BEAT)])


def lose(rig: Rig, name: str) -> None:
    """A host's connection ends."""
    rig.controller.tell((rig.sessions[name], SessionEnded("reset by peer")))


def in_turn(what: Callable[[Rig, str], None], rig: Rig, names: list[str]) -> None:
    """Something happens to one host after the other."""
    for name in names:
        what(rig, name)
        time.sleep(APART_S)


def come_back(rig: Rig, name: str) -> None:
    """Its next holder announces itself, with what the memory has."""
    host = rig.fleet.hosts[name]
    host.incarnation += 1
    rig.sessions[name].incarnation = host.incarnation
    rig.controller.sessions[name] = rig.sessions[name]
    rig.notify([(name, rig.fleet.up(host))])


# -- catalog ------------------------------------------------------------------------------------------
# What do the seals of one step cost the catalog, on one core, and does it grow with the ranks alone?
#
# The real catalog, 8 ranks a host, 2 copies, in a fleet of hosts that only obey
# (`memstore/testing/controller/fleet.py`). Every seal is a report of its own, as holders send it; the step counts
# from the first seal until every host was informed of the commit. Beside it: what a second without a put costs (a
# heartbeat of every host each 0.5 s, ten ticks).


CATALOG_RANKS = 8
WORLDS = (4096, 8192, 16384)
LARGE_WORLD = 131072  # its fleet takes minutes to connect, and a GiB
TICKS_PER_S, BEATS_PER_S = 10, 2


def run_catalog(options: Options) -> list[Record]:
    """Return the seconds of a step by world size."""
    return [measure_catalog(WORLDS, options, LARGE_WORLD if options.nbytes >= GIB else 0)]


def measure_catalog(worlds: tuple[int, ...], options: Options, large: int = 0) -> Record:
    """Return one record for fleets of these many ranks, which take turns, and one that takes them alone, if any."""
    before, switch_s = gc.get_threshold(), sys.getswitchinterval()
    collect_rarely()  # as a controller's process does
    try:
        found = _measure(worlds, options)
        if large:
            fleet = ControllerFleet(large // CATALOG_RANKS, ranks_per_host=CATALOG_RANKS)
            steps = [step_seconds(fleet, step, list(range(large))) for step in range(1, options.rounds)]
            found.figure(f"a step of {large:,} ranks", steps[1:], "s", targets.CATALOG_LARGE)
        return found
    finally:
        gc.set_threshold(*before)
        sys.setswitchinterval(switch_s)


def _measure(worlds: tuple[int, ...], options: Options) -> Record:
    fleets = {world: ControllerFleet(world // CATALOG_RANKS, ranks_per_host=CATALOG_RANKS) for world in worlds}
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
    fleet = ControllerFleet(world // CATALOG_RANKS, ranks_per_host=CATALOG_RANKS)
    tracemalloc.start()
    try:
        fleet.put(1)
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
