"""A training function that is entered again after a loss, with faults at its steps: for tests of in-place recovery."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

import memstore
from memstore.inplace import generation, reentrant, watchdog

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
