"""What comes with torch: torch.save, safetensors, and torch.distributed.checkpoint's save and async_save."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save, save

from benchmarks.peers.contestant import Contestant, Stamps, Task, now
from benchmarks.rigs import gpt_tensors

KINDS = {"thread": AsyncCheckpointerType.THREAD, "process": AsyncCheckpointerType.PROCESS}


class TorchSaves(Contestant):
    """Ways: "torch.save" and "safetensors", each "memory" or "disk" (flushed); "dcp save"; "dcp thread|process [kept]".

    DCP writes into shared memory, so that no disk is timed. "kept" hands every async_save the same stager, whose
    buffers are then warm; without it torch makes one for each save, as it does by default.
    """

    def __init__(self, task: Task) -> None:
        """Start a group of one rank, which async_save in a process asks for."""
        self._task = task
        if not dist.is_initialized():
            dist.init_process_group("gloo", init_method=f"file://{task.memory}/group", rank=0, world_size=1)
        # async_save in a process makes its own group from these.
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1")
        self._stagers: dict[str, DefaultStager] = {}

    def run(self, way: str, step: int) -> Stamps:
        """Save, and wait until everything is written."""
        kind, _, how = way.partition(" ")
        path = self._path(way)
        if kind == "dcp" and how != "save":
            return self._async_save(how, path)
        started = now()
        if kind == "torch.save":
            torch.save(self._task.state, path)
        elif kind == "safetensors":
            self._safetensors(path)
        else:
            save(self._task.state, checkpoint_id=path)
        if how == "disk":
            _flush(path)
        ended = now()
        return Stamps(started, ended, ended)

    def _async_save(self, how: str, path: Path) -> Stamps:
        kind, _, kept = how.partition(" ")
        started = now()
        saved: Any = async_save(
            self._task.state,
            checkpoint_id=path,
            async_checkpointer_type=KINDS[kind],
            async_stager=self._stager(kind) if kept else None,
        )
        if not hasattr(saved, "result"):  # AsyncSaveResponse: training goes on once the staging is through
            saved.staging_completion.result()
            saved = saved.upload_completion
        released = now()
        saved.result(timeout=120)
        return Stamps(started, released, now())

    def _stager(self, kind: str) -> DefaultStager:
        if kind not in self._stagers:
            shared = kind == "process"
            options = StagingOptions(
                use_pinned_memory=False, use_shared_memory=shared, use_async_staging=False, use_non_blocking_copy=False
            )
            self._stagers[kind] = DefaultStager(options)
        return self._stagers[kind]

    def _safetensors(self, path: Path) -> None:
        from safetensors.torch import save_file

        save_file({str(n): tensor for n, tensor in enumerate(gpt_tensors.tensors(self._task.state))}, path)

    def is_same(self, way: str) -> bool:
        """Load the file again, then remove it."""
        path = self._path(way)
        if way.startswith("torch.save"):
            got: Any = torch.load(path, mmap=True)
        elif way.startswith("safetensors"):
            from safetensors.torch import load_file

            loaded = load_file(path)
            got = [loaded[str(n)] for n in range(len(loaded))]
        else:
            got = gpt_tensors.empty_like(self._task.state)
            load(got, checkpoint_id=path)
        is_same = gpt_tensors.is_same(got, self._task.state)
        del got
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
        return is_same

    def _path(self, way: str) -> Path:
        folder = self._task.disk if way.endswith("disk") else self._task.memory
        return folder / way.replace(" ", "-")

    def close(self) -> None:
        """Close the stagers that were kept."""
        for stager in self._stagers.values():
            stager.close()


def _flush(path: Path) -> None:
    """Wait until the file is on the disk; without it the page cache would be timed."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
