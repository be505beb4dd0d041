"""How long do holders hold the interpreter's lock for a gigabyte that they send, and for one that they receive?

Linux's perf samples the processor time of both holders while a rank on NEAR puts: NEAR's holder sends, FAR's
receives. A sample within the interpreter, or within an extension module that keeps the lock, counts as time with the
lock: what a second thread of that holder could not use. Digests, copies and system calls run without it. Once with
chunks of 4 MiB, and once with the 16 MiB that are advised for shards of many gigabytes.
"""

from __future__ import annotations

import collections
import contextlib
import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from benchmarks.report import targets
from benchmarks.report.harness import MIB, Options, Record, require
from benchmarks.rigs import gpt_tensors, rig

PUTS = 2  # of a round
PERIOD_S = 250e-6
FREE = re.compile(r"xxhash|memstore")  # extension modules that let go of the lock for their work
WITH_LOCK = re.compile(r"/python3[\d.]*$|libpython3|\.cpython-\d+|lib-dynload/")
SENDS, RECEIVES = "interpreter's lock held per GB sent", "interpreter's lock held per GB received"
PERF_S = 60.0


def run(options: Options) -> list[Record]:
    """Return the seconds with the lock for each way and size of chunks; without perf, why there are none."""
    large = replace(options, chunk_bytes=16 * MIB)
    return [measure(options, "interpreter's lock"), measure(large, "interpreter's lock, chunks of 16 MiB")]


def measure(options: Options, name: str) -> Record:
    """Return the seconds with the lock for each way."""
    state = gpt_tensors.gpt_state(options.nbytes)
    nbytes = gpt_tensors.total_nbytes(state)
    record = Record(name, nbytes, {})
    if shutil.which("perf") is None:
        record.absent = dict.fromkeys((SENDS, RECEIVES), "perf is not installed")
        return record
    held: dict[str, list[float]] = {SENDS: [], RECEIVES: []}
    with rig.store_on_two_hosts(options, replicas=2) as (cluster, store), tempfile.TemporaryDirectory() as folder:
        pids = {SENDS: cluster.holders[rig.NEAR].pid, RECEIVES: cluster.holders[rig.FAR].pid}
        for number in range(options.warmups + options.rounds):
            path = Path(folder) / f"{number}.perf"
            with _sampled(path, list(pids.values())):
                for step in range(number * PUTS, (number + 1) * PUTS):
                    gpt_tensors.touch(state)
                    store.put(step, state).wait("committed")
            got = rig.read_at(rig.FAR, cluster.config, step)
            require(got.source == "local" and gpt_tensors.is_same(got.state, state), f"the peer's copy of step {step}")
            if number >= options.warmups:
                seconds = seconds_with_lock(_script(path))
                for way, pid in pids.items():
                    held[way].append(seconds[pid] / (PUTS * nbytes) * 1e9)
            path.unlink()
    for way, values in held.items():
        record.figure(way, values, "s", targets.GIL)
    return record


def seconds_with_lock(script: str) -> Mapping[int, float]:
    """Return each process's seconds with the lock, out of perf's lines of process and (shared object)."""
    samples: collections.Counter[int] = collections.Counter()
    for line in script.splitlines():
        pid, _, where = line.strip().partition(" ")
        shared_object = where.rpartition("(")[2].rstrip(")")
        if WITH_LOCK.search(shared_object) and not FREE.search(shared_object):
            samples[int(pid)] += 1
    return collections.defaultdict(float, {pid: count * PERIOD_S for pid, count in samples.items()})


@contextlib.contextmanager
def _sampled(path: Path, pids: list[int]) -> Iterator[None]:
    """Sample the processor time of these processes, all threads, from when perf says that it does until the end."""
    orders, answers = path.with_suffix(".orders"), path.with_suffix(".answers")
    os.mkfifo(orders)
    os.mkfifo(answers)
    command = [
        "perf",
        "record",
        "-q",
        "-e",
        "cpu-clock",
        "-c",
        str(round(PERIOD_S * 1e9)),
        "-o",
        str(path),
        "-p",
        ",".join(map(str, pids)),
        "-D",
        "-1",
        f"--control=fifo:{orders},{answers}",
    ]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as perf:
        try:
            with orders.open("w") as order, answers.open() as answer:
                print("enable", file=order, flush=True)
                answer.readline()
                yield
        finally:
            perf.send_signal(signal.SIGINT)
            perf.wait(PERF_S)


def _script(path: Path) -> str:
    command = ["perf", "script", "-i", str(path), "-F", "pid,ip,dso"]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=PERF_S).stdout
