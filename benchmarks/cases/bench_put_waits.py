"""What in a put waits for another process: puts while every other process of the store is stopped (R11).

Each round puts twice: with the store running, and with all holders and the controller stopped by SIGSTOP from before
the call until after the return. A stopped process answers nothing, so all that put waits for ends with a deadline,
the least of which is memstore's 0.1 s, or skips the step: such a put counts as a wait. Once the processes go on, both
puts must commit, and their bytes are compared. The voluntary context switches of the training thread are its waits
of any kind, for the thread that copies the other half too.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import signal
import statistics
from collections.abc import Iterator

from benchmarks.report import targets
from benchmarks.report.harness import Options, Record, Took, interleave, require
from benchmarks.rigs import gpt_tensors, rig
from benchmarks.rigs.stopwatch import timed
from memstore.testing.clusters.processes import ProcessCluster, wait_for

RUNNING, STOPPED = "put, the store running", "put, the store stopped"
DEADLINE_LEAST_S = 0.1


def run(options: Options) -> list[Record]:
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
