"""Transformers: a callback that puts as `put_every` says; the Trainer resumes from a checkpoint folder in memory.

The Trainer reads checkpoints as folders only. `checkpoint_folder` writes one into tmpfs from the store, for
as long as the Trainer needs to read it. The number of ranks may change between launches.

- One process or DDP: every rank holds the model whole. Ranks name one shard, which as many of them copy as `replicas`
  asks, and the folder has it all.
- FSDP2: each rank saves its part by torch's DCP. The folder has progress and random states only; model, optimizer and
  schedule are loaded from the store where the Trainer would read theirs, when they are sharded.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.tensor import DTensor
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.utils import WEIGHTS_NAME

from memstore.adapters.data import Batches, host_random_states
from memstore.adapters.torch import NamedOptimizer, load_dcp
from memstore.client.connect import connect
from memstore.client.store import Store
from memstore.config import Config
from memstore.errors import ConfigError


class MemstoreCallback(TrainerCallback):
    """Puts model, optimizer, scheduler, progress and random states after each step that is due.

        callback = MemstoreCallback("job")
        trainer = Trainer(..., callbacks=[callback])
        with callback.checkpoint_folder(trainer) as folder:  # None on a job without history
            trainer.train(resume_from_checkpoint=folder)

    Args:
        job: Name of the training run; the same after every restart.
        config: As for `memstore.connect`; its `put_every` counts optimizer steps, and "epoch" is the Trainer's.
    """

    def __init__(self, job: str, *, config: Config | None = None) -> None:
        self.job, self.config = job, config or Config()
        self.store: Store | None = None
        self.restored_step: int | None = None  # global_step that this training went on from; None: it began
        self._folder: Path | None = None
        self._is_sharded = False

    @contextmanager
    def checkpoint_folder(self, trainer: Trainer) -> Iterator[str | None]:
        """Connect, and yield a folder for `train(resume_from_checkpoint=)` with the newest step; collective.

        The folder goes after the first step that was trained from it, at the latest with the block, which also
        waits for the last commit and leaves the job.

        Raises:
            ConfigError: The Trainer scales losses (fp16), or shards the model otherwise than by FSDP2.
        """
        args, self._is_sharded = trainer.args, is_sharded(trainer)
        with connect(
            self.job,
            rank=args.process_index,
            world_size=args.world_size,
            config=self.config,
            shard_rank=None if self._is_sharded else 0,
            shard_count=None if self._is_sharded else 1,
        ) as self.store:
            try:
                state, own = self._read_sharded(trainer) if self._is_sharded else self._read_whole()
                if state is not None:
                    self._folder = self._fresh_folder()
                    write_folder(self._folder, state, own, rank=args.process_index, ranks=args.world_size)
                    del state
                yield None if self._folder is None else str(self._folder)
            finally:
                self._remove_folder()
                trainer.__dict__.pop("_load_from_checkpoint", None)

    def _read_whole(self) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
        got = self._connected().get()
        if got is None:
            return None, None
        self.restored_step = got.step
        return got.state, got.rank_state

    def _read_sharded(self, trainer: Any) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
        """Read progress and random states; model, optimizer and schedule follow when the Trainer has sharded them."""
        store, rank = self._connected(), trainer.args.process_index
        self.restored_step = step = store.agree_on_step()
        if step is None:
            return None, None
        small: dict[str, Any] = {}
        planner = _EmptyStateDictLoadPlanner(keys={"trainer", _own_key(rank)})
        _load_state_dict(small, store.dcp_reader(step), planner=planner, no_dist=True)

        def load(folder: str, model: torch.nn.Module | None = None) -> None:
            states = sharded_states(trainer.model, trainer.optimizer, trainer.lr_scheduler)
            load_dcp(states, store.dcp_reader(step))

        trainer._load_from_checkpoint = load
        return {"trainer": small["trainer"]}, small.get(_own_key(rank))

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Refuse to train outside of checkpoint_folder(), where nothing would be put or restored.

        Raises:
            ConfigError: train() was called without the block; or the data is a `Batches`, which has a place of its own
                beside the Trainer's.
        """
        if isinstance(kwargs.get("train_dataloader"), Batches):
            raise ConfigError(
                f"job {self.job!r}: the Trainer finds its place in the data by itself, and a Batches has one too: let "
                "get_train_dataloader() return the DataLoader below it"
            )
        if self.store is None:
            raise ConfigError(
                f"job {self.job!r}: trainer.train() runs outside of the callback's block, so no step would be stored. "
                "Write `with callback.checkpoint_folder(trainer) as folder: "
                "trainer.train(resume_from_checkpoint=folder)`"
            )

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Put as `put_every` says; free the folder that was resumed from at the first step."""
        self._remove_folder()
        is_epoch_end = state.epoch is not None and float(state.epoch).is_integer()
        if self.store is None or not self.store.should_put(state.global_step, is_epoch_end=is_epoch_end):
            return
        own = own_state(state, args.world_size)
        if not self._is_sharded:
            self.store.put(state.global_step, shared_state(state, **kwargs), rank_state=own)
            return
        states = sharded_states(kwargs["model"], kwargs["optimizer"], kwargs["lr_scheduler"])
        states |= {"trainer": progress_of(state), _own_key(args.process_index): own}
        dcp.save(states, storage_writer=self.store.dcp_writer(state.global_step, wait=None))

    def _fresh_folder(self) -> Path:
        """Create a folder of this rank's own, 0700, without the files of a killed process."""
        name = f"memstore-transformers-{os.getuid()}-{self.config.store}-{self.job}-{self._connected().rank}"
        folder = Path(self.config.arena_dir, name)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(mode=0o700)
        return folder

    def _connected(self) -> Store:
        if self.store is None:
            raise ConfigError("not connected: use checkpoint_folder() as a context manager")
        return self.store

    def _remove_folder(self) -> None:
        folder, self._folder = self._folder, None
        if folder is not None:
            shutil.rmtree(folder)


def is_sharded(trainer: Any) -> bool:
    """Tell whether Accelerate shards the Trainer's model by FSDP2; ConfigError if it cannot be put either way."""
    args, is_fsdp2 = trainer.args, trainer.is_fsdp_enabled and trainer.accelerator.is_fsdp2
    problems = {
        "fsdp": "" if is_fsdp2 else args.fsdp,
        "deepspeed": args.deepspeed,
        "fp16": args.fp16,
        "distributed_config": any(isinstance(each, DTensor) for each in trainer.model.parameters()) and not is_fsdp2,
    }
    for problem, is_set in problems.items():
        if is_set:
            raise ConfigError(
                f"{problem}={is_set!r}: only models that every rank holds whole (one process, DDP) or that Accelerate "
                "shards by FSDP2 (fsdp=True, fsdp_config={'version': 2}, on an accelerator) can be put here, without a "
                "loss scaler: use one of these with bf16, or memstore.adapters.torch in a loop of your own"
            )
    return bool(is_fsdp2)


def shared_state(state: TrainerState, *, model: Any, optimizer: Any, lr_scheduler: Any, **_: Any) -> dict[str, Any]:
    """Return what all ranks hold alike, as a put takes it."""
    return {"model": model, "optimizer": optimizer, "scheduler": lr_scheduler, "trainer": progress_of(state)}


def sharded_states(model: Any, optimizer: Any, lr_scheduler: Any) -> dict[str, Any]:
    """Return what DCP saves and loads in parts; Accelerate has wrapped the optimizer."""
    return {"model": model, "optimizer": NamedOptimizer(model, optimizer.optimizer), "scheduler": lr_scheduler}


def progress_of(state: TrainerState) -> str:
    """Return the progress that all ranks have in common."""
    return json.dumps({key: value for key, value in dataclasses.asdict(state).items() if key not in OF_ONE_RANK})


# Fields of a TrainerState in which ranks differ: their rank flags, and logs with times.
OF_ONE_RANK = ("is_local_process_zero", "is_world_process_zero", "log_history")


def own_state(state: TrainerState, ranks: int) -> dict[str, Any]:
    """Return the state of this rank alone: its logs, and random states in the form that the Trainer reads."""
    cuda = torch.cuda.random
    own: dict[str, Any] = {"rng": host_random_states(), "logs": json.dumps(state.log_history)}
    if torch.cuda.is_available():
        own["rng"]["cuda"] = cuda.get_rng_state_all() if ranks > 1 else cuda.get_rng_state()
    return own


def _own_key(rank: int) -> str:
    return f"rank{rank}"


def write_folder(folder: Path, state: dict[str, Any], own: dict[str, Any] | None, *, rank: int, ranks: int) -> None:
    """Write a step as the Trainer reads it; not by save_pretrained, which writes on the first rank only.

    Args:
        folder: Where, empty.
        state: The result of `shared_state`, or the progress of it alone.
        own: The result of `own_state`; None where the step was put by another number of ranks: the Trainer then
            begins with the random states of its seed.
        rank: This process's.
        ranks: How many there are.
    """
    for key, name in (("model", WEIGHTS_NAME), ("optimizer", OPTIMIZER_NAME), ("scheduler", SCHEDULER_NAME)):
        if key in state:
            torch.save(state[key], folder / name)
    if own is not None:
        torch.save(own["rng"], folder / ("rng_state.pth" if ranks == 1 else f"rng_state_{rank}.pth"))
    logs = json.loads(own["logs"]) if own is not None else []
    (folder / TRAINER_STATE_NAME).write_text(json.dumps({**json.loads(state["trainer"]), "log_history": logs}))
