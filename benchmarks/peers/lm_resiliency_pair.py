"""lm-resiliency's in-memory manager: two ranks copy their state and exchange the copies over gloo. No digest."""

from __future__ import annotations

from lm_resiliency.checkpointing.config import InMemoryCkptConfig
from lm_resiliency.experimental import InMemoryCheckpointManager

from benchmarks.peers.contestant import Contestant, Stamps, Task, now
from benchmarks.rigs import gpt_tensors


class LmResiliencyPair(Contestant):
    """One way: save, then finalize_replication, which returns once both ranks have both copies."""

    def __init__(self, task: Task) -> None:
        """Make the manager; it flushes nothing to a disk while we time it."""
        self._task = task
        config = InMemoryCkptConfig(
            replication_jump=1, disk_flush_interval=0, disk_folder=str(task.memory / f"lmr{task.rank}"), run_id="bench"
        )
        self._manager = InMemoryCheckpointManager(config)

    def run(self, way: str, step: int) -> Stamps:
        """Save and replicate; it takes no step 0."""
        started = now()
        self._manager.save(self._task.state, step + 1)
        released = now()
        if not self._manager.finalize_replication(timeout_s=100.0):
            raise RuntimeError("finalize_replication returned False: the copies were not exchanged")
        return Stamps(started, released, now())

    def is_same(self, way: str) -> bool:
        """Compare both buffers, the own copy and the one received."""
        pool = self._manager._buffer_pool
        own, other = pool.own_current.tensors, pool.peer_current.tensors
        return gpt_tensors.is_same(own, self._task.state) and gpt_tensors.is_same_but(
            other, self._task.state, self._task.peer
        )

    def close(self) -> None:
        """Take its signal handlers and its flush at exit away."""
        self._manager.close()
