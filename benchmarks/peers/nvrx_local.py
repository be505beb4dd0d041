"""nvidia-resiliency-ext's local checkpoints with replication: two ranks, files in shared memory, no digest.

Its own `BasicTensorAwareStateDict` asserts CUDA tensors, and its asynchronous save synchronises CUDA; so without a GPU
only the synchronous save runs, with the interface that it asks a user to fill in.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from nvidia_resiliency_ext.checkpointing.local.base_state_dict import TensorAwareStateDict
from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager import LocalCheckpointManager
from nvidia_resiliency_ext.checkpointing.local.replication.strategies import CliqueReplicationStrategy

from benchmarks.peers.contestant import Contestant, Stamps, Task, now
from benchmarks.rigs import gpt_tensors


class CpuTensors(TensorAwareStateDict):  # type: ignore[misc]
    """The tensors of a state that lies in host memory already: nothing to move."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors: list[torch.Tensor] | None = list(tensors)
        self._shapes = [(t.shape, t.dtype) for t in tensors]

    @property
    def tensors(self) -> Iterable[torch.Tensor]:
        """The tensors."""
        return self._tensors or []

    @property
    def is_hollow(self) -> bool:
        """Whether the tensors were taken out."""
        return self._tensors is None

    def pop_tensors(self) -> Sequence[torch.Tensor]:
        """Take the tensors out."""
        taken, self._tensors = list(self.tensors), None
        return taken

    def insert_tensors(self, tensor_data: Iterable[torch.Tensor]) -> None:
        """Put tensors in."""
        self._tensors = list(tensor_data)

    def init_tensors(self) -> None:
        """Put fresh tensors in."""
        self._tensors = [torch.empty(shape, dtype=dtype) for shape, dtype in self._shapes]

    def copy_tensors_to_cpu(self, non_blocking: bool = False) -> None:
        """They are there."""

    def restore_tensor_device(self, non_blocking: bool = True) -> None:
        """They stay."""


class NvrxLocal(Contestant):
    """One way: the synchronous save, which returns when every rank's file and its copy on the other are written."""

    def __init__(self, task: Task) -> None:
        """Make the manager, with a clique of both ranks."""
        self._task = task
        self._manager = LocalCheckpointManager(
            task.memory / "nvrx", repl_strategy=CliqueReplicationStrategy(dist.group.WORLD)
        )

    def run(self, way: str, step: int) -> Stamps:
        """Save and replicate."""
        state = CpuTensors(gpt_tensors.tensors(self._task.state))
        started = now()
        self._manager.save(state, step, is_async=False)
        ended = now()
        return Stamps(started, ended, ended)

    def is_same(self, way: str) -> bool:
        """Load both files of this rank: its own shard, and its copy of the other's."""
        manager: Any = self._manager
        found = {}
        step = manager.find_latest()
        for rank in range(self._task.world_size):
            path = manager._local_ckpt_path_from_id((step, rank, manager.session_id))
            found[rank] = list(torch.load(path, weights_only=False, mmap=True).tensors)
        own, other = found[self._task.rank], found[1 - self._task.rank]
        return gpt_tensors.is_same(own, self._task.state) and gpt_tensors.is_same_but(
            other, self._task.state, self._task.peer
        )
