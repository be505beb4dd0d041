"""What a put costs a training step that computes meanwhile: overlapped, plain, and without any put.

A step is forward, backward and Adam of a stack of linear layers whose parameters and moments are the state. Batches are
chosen so that forward and backward take as long as `COPIES` plain copies of the state. Steps of all kinds take turns;
a put's step runs until the optimizer is done, so it pays for the put, for what the copy takes from the computation,
and for the fence. Replication to another host would compute beside all of them alike: here one copy is kept.
"""

from __future__ import annotations

import statistics
from typing import Any

import torch
from torch import nn

from benchmarks.report.harness import Options, Record, Took, interleave, require
from benchmarks.report.targets import OVERLAP
from benchmarks.rigs import rig
from benchmarks.rigs.stopwatch import timed
from memstore.client.store import Store
from memstore.client.ticket import Ticket

COPIES = 5
LAYERS = 10
STATE_COPIES = 3  # a parameter and Adam's two moments
WAIT_S = 60.0


class Training:
    """A model with its optimizer and a batch."""

    def __init__(self, nbytes: int) -> None:
        width = int((nbytes / STATE_COPIES / 4 / LAYERS) ** 0.5)
        self.model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(LAYERS)))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-4)
        self.width, self.rows = width, 1
        self.forward_backward()
        self.optimizer.step()  # makes the moments

    @property
    def state(self) -> dict[str, object]:
        """What is put."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def tensors(self) -> list[torch.Tensor]:
        """The large tensors of the state."""
        moments = [v for s in self.optimizer.state.values() for v in s.values() if v.dim() == 2]
        return [p.detach() for p in self.model.parameters()] + moments

    def forward_backward(self) -> None:
        """Compute gradients for one batch."""
        self.optimizer.zero_grad(set_to_none=False)
        torch.relu(self.model(torch.ones(self.rows, self.width))).square().mean().backward()

    def fit(self, seconds: float) -> None:
        """Choose the batch so that forward and backward take this long."""
        low, high = 0.0, self._seconds(16)
        while high < seconds:
            low, high = high, self._seconds(self.rows * 2)
        step = self.rows // 2
        self.rows = max(1, round(step + step * (seconds - low) / (high - low)))

    def _seconds(self, rows: int) -> float:
        self.rows = rows
        self.forward_backward()
        return statistics.median(timed(self.forward_backward)[0].wall_s for _ in range(3))


def run(options: Options) -> list[Record]:
    """Return the added step time over a plain copy with training on one core, then on all of them."""
    all_threads = torch.get_num_threads()
    records = []
    try:
        for threads in sorted({1, all_threads}):
            torch.set_num_threads(threads)
            records.append(_measure(options, threads, all_threads))
    finally:
        torch.set_num_threads(all_threads)
    return records


def _measure(options: Options, threads: int, all_threads: int) -> Record:
    training = Training(options.nbytes)
    sources = training.tensors()
    twins = [torch.empty_like(tensor) for tensor in sources]
    stalls: dict[str, list[float]] = {"plain": [], "overlapped": []}
    with rig.store_on_two_hosts(options, replicas=1) as (cluster, store):
        store.wait_before_step(training.optimizer)
        steps = iter(range(1, 1 << 30))

        def copy(_: int) -> Took:
            torch.set_num_threads(all_threads)
            took = timed(lambda: [twin.copy_(source) for twin, source in zip(twins, sources, strict=True)])[0]
            torch.set_num_threads(threads)
            return took

        for _ in range(3):
            copy(0)
        training.fit(COPIES * statistics.median(copy(0).wall_s for _ in range(3)))

        def step(put: str) -> Took:
            return _step(training, store, twins, put, next(steps), stalls, rig.pids_of(cluster))

        contenders = {
            "plain copy": copy,
            "step": lambda _: step(""),
            "step, plain put": lambda _: step("plain"),
            "step, overlapped put": lambda _: step("overlapped"),
        }
        rounds = interleave(contenders, options, lambda _: None)
    seconds = rounds.seconds
    record = Record(f"overlap, {threads} of {all_threads} cores compute", sum(t.nbytes for t in sources), seconds)
    record.cpu_seconds = rounds.cpu_seconds
    added = {
        kind: [a - b for a, b in zip(seconds[f"step, {kind} put"], seconds["step"], strict=True)] for kind in stalls
    }
    for kind, target in (("plain", None), ("overlapped", OVERLAP)):
        record.seconds[f"added by the {kind} put"] = added[kind]
        record.ratio(f"added by the {kind} put / plain copy", f"added by the {kind} put", "plain copy", target)
        record.notes.append(
            f"{kind} put's own stall: {statistics.median(stalls[kind][-options.rounds :]) * 1e3:.1f} ms"
        )
    return record


def _step(
    training: Training,
    store: Store,
    twins: list[torch.Tensor],
    put: str,
    step: int,
    stalls: dict[str, list[float]],
    pids: list[int],
) -> Took:
    """Time one step, its put in front; afterwards what was put is compared with the state as it was."""
    state = training.state
    if put:
        for twin, source in zip(twins, training.tensors(), strict=True):
            twin.copy_(source)

    def work() -> Ticket | None:
        ticket = store.put(step, state, overlap=put == "overlapped") if put else None
        training.forward_backward()
        training.optimizer.step()
        return ticket

    took, ticket = timed(work, pids)
    if ticket is not None:
        ticket.wait("committed", WAIT_S)
        stalls[put].append(ticket.stall_s)
        got = store.get(step, rank=0)
        require(got is not None and _is_same(got.state, twins), f"{put} put of step {step}")
    return took


def _is_same(state: Any, twins: list[torch.Tensor]) -> bool:
    moments = [v for s in state["optimizer"]["state"].values() for v in s.values() if v.dim() == 2]
    got = [*state["model"].values(), *moments]
    return len(got) == len(twins) and all(torch.equal(a, b) for a, b in zip(got, twins, strict=True))
