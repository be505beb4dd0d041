"""Lightning: a callback that puts every n steps, and restores from the store before the first one.

It stands beside Lightning's own checkpoints and does not use CheckpointIO, which the FSDP strategies bypass: each
rank puts its own part of model and optimizer, named and sharded by torch's own rules (`AppState`).
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy

from memstore.adapters.torch import AppState
from memstore.client.connect import connect
from memstore.client.store import Store
from memstore.config import Config
from memstore.errors import WorldSizeError


class MemstoreCallback(Callback):
    """Connects when fit starts, resumes there if the job has a step, puts while it trains.

    The step number is Lightning's `global_step`. A run that ends in the middle of an epoch resumes at the same batch
    only if the data loader is resumable, as with Lightning's own checkpoints: it has state_dict and load_state_dict.

    Under DDP all ranks hold equal models: they name one shard, and as many of them copy it as `replicas` asks.

    Args:
        job: Name of the training run; the same after every restart.
        every_n_steps: Steps between two puts.
        config: As for `memstore.connect`.
        shard_rank: As for `memstore.connect`, where a strategy's ranks hold equal parts, such as HSDP. Default: 0 of 1
            under DDP; else, also under DeepSpeed, every rank's part is its own.
        shard_count: As for `memstore.connect`; given together with `shard_rank`.
    """

    def __init__(
        self, job: str, *, every_n_steps: int = 1, config: Config | None = None, shard_rank: int | None = None,
        shard_count: int | None = None,
    ) -> None:  # fmt: skip
        self.job, self.every_n_steps, self.config = job, every_n_steps, config
        self.shard, self.shards = shard_rank, shard_count
        self.store: Store | None = None
        self.restored_step: int | None = None  # global_step that this fit went on from; None: it began
        self._state: dict[str, Any] = {}
        self._own: dict[str, Any] | None = None  # state of this rank alone, if ranks share a shard
        self._newest_step = 0

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore here, where Lightning would load a file: the model is wrapped and the optimizers exist.

        Raises:
            WorldSizeError: Ranks share a shard and the step was put by another number of them, whose trainers' states
                no rank of this launch can take.
        """
        shard_rank, shard_count = self.shard, self.shards
        if shard_rank is None and holds_equal_models(trainer.strategy):
            shard_rank, shard_count = 0, 1
        self.store = connect(
            self.job, rank=trainer.global_rank, world_size=trainer.world_size, config=self.config,
            shard_rank=shard_rank, shard_count=shard_count,
        )  # fmt: skip
        model = trainer.strategy.model if trainer.strategy.model is not None else pl_module
        self._state, own = {"app": AppState(model, trainer.optimizers)}, {"trainer": TrainerState(trainer)}
        if shard_rank is None:
            self._state.update(own)
            got = self.store.get(into=self._state)
        else:
            self._own = own
            got = self.store.get(into=self._state, rank_state_into=own)
            if got is not None and got.rank_state is None:
                raise WorldSizeError(
                    f"step {got.step} of job {self.job!r} was put by another number of ranks than the "
                    f"{trainer.world_size} of this launch, and each rank's Lightning trainer goes on from its own "
                    "state only: launch as many ranks as before, or begin a job of another name"
                )
        self.restored_step = got.step if got is not None else None
        self._newest_step = got.step if got is not None else 0

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Put every n optimizer steps; batches that only accumulate gradients put nothing."""
        if self.store is not None and trainer.global_step - self._newest_step >= self.every_n_steps:
            self._newest_step = trainer.global_step
            self.store.put(trainer.global_step, self._state, rank_state=self._own)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Wait for the last commit, leave the job."""
        store, self.store = self.store, None
        if store is not None:
            with store:
                pass

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave the job at once; committed steps stay."""
        if self.store is not None:
            self.store.close()
            self.store = None


def holds_equal_models(strategy: object) -> bool:
    """Return whether all ranks of a strategy hold the same model and optimizer; DeepSpeed's is a DDP, but does not."""
    return isinstance(strategy, DDPStrategy) and not isinstance(strategy, DeepSpeedStrategy)


class TrainerState:
    """What of a Lightning trainer is neither model nor optimizer, for `put` and `get(into=)`."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        """Return loops with their data loaders, schedulers, callbacks, precision, and values of the user's hooks."""
        trainer = self._trainer
        hooks: dict[str, Any] = {}
        trainer.lightning_module.on_save_checkpoint(hooks)
        return {
            "fit_loop": trainer.fit_loop.state_dict(),
            "schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
            "callbacks": {callback.state_key: callback.state_dict() for callback in _callbacks(trainer)},
            "precision": trainer.precision_plugin.state_dict(),
            "module": hooks,
            "data": _datamodule(trainer).state_dict() if _datamodule(trainer) is not None else {},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put everything back where it came from."""
        trainer = self._trainer
        trainer.fit_loop.load_state_dict(state["fit_loop"])
        for config, values in zip(trainer.lr_scheduler_configs, state["schedulers"], strict=True):
            config.scheduler.load_state_dict(values)
        for callback in _callbacks(trainer):
            if state["callbacks"].get(callback.state_key):  # as Lightning does: skip callbacks without saved state
                callback.load_state_dict(state["callbacks"][callback.state_key])
        if state["precision"]:
            trainer.precision_plugin.load_state_dict(state["precision"])
        trainer.lightning_module.on_load_checkpoint(state["module"])
        if _datamodule(trainer) is not None:
            _datamodule(trainer).load_state_dict(state["data"])


def _callbacks(trainer: Trainer) -> list[Any]:
    return [callback for callback in trainer.callbacks if not isinstance(callback, MemstoreCallback)]  # type: ignore[attr-defined]


def _datamodule(trainer: Trainer) -> Any:
    return trainer.datamodule  # type: ignore[attr-defined]
