"""DeepSpeed: engine.save_checkpoint and load_checkpoint into the memory of the hosts, for ZeRO 1, 2 and 3.

DeepSpeed's own calls say what a checkpoint is; for their time its CheckpointEngine is one that keeps what it would
write. Weights that ZeRO 1 and 2 hold on every rank are not kept: they come from the optimizer's partitions again.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointCommitInfo, CheckpointEngine
from deepspeed.runtime.pipe.engine import PipelineEngine

from memstore.client.store import Store
from memstore.client.ticket import Ticket
from memstore.errors import ConfigError, ManifestMismatch

ZERO = "optimizer_state_dict"  # DeepSpeed's name for what a rank's optimizer file has
TAG = "step"


class EngineCheckpoints:
    """Puts and gets the state of one engine, every rank its part; a step is the engine's `global_steps`.

        checkpoints = EngineCheckpoints(engine, store)
        client_state = checkpoints.load()  # None on a job without history
        ...
        checkpoints.save({"epoch": epoch})  # after engine.step()

    ConfigError for other kinds of engine, which were not tried.
    """

    def __init__(self, engine: Any, store: Store) -> None:
        self.engine, self.store = engine, store
        for problem, is_so in (
            ("zero_optimization.stage 0", engine.zero_optimization_stage() == 0),
            ("pipeline parallelism", isinstance(engine, PipelineEngine)),
            ("tensor parallelism", engine.mp_world_size != 1),
            ("a mixture of experts", engine.has_moe_layers),
            ("an optimizer on NVMe", engine.zero_nvme_offload_optimizer()),
        ):
            if is_so:
                raise ConfigError(
                    f"{problem} is not supported: EngineCheckpoints is for ZeRO 1, 2 and 3, data-parallel"
                )

    def save(self, client_state: dict[str, Any] | None = None) -> Ticket:
        """Do what engine.save_checkpoint does, into memory; returns after one memory copy. Collective."""
        contents = _Contents({})
        with self._contents_in_place(contents) as folder:
            self.engine.save_checkpoint(folder, TAG, client_state=client_state or {}, save_latest=False)
        return self.store.put(self.engine.global_steps, contents)

    def load(self) -> dict[str, Any] | None:
        """Do what engine.load_checkpoint does, from the newest whole step; return the client state. Collective.

        ManifestMismatch if that has other parameters or buffers than the engine.
        """
        got = self.store.get()
        if got is None:
            return None
        saved, shapes = got.state["model"], self.engine._get_zero_param_shapes()
        kept = self.engine.module_state_dict().keys() - _trained(shapes)
        if saved["param_shapes"] != shapes or saved["module"].keys() != kept:
            what = f"{saved['param_shapes']} and {sorted(saved['module'])}, the engine {shapes} and {sorted(kept)}"
            raise ManifestMismatch(f"step {got.step} has parameters {what}: build the model that was saved")
        with self._contents_in_place(_Contents(got.state, self.engine.optimizer.loss_scaler)) as folder:
            name = Path(self.engine._get_ckpt_name(folder, TAG))
            name.parent.mkdir()
            name.touch()  # DeepSpeed looks for it, and asks the CheckpointEngine what is in it
            client_state = self.engine.load_checkpoint(folder, TAG, load_module_strict=False)[1]
        if self.engine.zero_optimization_stage() < 3:
            self.engine.optimizer.update_lp_params()
        return dict(client_state)

    @contextmanager
    def _contents_in_place(self, contents: _Contents) -> Iterator[str]:
        """Have the engine save to and load from `contents`, on every rank, with a folder for what it writes beside."""
        engine = self.engine
        before = engine.checkpoint_engine, engine.save_non_zero_checkpoint
        with tempfile.TemporaryDirectory(prefix="memstore-deepspeed-") as folder:
            engine.checkpoint_engine, engine.save_non_zero_checkpoint = contents, True
            try:
                yield folder
            finally:
                engine.checkpoint_engine, engine.save_non_zero_checkpoint = before


class _Contents(CheckpointEngine):  # type: ignore[misc]
    """What DeepSpeed would write to this rank's two files, as values that a store takes."""

    def __init__(self, files: dict[str, Any], loss_scaler: Any = None) -> None:
        super().__init__()
        self.files, self.loss_scaler = files, loss_scaler

    def state_dict(self) -> dict[str, Any]:
        return self.files

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.files = state

    def create(self, info: CheckpointCommitInfo) -> None: ...

    def commit(self, info: CheckpointCommitInfo) -> bool:
        return True

    def save(self, state_dict: dict[str, Any], path: str) -> None:
        """Keep a file's content, without what only DeepSpeed's converters read."""
        if ZERO in state_dict:
            zero = {key: value for key, value in state_dict[ZERO].items() if key != "param_slice_mappings"}
            zero |= {"loss_scaler": vars(zero["loss_scaler"]), "zero_stage": int(zero["zero_stage"])}
            self.files["optimizer"] = {**state_dict, ZERO: zero}
        else:
            trained = _trained(state_dict["param_shapes"])
            module = {name: value for name, value in state_dict["module"].items() if name not in trained}
            self.files["model"] = {**state_dict, "module": module}

    def load(self, path: str, map_location: Any = None) -> dict[str, Any]:
        if not path.endswith("_optim_states.pt"):
            return dict(self.files["model"])
        zero = self.files["optimizer"][ZERO]
        vars(self.loss_scaler).update(zero["loss_scaler"])
        return {**self.files["optimizer"], ZERO: {**zero, "loss_scaler": self.loss_scaler}}


def _trained(param_shapes: list[dict[str, Any]]) -> set[str]:
    return {name for group in param_shapes for name in group}
