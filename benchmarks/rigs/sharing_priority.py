"""What puts cost a training that computes on every processor, with the holders' bulk threads giving way or not (D89).

A step is a fixed amount of matrix products on all processors, then a put; both ends of the copy share the machine, so
it does twice what a host of its own has to. "Do not": the same threads of the same holders, raised from outside to the
priority of their process for as long as that contender trains (needs root).
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from benchmarks.report.harness import MIB, Options, Record, interleave, require
from benchmarks.rigs import rig
from memstore.client.store import Store
from memstore.config import Config

NBYTES = 32 * MIB
STEPS = 6
STEP_S = 0.12
PLAIN, NICED, EQUAL = "no put", "put, threads give way", "put, threads do not"


def run(options: Options) -> Record:
    """Return seconds of a step, the mean of each round's."""
    options = Options(NBYTES, options.rounds, 1)
    with rig.store_on_two_hosts(options, replicas=2) as (cluster, store):
        pids = [process.pid for process in cluster.holders.values()]
        training = Training(store, cluster.config)

        def equal(number: int) -> float:
            with _raised(pids):
                return training.run(EQUAL)

        contenders = {PLAIN: lambda number: training.run(""), NICED: lambda number: training.run(NICED), EQUAL: equal}
        seconds = interleave(contenders, options, lambda number: None)
    record = Record("sharing, the processors", 0, seconds)
    for over, under in ((NICED, PLAIN), (EQUAL, PLAIN), (NICED, EQUAL)):
        record.ratio(f"{over} / {under}", over, under)
    for name in (NICED, EQUAL):
        stall_s, late_s = (statistics.median(values) for values in (training.stalls_s[name], training.lates_s[name]))
        record.notes.append(
            f"{name}: a put of {NBYTES // MIB} MiB blocked {stall_s * 1e3:.0f} ms; the last of a round was committed "
            f"{late_s * 1e3:.0f} ms after the training had stopped computing"
        )
    return record


class Training:
    """A rank that computes on all processors."""

    def __init__(self, store: Store, config: Config) -> None:
        self.store, self.config, self.step = store, config, 0
        self.stalls_s: dict[str, list[float]] = {NICED: [], EQUAL: []}
        self.lates_s: dict[str, list[float]] = {NICED: [], EQUAL: []}
        self.state = torch.zeros(NBYTES // 4)
        self.factor = torch.rand(512, 512)
        self.products = 20
        self.compute()
        began_s = time.perf_counter()
        self.compute()
        self.products = max(1, int(self.products * STEP_S / (time.perf_counter() - began_s)))

    def compute(self) -> None:
        """Keep all processors busy."""
        for _ in range(self.products):
            torch.mm(self.factor, self.factor)

    def run(self, name: str) -> float:
        """Train, with puts if there is a name to note their stalls under; compare the bytes of the last one."""
        began_s = time.perf_counter()
        for _ in range(STEPS):
            self.step += 1
            self.state.fill_(self.step)
            if name:
                ticket = self.store.put(self.step, {"state": self.state})
                self.stalls_s[name].append(ticket.stall_s)
            self.compute()
        took_s = time.perf_counter() - began_s
        if name:
            ticket.wait("committed", 60.0)
            self.lates_s[name].append(time.perf_counter() - began_s - took_s)
            got = rig.read_at(rig.FAR, self.config, self.step)
            found = got.state["state"].numpy()
            require(got.source == "local" and bool(np.all(found == self.step)), f"{name}: the peer's copy")
        return took_s / STEPS


@contextlib.contextmanager
def _raised(pids: list[int]) -> Iterator[None]:
    """While inside, no thread of these processes gives way to training."""
    before: dict[int, int] = {}
    for pid in pids:
        base = os.getpriority(os.PRIO_PROCESS, pid)
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(ProcessLookupError):  # it has ended
                before[int(task.name)] = os.getpriority(os.PRIO_PROCESS, int(task.name))
                os.setpriority(os.PRIO_PROCESS, int(task.name), base)
    try:
        yield
    finally:
        for thread, nice in before.items():
            with contextlib.suppress(ProcessLookupError):
                os.setpriority(os.PRIO_PROCESS, thread, nice)
