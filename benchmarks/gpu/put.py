"""`python -m benchmarks.gpu.put`: what a put of a training state on a GPU costs a step, plain and overlapped.

A step is forward, backward and Adam of a GPT of 1B parameters, its micro-batches chosen so that forward and backward
take `COPIES` pinned copies of the state. A stall is what a put adds to a step: GPU and host idle before it and after.
Beside it a pinned copy of the same tensors, and the peak: one large copy into pinned memory.
"""

from __future__ import annotations

import itertools
import statistics
from typing import Any

import torch

from benchmarks.gpu import training as gpu_training
from benchmarks.gpu.training import Size, Training
from benchmarks.report import targets
from benchmarks.report.harness import Record, Took, interleave, require
from memstore.client.store import Store
from memstore.client.ticket import Ticket

COPIES = 2
WAIT_S = 120.0
COPY, PEAK, STEP, PUT, PLAIN, OVERLAPPED = (
    "pinned copy",
    "pinned peak",
    "step",
    "put",
    "step, plain put",
    "step, overlapped put",
)


def measure(device: torch.device, size: Size) -> Record:
    """Return the stalls over a pinned copy, and the plain put's speed over the pinned peak."""
    training = Training(device, size)
    with gpu_training.store_of_one_host(size.options) as (store, pids):
        race = PutRace(training, store, pids)
        contenders = {
            COPY: lambda _: race.copy(),
            PEAK: lambda _: race.peak(),
            PUT: lambda _: race.put_alone(),
            STEP: lambda _: race.step(""),
            PLAIN: lambda _: race.step(PLAIN),
            OVERLAPPED: lambda _: race.step(OVERLAPPED),
        }
        rounds = interleave(contenders, size.options, lambda _: None)
    seconds = rounds.seconds
    record = Record("gpu put", race.nbytes, seconds, cpu_seconds=rounds.cpu_seconds)
    for kind, name in ((PLAIN, "plain"), (OVERLAPPED, "overlapped")):
        record.seconds[f"added by the {name} put"] = [a - b for a, b in zip(seconds[kind], seconds[STEP], strict=True)]
    record.ratio("plain put / pinned copy", PUT, COPY, targets.GPU_STALL)
    record.ratio("added by the plain put / pinned copy", "added by the plain put", COPY)
    record.ratio("added by the overlapped put / pinned copy", "added by the overlapped put", COPY, targets.GPU_OVERLAP)
    record.ratio("plain put: speed / pinned peak", PEAK, PUT, targets.GPU_D2H)
    host_s = statistics.median(race.blocked_s[-size.rounds :])
    record.notes.append(
        f"{training.micro_batches} micro-batches; an overlapped put and its fence block the host {host_s * 1e3:.2f} ms"
    )
    return record


class PutRace:
    """What is timed, each once a call; what was put is compared with the state as it was, after the clock stopped."""

    def __init__(self, training: Training, store: Store, pids: list[int]) -> None:
        self._training, self._store, self._pids = training, store, pids
        self._sources = training.tensors()
        self.nbytes = sum(tensor.nbytes for tensor in self._sources)
        self._twins = gpu_training.pinned_like(self._sources)
        self._large, self._host = gpu_training.peaks(training.device, self.nbytes)
        self._steps = itertools.count(1)
        self.blocked_s: list[float] = []  # the host, by overlapped puts
        store.wait_before_step(training.optimizer)
        store.prepare(training.state).wait()
        self.copy()
        training.fit(COPIES * self.copy().wall_s)

    def copy(self) -> Took:
        """A copy of every tensor into pinned memory."""
        return self._training.timed(lambda: gpu_training.copy_all(self._twins, self._sources))

    def peak(self) -> Took:
        """One large copy into pinned memory; seconds for as many bytes as the state has."""
        took = self._training.timed(lambda: self._host.copy_(self._large, non_blocking=True))
        return Took(took.wall_s * self.nbytes / self._large.nbytes)

    def step(self, put: str) -> Took:
        """One step, its put in front."""
        self.copy()
        number, state = next(self._steps), self._training.state
        tickets: list[Ticket] = []

        def work() -> None:
            if put:
                tickets.append(self._store.put(number, state, overlap=put == OVERLAPPED))
            self._training.step()

        took = self._training.timed(work, self._pids)
        for ticket in tickets:
            ticket.wait("committed", WAIT_S)
            self._compare(number)
            if put == OVERLAPPED:
                self.blocked_s.append(ticket.stall_s)
        return took

    def put_alone(self) -> Took:
        """A put; a step afterwards, so that no two puts are of the same bytes."""
        self.copy()
        number, state = next(self._steps), self._training.state
        took = self._training.timed(lambda: self._store.put(number, state), self._pids)
        self._store.flush(timeout_s=WAIT_S)
        self._compare(number)
        self._training.step()
        return took

    def _compare(self, number: int) -> None:
        got = self._store.get(number, rank=0)
        require(got is not None and gpu_training.is_same(stored(got.state), self._twins), f"put of step {number}")


def stored(state: dict[str, Any]) -> list[torch.Tensor]:
    """Return the tensors of a stored state in the order of `Training.tensors`."""
    moments = [v for values in state["optimizer"]["state"].values() for v in values.values()]
    return [*state["model"].values(), *(v for v in moments if v.dim())]


def main() -> None:
    """Measure, or say why not."""
    gpu_training.main("gpu_put", measure)


if __name__ == "__main__":
    main()
