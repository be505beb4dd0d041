"""The manager of non-persistent local checkpoints, called as Megatron-LM calls it, on two ranks.

The calls and their order are those of megatron/training/checkpointing.py with `--non-persistent-ckpt-type local`:
load_checkpoint asks find_latest, takes load() if that is the newer one, and calls to_state_dict on its result;
save_checkpoint reads local_ckpt_dir, then calls save(state, iteration, is_async=...). Megatron-Bridge asks
find_latest once more before. The state is a class of the caller with nvidia-resiliency-ext's TensorAwareStateDict
interface, whose own implementation needs CUDA.
"""

from __future__ import annotations

import argparse
import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import memstore
from memstore.adapters.megatron import LocalCheckpointManager
from memstore.config import Config
from memstore.errors import MemstoreError, RecoveryError
from memstore.testing.clusters.processes import ProcessCluster

RANKS = 2
pytestmark = pytest.mark.slow


class TensorAware:
    """Tensors anywhere among other objects; hollow between pop and insert, as Megatron's class checks it."""

    def __init__(self, common: dict[str, Any], sharded: dict[str, torch.Tensor | None]) -> None:
        self.common, self.sharded = common, sharded
        self.is_hollow = False

    def pop_tensors(self) -> list[torch.Tensor]:
        assert not self.is_hollow
        found = [tensor for tensor in self.sharded.values() if tensor is not None]
        self.sharded, self.is_hollow = dict.fromkeys(self.sharded), True
        return found

    def insert_tensors(self, tensors: list[torch.Tensor]) -> None:
        assert self.is_hollow
        self.sharded, self.is_hollow = dict(zip(self.sharded, tensors, strict=True)), False

    def restore_tensor_device(self, non_blocking: bool = True) -> None:
        assert not self.is_hollow
        assert not non_blocking

    def to_state_dict(self) -> dict[str, Any]:
        assert not self.is_hollow
        return {**self.common, **self.sharded}


class Megatron:
    """One rank's training: a weight, and the checkpointing context."""

    def __init__(self, manager: LocalCheckpointManager) -> None:
        self.context = {"local_checkpoint_manager": manager}
        self.weights = torch.zeros(300, 70)

    def load_checkpoint(self, persistent_iteration: int = -1) -> int:
        local = self.context["local_checkpoint_manager"].find_latest()
        if local == -1 or local < persistent_iteration:
            return max(0, persistent_iteration)
        state, _ = self.context["local_checkpoint_manager"].load()
        loaded = state.to_state_dict()
        self.weights = loaded["weights"]
        assert loaded["args"] == argparse.Namespace(tensor_parallel=2)
        return int(loaded["iteration"])

    def train(self, first: int, last: int) -> None:
        for iteration in range(first, last + 1):
            self.weights = self.weights * 1.5 + iteration
            common = {"args": argparse.Namespace(tensor_parallel=2), "iteration": iteration}
            state = TensorAware(common, {"weights": self.weights, "view": self.weights[3]})
            assert self.context["local_checkpoint_manager"].local_ckpt_dir == "memstore:megatron"
            assert self.context["local_checkpoint_manager"].save(state, iteration, is_async=False) is None
            assert not state.is_hollow


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Config]:
    with ProcessCluster(tmp_path / "store", {"h1": {}}, replicas=1) as cluster:
        monkeypatch.setenv("MEMSTORE_HOST", "h1")
        yield cluster.config


def on_all_ranks(config: Config, attempt: str, work: Callable[[int, LocalCheckpointManager], Any]) -> list[Any]:
    """Every rank connects, works and leaves, each in its thread."""

    def run(rank: int) -> Any:
        with memstore.connect("megatron", rank=rank, world_size=RANKS, attempt=attempt, config=config) as store:
            return work(rank, LocalCheckpointManager(store, encode=pickle.dumps, decode=pickle.loads))

    with ThreadPoolExecutor(RANKS) as pool:
        return list(pool.map(run, range(RANKS)))


def unbroken(rank: int, iterations: int) -> torch.Tensor:
    weights = torch.full((300, 70), float(rank))
    for iteration in range(1, iterations + 1):
        weights = weights * 1.5 + iteration
    return weights


def test_training_goes_on_from_the_newest_iteration(config: Config) -> None:
    """First run: nothing found, 5 iterations saved. Second: iteration 5 on both ranks, their own bytes, trained on."""

    def first(rank: int, manager: LocalCheckpointManager) -> None:
        training = Megatron(manager)
        assert training.load_checkpoint() == 0
        training.weights += rank
        training.train(1, 5)

    def second(rank: int, manager: LocalCheckpointManager) -> torch.Tensor:
        training = Megatron(manager)
        assert manager.find_latest() == 5  # Megatron-Bridge's own question
        assert training.load_checkpoint() == 5
        assert torch.equal(training.weights, unbroken(rank, 5))
        training.train(6, 8)
        return training.weights

    on_all_ranks(config, "first", first)
    for rank, weights in enumerate(on_all_ranks(config, "second", second)):
        assert torch.equal(weights, unbroken(rank, 8))


def test_a_newer_persistent_checkpoint_is_taken_instead(config: Config) -> None:
    """find_latest without load costs nothing and training goes on from the later iteration."""

    def first(rank: int, manager: LocalCheckpointManager) -> None:
        Megatron(manager).load_checkpoint()
        Megatron(manager).train(1, 3)

    def second(rank: int, manager: LocalCheckpointManager) -> None:
        training = Megatron(manager)
        assert training.load_checkpoint(persistent_iteration=7) == 7
        training.train(8, 9)

    on_all_ranks(config, "first", first)
    on_all_ranks(config, "second", second)
    assert on_all_ranks(config, "third", lambda _, manager: manager.find_latest()) == [9, 9]


def test_load_follows_find_latest(config: Config) -> None:
    """load() before the question, or after a -1, is an error that says so."""

    def wrong(rank: int, manager: LocalCheckpointManager) -> list[str]:
        found = []
        for _ in range(2):
            with pytest.raises(RecoveryError) as caught:
                manager.load()
            found.append(str(caught.value))
            assert manager.find_latest() == -1
        return found

    for texts in on_all_ranks(config, "first", wrong):
        assert all("find_latest" in text for text in texts)


def test_a_state_that_cannot_be_encoded_stays_whole(config: Config) -> None:
    """An encode that raises leaves the caller's state with its tensors."""

    def run(rank: int, manager: LocalCheckpointManager) -> None:
        manager.find_latest()
        state = TensorAware({"lock": lambda: None}, {"weights": torch.ones(4)})
        with pytest.raises((pickle.PicklingError, AttributeError, MemstoreError)):
            manager.save(state, 1)
        assert not state.is_hollow

    on_all_ranks(config, "first", run)
