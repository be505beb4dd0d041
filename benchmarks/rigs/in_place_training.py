"""A training under Ray Train that is held at a gate, notes each step, and shards its model in one of three ways.

The function is the same for the ordinary restart and for recovery in place: Ray decides which of them it is.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import memstore
from memstore.adapters.data import Batches, SampleOrder
from memstore.config import Config
from memstore.drills.ranks.in_place import Gate
from memstore.inplace import reentrant, reuse

RANKS = 4
WIDTH, BLOCKS = 256, 4  # 2.1 M parameters, 25 MB with Adam's moments
SAMPLES, GLOBAL_BATCH = 4096, 32
PAUSE_S = 0.05  # after each step: the processors of a host whose GPUs train are not busy either
TENSOR, DDP = "tensor", "ddp"  # else FSDP2 over all ranks


class StepDone(msgspec.Struct, frozen=True):
    """The record of one step of one rank, as it was done."""

    rank: int
    pid: int
    entered_s: float  # when the rank entered the function; monotonic, as all clocks here, and one for all processes
    done_s: float
    cpu_s: float  # of the process, from its start
    step: int
    loss: str  # the ranks' mean, in every bit
    samples: tuple[int, ...]


_DECODER = msgspec.json.Decoder(StepDone)


@dataclass(frozen=True)
class Settings:
    """The settings of one job; `setup` is "fsdp", TENSOR or DDP."""

    job: str
    setup: str
    folder: str  # of the gate and the records
    config: Config
    device: str = "cpu"


class Announced:
    """Leaves a file in a folder for each process that unpickles it: each rank and each spare."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Callable[[str], Announced], tuple[str]]:
        return _announce, (self.folder,)


def _announce(folder: str) -> Announced:
    Path(folder, f"{os.getpid()}.process").touch()
    return Announced(folder)


def announced(folder: Path) -> set[int]:
    """Return the processes that have unpickled an `Announced`."""
    return {int(path.stem) for path in folder.glob("*.process")}


class Records:
    """Reads what all processes of a job have noted; every line once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read_bytes: dict[Path, int] = {}
        self._found: list[StepDone] = []

    def steps_done(self) -> list[StepDone]:
        """Return the steps that all processes have done so far; those of one process in their order."""
        for path in self._folder.glob("*.steps"):
            with path.open("rb") as file:
                file.seek(self._read_bytes.get(path, 0))
                whole = file.read().rpartition(b"\n")[0]  # a kill may cut the last line short
            if whole:
                self._read_bytes[path] = self._read_bytes.get(path, 0) + len(whole) + 1
                self._found += map(_DECODER.decode, whole.split(b"\n"))
        return self._found


class Values(Dataset[tuple[int, torch.Tensor]]):
    """Random vectors that follow from their index."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, torch.randn(WIDTH, generator=torch.Generator().manual_seed(index))


class Block(nn.Module):
    """One layer, of a width that tensor parallelism can halve."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """Map [batch, WIDTH] to the same."""
        out: torch.Tensor = value + self.down(torch.relu(self.up(value)))
        return out


def build(setup: str, device: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model over all ranks and its optimizer; equal weights on all of them."""
    torch.manual_seed(7)
    model: nn.Module = nn.Sequential(*(Block() for _ in range(BLOCKS))).to(device)
    mesh = None
    if setup == TENSOR:
        meshes = init_device_mesh(device, (RANKS // 2, 2), mesh_dim_names=("data", "model"))
        for block in model.children():
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(block, meshes["model"], plan, src_data_rank=None)
        mesh = meshes["data"]
    if setup == DDP:
        # Else DDP groups gradients in another way after its first backward. A sum's last bits follow from the groups,
        # and they would differ in a process that began later.
        model = DistributedDataParallel(model, gradient_as_bucket_view=True, find_unused_parameters=True)
    else:
        for block in model.children():
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)


@reentrant
def train(here: Announced, settings: dict[str, Any]) -> None:
    """Train from the newest committed step to the last one that the gate allows; Ray Train passes {"settings": ...}."""
    s: Settings = settings["settings"]
    torch.set_num_threads(1)
    entered_s, rank, setup = time.monotonic(), dist.get_rank(), s.setup
    copies = 2 if setup == TENSOR else 1  # ranks with the same data
    order = SampleOrder(SAMPLES, global_batch=GLOBAL_BATCH, rank=rank // copies, world_size=RANKS // copies, seed=7)
    shard = (0, 1) if setup == DDP else (None, None)
    gate, path = Gate(s.folder), Path(s.folder, f"{rank}-{os.getpid()}.steps")
    store = memstore.connect(s.job, config=s.config, shard_rank=shard[0], shard_count=shard[1])
    with store, path.open("ab", buffering=0) as file:
        model, optimizer = reuse(lambda: build(setup, s.device), store)
        data = Batches(DataLoader(Values(), batch_sampler=order))
        state = {"model": model, "optim": optimizer, "data": data}
        got = store.get(into=state)
        step = got.step + 1 if got else 0
        while gate.wait(step):
            indices, values = next(data)
            loss = _step(model, optimizer, values.to(s.device))
            done = StepDone(
                rank, os.getpid(), entered_s, time.monotonic(), time.process_time(), step, loss, tuple(indices.tolist())
            )
            # First: a rank that is killed between the two would leave a committed step without a record.
            file.write(msgspec.json.encode(done) + b"\n")
            store.put(step, state)
            time.sleep(PAUSE_S)
            step += 1


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, values: torch.Tensor) -> str:
    loss = (model(values) - values.roll(1, 1)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    return float(mean / RANKS).hex()
