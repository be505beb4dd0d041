"""Ranks whose training breaks off four times, and that go on with the model they have: `FOLDER LAYOUT`.

The unbroken run, the saved states and the copies that restore them are plain torch. Only the run that breaks off calls
the product, and only `reuse`.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp
import torch.distributed.tensor.parallel
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from memstore.inplace import generation, reuse
from memstore.inplace.reentry import Generation, enter

WIDTH, BLOCKS, STEPS, LOST = 12, 3, 8, 1
BREAKS = {2: "forward", 3: "backward", 4: "clip", 5: "step"}
REGROUPINGS = 20
WAIT_S = 60.0
Built = tuple[nn.Module, torch.optim.Optimizer]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.norm(value + self.down(torch.relu(self.up(value))))
        return out


class History:
    def __init__(self, step: int | None) -> None:
        self.step = step

    def latest_step(self) -> int | None:
        return self.step


def plain() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(*[Block() for _ in range(BLOCKS)])


def sharded(made: nn.Module, mesh: Any = None, **options: Any) -> nn.Module:
    for block in made.children():
        fully_shard(block, mesh=mesh, **options)
    fully_shard(made, mesh=mesh)
    return made


def fsdp() -> nn.Module:
    return sharded(plain())


def resharded() -> nn.Module:
    return sharded(plain(), reshard_after_forward=2)


def hsdp() -> nn.Module:
    made = sharded(plain(), init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    assert isinstance(made, FSDPModule)
    made.set_separate_reduce_scatter_group(True)
    return made


def tensor_parallel(src_data_rank: int | None = None) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    made = plain()
    for block in made.children():
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(block, mesh["model"], plan, src_data_rank=src_data_rank)
    return sharded(made, mesh["data"])


def ddp() -> nn.Module:
    made = DistributedDataParallel(plain(), gradient_as_bucket_view=True, process_group=dist.new_group())
    made.register_comm_hook(None, halved)
    return made


def halved(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Reduce gradients to what DDP would not: a rank that lost the hook would have others."""
    reduced = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return reduced.then(lambda done: done.value()[0] / 4)  # type: ignore[no-any-return]


halved.__annotations__.clear()  # DDP compares them with classes, and here they are text


LAYOUTS: dict[str, tuple[int, Callable[[], nn.Module]]] = {
    "fsdp": (3, fsdp),
    "resharded": (4, resharded),
    "hsdp": (4, hsdp),
    "tensor-parallel": (4, tensor_parallel),
    "ddp": (2, ddp),
    "plain": (2, plain),
    "scattered": (4, lambda: tensor_parallel(0)),
}


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def tensors(built: Built) -> dict[str, torch.Tensor]:
    """Every tensor of the model and of the optimizer, as this rank holds it."""
    model, optimizer = built
    found = {name: local(value.detach()) for name, value in model.named_parameters()}
    names = {id(value): name for name, value in model.named_parameters()}
    for parameter, state in optimizer.state.items():
        found.update({f"{names[id(parameter)]}.{key}": local(value) for key, value in state.items()})
    return found


def by_mesh(model: nn.Module) -> list[list[nn.Parameter]]:
    """Parameters that can have one norm: those that tensor parallelism leaves whole are over another mesh."""
    found: dict[Any, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        found.setdefault(parameter.device_mesh if isinstance(parameter, DTensor) else None, []).append(parameter)
    return list(found.values())


class Ranks:
    """One rank: its process groups, one after the other."""

    def __init__(self, folder: Path, rank: int, world_size: int) -> None:
        self.rank, self.world_size, self.groups_count = rank, world_size, 0
        self.store = dist.FileStore(str(folder / "meeting"), world_size)
        self.store.set_timeout(timedelta(seconds=WAIT_S))

    @contextmanager
    def group(self) -> Iterator[None]:
        self.groups_count += 1
        store = dist.PrefixStore(f"{self.groups_count}", self.store)
        dist.init_process_group(
            "gloo", store=store, rank=self.rank, world_size=self.world_size, timeout=timedelta(seconds=WAIT_S)
        )
        try:
            yield
            store.set(f"done {self.rank}", "")
            store.wait([f"done {rank}" for rank in range(self.world_size)])
        finally:
            shut_sockets()
            dist.destroy_process_group()


def open_sockets() -> list[int]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                found.append(int(name))
        except FileNotFoundError:
            continue
    return found


def shut_sockets() -> None:
    """End every connection of this process: all are gloo's, for the ranks meet at a file."""
    for descriptor in open_sockets():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as one:  # the other end was first
            if not one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                one.shutdown(socket.SHUT_RDWR)


def train_step(built: Built, step: int, rank: int, breaks: str = "") -> str:
    """Train a step and return the loss; break off at a point."""
    model, optimizer = built
    is_lost = rank == LOST
    torch.manual_seed(
        1000 * step + (rank // 2 if dist.get_world_size() == 4 else rank)
    )  # the same on tensor parallel peers
    inputs = torch.randn(4, WIDTH)
    second = list(getattr(model, "module", model).children())[1]
    hooks = []
    if breaks == "forward" and is_lost:
        hooks.append(second.register_forward_pre_hook(lambda *_: shut_sockets()))
    if breaks == "backward" and is_lost:
        hooks.append(second.register_full_backward_hook(lambda *_: shut_sockets()))
    try:
        loss = (model(inputs) - inputs).square().mean()
        loss.backward()
    finally:
        for hook in hooks:
            hook.remove()
    if breaks == "clip" and is_lost:
        shut_sockets()
    for part in by_mesh(model):
        torch.nn.utils.clip_grad_norm_(part, 0.05)
    if breaks == "clip":
        dist.barrier()  # a model without a collective in it breaks here
    if breaks == "step":  # half of the parameters are stepped
        for parameter in list(model.parameters())[::2]:
            parameter.grad = None
        optimizer.step()
        raise RuntimeError("broken off in the optimizer's step")
    optimizer.step()
    optimizer.zero_grad()
    dist.barrier()
    return float(loss.detach()).hex()


def restore(built: Built, saved: dict[str, torch.Tensor]) -> None:
    """Copy a saved state into the tensors that are there; a new optimizer has none yet."""
    model, optimizer = built
    if not optimizer.state:
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
    there = tensors(built)
    assert there.keys() == saved.keys()
    for name, value in there.items():
        value.copy_(saved[name])


def unbroken(ranks: Ranks, build: Callable[[], Built]) -> tuple[list[str], list[dict[str, torch.Tensor]]]:
    """Return each step's loss, and the state after it. Nothing of the product takes part."""
    losses, states = [], []
    with ranks.group():
        built = build()
        for step in range(STEPS):
            losses.append(train_step(built, step, ranks.rank))
            states.append({name: value.clone() for name, value in tensors(built).items()})
    return losses, states


def broken(ranks: Ranks, build: Callable[[], Built], states: list[dict[str, torch.Tensor]]) -> dict[str, Any]:
    """Return the losses of a run that breaks off at each point; after each, rank LOST starts with nothing."""
    losses: list[str] = []
    kept: dict[str, Any] = {}
    errors: list[str] = []
    builds_count, step, last = 0, 0, [0]

    def counted() -> Built:
        nonlocal builds_count
        builds_count += 1
        return build()

    breaks = dict(BREAKS)
    for number in range(len(BREAKS) + 1):
        if number and ranks.rank == LOST:
            kept = {}
        enter(Generation(number, ranks.rank, ranks.world_size, number == 0, kept))
        try:
            with ranks.group():
                built = reuse(counted, History(step - 1 if number else None))
                if number:
                    assert not any(value.grad is not None for value in built[0].parameters())
                    restore(built, states[step - 1])
                    is_same = [value.data_ptr() for value in tensors(built).values()] == last
                    assert is_same == (builds_count == 1), "a survivor's tensors are the ones it had"
                while step < STEPS:
                    last = [value.data_ptr() for value in tensors(built).values()]
                    losses.append(train_step(built, step, ranks.rank, breaks.get(step, "")))
                    step += 1
                final = tensors(built)
        except RuntimeError as error:
            if step not in breaks:
                raise
            errors.append(f"{breaks.pop(step)}: {error}")
        if number == 0:
            del built
    now = generation()
    assert now is not None
    assert now.number == len(BREAKS)
    enter(None)
    return {
        "losses": losses,
        "builds": builds_count,
        "errors": errors,
        "different": [name for name, value in final.items() if not torch.equal(value, states[-1][name])],
    }


def regrouped(ranks: Ranks, build: Callable[[], Built]) -> dict[str, Any]:
    """Return threads and sockets of the process after the 1st group, and after the last."""
    kept: dict[str, Any] = {}
    counts = []
    for number in range(REGROUPINGS + 1):
        enter(Generation(number, ranks.rank, ranks.world_size, number == 0, kept))
        with ranks.group():
            built = reuse(build, History(0))
            train_step(built, number, ranks.rank)
            counts.append((len(os.listdir("/proc/self/task")), len(open_sockets())))
    enter(None)
    return {"counts": counts}


def as_rank(folder: Path, layout: str, rank: int) -> None:
    torch.set_num_threads(1)
    world_size, make = LAYOUTS[layout]
    ranks = Ranks(folder, rank, world_size)

    def build() -> Built:
        model = make()
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    losses, states = unbroken(ranks, build)
    found = {"unbroken": losses, **broken(ranks, build, states), **regrouped(ranks, build)}
    (folder / f"{rank}.json").write_text(json.dumps(found))


def main(folder: Path, layout: str) -> int:
    """Fork the ranks, which have torch imported so; return 0 if all end well."""
    children = []
    for rank in range(LAYOUTS[layout][0]):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                as_rank(folder, layout, rank)
                code = 0
            finally:
                if code:
                    sys.excepthook(*sys.exc_info())
                sys.stderr.flush()
                os._exit(code)
        children.append(child)
    return max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0 for child in children)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
