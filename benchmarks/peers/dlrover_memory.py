"""DLRover's flash checkpoint: the state copied into shared memory that a saver process reads. No copy on a peer."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import time
import uuid
from pathlib import Path

from benchmarks.peers.contestant import Contestant, Stamps, Task, now
from benchmarks.rigs import gpt_tensors

SAVER_S = 60.0


class DlroverMemory(Contestant):
    """One way: the save into memory, of which all blocks training."""

    def __init__(self, task: Task) -> None:
        """Start its saver process, as `dlrover-run` does; its sockets and shared memory are named by a job."""
        os.environ["TORCHELASTIC_RUN_ID"] = f"bench{uuid.uuid4().hex[:8]}"
        os.environ["ROLE_NAME"] = "dlrover-trainer"  # so that no second saver is forked
        self._saver = multiprocessing.get_context("spawn").Process(target=_save_forever, daemon=True)
        self._saver.start()
        from dlrover.python.common.multi_process import SharedQueue
        from dlrover.trainer.torch.flash_checkpoint.checkpointer import StorageType
        from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer

        self._task = task
        self._memory = StorageType.MEMORY
        queue = SharedQueue(name="factory")
        deadline_s = time.monotonic() + SAVER_S
        while not queue.is_available() and time.monotonic() < deadline_s:
            time.sleep(0.1)
        time.sleep(1.0)  # a saver asked the moment it listens was seen to lose the request
        self._checkpointer = DdpCheckpointer(str(task.memory / "dlrover"))

    def run(self, way: str, step: int) -> Stamps:
        """Save into its shared memory; it takes no step 0."""
        started = now()
        self._checkpointer.save_checkpoint(step + 1, self._task.state, storage_type=self._memory)
        ended = now()
        return Stamps(started, ended, ended)

    def is_same(self, way: str) -> bool:
        """Load from its shared memory, not from storage: nothing was ever written there."""
        got = self._checkpointer.load_checkpoint()
        return bool(got) and gpt_tensors.is_same(got, self._task.state)

    def close(self) -> None:
        """Remove its shared memory and sockets, and end its saver process."""
        handler = self._checkpointer._engine._shm_handler
        handler.close()
        handler.unlink()
        self._saver.kill()
        shutil.rmtree(Path("/tmp/ckpt_sock") / os.environ["TORCHELASTIC_RUN_ID"], ignore_errors=True)


def _save_forever() -> None:
    """The saver's process; its parent ends it."""
    from dlrover.trainer.torch.flash_checkpoint.engine import start_async_save

    start_async_save()
