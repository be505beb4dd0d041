"""The Transformers Trainer with every step in the memory of the hosts: one callback, and a folder to resume from.

    python examples/transformers_trainer.py --steps 40

Kill it at any moment and start it again: the store's newest step is written as a checkpoint folder into tmpfs, the
Trainer resumes from it (model, optimizer, schedule, dropout, place in the data), and it is gone after the first step.
"""

from __future__ import annotations

import argparse
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

import memstore
from memstore.adapters.transformers import MemstoreCallback


class Print(TrainerCallback):
    """The loss of every step, for a reader's eyes."""

    def on_log(self, args, state, control, logs, **kwargs) -> None:
        if "loss" in logs:
            print(f"rank {args.process_index}: step {state.global_step} loss {float(logs['loss']):.9f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--job", default="transformers-example")
    parser.add_argument("--store", default="default")
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2)  # tiny, untrained, with dropout
    tokens = torch.randint(0, 64, (80, 16), generator=torch.Generator().manual_seed(1))
    callback = MemstoreCallback(args.job, config=memstore.Config(store=args.store))
    with tempfile.TemporaryDirectory() as output_dir:
        trainer = Trainer(
            GPT2LMHeadModel(config),
            TrainingArguments(
                output_dir,
                max_steps=args.steps,
                per_device_train_batch_size=8,
                learning_rate=0.01,
                logging_steps=1,
                lr_scheduler_type="constant",
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
                use_cpu=not torch.cuda.is_available(),
            ),
            train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
            callbacks=[callback, Print()],
        )
        with callback.checkpoint_folder(trainer) as folder:  # None on a job without history
            trainer.train(resume_from_checkpoint=folder)
            first = callback.restored_step + 1 if callback.restored_step is not None else 1
            print(f"rank {trainer.args.process_index}: first step {first}, from {folder}")
