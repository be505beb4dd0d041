"""What the Transformers tests train. They import it when they run: what it imports takes seconds.

Run as a program it is one rank of jobs whose model FSDP2 shards:

python transformers_case.py STORE STEPS DIES_AFTER JOB...    STEPS of each JOB; DIES_AFTER: of the last one, 0: never
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

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
        str(tmp_path / "out"),
        max_steps=STEPS,
        per_device_train_batch_size=4,
        learning_rate=0.01,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        **options,
    )
    data = [{"input_ids": row, "labels": row} for row in tokens]
    return hf.Trainer(model, args, train_dataset=data, callbacks=list(callbacks))


def train(tmp_path: Path, config: Config, job: str, losses: Losses, **options: Any) -> MemstoreCallback:
    callback = MemstoreCallback(job, config=config, **options)
    trainer = trainer_for(tmp_path, callback, losses)
    with callback.checkpoint_folder(trainer) as folder:
        trainer.train(resume_from_checkpoint=folder)
    losses.weights = trainer.model.state_dict()
    return callback


class OnCpu(hf.Trainer):  # type: ignore[misc]
    """A Trainer that shards on a CPU too: Accelerate's own code does, but it asks for an accelerator first."""

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self.accelerator.state.distributed_type = DistributedType.FSDP
        self.accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(**self.args.fsdp_plugin_args)
        self.is_fsdp_enabled = True


class Report(hf.TrainerCallback):  # type: ignore[misc]
    """Print what every step lost, to the last bit, and die after one."""

    def __init__(self, job: str, dies_after: int) -> None:
        self.job, self.dies_after = job, dies_after

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **kwargs: Any) -> None:
        if "loss" in logs:
            bits = f"{float(logs['loss']).hex()} {float(logs['grad_norm']).hex()}"
            os.write(1, f"\n{self.job} rank {args.process_index} step {state.global_step}: {bits}\n".encode())

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.dies_after:
            os.kill(os.getpid(), signal.SIGKILL)


def train_sharded(store: str, job: str, steps: int, dies_after: int, folder: str) -> None:
    torch.manual_seed(0)
    model = hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=32, n_positions=8, n_embd=16, n_layer=2, n_head=2))
    tokens = torch.randint(0, 32, (64, 8), generator=torch.Generator().manual_seed(1))
    args = hf.TrainingArguments(
        folder,
        max_steps=steps,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=0.01,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=6,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        fsdp=True,
        fsdp_config={"version": 2, "transformer_layer_cls_to_wrap": ["GPT2Block"]},
    )
    callback = MemstoreCallback(job, config=Config(store=store))
    data = [{"input_ids": row, "labels": row} for row in tokens]
    trainer = OnCpu(model, args, train_dataset=data, callbacks=[callback, Report(job, dies_after)])
    with callback.checkpoint_folder(trainer) as resumed:
        trainer.train(resume_from_checkpoint=resumed)
    assert {type(each).__name__ for each in trainer.model.parameters()} == {"DTensor"}
    os.write(1, f"\n{job} restored {callback.restored_step}\n".encode())


if __name__ == "__main__":
    os.environ["LOCAL_RANK"] = os.environ["RANK"]
    store, steps, dies_after, *jobs = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        for job in jobs:
            train_sharded(store, job, int(steps), int(dies_after) if job == jobs[-1] else 0, folder)
