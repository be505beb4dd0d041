"""The first put of a process in a store that was started for it, prepared or not, beside the warm puts after it.

Every round starts a cluster and a process for each contender, so nothing is warm: no arena, no page, no connection,
no import. The one-off cost is the time from `store.prepare(state)` until its wait() returns. A put is timed until it
returns (its stall) and until the peer has sealed it; the warm put is the median of the third to the fifth.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.report import targets
from benchmarks.report.harness import Options, Record, Took, interleave, require
from benchmarks.rigs import gpt_tensors, rig
from benchmarks.rigs.process_costs import cpu_seconds

PREPARE = "prepare and wait, once"
FIRST, WARM = "first put", "warm put"
COLD = "first put without prepare"
PUTS, WARM_FROM = 5, 2
CHILD_S = 120.0
Times = list[tuple[Took, Took]]  # of every put: until it returned, until it was sealed on the peer


def run(options: Options) -> list[Record]:
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
