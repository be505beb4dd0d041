"""Transformers with its real Trainer: resumed from a folder in memory it trains as if unbroken."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from memstore.config import Config
from memstore.errors import ConfigError
from memstore.testing.clusters.processes import ProcessCluster

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # what is imported warns about itself


@pytest.fixture(scope="module")
def case() -> Any:
    pytest.importorskip("transformers", reason="pip install -e '.[frameworks]'")
    pytest.importorskip("accelerate", reason="pip install -e '.[frameworks]'")
    import transformers_case

    return transformers_case


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Config]:
    with ProcessCluster(tmp_path / "store", {"h1": {}}, replicas=1) as cluster:
        monkeypatch.setenv("MEMSTORE_HOST", "h1")
        yield cluster.config


@pytest.mark.parametrize("fails_at", [3, 6])
def test_training_goes_on_where_it_broke_off(case: Any, config: Config, tmp_path: Path, fails_at: int) -> None:
    """Broken off within and between epochs: weights, schedule, dropout and place in the data are as if unbroken."""
    whole = case.Losses()
    case.train(tmp_path, config, "whole", whole)
    broken = case.Losses(fails_at)
    with pytest.raises(RuntimeError, match="planted"):
        case.train(tmp_path, config, "broken", broken)
    resumed = case.Losses()
    before = case.folders()
    callback = case.train(tmp_path, config, "broken", resumed)
    assert callback.restored_step is not None
    assert fails_at - 1 <= callback.restored_step <= fails_at
    assert resumed.losses == {step: whole.losses[step] for step in range(callback.restored_step + 1, case.STEPS + 1)}
    assert all(torch.equal(tensor, whole.weights[name]) for name, tensor in resumed.weights.items())
    mine = str(case.folder_of(config, "broken"))
    assert [mine in found for found in resumed.folders] == [True] + [False] * (case.STEPS - callback.restored_step - 1)
    assert case.folders() == before


def test_a_folder_goes_with_an_error_and_what_a_dead_process_left_is_replaced(
    case: Any, config: Config, tmp_path: Path
) -> None:
    """Nothing stays in memory when training never starts; a leftover of a killed process does not matter."""
    case.train(tmp_path, config, "job", case.Losses(), every_n_steps=4)
    mine = case.folder_of(config, "job")
    mine.mkdir()
    (mine / "pytorch_model.bin").write_bytes(b"torn")
    callback = case.MemstoreCallback("job", config=config)
    with pytest.raises(RuntimeError, match="planted"):
        start_and_fail(callback, case.trainer_for(tmp_path), mine)
    assert callback.restored_step == case.STEPS
    assert not mine.exists()


def start_and_fail(callback: Any, trainer: Any, mine: Path) -> None:
    with callback.checkpoint_folder(trainer) as folder:
        assert folder == str(mine)
        assert (mine / "pytorch_model.bin").stat().st_size > 1000
        assert mine.stat().st_mode & 0o777 == 0o700
        raise RuntimeError("planted")


def test_training_outside_of_the_block_is_refused(case: Any, config: Config, tmp_path: Path) -> None:
    """Without checkpoint_folder() nothing would ever be put: train() says so before its first step."""
    losses = case.Losses()
    trainer = case.trainer_for(tmp_path, case.MemstoreCallback("job", config=config), losses)
    with pytest.raises(ConfigError, match=r"with callback\.checkpoint_folder\(trainer\)"):
        trainer.train()
    assert not losses.losses


@pytest.mark.parametrize("option", ["fsdp", "deepspeed", "fp16"])
def test_what_a_folder_cannot_hold_is_refused(case: Any, config: Config, tmp_path: Path, option: str) -> None:
    """Sharded models and a loss scaler: a ConfigError that names the option, before anything is connected."""
    trainer = case.trainer_for(tmp_path)
    setattr(trainer.args, option, "full_shard")
    callback = case.MemstoreCallback("job", config=config)
    with pytest.raises(ConfigError, match=option), callback.checkpoint_folder(trainer):
        pass
    assert callback.store is None
