"""What the Lightning tests fit. They import it when they run: Lightning takes ten seconds to import."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from memstore.adapters.data import Batches, SampleOrder
from memstore.adapters.lightning import MemstoreCallback
from memstore.config import Config

EPOCH, BATCH = 4, 8  # batches, rows


class Samples(torch.utils.data.Dataset[torch.Tensor]):
    """Rows that are read with noise of the process that trains, if it reads them itself."""

    def __len__(self) -> int:
        return EPOCH * BATCH

    def __getitem__(self, index: int) -> torch.Tensor:
        row = torch.randn(6, generator=torch.Generator().manual_seed(index))
        return row if torch.utils.data.get_worker_info() is not None else row + torch.rand(())


def in_order(workers: int = 0) -> Batches:
    """Batches that know their place."""
    order = SampleOrder(EPOCH * BATCH, global_batch=BATCH, rank=0, world_size=1)
    return Batches(DataLoader(Samples(), batch_sampler=order, num_workers=workers))


def by_sampler() -> Any:
    """The loader of torchdata, whose sampler Lightning tells the epoch."""
    sampler = DistributedSampler(Samples(), 1, 0)
    return StatefulDataLoader(Samples(), batch_size=BATCH, sampler=sampler)


def shuffled() -> Any:
    """The loader of torchdata, which shuffles by itself, with workers."""
    return StatefulDataLoader(Samples(), batch_size=BATCH, shuffle=True, num_workers=1)


def endless() -> Iterator[torch.Tensor]:
    """Batches of an unknown number."""
    while True:
        yield torch.zeros(BATCH, 6)


class Module(pl.LightningModule):  # type: ignore[misc]
    def __init__(self, fails_at: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Dropout(0.2))
        self.losses: dict[int, float] = {}  # of a step's last batch
        self.fails_at, self.note = fails_at, "new"

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        if self.global_step == self.fails_at:
            raise RuntimeError("planted")
        loss = (self.net(batch) - batch).square().mean()
        self.losses[self.global_step] = loss.item()
        return loss

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["note"] = "saved"

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.note = checkpoint["note"]


class Count(pl.Callback):  # type: ignore[misc]
    """Another callback with a state of its own."""

    def __init__(self) -> None:
        self.batches = 0

    def on_train_batch_start(self, *args: Any) -> None:
        self.batches += 1

    def state_dict(self) -> dict[str, int]:
        return {"batches": self.batches}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.batches = state["batches"]


def fit(
    config: Config,
    job: str,
    module: Module,
    steps: int = 10,
    *,
    loader: Any = None,
    trainer: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[MemstoreCallback, Count]:
    checkpoints, count = MemstoreCallback(job, config=config, **options), Count()
    more = dict(trainer or {})
    callbacks = [checkpoints, count, *more.pop("callbacks", [])]
    torch.manual_seed(7)  # as where a process starts
    fitter = pl.Trainer(
        max_steps=steps,
        max_epochs=-1,
        accelerator="cpu",
        callbacks=callbacks,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **more,
    )
    fitter.fit(module, in_order() if loader is None else loader)
    return checkpoints, count
