"""The client of HyperPod's managed tiered checkpointing, before a stand-in for the daemon that AWS runs on each host.

What the daemon does beside keeping the bytes is not here, so only the client is measured.
"""

from __future__ import annotations

import multiprocessing
import shutil
import uuid
from pathlib import Path
from typing import Any

from amzn_sagemaker_checkpointing.checkpointing.filesystem.filesystem import (
    SageMakerTieredStorageReader,
    SageMakerTieredStorageWriter,
)
from amzn_sagemaker_checkpointing.config.sagemaker_checkpoint_config import SageMakerCheckpointConfig
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save

from benchmarks.peers import hyperpod_stand_in
from benchmarks.peers.contestant import Contestant, Stamps, Task, now
from benchmarks.rigs import gpt_tensors

LOGS = Path("/var/log/sagemaker_checkpointing")  # the client writes one file a namespace there


class HyperpodClient(Contestant):
    """One way: DCP's async_save with its storage writer, as its documentation shows."""

    def __init__(self, task: Task) -> None:
        """Start the stand-in."""
        self._task = task
        ours, theirs = multiprocessing.Pipe()
        self._stand_in = multiprocessing.get_context("spawn").Process(
            target=hyperpod_stand_in.serve, args=(theirs,), daemon=True
        )
        self._stand_in.start()
        self._url = f"http://127.0.0.1:{ours.recv()}"
        self._config = SageMakerCheckpointConfig(namespace=f"bench-{uuid.uuid4().hex[:8]}", world_size=task.world_size)
        self._step = -1

    def run(self, way: str, step: int) -> Stamps:
        """Save, and wait until the stand-in has everything."""
        started = now()
        writer = SageMakerTieredStorageWriter(checkpoint_config=self._config, step=step)
        writer.client.config.base_url = self._url
        saved: Any = async_save(self._task.state, storage_writer=writer)
        released = now()
        saved.result(timeout=120)
        self._step = step
        return Stamps(started, released, now())

    def is_same(self, way: str) -> bool:
        """Load from the stand-in; the client compares its digest before it hands the bytes out."""
        got = gpt_tensors.empty_like(self._task.state)
        reader = SageMakerTieredStorageReader(checkpoint_config=self._config, step=self._step)
        reader.client.config.base_url = self._url
        load(got, storage_reader=reader)
        return gpt_tensors.is_same(got, self._task.state)

    def close(self) -> None:
        """End the stand-in, and remove the client's log."""
        self._stand_in.kill()
        for path in LOGS.glob(f"{self._config.namespace}*"):
            path.unlink()
        if LOGS.exists() and not any(LOGS.iterdir()):
            shutil.rmtree(LOGS)
