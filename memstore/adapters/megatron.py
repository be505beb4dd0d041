"""Megatron-LM: a manager of non-persistent local checkpoints that keeps them in the store.

Megatron calls `find_latest`, `load` and `save` of `checkpointing_context["local_checkpoint_manager"]`, prints its
`local_ckpt_dir`, and gives states with `pop_tensors` and `insert_tensors` (megatron/training/checkpointing.py,
`--non-persistent-ckpt-type local`; the interface is nvidia-resiliency-ext's BaseCheckpointManager).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from memstore.client.store import Store
from memstore.errors import RecoveryError

NOTHING = -1  # what find_latest returns for a job without history


class LocalCheckpointManager:
    """Replaces nvidia-resiliency-ext's manager in Megatron's checkpointing context.

    A state is a tensor part, which the store takes as tensors, and a hollow rest of Megatron's own classes, which the
    caller's `encode` and `decode` turn into bytes and back: memstore itself pickles nothing.

    Args:
        store: Connected; a step is an iteration.
        encode: Serialises the hollow state; Megatron's own manager uses pickle.dumps.
        decode: The reverse. pickle.loads trusts every process that may write to the store.
    """

    def __init__(self, store: Store, *, encode: Callable[[Any], bytes], decode: Callable[[bytes], Any]) -> None:
        self.store, self.encode, self.decode = store, encode, decode
        self.local_ckpt_dir = f"memstore:{store.job}"
        self.latest_iteration: int | None = None  # None: not asked yet

    def find_latest(self) -> int:
        """Return the iteration that `load` will return, -1 on a job without history; collective at the first call."""
        if self.latest_iteration is None:
            step = self.store.agree_on_step()
            self.latest_iteration = NOTHING if step is None else step
        return self.latest_iteration

    def load(self) -> tuple[Any, tuple[int, int, str]]:
        """Return this rank's state of the iteration that `find_latest` named, on its devices, and the state's name.

        Raises:
            RecoveryError: `find_latest` was not called, or found nothing.
        """
        if self.latest_iteration is None or self.latest_iteration == NOTHING:
            raise RecoveryError(f"job {self.store.job!r}: load() follows a find_latest() that found something")
        got = self.store.get(self.latest_iteration, rank=self.store.rank)
        if got is None:
            raise RecoveryError(f"job {self.store.job!r}: iteration {self.latest_iteration} is gone: start again")
        state = self.decode(got.state["hollow"])
        state.insert_tensors(got.state["tensors"])
        state.restore_tensor_device(non_blocking=False)
        return state, (self.latest_iteration, self.store.rank, self.store.job)

    def save(self, state_dict: Any, iteration: int, is_async: bool = False) -> Any:
        """Put the state; returns after one memory copy, with everything else under way.

        Returns:
            With `is_async` a request without work, because Megatron attaches its own last words to one; else None.
        """
        tensors = state_dict.pop_tensors()
        try:
            hollow = self.encode(state_dict)
        finally:
            state_dict.insert_tensors(tensors)
        self.store.put(iteration, {"hollow": hollow, "tensors": tensors})
        if not is_async:
            return None
        # Megatron's local checkpoints need this package anyway; nothing else here does.
        from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncRequest

        return AsyncRequest(None, (), [])
