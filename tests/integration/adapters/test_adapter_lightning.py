"""Lightning with its real Trainer: a fit that was broken off goes on as if it had not been."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from memstore.config import Config
from memstore.testing.clusters.processes import ProcessCluster

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Lightning's imports warn about themselves
    pl = pytest.importorskip("lightning.pytorch", reason="pip install -e '.[frameworks]'")
    from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy

    from memstore.adapters.lightning import MemstoreCallback, holds_equal_models

EPOCH = 4  # batches
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Config]:
    with ProcessCluster(tmp_path / "store", {"h1": {}}, replicas=1) as cluster:
        monkeypatch.setenv("MEMSTORE_HOST", "h1")
        yield cluster.config


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


class Module(pl.LightningModule):  # type: ignore[misc, name-defined]
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


class Count(pl.Callback):  # type: ignore[misc, name-defined]
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


@pytest.mark.parametrize("fails_at", [3, 6, 8])
def test_a_fit_goes_on_where_it_broke_off(config: Config, fails_at: int) -> None:
    """Broken off within and between epochs: losses, schedule, callbacks and hooks are as in an unbroken fit."""
    whole = Module()
    _, counted = fit(config, "whole", whole)
    broken = Module(fails_at)
    with pytest.raises(RuntimeError, match="planted"):
        fit(config, "broken", broken)
    resumed = Module()
    checkpoints, count = fit(config, "broken", resumed)
    assert checkpoints.restored_step is not None
    assert fails_at - 2 <= checkpoints.restored_step <= fails_at
    assert resumed.losses == {step: whole.losses[step] for step in range(checkpoints.restored_step, 10)}
    assert count.batches == counted.batches == 10
    assert resumed.note == "saved"


def test_puts_come_every_n_optimizer_steps(config: Config) -> None:
    """every_n_steps=3 leaves the last multiple; a fit that has nothing left to do trains nothing."""
    fit(config, "every", Module(), steps=8, every_n_steps=3)
    module = Module()
    checkpoints, _ = fit(config, "every", module, steps=6, every_n_steps=3)
    assert checkpoints.restored_step == 6
    assert not module.losses


@pytest.mark.parametrize(
    ("strategy", "is_equal"), [(DDPStrategy, True), (DeepSpeedStrategy, False), (FSDPStrategy, False)]
)
def test_only_ranks_with_equal_models_share_a_shard(strategy: type, is_equal: bool) -> None:
    """DeepSpeed's strategy is a subclass of DDP's, and each of its ranks has a part of the optimizer of its own."""
    assert holds_equal_models(strategy.__new__(strategy)) is is_equal
