"""Lightning with every step in the memory of the hosts: one callback.

    python examples/lightning_fit.py --steps 40

Kill it at any moment and start it again: it goes on after the newest committed step, in the middle of an epoch too,
because its data loader is resumable (state_dict / load_state_dict). Under torchrun with `devices` and `num_nodes` set
it is the same script.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import lightning.pytorch as pl
import torch

import memstore
from memstore.adapters.lightning import MemstoreCallback

BATCHES = 10  # of one epoch


class Batches:
    """A loader that knows where it stands, as torchdata's StatefulDataLoader does."""

    def __init__(self) -> None:
        self.position = 0

    def __len__(self) -> int:
        return BATCHES

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.position < BATCHES:
            self.position += 1
            yield torch.randn(16, 32, generator=torch.Generator().manual_seed(self.position))
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class Autoencoder(pl.LightningModule):
    """What is trained; nothing in it knows of memstore."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 32))

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        loss = (self.net(batch) - batch).square().mean()
        print(f"rank {self.global_rank}: step {self.global_step + 1} loss {loss.item():.9f}", flush=True)
        return loss

    def configure_optimizers(self) -> dict:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--job", default="lightning-example")
    parser.add_argument("--store", default="default")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--devices", default="auto", help="Processes of a torchrun on this machine, as Lightning asks.")
    args = parser.parse_args()
    pl.seed_everything(0)
    checkpoints = MemstoreCallback(args.job, config=memstore.Config(store=args.store))
    trainer = pl.Trainer(
        max_steps=args.steps, max_epochs=-1, accelerator="auto", devices=args.devices, callbacks=[checkpoints],
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Autoencoder(), Batches())
    print(f"rank {trainer.global_rank}: first step {(checkpoints.restored_step or 0) + 1}")
