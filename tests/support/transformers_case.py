"""What the Transformers tests train. They import it when they run: what it imports takes seconds."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import transformers as hf

from memstore.adapters.transformers import MemstoreCallback
from memstore.config import Config

STEPS = 8


class Losses(hf.TrainerCallback):  # type: ignore[misc]
    """What every step lost, and which folders lay in memory then."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.losses: dict[int, float] = {}
        self.fails_at = fails_at
        self.folders: list[list[str]] = []
        self.weights: dict[str, torch.Tensor] = {}

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.folders.append(folders())
        if state.global_step == self.fails_at:
            raise RuntimeError("planted")

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **kwargs: Any) -> None:
        if "loss" in logs:
            self.losses[state.global_step] = float(logs["loss"])


def folders() -> list[str]:
    """Checkpoint folders of this user in memory."""
    return sorted(str(path) for path in Path("/dev/shm").glob(f"memstore-transformers-{os.getuid()}-*"))


def folder_of(config: Config, job: str) -> Path:
    """Where rank 0 of a job resumes from."""
    return Path(f"/dev/shm/memstore-transformers-{os.getuid()}-{config.store}-{job}-0")


def trainer_for(tmp_path: Path, *callbacks: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    model = hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=32, n_positions=8, n_embd=16, n_layer=1, n_head=2))
    tokens = torch.randint(0, 32, (24, 8), generator=torch.Generator().manual_seed(1))
    args = hf.TrainingArguments(
        str(tmp_path / "out"), max_steps=STEPS, per_device_train_batch_size=4, learning_rate=0.01, logging_steps=1,
        save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True, **options,
    )  # fmt: skip
    data = [{"input_ids": row, "labels": row} for row in tokens]
    return hf.Trainer(model, args, train_dataset=data, callbacks=list(callbacks))


def train(tmp_path: Path, config: Config, job: str, losses: Losses, **options: Any) -> MemstoreCallback:
    callback = MemstoreCallback(job, config=config, **options)
    trainer = trainer_for(tmp_path, callback, losses)
    with callback.checkpoint_folder(trainer) as folder:
        trainer.train(resume_from_checkpoint=folder)
    losses.weights = trainer.model.state_dict()
    return callback
