"""Transformers with its real Trainer: resumed from a folder in memory it trains as if unbroken."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from example_runs import run_ranks
from repository import ROOT
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import DataLoader

from memstore.adapters.data import Batches, SampleOrder
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


def test_what_fsdp2_shards_goes_on_after_sigkill(config: Config, tmp_path: Path) -> None:
    """Two ranks, each with its part: losses and gradients, dropout, accumulation and schedule as in an unbroken run."""
    program = [sys.executable, str(ROOT / "tests/support/transformers_case.py"), config.store, "7"]
    env = {**os.environ, "MEMSTORE_HOST": "h1", "PYTHONPATH": str(ROOT)}
    before = run_ranks([*program, "4", "whole", "broken"], env, 2, tmp_path)
    after = run_ranks([*program, "0", "broken"], env, 2, tmp_path)
    whole = dict(re.findall(r"^whole (rank \d step \d): (.*)$", before, re.MULTILINE))
    resumed = dict(re.findall(r"^broken (rank \d step \d): (.*)$", after, re.MULTILINE))
    [first] = set(re.findall(r"^broken restored (\d)$", after, re.MULTILINE))
    assert int(first) in (3, 4)
    assert resumed == {
        f"rank {rank} step {n}": whole[f"rank {rank} step {n}"] for rank in (0, 1) for n in range(int(first) + 1, 8)
    }


def test_a_folder_goes_with_an_error_and_what_a_dead_process_left_is_replaced(
    case: Any, config: Config, tmp_path: Path
) -> None:
    """Nothing stays in memory when training never starts; a leftover of a killed process does not matter."""
    case.train(tmp_path, config.with_fields({"put_every": 4}), "job", case.Losses())
    mine = case.folder_of(config, "job")
    mine.mkdir()
    (mine / "pytorch_model.bin").write_bytes(b"torn")
    callback = case.MemstoreCallback("job", config=config)
    with pytest.raises(RuntimeError, match="planted"):
        start_and_fail(callback, case.trainer_for(tmp_path), mine)
    assert callback.restored_step == case.STEPS
    assert not mine.exists()


def test_with_epoch_the_ends_of_epochs_are_put(case: Any, config: Config, tmp_path: Path) -> None:
    """24 rows in batches of 4 are an epoch of 6 steps: of 8 steps the sixth is what is left."""
    config = config.with_fields({"put_every": "epoch"})
    case.train(tmp_path, config, "epochs", case.Losses())
    assert case.train(tmp_path, config, "epochs", case.Losses()).restored_step == case.STEPS // 6 * 6


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


def test_batches_with_a_place_of_their_own_are_refused(case: Any, config: Config, tmp_path: Path) -> None:
    """The Trainer skips to its place in whatever it is given: batches would be left out."""
    callback = case.MemstoreCallback("job", config=config)
    trainer = case.trainer_for(tmp_path, callback)
    rows = trainer.train_dataset
    order = SampleOrder(len(rows), global_batch=4, rank=0, world_size=1)
    trainer.get_train_dataloader = lambda: Batches(DataLoader(rows, batch_sampler=order))
    with pytest.raises(ConfigError, match="return the DataLoader below it"), callback.checkpoint_folder(trainer):
        trainer.train()


def test_parts_of_tensors_outside_of_fsdp2_are_refused(case: Any, config: Config, tmp_path: Path) -> None:
    """As a model has that was sharded where it was loaded: each rank would put its part as the whole."""
    trainer, callback = case.trainer_for(tmp_path), case.MemstoreCallback("job", config=config)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        part = distribute_tensor(torch.zeros(4), init_device_mesh("cpu", (2,)))
        trainer.model.register_parameter("part", torch.nn.Parameter(part))
        with pytest.raises(ConfigError, match="distributed_config=True"), callback.checkpoint_folder(trainer):
            pass
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("option", ["fsdp", "deepspeed", "fp16"])
def test_what_a_folder_cannot_hold_is_refused(case: Any, config: Config, tmp_path: Path, option: str) -> None:
    """Other sharding, and a loss scaler: a ConfigError that names the option, before anything is connected."""
    trainer = case.trainer_for(tmp_path)
    setattr(trainer.args, option, "full_shard")
    callback = case.MemstoreCallback("job", config=config)
    with pytest.raises(ConfigError, match=option), callback.checkpoint_folder(trainer):
        pass
    assert callback.store is None
