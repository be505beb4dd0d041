"""What puts and copies cost the host's processors, and how long they hold the interpreter's lock."""

from __future__ import annotations

import collections
import contextlib
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from benchmarks.report import targets
from benchmarks.report.harness import MIB, Options, Record, require
from benchmarks.rigs import gpt_tensors, rig
from benchmarks.rigs.stopwatch import cpu_seconds
from memstore.client.store import Store

# -- loader -------------------------------------------------------------------------------------------
# What does a put cost the host's processors, and a training that needs all of them?
#
# First, processor seconds per GB: the rank's put and its link thread, the holders of both ends and the controller,
# over puts in a row without anything else. Then a training whose data loader is the bottleneck: as many workers as
# cores, each busy all the time, a small model, and 64 MiB put in every second step of about a second: the machine
# drifts by the second, so steps with and without a put take turns. A step takes many small batches, so that what lies
# ready when it begins counts little. Both ends of the transfer share the machine, as on a host that sends its copy to
# one neighbour and takes another's.


STATE_BYTES = 64 * MIB
STEP_S = 1.0
ROUND_STEPS = 8  # with a put, and as many without
STEP_BATCHES = 32
ITEM_VALUES = 100_000
SAMPLED_ITEMS = 20
COST_PUTS = 16


class Items(Dataset[torch.Tensor]):
    """Samples that take some processor time to make, as decoding does."""

    def __len__(self) -> int:
        return 1 << 30

    def __getitem__(self, index: int) -> torch.Tensor:
        values = np.random.default_rng(index).random(ITEM_VALUES, np.float32)
        values.sort()
        return torch.from_numpy(values[:: ITEM_VALUES // 64][:64].copy())


def run_loader(options: Options) -> list[Record]:
    """Return the seconds of a step with and without puts, and the processor seconds per GB."""
    options = Options(min(options.nbytes, STATE_BYTES), options.rounds, 1, options.chunk_bytes)
    state = gpt_tensors.gpt_state(options.nbytes)
    nbytes = gpt_tensors.total_nbytes(state)
    cores = len(os.sched_getaffinity(0))
    step_s = STEP_S if options.nbytes == STATE_BYTES else STEP_S / 10
    with rig.store_on_two_hosts(options, replicas=2) as (cluster, store):
        others = rig.pids_of(cluster)
        steps = iter(range(1 << 30))
        costs = [_cost(store, state, others, steps) * 1e9 / nbytes for _ in range(options.rounds)]
        batches = iter(DataLoader(Items(), batch_size=_items(step_s, cores), num_workers=cores, prefetch_factor=1))
        model = torch.nn.Linear(64, 64)
        seconds: dict[str, list[float]] = {"with": [], "without": []}
        for number in range(options.warmups + options.rounds):
            took_s = {"with": 0.0, "without": 0.0}
            for turn in range(2 * ROUND_STEPS):
                name = "with" if turn % 4 in (0, 3) else "without"  # the last one is with
                step = next(steps)
                took_s[name] += _step(batches, model, store, state, step if name == "with" else None)
            got = rig.read_at(rig.FAR, cluster.config, step)
            require(gpt_tensors.is_same(got.state, state), "the peer's copy of the last step")
            if number >= options.warmups:
                for name, total_s in took_s.items():
                    seconds[name].append(total_s / ROUND_STEPS)
        del batches
    record = Record("loader", nbytes, {f"a step, {name} puts": values for name, values in seconds.items()})
    record.ratio("step, with / without puts", "a step, with puts", "a step, without puts", targets.LOADER)
    record.figure("processor seconds per GB put", costs, "s")
    record.notes.append(f"{nbytes / MIB:.0f} MiB put every step; {cores} loader workers on {cores} cores")
    return [record]


def _items(step_s: float, cores: int) -> int:
    """Return how many samples a batch must have for a step's batches to make all cores busy as long as the step."""
    items, begun_s = Items(), time.process_time()
    for index in range(SAMPLED_ITEMS):
        items[index]
    return max(1, round(step_s * cores / STEP_BATCHES / ((time.process_time() - begun_s) / SAMPLED_ITEMS)))


def _cost(store: Store, state: Any, others: list[int], steps: Iterator[int]) -> float:
    """Return the processor seconds of one put, everything counted but the change of the state."""
    total_s = 0.0
    for _ in range(COST_PUTS):
        gpt_tensors.touch(state)
        before_s = time.process_time() + cpu_seconds(others)
        store.put(next(steps), state).wait("committed")
        total_s += time.process_time() + cpu_seconds(others) - before_s
    return total_s / COST_PUTS


def _step(batches: Iterator[torch.Tensor], model: torch.nn.Linear, store: Store, state: Any, step: int | None) -> float:
    """Return the seconds of a step, put under this number; its copy must be through by then, or the next one pays."""
    begun_s = time.perf_counter()
    gpt_tensors.touch(state)
    ticket = store.put(step, state) if step is not None else None
    for _ in range(STEP_BATCHES):
        model(next(batches)).sum().backward()
    took_s = time.perf_counter() - begun_s
    if ticket is not None and ticket.level != "committed":
        raise RuntimeError(f"the put of step {step} is not committed within its step of {took_s:.2f} s")
    return took_s


# -- gil ----------------------------------------------------------------------------------------------
# How long do holders hold the interpreter's lock for a gigabyte that they send, and for one that they receive?
#
# Linux's perf samples the processor time of both holders while a rank on NEAR puts: NEAR's holder sends, FAR's
# receives. A sample within the interpreter, or within an extension module that keeps the lock, counts as time with
# the lock: what a second thread of that holder could not use. Digests, copies and system calls run without it. Once
# with chunks of 4 MiB, and once with the 16 MiB that are advised for shards of many gigabytes.


PUTS = 2  # of a round
PERIOD_S = 250e-6
FREE = re.compile(r"xxhash|memstore")  # extension modules that let go of the lock for their work
WITH_LOCK = re.compile(r"/python3[\d.]*$|libpython3|\.cpython-\d+|lib-dynload/")
SENDS, RECEIVES = "interpreter's lock held per GB sent", "interpreter's lock held per GB received"
PERF_S = 60.0


def run_gil(options: Options) -> list[Record]:
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
