"""What the Lightning tests fit. They import it when they run: Lightning takes ten seconds to import."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import torch

from memstore.adapters.lightning import MemstoreCallback
from memstore.config import Config

EPOCH = 4  # batches


class Batches:
    """A resumable loader."""

    def __init__(self) -> None:
        self.position = 0

    def __len__(self) -> int:
        return EPOCH

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.position < EPOCH:
            self.position += 1
            yield torch.randn(8, 6, generator=torch.Generator().manual_seed(self.position))
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class Module(pl.LightningModule):  # type: ignore[misc]
    def __init__(self, fails_at: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Linear(6, 6)
        self.losses: dict[int, float] = {}
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


def fit(config: Config, job: str, module: Module, steps: int = 10, **options: Any) -> tuple[MemstoreCallback, Count]:
    checkpoints, count = MemstoreCallback(job, config=config, **options), Count()
    trainer = pl.Trainer(
        max_steps=steps, max_epochs=-1, accelerator="cpu", callbacks=[count, checkpoints], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, Batches())
    return checkpoints, count
