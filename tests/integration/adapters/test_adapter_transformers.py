"""Transformers with its real Trainer: resumed from a folder in memory it trains as if unbroken."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from memstore.config import Config
from memstore.errors import ConfigError
from memstore.testing.clusters.processes import ProcessCluster

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what it imports warns about itself
    hf = pytest.importorskip("transformers", reason="pip install -e '.[frameworks]'")
    pytest.importorskip("accelerate", reason="pip install -e '.[frameworks]'")
    from memstore.adapters.transformers import MemstoreCallback

STEPS = 8
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Config]:
    with ProcessCluster(tmp_path / "store", {"h1": {}}, replicas=1) as cluster:
        monkeypatch.setenv("MEMSTORE_HOST", "h1")
        yield cluster.config


class Losses(hf.TrainerCallback):  # type: ignore[misc, name-defined]
    """What every step lost, and which folders lay in memory then."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.losses: dict[int, float] = {}
        self.fails_at = fails_at
        self.folders: list[list[str]] = []
        self.weights: dict[str, torch.Tensor] = {}

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.folders.append(folders())
        if state.global_step == self.fails_at:
            raise RuntimeError("planted")

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **kwargs: Any) -> None:
        if "loss" in logs:
            self.losses[state.global_step] = float(logs["loss"])


def folders() -> list[str]:
    """Checkpoint folders of this user in memory."""
    return sorted(str(path) for path in Path("/dev/shm").glob(f"memstore-transformers-{os.getuid()}-*"))


def folder_of(config: Config, job: str) -> Path:
    """Where rank 0 of a job resumes from."""
    return Path(f"/dev/shm/memstore-transformers-{os.getuid()}-{config.store}-{job}-0")


def trainer_for(tmp_path: Path, *callbacks: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    model = hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=32, n_positions=8, n_embd=16, n_layer=1, n_head=2))
    tokens = torch.randint(0, 32, (24, 8), generator=torch.Generator().manual_seed(1))
    args = hf.TrainingArguments(
        str(tmp_path / "out"), max_steps=STEPS, per_device_train_batch_size=4, learning_rate=0.01, logging_steps=1,
        save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True, **options,
    )  # fmt: skip
    data = [{"input_ids": row, "labels": row} for row in tokens]
    return hf.Trainer(model, args, train_dataset=data, callbacks=list(callbacks))


def train(tmp_path: Path, config: Config, job: str, losses: Losses, **options: Any) -> MemstoreCallback:
    callback = MemstoreCallback(job, config=config, **options)
    trainer = trainer_for(tmp_path, callback, losses)
    with callback.checkpoint_folder(trainer) as folder:
        trainer.train(resume_from_checkpoint=folder)
    losses.weights = trainer.model.state_dict()
    return callback


@pytest.mark.parametrize("fails_at", [3, 6])
def test_training_goes_on_where_it_broke_off(config: Config, tmp_path: Path, fails_at: int) -> None:
    """Broken off within and between epochs: weights, schedule, dropout and place in the data are as if unbroken."""
    whole = Losses()
    train(tmp_path, config, "whole", whole)
    broken = Losses(fails_at)
    with pytest.raises(RuntimeError, match="planted"):
        train(tmp_path, config, "broken", broken)
    resumed = Losses()
    before = folders()
    callback = train(tmp_path, config, "broken", resumed)
    assert callback.restored_step is not None
    assert fails_at - 1 <= callback.restored_step <= fails_at
    assert resumed.losses == {step: whole.losses[step] for step in range(callback.restored_step + 1, STEPS + 1)}
    assert all(torch.equal(tensor, whole.weights[name]) for name, tensor in resumed.weights.items())
    mine = str(folder_of(config, "broken"))
    assert [mine in found for found in resumed.folders] == [True] + [False] * (STEPS - callback.restored_step - 1)
    assert folders() == before


def test_a_folder_goes_with_an_error_and_what_a_dead_process_left_is_replaced(config: Config, tmp_path: Path) -> None:
    """Nothing stays in memory when training never starts; a leftover of a killed process does not matter."""
    train(tmp_path, config, "job", Losses(), every_n_steps=4)
    mine = folder_of(config, "job")
    mine.mkdir()
    (mine / "pytorch_model.bin").write_bytes(b"torn")
    callback = MemstoreCallback("job", config=config)
    with pytest.raises(RuntimeError, match="planted"):
        start_and_fail(callback, trainer_for(tmp_path), mine)
    assert callback.restored_step == STEPS
    assert not mine.exists()


def start_and_fail(callback: MemstoreCallback, trainer: Any, mine: Path) -> None:
    with callback.checkpoint_folder(trainer) as folder:
        assert folder == str(mine)
        assert (mine / "pytorch_model.bin").stat().st_size > 1000
        assert mine.stat().st_mode & 0o777 == 0o700
        raise RuntimeError("planted")


def test_training_outside_of_the_block_is_refused(config: Config, tmp_path: Path) -> None:
    """Without checkpoint_folder() nothing would ever be put: train() says so before its first step."""
    losses = Losses()
    trainer = trainer_for(tmp_path, MemstoreCallback("job", config=config), losses)
    with pytest.raises(ConfigError, match=r"with callback\.checkpoint_folder\(trainer\)"):
        trainer.train()
    assert not losses.losses


@pytest.mark.parametrize("option", ["fsdp", "deepspeed", "fp16"])
def test_what_a_folder_cannot_hold_is_refused(config: Config, tmp_path: Path, option: str) -> None:
    """Sharded models and a loss scaler: a ConfigError that names the option, before anything is connected."""
    trainer = trainer_for(tmp_path)
    setattr(trainer.args, option, "full_shard")
    callback = MemstoreCallback("job", config=config)
    with pytest.raises(ConfigError, match=option), callback.checkpoint_folder(trainer):
        pass
    assert callback.store is None
