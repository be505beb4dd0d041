"""The training function of every Ray Train worker: the code a user would write, and a journal of what happens."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

import memstore
from memstore.adapters.torch import AppState
from memstore.client.ticket import Ticket
from memstore.config import Config
from memstore.demo.model import ModelSize, sharded_model
from memstore.demo.records import Joined, Journal, Restored, StepRun
from memstore.demo.text import Batches, library_text
from memstore.shell.host.identity import current_node_labels

TEXT_BYTES = 1 << 20


@dataclass(frozen=True)
class Settings:
    """The settings of one training run."""

    job: str
    journal: str  # folder
    config: Config
    steps: int
    seed: int = 7
    batch_size: int = 4  # per rank
    learning_rate: float = 2e-3
    is_restoring: bool = True  # False for the control run, which starts over after every failure
    size: ModelSize = field(default_factory=ModelSize)


def train(settings: dict[str, Any]) -> None:
    """Train. Ray Train passes one dict; its "settings" is a Settings."""
    entered_s = time.time()
    s: Settings = settings["settings"]
    torch.set_num_threads(1)  # so that sums have one order; besides, four ranks may share two cores
    rank = dist.get_rank()
    journal = Journal(s.journal, rank)
    model = sharded_model(s.size, seed=s.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=s.learning_rate)
    state = {"app": AppState(model, optimizer)}
    batches = Batches(library_text(TEXT_BYTES), seed=s.seed, batch_size=s.batch_size, context=s.size.context)
    tickets: list[Ticket] = []
    started_s = time.perf_counter()
    with memstore.connect(s.job, config=s.config, fresh=not s.is_restoring) as store:
        host = (current_node_labels() or {}).get("host", "")
        connect_s = time.perf_counter() - started_s
        journal.write(Joined(store.attempt, rank, host, entered_s, connect_s, time.time()))
        started_s = time.perf_counter()
        got = store.get(into=state) if s.is_restoring else None
        if got is not None:
            journal.write(
                Restored(
                    store.attempt, rank, got.step, got.nbytes, got.source, got.steps_lost, got.ranks_moved,
                    got.bytes_by_tier, got.seconds_by_phase, time.perf_counter() - started_s, time.time(),
                )
            )  # fmt: skip
        for step in range(got.step + 1 if got else 0, s.steps):
            loss = train_step(model, optimizer, batches.draw(step, rank))
            tickets.append(store.put(step, state))
            committed = max((t.step for t in tickets if t.level == "committed"), default=-1)
            stall_s = tickets[-1].stall_s
            journal.write(StepRun(store.attempt, rank, step, loss.hex(), committed, stall_s, time.time()))
    journal.close()


def train_step(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[torch.Tensor, torch.Tensor]
) -> float:
    """Run one optimizer step; return the mean loss of the ranks, in nats per character."""
    characters, target = batch
    loss = functional.cross_entropy(model(characters).flatten(0, 1), target.flatten())
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    value = float(mean) / dist.get_world_size()
    if not math.isfinite(value):
        raise FloatingPointError(f"the demo's loss is {value}: lower the learning rate")
    return value
