"""What a put costs the rank that calls it: beside a plain copy, in waits for others, as the first, on busy cores."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import multiprocessing
import os
import resource
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from benchmarks.report import targets
from benchmarks.report.harness import MIB, Options, Record, Took, interleave, require
from benchmarks.rigs import gpt_tensors, rig
from benchmarks.rigs.busy_ranks import RANKS, Round
from benchmarks.rigs.stopwatch import cpu_seconds, timed
from memstore.testing.clusters.processes import ProcessCluster, wait_for

# -- put stall ----------------------------------------------------------------------------------------
# How long a put blocks training, beside a plain copy of the same tensors into warm memory.
#
# The put runs in a store that replicates it, and the clock stops when put returns. The next contender starts only
# when the step is committed, so neither is slowed by the other's work in the background.


def run_stall(options: Options) -> list[Record]:
    """Return put's stall and the plain copy, and their ratio."""
    state = gpt_tensors.gpt_state(options.nbytes)
    twin = gpt_tensors.empty_like(state)
    pairs = list(zip(gpt_tensors.tensors(twin), gpt_tensors.tensors(state), strict=True))
    with rig.store_on_two_hosts(options, replicas=2) as (cluster, store):
        pids = rig.pids_of(cluster)

        def put(step: int) -> Took:
            took, ticket = timed(lambda: store.put(step, state), pids)
            ticket.wait("committed")
            got = store.get(step, rank=0)
            require(got is not None and gpt_tensors.is_same(got.state, state), f"put of step {step}")
            return took

        def copy(step: int) -> Took:
            took = timed(lambda: [target.copy_(source) for target, source in pairs])[0]
            require(gpt_tensors.is_same(twin, state), f"plain copy {step}")
            return took

        rounds = interleave({"put": put, "plain copy": copy}, options, lambda _: gpt_tensors.touch(state))
    record = Record("put stall", gpt_tensors.total_nbytes(state), rounds.seconds, cpu_seconds=rounds.cpu_seconds)
    record.ratio("put / plain copy", "put", "plain copy", targets.STALL_COPY)
    return [record]


# -- put waits ----------------------------------------------------------------------------------------
# What in a put waits for another process: puts while every other process of the store is stopped (R11).
#
# Each round puts twice: with the store running, and with all holders and the controller stopped by SIGSTOP from
# before the call until after the return. A stopped process answers nothing, so all that put waits for ends with a
# deadline, the least of which is memstore's 0.1 s, or skips the step: such a put counts as a wait. Once the processes
# go on, both puts must commit, and their bytes are compared. The voluntary context switches of the training thread
# are its waits of any kind, for the thread that copies the other half too.


RUNNING, STOPPED = "put, the store running", "put, the store stopped"
DEADLINE_LEAST_S = 0.1


def run_waits(options: Options) -> list[Record]:
    """Return the stalls of both, how many puts waited, and how often the training thread gave up its core."""
    state = gpt_tensors.gpt_state(options.nbytes)
    chunks_count = gpt_tensors.total_nbytes(state) // options.chunk_bytes + 1
    steps = itertools.count()
    is_skipped: list[bool] = []
    switches: list[float] = []
    with rig.store_on_two_hosts(options, replicas=2) as (cluster, store):

        def put(is_stopped: bool) -> Took:
            gpt_tensors.touch(state)
            step = next(steps)
            if step:  # the room of an older step comes back after the commit of the last
                wait_for(lambda: len(store.puts.link.leases.free) >= chunks_count, "leased slots")
            with _stopped(cluster) if is_stopped else contextlib.nullcontext():
                switched = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
                took, ticket = timed(lambda: store.put(step, state), rig.pids_of(cluster))
                switched = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw - switched
            if is_stopped:
                switches.append(switched)
                is_skipped.append(ticket.is_over)
            ticket.wait("committed")
            got = store.get(step, rank=0)
            require(got is not None and gpt_tensors.is_same(got.state, state), f"put of step {step}")
            return took

        contenders = {RUNNING: lambda _: put(False), STOPPED: lambda _: put(True)}
        rounds = interleave(contenders, options, lambda _: None)
    record = Record("put waits", gpt_tensors.total_nbytes(state), rounds.seconds, cpu_seconds=rounds.cpu_seconds)
    record.ratio("put, the store stopped / running", STOPPED, RUNNING)
    limit_s = statistics.median(rounds.seconds[RUNNING]) + DEADLINE_LEAST_S
    waited = [
        float(skipped or took_s > limit_s)
        for skipped, took_s in zip(is_skipped[options.warmups :], rounds.seconds[STOPPED], strict=True)
    ]
    record.figure("puts that waited for a process", waited, "count", targets.WAITS, judged_by="highest")
    record.figure("voluntary switches of the training thread", switches[options.warmups :], "count")
    return [record]


@contextlib.contextmanager
def _stopped(cluster: ProcessCluster) -> Iterator[None]:
    """Stop every process of the store; they go on in any case."""
    processes = [p for p in (*cluster.holders.values(), cluster.controller) if p is not None]
    try:
        for process in processes:
            os.kill(process.pid, signal.SIGSTOP)
        yield
    finally:
        for process in processes:
            os.kill(process.pid, signal.SIGCONT)


# -- first put ----------------------------------------------------------------------------------------
# The first put of a process in a store that was started for it, prepared or not, beside the warm puts after it.
#
# Every round starts a cluster and a process for each contender, so nothing is warm: no arena, no page, no connection,
# no import. The one-off cost is the time from `store.prepare(state)` until its wait() returns. A put is timed until
# it returns (its stall) and until the peer has sealed it; the warm put is the median of the third to the fifth.


PREPARE = "prepare and wait, once"
FIRST, WARM = "first put", "warm put"
COLD = "first put without prepare"
PUTS, WARM_FROM = 5, 2
CHILD_S = 120.0
Times = list[tuple[Took, Took]]  # of every put: until it returned, until it was sealed on the peer


def run_first(options: Options) -> list[Record]:
    """Return stalls and times to sealed of first and warm puts, and how many times the first is slower."""
    one_offs: list[float] = []
    puts: dict[str, list[Times]] = {FIRST: [], COLD: []}

    def contender(name: str, is_prepared: bool) -> Took:
        prepare_s, times = _fresh_process(options, is_prepared)
        puts[name].append(times)
        if is_prepared:
            one_offs.append(prepare_s)
        return times[0][0]

    interleave(
        {FIRST: lambda _: contender(FIRST, True), COLD: lambda _: contender(COLD, False)}, options, lambda _: None
    )
    nbytes = gpt_tensors.total_nbytes(gpt_tensors.gpt_state(options.nbytes))
    records = []
    for part, what in ((0, "stall"), (1, "to sealed")):
        took = {name: [times[0][part] for times in rounds[options.warmups :]] for name, rounds in puts.items()}
        took[WARM] = [_middle([put[part] for put in times[WARM_FROM:]]) for times in puts[FIRST][options.warmups :]]
        record = Record(f"first put {what}", nbytes, {name: [t.wall_s for t in each] for name, each in took.items()})
        record.cpu_seconds = {name: [t.cpu_s or 0.0 for t in each] for name, each in took.items()}
        if part == 0:
            record.seconds[PREPARE] = one_offs[options.warmups :]
        record.ratio(f"first put / warm put, {what}", FIRST, WARM, targets.FIRST_PUT)
        record.ratio(f"without prepare / warm put, {what}", COLD, WARM)
        records.append(record)
    return records


def _middle(some: list[Took]) -> Took:
    return sorted(some)[len(some) // 2]


def _fresh_process(options: Options, is_prepared: bool) -> tuple[float, Times]:
    """Start a cluster and a rank in a process of its own; return what it measured."""
    with rig.two_hosts(options, replicas=2) as cluster, rig.on_host(rig.NEAR):
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        child = context.Process(
            target=_rank, args=(there, cluster.config, options.nbytes, is_prepared, rig.pids_of(cluster))
        )
        child.start()
        there.close()
        try:
            if not here.poll(CHILD_S):
                raise RuntimeError(f"the process that puts did not end within {CHILD_S:g} s")
            prepare_s, times = here.recv()
        finally:
            child.join(CHILD_S)
            if child.is_alive():
                child.kill()
                child.join()
            here.close()
    return prepare_s, times


def _rank(channel: Connection, config: Any, nbytes: int, is_prepared: bool, pids: list[int]) -> None:
    """On the child: prepare, put, compare every step's bytes on both hosts once its clock has stopped."""
    from memstore.client.connect import connect

    state = gpt_tensors.gpt_state(nbytes)
    times: Times = []
    pids = [os.getpid(), *pids]
    with connect(rig.JOB, rank=0, world_size=1, config=config) as store:
        began_s = time.perf_counter()
        if is_prepared:
            store.prepare(state).wait()
        prepare_s = time.perf_counter() - began_s
        for step in range(PUTS):
            gpt_tensors.touch(state)
            used_s, began_s = cpu_seconds(pids), time.perf_counter()
            ticket = store.put(step, state)
            stall = Took(time.perf_counter() - began_s, cpu_seconds(pids) - used_s)
            ticket.wait("replicated")
            times.append((stall, Took(time.perf_counter() - began_s, cpu_seconds(pids) - used_s)))
            ticket.wait("committed")
            if step in (0, PUTS - 1):
                for host in (rig.NEAR, rig.FAR):
                    got = rig.read_at(host, config, step)
                    is_same = got.source == "local" and gpt_tensors.is_same(got.state, state)
                    require(is_same, f"step {step} on {host}, pid {os.getpid()}")
    channel.send((prepare_s, times))
    channel.close()


# -- busy ---------------------------------------------------------------------------------------------
# How much later is a put committed where every core computes? Beside as many busy loops as there are cores.
#
# In each way of starting, whose nice values differ: a store of plain processes, where training and holders have the
# same; Ray Train, which starts both at 15; torchrun beside `ray start`, where training has 0 and the holders 15, and
# the same with the remedy that `memstore status` names. Everything of one way is in one session, which stands for a
# container: there nice values count. Each round puts once on idle cores and once beside the loops.


NBYTES = 128 * MIB
RAY_NICE = 15


class Way(NamedTuple):
    """How training and holders are started."""

    name: str
    rank_nice: int
    holders_niceness: int  # added to the rank's


PLAIN = Way("plain processes, and torchrun with RAY_worker_niceness=0", 0, 0)
RAY_TRAIN = Way("Ray Train", RAY_NICE, 0)
TORCHRUN = Way("torchrun beside ray start", 0, RAY_NICE)


def run_busy(options: Options) -> list[Record]:
    """Return put to committed on idle and on busy cores, and what the loops lose, for each way of starting."""
    options = dataclasses.replace(options, nbytes=min(options.nbytes, NBYTES))
    return [measure(options, way) for way in (PLAIN, RAY_TRAIN, TORCHRUN)]


def measure(options: Options, way: Way) -> Record:
    """Return one way's record."""
    arguments = json.dumps([dataclasses.astuple(options), way.holders_niceness])
    command = ["nice", "-n", str(way.rank_nice), sys.executable, "-m", "benchmarks.rigs.busy_ranks", arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, start_new_session=True, check=True, timeout=900)
    rounds = [Round(*each) for each in json.loads(done.stdout.splitlines()[-1])]
    record = Record(
        f"busy cores, {way.name}",
        RANKS * options.nbytes,
        {"put to committed, idle": [r.idle_s for r in rounds], "put to committed, busy": [r.busy_s for r in rounds]},
    )
    is_promised = way != TORCHRUN  # what the system forbids, status names
    busy = targets.BUSY if is_promised else None
    record.ratio("busy / idle", "put to committed, busy", "put to committed, idle", busy)
    lost = [r.loops_lost_s / r.put_cpu_s for r in rounds]
    record.figure("the loops' loss / the put's CPU", lost, "", targets.BUSY_LOSS if is_promised else None)
    record.figure("stall beside the loops", [r.stall_s for r in rounds], "s")
    record.figure("CPU seconds per GB put", [r.put_cpu_s / (RANKS * options.nbytes) * 1e9 for r in rounds], "s")
    return record
