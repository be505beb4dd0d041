"""Transformers: a callback that puts every n steps; the Trainer resumes from a checkpoint folder in memory.

The Trainer reads checkpoints as folders only. `checkpoint_folder` writes one into tmpfs from the store, for
as long as the Trainer needs to read it. For models that every rank holds whole: one process or DDP. Ranks therefore
name one shard: as many of them copy the model as `replicas` asks, and the number of ranks may change between launches.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.utils import WEIGHTS_NAME

from memstore.client.connect import connect
from memstore.client.store import Store
from memstore.config import Config
from memstore.errors import ConfigError


class MemstoreCallback(TrainerCallback):
    """Puts model, optimizer, scheduler, progress and random states after every n-th step.

        callback = MemstoreCallback("job")
        trainer = Trainer(..., callbacks=[callback])
        with callback.checkpoint_folder(trainer) as folder:  # None on a job without history
            trainer.train(resume_from_checkpoint=folder)

    Args:
        job: Name of the training run; the same after every restart.
        every_n_steps: Optimizer steps between two puts.
        config: As for `memstore.connect`.
    """

    def __init__(self, job: str, *, every_n_steps: int = 1, config: Config | None = None) -> None:
        self.job, self.every_n_steps, self.config = job, every_n_steps, config or Config()
        self.store: Store | None = None
        self.restored_step: int | None = None  # global_step that this training went on from; None: it began
        self._folder: Path | None = None

    @contextmanager
    def checkpoint_folder(self, trainer: Trainer) -> Iterator[str | None]:
        """Connect, and yield a folder for `train(resume_from_checkpoint=)` with the newest step; collective.

        The folder goes after the first step that was trained from it, at the latest with the block, which also
        waits for the last commit and leaves the job.

        Raises:
            ConfigError: The Trainer shards the model (FSDP, DeepSpeed) or scales losses (fp16).
        """
        args = trainer.args
        for problem, is_set in (("fsdp", args.fsdp), ("deepspeed", args.deepspeed), ("fp16", args.fp16)):
            if is_set:
                raise ConfigError(
                    f"{problem}={is_set!r}: a checkpoint folder holds whole models without a loss scaler only. Use "
                    "bf16 with DDP or one process here, and memstore.adapters.torch in a loop of your own otherwise"
                )
        with connect(
            self.job,
            rank=args.process_index,
            world_size=args.world_size,
            config=self.config,
            shard_rank=0,
            shard_count=1,
        ) as self.store:
            got = self.store.get()
            try:
                if got is not None:
                    self.restored_step = got.step
                    self._folder = self._fresh_folder()
                    write_folder(
                        self._folder, got.state, got.rank_state, rank=args.process_index, ranks=args.world_size
                    )
                    del got
                yield None if self._folder is None else str(self._folder)
            finally:
                self._remove_folder()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:  # fmt: skip
        """Refuse to train outside of checkpoint_folder(): nothing would be put, and nothing restored.

        Raises:
            ConfigError: train() was called without the block.
        """
        if self.store is None:
            raise ConfigError(
                f"job {self.job!r}: trainer.train() runs outside of the callback's block, so no step would be stored. "
                "Write `with callback.checkpoint_folder(trainer) as folder: "
                "trainer.train(resume_from_checkpoint=folder)`"
            )

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:  # fmt: skip
        """Put every n steps; free the folder that was resumed from at the first put."""
        self._remove_folder()
        if self.store is not None and state.global_step % self.every_n_steps == 0:
            self.store.put(state.global_step, shared_state(state, **kwargs), rank_state=own_state(state))

    def _fresh_folder(self) -> Path:
        """Create a folder of this rank's own, 0700, without the files of a killed process."""
        store = self.store
        if store is None:
            raise ConfigError("not connected: use checkpoint_folder() as a context manager")
        name = f"memstore-transformers-{os.getuid()}-{self.config.store}-{self.job}-{store.rank}"
        folder = Path(self.config.arena_dir, name)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(mode=0o700)
        return folder

    def _remove_folder(self) -> None:
        folder, self._folder = self._folder, None
        if folder is not None:
            shutil.rmtree(folder)


def shared_state(state: TrainerState, *, model: Any, optimizer: Any, lr_scheduler: Any, **_: Any) -> dict[str, Any]:
    """Return what all ranks hold alike, as plain values and tensors."""
    trainer = {key: value for key, value in dataclasses.asdict(state).items() if key not in OF_ONE_RANK}
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": lr_scheduler.state_dict(),
        "trainer": json.dumps(trainer),
    }


# Fields of a TrainerState in which ranks differ: their rank flags, and logs with times.
OF_ONE_RANK = ("is_local_process_zero", "is_world_process_zero", "log_history")


def own_state(state: TrainerState) -> dict[str, Any]:
    """Return the state of this rank alone: its random states and its logs."""
    return {
        "rng": {
            "python": random.getstate(),
            "numpy": np.random.get_state(),
            "cpu": torch.random.get_rng_state(),
            **({"cuda": torch.cuda.random.get_rng_state()} if torch.cuda.is_available() else {}),
        },
        "logs": json.dumps(state.log_history),
    }


def write_folder(folder: Path, state: dict[str, Any], own: dict[str, Any] | None, *, rank: int, ranks: int) -> None:
    """Write a step as the Trainer reads it; not by save_pretrained, which writes on the first rank only.

    Args:
        folder: Where, empty.
        state: The result of `shared_state`.
        own: The result of `own_state`; None where the step was put by another number of ranks: the Trainer then
            begins with the random states of its seed.
        rank: This process's.
        ranks: How many there are.
    """
    torch.save(state["model"], folder / WEIGHTS_NAME)
    torch.save(state["optimizer"], folder / OPTIMIZER_NAME)
    torch.save(state["scheduler"], folder / SCHEDULER_NAME)
    if own is not None:
        torch.save(own["rng"], folder / ("rng_state.pth" if ranks == 1 else f"rng_state_{rank}.pth"))
    logs = json.loads(own["logs"]) if own is not None else []
    (folder / TRAINER_STATE_NAME).write_text(json.dumps({**json.loads(state["trainer"]), "log_history": logs}))
