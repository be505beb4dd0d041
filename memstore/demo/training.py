"""The training of the demo: the text, a small transformer sharded with FSDP2, and the loop that a user would write."""

from __future__ import annotations

import math
import os
import sysconfig
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

import memstore
from memstore.client.ticket import Ticket
from memstore.config import Config
from memstore.demo.records import JoinedRecord, RestoredRecord, StepRun, write
from memstore.inplace import reentrant
from memstore.shell.identity import current_node_labels

TEXT_BYTES = 1 << 20


def library_text(limit_bytes: int) -> bytes:
    """Return the first `limit_bytes` of the standard library's modules in name order, with "?" for what is not ASCII.

    This text is on every machine; so the demo needs no download.

    Raises:
        FileNotFoundError: this Python has no library source.
    """
    folder, text = Path(sysconfig.get_path("stdlib")), b""
    for path in sorted(folder.glob("*.py")):
        text += path.read_bytes().decode("ascii", "replace").encode("ascii", "replace")
        if len(text) >= limit_bytes:
            return text[:limit_bytes]
    raise FileNotFoundError(f"{len(text)} bytes of Python source in {folder}: the demo trains on {limit_bytes}")


class SyntheticBatches:
    """Random windows of a text. They depend on (seed, step, rank) alone; so a repeated step gets the same bytes."""

    def __init__(self, text: bytes, *, seed: int, batch_size: int, context: int) -> None:
        self._text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._seed, self._batch_size, self._context = seed, batch_size, context

    def draw(self, step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (input, target), both [batch_size, context], target one character ahead."""
        generator = torch.Generator().manual_seed((self._seed * 1_000_003 + step) * 4_099 + rank)
        starts = torch.randint(0, len(self._text) - self._context - 1, (self._batch_size,), generator=generator)
        windows = torch.stack([self._text[s : s + self._context + 1] for s in starts.tolist()]).long()
        return windows[:, :-1], windows[:, 1:]


@dataclass(frozen=True)
class ModelSize:
    """The sizes of the model. The number of ranks divides all widths, so that all shards have the same size."""

    width: int = 128
    heads: int = 4
    layers: int = 4
    context: int = 64
    vocabulary: int = 128  # ASCII


class CharTransformer(nn.Module):
    """A transformer that predicts the next character."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.vocabulary, size.width)
        self.positions = nn.Parameter(torch.randn(size.context, size.width) * 0.02)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                size.width, size.heads, 4 * size.width, 0.0, "gelu", batch_first=True, norm_first=True
            )
            for _ in range(size.layers)
        )
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary)

    def forward(self, characters: torch.Tensor) -> torch.Tensor:
        """Map characters [batch, context] to logits [batch, context, vocabulary]."""
        context = characters.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(context)
        x = self.tokens(characters) + self.positions[:context]
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits.clone()  # FSDP2 hooks the output, and warns if it is a view


def sharded_model(size: ModelSize, *, seed: int) -> CharTransformer:
    """Return the model with its parameters sharded over the ranks; equal seeds give equal bits on all ranks."""
    torch.manual_seed(seed)
    model = CharTransformer(size)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model


def parameters_count(size: ModelSize) -> int:
    """Return how many numbers the model learns; allocate no memory for them."""
    with torch.device("meta"):
        return sum(p.numel() for p in CharTransformer(size).parameters())


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


@reentrant
def train(settings: dict[str, Any]) -> None:
    """Train, and write a journal of what happens. Ray Train passes one dict; its "settings" is a Settings.

    Under `InPlaceTorchConfig` the ranks that were not lost enter it again in their processes; else Ray starts all of
    them again.
    """
    entered_s = time.time()
    s: Settings = settings["settings"]
    torch.set_num_threads(1)  # so that sums have one order; besides, four ranks may share two cores
    rank = dist.get_rank()
    model = sharded_model(s.size, seed=s.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=s.learning_rate)
    state = {"model": model, "optim": optimizer}
    batches = SyntheticBatches(library_text(TEXT_BYTES), seed=s.seed, batch_size=s.batch_size, context=s.size.context)
    tickets: list[Ticket] = []
    started_s = time.perf_counter()
    with memstore.connect(s.job, config=s.config, fresh=not s.is_restoring) as store:
        host = (current_node_labels() or {}).get("host", "")
        took_s = time.perf_counter() - started_s
        write(s.journal, JoinedRecord(store.attempt, rank, host, os.getpid(), entered_s, took_s, time.time()))
        started_s = time.perf_counter()
        got = store.get(into=state) if s.is_restoring else None
        if got is not None:
            took_s = time.perf_counter() - started_s
            write(
                s.journal,
                RestoredRecord(
                    store.attempt,
                    rank,
                    got.step,
                    got.nbytes,
                    got.source,
                    got.steps_lost,
                    got.ranks_moved,
                    got.bytes_by_tier,
                    got.seconds_by_phase,
                    took_s,
                    time.time(),
                ),
            )
        for step in range(got.step + 1 if got else 0, s.steps):
            loss = train_step(model, optimizer, batches.draw(step, rank))
            tickets.append(store.put(step, state))
            committed = max((t.step for t in tickets if t.level == "committed"), default=-1)
            stall_s = tickets[-1].stall_s
            write(s.journal, StepRun(store.attempt, rank, step, loss.hex(), committed, stall_s, time.time()))


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[torch.Tensor, torch.Tensor]) -> float:
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
