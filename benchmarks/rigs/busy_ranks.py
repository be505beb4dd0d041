"""Two ranks on two hosts that put beside busy loops, in one session with all that they use; prints what was measured.

A process of its own, because a nice value can only be raised. One session, because with autogroups it counts only in
one; so it stands for a container, where it counts in all of it.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import NamedTuple

from benchmarks.report.harness import Options, require
from benchmarks.rigs.rank_workers import RankWorkers, ranks_on_hosts
from benchmarks.rigs.rig import pids_of
from benchmarks.rigs.stopwatch import cpu_seconds

SETTLE_S = 0.3  # what the put before has left behind is done
LOOP = """
import os
parent = os.getppid()
print(flush=True)
while os.getppid() == parent:  # it may be killed
    for _ in range(10**6):
        pass
"""
RANKS = 2


class Round(NamedTuple):
    """Seconds of a step from put to commit on idle processors and on busy ones, and what the latter costs."""

    idle_s: float
    busy_s: float
    stall_s: float
    put_cpu_s: float  # of all processes of the store and the ranks
    loops_lost_s: float  # processor seconds that the loops did not get meanwhile


def measure(options: Options, niceness: int) -> list[Round]:
    """Put once on idle processors and once on busy ones in every round, with holders so far behind the ranks."""
    found = []
    with ranks_on_hosts(options, options.nbytes, count=RANKS, niceness=niceness) as (cluster, workers):
        hosts = list(cluster.labels)
        pids = [*workers.pids, *pids_of(cluster)]
        for number in range(options.warmups + options.rounds):
            _settle(workers)
            idle_s, _ = _put(workers, 2 * number)
            step = 2 * number + 1
            with _busy_loops(len(os.sched_getaffinity(0))) as loops:
                _settle(workers)
                cpu_s, loops_s, begun_s = cpu_seconds(pids), cpu_seconds(loops), time.monotonic()
                busy_s, stall_s = _put(workers, step)
                loops_lost_s = len(loops) * (time.monotonic() - begun_s) - (cpu_seconds(loops) - loops_s)
                found.append(Round(idle_s, busy_s, stall_s, cpu_seconds(pids) - cpu_s, loops_lost_s))
            for rank in range(len(hosts)):
                same = workers.ask("is_same", step, hosts[1 - rank], ranks=[rank])
                require(all(same), f"rank {rank}'s shard of step {step}, put beside busy loops")
    return found[options.warmups :]


def _settle(workers: RankWorkers) -> None:
    workers.ask("touch")
    time.sleep(SETTLE_S)


def _put(workers: RankWorkers, step: int) -> tuple[float, float]:
    """Return the seconds from the first put to the last commit, and the longest stall."""
    marks = workers.ask("put", step)
    return (
        max(mark["committed"] for mark in marks) - min(mark["begun"] for mark in marks),
        max(mark["stall"] for mark in marks),
    )


@contextlib.contextmanager
def _busy_loops(count: int) -> Iterator[list[int]]:
    loops = [subprocess.Popen([sys.executable, "-c", LOOP], stdout=subprocess.PIPE) for _ in range(count)]
    try:
        for loop in loops:
            assert loop.stdout is not None
            loop.stdout.readline()
        yield [loop.pid for loop in loops]
    finally:
        for loop in loops:
            loop.kill()
            loop.communicate()


if __name__ == "__main__":
    given, behind = json.loads(sys.argv[1])
    print(json.dumps(measure(Options(*given), behind)))
