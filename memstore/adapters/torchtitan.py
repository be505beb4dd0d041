"""torchtitan: a CheckpointManager whose steps lie in the memory of the hosts, through torch's DCP.

config.checkpoint = MemstoreCheckpointManager.Config(enable=True, interval=1, job="llama3-8b")
"""

from __future__ import annotations

import dataclasses
import sys
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torchtitan.components.checkpointer import MODEL, OPTIMIZER, AsyncMode, CheckpointManager

from memstore.client.connect import connect
from memstore.config import Config as StoreConfig
from memstore.errors import ConfigError


class MemstoreCheckpointManager(CheckpointManager):  # type: ignore[misc]
    """Saves every `interval` steps, all of the trainer's states; loads the newest whole step.

    `load_step` rewinds the job to that step. `initial_load_path` counts while the job has no step. A model alone, as
    torchtitan writes it after the last step, goes to `folder` as always. `keep_latest_k` counts there; of the steps in
    memory `keep_steps` of the store's configuration are kept.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):  # type: ignore[misc]
        """torchtitan's options, and the store's."""

        job: str = "torchtitan"
        """Name of the training run; the same after every restart."""

        store: StoreConfig = dataclasses.field(default_factory=StoreConfig)
        """As for `memstore.connect`."""

    def __init__(self, config: Config, **parts: Any) -> None:
        super().__init__(config, **parts)
        if not self.enable:
            return
        if config.async_mode == "async_with_pinned_mem":
            self.async_mode = AsyncMode.ASYNC  # slots are what it would stage in: no buffers, no process beside
        if config.store.put_every != "step":
            raise ConfigError(
                f"put_every={config.store.put_every!r}: torchtitan's `interval` says when to save, set that"
            )
        self.store = connect(config.job, config=config.store)

    @torch.no_grad()
    def dcp_save(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: AsyncMode,
        enable_garbage_collection: bool = False,
        to_hf: bool = False,
    ) -> Future[Any] | None:
        """Save a step in memory, and a model alone where torchtitan does; returns after one memory copy."""
        if OPTIMIZER not in state_dict:
            super().dcp_save(state_dict, checkpoint_id, AsyncMode.DISABLED, enable_garbage_collection, to_hf)
            return None
        writer = self.store.dcp_writer(int(checkpoint_id.rpartition("-")[2]), wait=None)
        if async_mode == AsyncMode.DISABLED:
            dcp.save(state_dict, storage_writer=writer)
            return None
        return dcp.async_save(state_dict, storage_writer=writer, process_group=self.pg)  # type: ignore[return-value]

    @torch.no_grad()
    def _load(self, step: int = -1) -> bool:
        if step != -1:
            self.store.rewind(step)
        found = self.store.agree_on_step()
        if found is None:
            return bool(super()._load())
        states = self._states_to_load(model_only=found == 0)
        dcp.load(states, storage_reader=self.store.dcp_reader(found))
        self.states[MODEL].load_state_dict(states)
        return True

    def _close(self) -> None:
        super()._close()
        if hasattr(self, "store"):
            self.store.__exit__(*sys.exc_info())
