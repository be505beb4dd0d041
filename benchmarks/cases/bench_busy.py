"""How much later is a put committed where every core computes? Beside as many busy loops as there are cores.

In each way of starting, whose nice values differ: a store of plain processes, where training and holders have the same;
Ray Train, which starts both at 15; torchrun beside `ray start`, where training has 0 and the holders 15, and the same
with the remedy that `memstore status` names. Everything of one way is in one session, which stands for a container:
there nice values count. Each round puts once on idle cores and once beside the loops.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from typing import NamedTuple

from benchmarks.report import targets
from benchmarks.report.harness import MIB, Options, Record
from benchmarks.rigs.busy_ranks import RANKS, Round

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


def run(options: Options) -> list[Record]:
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
