"""A training function that is entered again after a loss, with faults at its steps: for tests of in-place recovery."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, Dataset

import memstore
from memstore.adapters.data import Batches, SampleOrder
from memstore.inplace import generation, reentrant, reuse, watchdog

STEPS, FAULT_AT = 30, 12
ALWAYS = -1  # in the place of a generation: in each, before step FAULT_AT
SPARES_S = 120.0


@dataclass(frozen=True)
class InPlaceRankEnd:
    """What a rank returns: its process, its last generation, the losses of the steps that it trained in that."""

    pid: int
    generation: int
    is_first_here: bool
    losses: dict[int, str]


_END = msgspec.json.Decoder(InPlaceRankEnd)


def train(store_name: str, job: str, faults: Mapping[tuple[int, int], str], device: str = "cpu") -> InPlaceRankEnd:
    """Train to the end.

    Args:
        store_name: The store to put into.
        job: The job's name.
        faults: (generation, rank) -> "exit", "stop", "pause:PATH" (its watchdog too, named in a file PATH), "raise",
            "wait" or "hold:PATH", until there is a file PATH; at step FAULT_AT in generation 0, at the next one in
            generation 1. (ALWAYS, rank) -> the same, in every generation.
        device: Where the weights lie; SharedGpu if they share one.
    """
    now = generation()
    if now is None:
        raise RuntimeError("the function is to be called in a generation")
    weights, losses = torch.zeros(64, device=device), {}
    config = memstore.Config(store=store_name, interface="127.0.0.1", connect_timeout_s=60)
    with memstore.connect(job, config=config) as store:
        got = store.get(into={"weights": weights})
        for step in range(got.step + 1 if got else 0, STEPS):
            if step == FAULT_AT:
                _fail(faults.get((ALWAYS, store.rank), ""), store)
            torch.manual_seed(step * store.world_size + store.rank)
            gradient = weights - torch.randn(64).to(device)
            dist.all_reduce(gradient)
            weights -= 0.1 * gradient
            losses[step] = float(gradient.square().mean()).hex()
            store.put(step, {"weights": weights})
            if step == FAULT_AT + now.number:
                _fail(faults.get((now.number, store.rank), ""), store)
    return InPlaceRankEnd(os.getpid(), now.number, now.is_first_here, losses)


@reentrant
def train_worker(args: Mapping[str, Any]) -> None:
    """Train as a worker of Ray Train: the arguments of `train` by name, and the `folder` for what a rank returns."""
    _train_and_tell(args)


@reentrant
def train_announced_worker(here: Announced, args: Mapping[str, Any]) -> None:
    """Train as `train_worker`; the folder of `here` names the processes."""
    _train_and_tell(args)


def _train_and_tell(args: Mapping[str, Any]) -> None:
    faults = {(number, rank): fault for number, rank, fault in args["faults"]}
    end = train(args["store_name"], args["job"], faults, args.get("device", "cpu"))
    Path(args["folder"], f"{dist.get_rank()}.json").write_bytes(msgspec.json.encode(end))


class Announced:
    """Leaves a file in a folder for each process that unpickles it: under Ray Train each rank and each spare."""

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


@reentrant
def train_beside_spares(here: Announced, args: Mapping[str, Any]) -> None:
    """Train as `train_worker` once `processes` ranks and spares are there; `early.json` names them.

    With `kills_spares` the spares are killed before the first step.
    """
    now, folder = generation(), Path(here.folder)
    if now is not None and now.number == 0:
        deadline_s = time.monotonic() + SPARES_S
        while len(announced(folder)) < args["processes"]:
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"{announced(folder)} are there after {SPARES_S:g} s, not {args['processes']}")
            time.sleep(0.05)
        ranks = torch.zeros(now.world_size, dtype=torch.int64)
        ranks[now.rank] = os.getpid()
        dist.all_reduce(ranks)
        if now.rank == 0:
            early = announced(folder)
            (folder / "early.json").write_bytes(msgspec.json.encode(sorted(early)))
            for pid in early.difference(ranks.tolist()) if args["kills_spares"] else ():
                os.kill(pid, signal.SIGKILL)
        dist.barrier()
    _train_and_tell(args)


def end_of(folder: Path, rank: int) -> InPlaceRankEnd:
    """Return what a rank wrote."""
    return _END.decode((folder / f"{rank}.json").read_bytes())


class StopsOnce(str):
    """The device "cpu", as an argument that stops the first process to unpickle it: before that has a watchdog."""

    path: str

    def __new__(cls, path: str) -> StopsOnce:
        """Return "cpu"; the file at `path` is there once a process was stopped."""
        made = super().__new__(cls, "cpu")
        made.path = path
        return made

    def __reduce__(self) -> tuple[Callable[[str], StopsOnce], tuple[str]]:
        return _stop_once, (self.path,)


def _stop_once(path: str) -> StopsOnce:
    with contextlib.suppress(FileExistsError):
        Path(path).touch(exist_ok=False)
        os.kill(os.getpid(), signal.SIGSTOP)
    return StopsOnce(path)


def _watchdog() -> int:
    """Return the watchdog of this process."""
    children = {int(pid) for task in Path("/proc/self/task").glob("*/children") for pid in task.read_text().split()}
    script = watchdog.__file__.encode()
    (found,) = [pid for pid in children if script in Path(f"/proc/{pid}/cmdline").read_bytes()]
    return found


def _fail(fault: str, store: memstore.Store) -> None:
    if fault:
        store.flush()
    if fault == "exit":
        os._exit(1)
    if fault.startswith("pause:"):
        Path(fault.removeprefix("pause:")).write_text(str(_watchdog()), encoding="ascii")
        os.kill(_watchdog(), signal.SIGSTOP)
    if fault == "stop" or fault.startswith("pause:"):
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault == "wait":  # in no collective and on no store: nothing can end it
        threading.Event().wait()
    if fault.startswith("hold:"):
        path = fault.removeprefix("hold:")
        Path(f"{path}.held").touch()
        while not os.path.exists(path):
            time.sleep(0.02)
    if fault == "raise":
        exec(
            'raise ValueError("a bug of the user\'s")', {"__name__": "train"}
        )  # what this package raises may be a loss


# -- in place data job --------------------------------------------------------------------------------
# A training function that is entered again after a loss, and whose state says which samples each step trained on.


DATA_STEPS, LENGTH, GLOBAL_BATCH = 24, 20, 6  # an epoch has three whole batches; two samples are left out
SEED = 5


@dataclass(frozen=True)
class DataEnd:
    """What a rank returns: each step's samples in the state that it has at the end, and where they were loaded."""

    trained: list[list[int]]
    generation: int
    first_step: int  # of the last generation
    kept_worker_pids: frozenset[int]  # that loaded in the last generation and in one before it


class IndexedSamples(Dataset[tuple[int, int]]):
    """Samples that show which process loaded them."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> tuple[int, int]:
        return index, os.getpid()


def ordered_loader(rank: int, world_size: int) -> Any:
    """Return a DataLoader whose workers live as long as it does."""
    order = SampleOrder(LENGTH, global_batch=GLOBAL_BATCH, rank=rank, world_size=world_size, seed=SEED)
    return DataLoader(IndexedSamples(), batch_sampler=order, num_workers=1, persistent_workers=True)


def stateful_loader(rank: int, world_size: int) -> Any:
    """Return torchdata's loader, over this rank's share of each epoch."""
    from torchdata.stateful_dataloader import StatefulDataLoader
    from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

    sampler = StatefulDistributedSampler(IndexedSamples(), world_size, rank, seed=SEED, drop_last=True)
    return StatefulDataLoader(
        IndexedSamples(), batch_size=GLOBAL_BATCH // world_size, sampler=sampler, num_workers=1, drop_last=True
    )


def epochs_of(loader: Any, first_step: int) -> Iterator[Any]:
    """Yield torchdata's batches from this step's on, whose sampler gets the epoch."""
    for epoch in itertools.count(first_step // (LENGTH // GLOBAL_BATCH)):
        loader.sampler.set_epoch(epoch)
        yield from loader


def train_on_data(store_name: str, job: str, kind: str, faults: Mapping[tuple[int, int], int]) -> DataEnd:
    """Train to the end, with the loader that a former generation kept, or a new one of torchdata's.

    Args:
        store_name: The store to put into.
        job: The job's name.
        kind: "ordered" or "stateful".
        faults: (generation, rank) -> the step that this rank trains and does not put, because it is killed.
    """
    now = generation()
    if now is None:
        raise RuntimeError("the function is to be called in a generation")
    trained = torch.full((DATA_STEPS, GLOBAL_BATCH), -1)
    pids: set[int] = set()
    config = memstore.Config(store=store_name, interface="127.0.0.1", connect_timeout_s=60)
    with memstore.connect(job, config=config) as store:
        if not now.kept:
            now.kept.update(loader=ordered_loader(store.rank, store.world_size), pids=set())
        is_ordered = kind == "ordered"
        data = Batches(now.kept["loader"]) if is_ordered else stateful_loader(store.rank, store.world_size)
        state = {"trained": trained, "data": data}
        got = store.get(into=state)
        first = got.step + 1 if got else 0
        batches = data if is_ordered else epochs_of(data, first)
        before = set(now.kept["pids"])
        for step in range(first, DATA_STEPS):
            indices, loaded_by = next(batches)
            pids.update(loaded_by.tolist())
            now.kept["pids"].update(pids)
            batch = torch.zeros(store.world_size, len(indices), dtype=torch.long)
            batch[store.rank] = indices
            dist.all_reduce(batch)
            trained[step] = batch.flatten()
            if faults.get((now.number, store.rank)) == step:
                os.kill(os.getpid(), signal.SIGKILL)
            store.put(step, state)
    return DataEnd(trained.tolist(), now.number, first, frozenset(before & pids))


# -- reuse job ----------------------------------------------------------------------------------------
# FSDP2 and AdamW that live on in the ranks that stay, with a fault at a step: for tests of in-place recovery.


REUSE_STEPS, REUSE_FAULT_AT, WIDTH = 16, 6, 32


@dataclass(frozen=True)
class ReuseEnd:
    """What a rank returns.

    Attributes:
        pid: Its process.
        generation: The last one.
        losses: Of the steps that it trained in that.
        restored_step: What get() returned.
        kept_count: Tensors of model and optimizer that are where they were when the last generation broke off.
        tensors_count: All of them.
    """

    pid: int
    generation: int
    losses: dict[int, str]
    restored_step: int | None
    kept_count: int
    tensors_count: int


def build(device: str) -> tuple[nn.Sequential, torch.optim.AdamW, torch.amp.GradScaler]:
    """Return a model, the same on every rank, its optimizer, and the optimizer's scaler."""
    torch.manual_seed(3)
    model = nn.Sequential(
        *[nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.1, batch_first=True) for _ in range(3)]
    ).to(device)
    for block in model:
        fully_shard(block)
    fully_shard(model)
    scaler = torch.amp.GradScaler(torch.device(device).type, init_scale=8.0)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3), scaler


@reentrant
def train_again(store_name: str, job: str, lost: int = -1, at: Sequence[str] = (), device: str = "cpu") -> ReuseEnd:
    """Train to the end.

    Args:
        store_name: The store to put into.
        job: The job's name.
        lost: Rank that ends its process in each of the first generations, at step FAULT_AT in the first, at the next
            one in the second.
        at: By generation, where: in the "backward"; "clip": before the gradients' norm, which follows unscale_(); in
            the "evaluation" after the step.
        device: Where the model lies.
    """
    now = generation()
    if now is None:
        raise RuntimeError("the function is to be called in a generation")
    torch.set_num_threads(1)
    losses: dict[int, str] = {}
    config = memstore.Config(store=store_name, interface="127.0.0.1", connect_timeout_s=60)
    with memstore.connect(job, config=config) as store:
        model, optimizer, scaler = reuse(lambda: build(device), store)
        state = {"model": model, "optim": optimizer, "scaler": scaler}
        got = store.get(into=state)
        there = pointers(model, optimizer)
        kept_count = len(there & now.kept.get("pointers", set()))
        for step in range(got.step + 1 if got else 0, REUSE_STEPS):
            torch.manual_seed(step * store.world_size + store.rank)
            inputs = torch.randn(2, 4, WIDTH).to(device)
            fault = at[now.number] if step == REUSE_FAULT_AT + now.number < REUSE_FAULT_AT + len(at) else ""
            is_lost = store.rank == lost
            if is_lost and fault == "backward":
                store.flush()
                model[1].register_full_backward_pre_hook(lambda *_: os._exit(1))
            loss = (model(inputs) - inputs).square().mean()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            if is_lost and fault == "clip":
                store.flush()
                os._exit(1)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            losses[step] = float(loss.detach()).hex()
            now.kept["pointers"] = pointers(model, optimizer)
            store.put(step, state)
            if step % 2 == 0:
                _evaluate(model, inputs, store if is_lost and fault == "evaluation" else None)
        dist.barrier()
    return ReuseEnd(os.getpid(), now.number, losses, got.step if got else None, kept_count, len(there))


def _evaluate(model: nn.Module, inputs: torch.Tensor, lost: memstore.Store | None) -> None:
    """Evaluate without a `finally`: what the forward raises when a rank is lost leaves the others in eval mode."""
    model.eval()
    torch.set_grad_enabled(False)
    if lost is not None:
        lost.flush()
        os._exit(1)
    model(inputs)
    torch.set_grad_enabled(True)
    model.train()


def pointers(model: nn.Module, optimizer: torch.optim.Optimizer) -> set[int]:
    """Return where this rank's tensors of the model and the optimizer lie, but for AdamW's scalars."""
    states = [value for state in optimizer.state.values() for value in state.values() if value.dim()]
    return {
        (tensor.to_local() if isinstance(tensor, DTensor) else tensor).data_ptr()
        for tensor in [*model.parameters(), *states]
    }


# -- shared gpu ---------------------------------------------------------------------------------------
# Lets several ranks use one GPU with NCCL, which otherwise refuses: for tests and benchmarks.


class SharedGpu(str):
    """The device "cuda" for a rank that shares it: an argument of its training function.

    NCCL takes each process that unpickles it for a host of its own, connected by loopback.
    """

    def __new__(cls) -> SharedGpu:
        """Return "cuda"."""
        return super().__new__(cls, "cuda")

    def __reduce__(self) -> tuple[Callable[[], SharedGpu], tuple[()]]:
        return _share, ()


def _share() -> SharedGpu:
    os.environ.update(NCCL_HOSTID=str(os.getpid()), NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
    return SharedGpu()
