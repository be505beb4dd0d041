"""The training function of ranks that recover in place, the gate that holds it up, and the notes that it leaves.

Gate and notes are files in one folder: every rank of an embedded cluster is on this machine, and a file outlives the
process that wrote it. A rank that is lost in the middle of a note leaves a line without an end, which is not read.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from memstore.config import Config
from memstore.drills.ranks.ranks import CALL_S
from memstore.errors import MemstoreError
from memstore.inplace import generation
from memstore.shell.arena.lock import process_start_time
from memstore.testing.ranks.rank import Restored, compared
from memstore.testing.ranks.states import alter, make_state

STEPS_MAX = 64
PAUSE_S = 0.1  # after each step
LOOK_S = 0.005
ENTERED, RESTORED, TRAINED, LEFT = "entered", "restored", "trained", "left"


class Note(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a rank did: entered the training function, restored, trained a step, or left the function by an error."""

    what: str
    at_s: float  # monotonic, the same clock for all processes of a machine
    rank: int
    generation: int
    pid: int
    start: int = 0
    node: str = ""  # Ray's
    step: int = -1
    loss: str = ""
    restored: Restored | None = None


_NOTE = msgspec.json.Decoder(Note)


@dataclass(frozen=True)
class RankEnd:
    """What a rank returns: what it read of its neighbour's shard of the newest committed step, and that step's history.

    Attributes:
        generation: The last one.
        history: By step, the samples on which all ranks trained it, as the committed state has them.
        read: The comparison of that shard's other tensors with fresh ones.
    """

    generation: int
    history: list[list[int]]
    read: Restored


@dataclass(frozen=True)
class Task:
    """What all ranks have in common."""

    job: str
    config: Config
    seed: int
    nbytes: int
    folder: str
    is_altered: bool = False


class Gate:
    """The steps that may be trained, and the ranks that are held before their get()."""

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        self._limit = self._folder / "limit"

    def open(self, limit: int, *, is_last: bool = False) -> None:
        """Let the ranks train up to a step; the last one ends the training."""
        new = self._limit.with_suffix(".new")
        new.write_text(f"{limit} {int(is_last)}")
        new.replace(self._limit)

    def wait(self, step: int) -> bool:
        """Wait until a step may be trained; False once there is none after the last."""
        while True:
            limit, is_last = self._limit.read_text().split()
            if step <= int(limit):
                return True
            if is_last == "1":
                return False
            time.sleep(LOOK_S)

    def hold(self, rank: int, generation: int) -> Path:
        """Hold a rank before its get() in a generation, while the others wait in theirs, until the file is removed."""
        path = self._folder / f"hold-{rank}-{generation}"
        path.touch()
        return path

    def wait_released(self, rank: int, generation: int) -> None:
        """Wait while this rank is held."""
        while (self._folder / f"hold-{rank}-{generation}").exists():
            time.sleep(LOOK_S)


def notes(folder: str | Path) -> list[Note]:
    """Return what all processes have noted, in the order of time."""
    found: list[Note] = []
    for path in Path(folder).glob("*.notes"):
        *lines, _ = path.read_bytes().split(b"\n")
        found += map(_NOTE.decode, lines)
    return sorted(found, key=lambda note: note.at_s)


def processes(folder: str | Path) -> set[int]:
    """Return the processes that have unpickled the training function: ranks and spares."""
    return {int(path.stem) for path in Path(folder).glob("*.process")}


class Training:
    """The training function; unpickled, as a rank or as a spare, it leaves a file with the process's pid."""

    def __init__(self, task: Task) -> None:
        self.task = task

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.task = state["task"]
        Path(self.task.folder, f"{os.getpid()}.process").touch()

    def __call__(self) -> RankEnd:
        """Train from the newest committed step to the last one that the gate allows."""
        import ray

        now = generation()
        if now is None:
            raise RuntimeError("the function is to be called in a generation")
        entry = _MadeEntry(self.task, now.rank, now.world_size, now.number)
        node, start = ray.get_runtime_context().get_node_id(), process_start_time(os.getpid()) or 0
        entry.note(ENTERED, node=node, start=start)
        try:
            return entry.train()
        except Exception:
            entry.note(LEFT)
            raise


class _MadeEntry:
    """One run of the training function in one process."""

    def __init__(self, task: Task, rank: int, world_size: int, generation: int) -> None:
        self.task, self.rank, self.world_size, self.generation = task, rank, world_size, generation
        self.gate = Gate(task.folder)
        self._notes = Path(task.folder, f"{rank}-{os.getpid()}.notes")

    def note(self, what: str, **fields: Any) -> None:
        """Write a note, whole or not at all."""
        note = Note(what, time.monotonic(), self.rank, self.generation, os.getpid(), **fields)
        with self._notes.open("ab", buffering=0) as file:
            file.write(msgspec.json.encode(note) + b"\n")

    def train(self) -> RankEnd:
        import torch
        import torch.distributed as dist
        from torch.utils.data import DataLoader

        import memstore
        from memstore.adapters.data import Batches, SampleOrder
        from memstore.drills.ranks.in_place_model import Samples, backward, build, step
        from memstore.inplace import reuse

        torch.set_num_threads(1)
        task, rank, samples = self.task, self.rank, Samples(self.world_size)
        order = SampleOrder(
            len(samples), global_batch=samples.global_batch, rank=rank, world_size=self.world_size, seed=task.seed
        )
        with memstore.connect(task.job, config=task.config) as store:
            model, optimizer = reuse(partial(build, task.seed, rank), store)
            data = Batches(DataLoader(samples, batch_sampler=order))
            trained = torch.full((STEPS_MAX, samples.global_batch), -1)
            state = {
                "model": model,
                "optim": optimizer,
                "data": data,
                "trained": trained,
                "filler": make_state(task.seed, task.job, store.attempt, rank, 0, task.nbytes),
            }
            now = self._restore(store, state) + 1
            while self.gate.wait(now):
                indices, inputs, targets = next(data)
                loss, gradient = backward(model, inputs, targets)
                gradients = [torch.empty_like(gradient) for _ in range(self.world_size)]
                batch = [torch.empty_like(indices) for _ in range(self.world_size)]
                dist.all_gather(gradients, gradient)
                dist.all_gather(batch, indices)
                step(model, optimizer, gradients)
                trained[now] = torch.cat(batch)
                self.note(TRAINED, step=now, loss=loss)
                state["filler"] = make_state(task.seed, task.job, store.attempt, rank, now, task.nbytes)
                store.put(now, state)
                time.sleep(PAUSE_S)
                now += 1
            return self._end(store)

    def _restore(self, store: Any, state: dict[str, Any]) -> int:
        """Get, and note what came; return the step, -1 if there is none."""
        self.gate.wait_released(self.rank, self.generation)
        try:
            got = store.get(into=state, timeout_s=CALL_S)
        except MemstoreError as exc:
            self.note(RESTORED, restored=Restored(self.rank, error=type(exc).__name__, message=str(exc)))
            raise
        if got is None:
            return -1
        self.note(RESTORED, step=got.step, restored=self._compared(got, self.rank))
        return int(got.step)

    def _end(self, store: Any) -> RankEnd:
        """Read the neighbour's shard of the newest committed step."""
        import torch
        import torch.distributed as dist

        store.flush()
        newest = torch.tensor(store.latest_step())
        dist.all_reduce(newest, dist.ReduceOp.MAX)
        got = store.get(step=int(newest), rank=(self.rank + 1) % self.world_size, timeout_s=CALL_S)
        history = got.state["trained"][: int(newest) + 1].tolist()
        dist.barrier()  # who returns first would leave while others still read
        return RankEnd(self.generation, history, self._compared(got, (self.rank + 1) % self.world_size))

    def _compared(self, got: Any, rank: int) -> Restored:
        if self.task.is_altered:
            alter(got.state["filler"])
        return compared(got, got.state["filler"], self.task.job, rank, self.task.seed, self.task.nbytes)
