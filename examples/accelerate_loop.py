"""A loop of one's own with Accelerate, every step in the memory of the hosts: what Accelerate prepared is the state.

    torchrun --standalone --nproc-per-node 2 examples/accelerate_loop.py --steps 40

Accelerate needs no adapter: what it prepares has state_dict and load_state_dict. The data is not prepared: `Batches`
deals it to the ranks, and knows its place in a shuffled epoch to the sample. Kill it at any moment and start it again:
dropout and order are those of an unbroken run.
"""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator

import memstore
from memstore.adapters.data import Batches, SampleOrder


class RandomState:
    """What dropout draws from."""

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"cpu": torch.get_rng_state()}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        torch.set_rng_state(state["cpu"])


def train(args: argparse.Namespace) -> None:
    """What runs on every rank."""
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    rank, world_size = accelerator.process_index, accelerator.num_processes
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Dropout(0.1), torch.nn.Linear(256, 64))
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5))
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    data = torch.randn(160, 64, generator=torch.Generator().manual_seed(1))
    order = SampleOrder(len(data), global_batch=8 * world_size, rank=rank, world_size=world_size)
    batches = Batches(torch.utils.data.DataLoader(data, batch_sampler=order))
    parts = {"model": model, "optim": optimizer, "schedule": schedule}
    with memstore.connect(args.job, config=memstore.Config(store=args.store)) as store:
        state = {**parts, "batches": batches, "random": RandomState()}
        got = store.get(into=state)
        first = got.step + 1 if got else 0
        print(f"rank {rank}: first step {first}, {got.source_reason if got else 'a new job'}", flush=True)
        for step in range(first, args.steps):
            batch = next(batches).to(accelerator.device)
            loss = (model(batch) - batch).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            store.put(step, state)
            print(f"rank {rank}: step {step} loss {loss.item():.9f}", flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--job", default="accelerate-example")
    parser.add_argument("--store", default="default")
    parser.add_argument("--steps", type=int, default=200)
    train(parser.parse_args())
