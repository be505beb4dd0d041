"""Lightning: a callback that puts as `put_every` says, and restores from the store before the first one.

It stands beside Lightning's own checkpoints and does not use CheckpointIO, which the FSDP strategies bypass: each
rank puts its own part of the model inside DDP and of the optimizers.
"""

from __future__ import annotations

from typing import Any

import lightning
from lightning.fabric.utilities.data import _set_sampler_epoch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy

from memstore.adapters.data import RandomStates
from memstore.adapters.torch import unwrapped
from memstore.client.connect import connect
from memstore.client.store import Store
from memstore.config import Config
from memstore.errors import ConfigError, WorldSizeError


class MemstoreCallback(Callback):
    """Connects when fit starts, resumes there if the job has a step, puts while it trains.

    The step number is Lightning's `global_step`. It restores what Lightning's own checkpoint restores, and each rank's
    random states. A run that ends in the middle of an epoch resumes at the same batch only if the data loader is
    resumable, as with Lightning's own checkpoints: it has state_dict and load_state_dict.

    Under DDP all ranks hold equal models: they name one shard, and as many of them copy it as `replicas` asks.

    Args:
        job: Name of the training run; the same after every restart.
        config: As for `memstore.connect`; its `put_every` counts optimizer steps, and "epoch" is Lightning's.
        shard_rank: As for `memstore.connect`, where a strategy's ranks hold equal parts, such as HSDP. Default: 0 of 1
            under DDP; else, also under DeepSpeed, every rank's part is its own.
        shard_count: As for `memstore.connect`; given together with `shard_rank`.
    """

    def __init__(
        self, job: str, *, config: Config | None = None, shard_rank: int | None = None, shard_count: int | None = None
    ) -> None:
        self.job, self.config = job, config
        self.shard, self.shards = shard_rank, shard_count
        self.store: Store | None = None
        self.restored_step: int | None = None  # global_step that this fit went on from; None: it began
        self._trainer_state: TrainerState | None = None
        self._state: dict[str, Any] = {}
        self._own: dict[str, Any] | None = None  # state of this rank alone, if ranks share a shard
        self._newest_step = 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Be the last callback: what the others do at the end of a batch belongs to the step that is put then."""
        trainer.callbacks = [*_callbacks(trainer), self]  # type: ignore[attr-defined]

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
            self.job,
            rank=trainer.global_rank,
            world_size=trainer.world_size,
            config=self.config,
            shard_rank=shard_rank,
            shard_count=shard_count,
        )
        model = trainer.strategy.model if trainer.strategy.model is not None else pl_module
        self._trainer_state = TrainerState(trainer)
        optimizers = {f"optim{number}": each for number, each in enumerate(trainer.optimizers)}
        self._state, own = {"model": unwrapped(model), **optimizers}, {"trainer": self._trainer_state}
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

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Go to the restored place in the data, which Lightning has begun by now.

        Raises:
            ConfigError: Lightning does not know how many batches an epoch has. It then takes one ahead of training,
                which no position would have.
        """
        if trainer.num_training_batches == float("inf"):
            raise ConfigError(
                f"job {self.job!r}: the training data has no length, so Lightning takes one batch ahead, and each "
                "restart would leave one batch out. Give the loader a __len__, or the Trainer "
                "limit_train_batches=<batches of an epoch>"
            )
        if self.restored_step is not None and self._trainer_state is not None:
            self._trainer_state.begin_data()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Put optimizer steps as `put_every` says; batches that only accumulate gradients put nothing."""
        step = trainer.global_step
        if self.store is None or step == self._newest_step:
            return
        self._newest_step = step
        if self.store.should_put(step, is_epoch_end=trainer.is_last_batch):
            self.store.put(step, self._state, rank_state=self._own)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Wait for the last commit, leave the job."""
        store, self.store = self.store, None
        if store is not None:
            with store:
                pass

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave the job at once; committed steps stay."""
        if self.store is not None:
            self.store.close(error=exception)
            self.store = None


def holds_equal_models(strategy: object) -> bool:
    """Return whether all ranks of a strategy hold the same model and optimizer; DeepSpeed's is a DDP, but does not."""
    return isinstance(strategy, DDPStrategy) and not isinstance(strategy, DeepSpeedStrategy)


class TrainerState:
    """What of a Lightning trainer is neither model nor optimizer, for `put` and `get(into=)`: Lightning's own lists."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._loaders: list[Any] = []  # states of the training data's loaders, and random states, until it is begun
        self._random: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        """Return loops with their data loaders, schedulers, callbacks, precision, values of hooks, random states."""
        trainer, module = self._trainer, self._trainer.lightning_module
        weights = module.state_dict()
        hooks: dict[str, Any] = {
            "epoch": trainer.current_epoch,
            "global_step": trainer.global_step,
            "pytorch-lightning_version": lightning.__version__,
            "state_dict": dict(weights),
        }
        trainer.precision_plugin.on_save_checkpoint(hooks)
        for callback in _callbacks(trainer):
            callback.on_save_checkpoint(trainer, module, hooks)
        module.on_save_checkpoint(hooks)
        changed = {name: each for name, each in hooks["state_dict"].items() if weights.get(name) is not each}
        return {
            "fit_loop": trainer.fit_loop.state_dict(),
            "schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
            "callbacks": {callback.state_key: callback.state_dict() for callback in _callbacks(trainer)},
            "precision": trainer.precision_plugin.state_dict(),
            "hooks": {**hooks, "state_dict": changed},
            "data": _datamodule(trainer).state_dict() if _datamodule(trainer) is not None else {},
            "random": RandomStates().state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put everything back where it came from; the place in the data and random states wait for `begin_data`."""
        trainer, module, loop = self._trainer, self._trainer.lightning_module, self._trainer.fit_loop
        if _datamodule(trainer) is not None:
            _datamodule(trainer).load_state_dict(state["data"])
        hooks = {**state["hooks"], "state_dict": {**module.state_dict(), **state["hooks"]["state_dict"]}}
        module.on_load_checkpoint(hooks)
        for callback in _callbacks(trainer):
            callback.on_load_checkpoint(trainer, module, hooks)
        for callback in _callbacks(trainer):
            if state["callbacks"].get(callback.state_key):  # as Lightning does: skip callbacks without saved state
                callback.load_state_dict(state["callbacks"][callback.state_key])
        trainer.precision_plugin.on_load_checkpoint(hooks)
        if state["precision"]:
            trainer.precision_plugin.load_state_dict(state["precision"])
        loop.load_state_dict(state["fit_loop"])
        for config, values in zip(trainer.lr_scheduler_configs, state["schedulers"], strict=True):
            config.scheduler.load_state_dict(values)
        self._loaders, loop._combined_loader_states_to_load = loop._combined_loader_states_to_load, []
        self._random = state["random"]

    def begin_data(self) -> None:
        """Begin the restored epoch at its place, or the next one, and draw from then on what would have been drawn.

        Lightning begins the loaders before it tells their samplers the epoch, so an epoch that was broken off would go
        on in the order of the first one. The seeds of loaders are drawn where an epoch begins, not in its middle.
        """
        loop: Any = self._trainer.fit_loop
        loaders = loop._combined_loader
        epoch, is_over = loop.epoch_progress.current.processed, loop.epoch_loop.batch_progress.is_last_batch
        _set_epoch(loaders, epoch - 1 if is_over else epoch)
        loaders._load_state_dicts(self._loaders)
        iter(loop._data_fetcher)
        RandomStates().load_state_dict(self._random)
        if is_over:
            _set_epoch(loaders, epoch)
            iter(loop._data_fetcher)
        self._loaders, self._random = [], {}


def _set_epoch(loaders: Any, epoch: int) -> None:
    for loader in loaders.flattened:
        _set_sampler_epoch(loader, epoch)


def _callbacks(trainer: Trainer) -> list[Any]:
    return [callback for callback in trainer.callbacks if not isinstance(callback, MemstoreCallback)]  # type: ignore[attr-defined]


def _datamodule(trainer: Trainer) -> Any:
    return trainer.datamodule  # type: ignore[attr-defined]
