"""Lightning with every step in the memory of the hosts: one callback.

    python examples/lightning_fit.py --steps 40

Kill it at any moment and start it again: it goes on after the newest committed step, in the middle of an epoch too,
because `Batches` knows its place in the data, and with the dropout that it would have had. Under torchrun with
`devices` and `num_nodes` set it is the same script.
"""

from __future__ import annotations

import argparse

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

import memstore
from memstore.adapters.data import Batches, SampleOrder
from memstore.adapters.lightning import MemstoreCallback


class Autoencoder(pl.LightningModule):
    """What is trained, and the data."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Dropout(0.1), torch.nn.Linear(64, 32)
        )

    def train_dataloader(self) -> Batches:
        rows = torch.randn(320, 32, generator=torch.Generator().manual_seed(1))
        ranks = {"rank": self.trainer.global_rank, "world_size": self.trainer.world_size}
        order = SampleOrder(len(rows), global_batch=32, **ranks)
        return Batches(DataLoader(rows, batch_sampler=order, num_workers=1))

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
        max_steps=args.steps,
        max_epochs=-1,
        accelerator="auto",
        devices=args.devices,
        callbacks=[checkpoints],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Autoencoder())
    print(f"rank {trainer.global_rank}: first step {(checkpoints.restored_step or 0) + 1}")
