"""Positions in a real store: they come back with their step, to any number of ranks, with torchdata's loader too."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.utils.data import DataLoader

from memstore.adapters.data import Batches, SampleOrder
from memstore.client.connect import connect
from memstore.config import Config
from memstore.testing.clusters.processes import ProcessCluster

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # torchdata warns about itself
LENGTH, GLOBAL_BATCH, STEPS, CALL_S = 27, 6, 14, 60.0
FAILS_AFTER = (3, 4, 11)  # in the first epoch, at its end, in the third
Trained = dict[int, list[int]]  # by step


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Config]:
    with ProcessCluster(tmp_path, {"h1": {}}, replicas=1) as cluster:
        monkeypatch.setenv("MEMSTORE_HOST", "h1")
        yield cluster.config


def ordered(rank: int, world_size: int) -> Any:
    order = SampleOrder(LENGTH, global_batch=GLOBAL_BATCH, rank=rank, world_size=world_size, drop_last=False)
    return Batches(DataLoader(range(LENGTH), batch_sampler=order))  # type: ignore[arg-type]


def stateful(rank: int, world_size: int) -> Any:
    module = pytest.importorskip("torchdata.stateful_dataloader", reason="pip install -e '.[frameworks]'")
    generator = torch.Generator().manual_seed(3)
    return module.StatefulDataLoader(
        range(LENGTH), batch_size=GLOBAL_BATCH, shuffle=True, generator=generator, num_workers=1
    )


def endless(data: Any) -> Iterator[Any]:
    """Return the batches of epoch after epoch; a StatefulDataLoader is begun with the first one, after its load."""
    return itertools.chain.from_iterable(itertools.repeat(data))


def train(
    config: Config, loader: Callable[[int, int], Any], rank: int, world_size: int, launch: str, last: int, **shard: int
) -> tuple[int, Trained]:
    """Train to a step as one launch's rank, and run ahead of it in the data; return the first step and all samples."""
    data, trained, weights = loader(rank, world_size), {}, torch.zeros(8)
    batches = endless(data)
    state = {"weights": weights, "data": data}
    with connect("data", rank=rank, world_size=world_size, attempt=launch, config=config, **shard) as store:
        got = store.get(into=state, timeout_s=CALL_S)
        first = got.step + 1 if got else 0
        assert got is None or weights[0] == got.step
        for step in range(first, last + 1):
            trained[step] = next(batches).tolist()
            ticket = store.put(step, {"weights": weights.fill_(step), "data": data})
        ticket.wait("committed", timeout_s=CALL_S)
        for _ in range(2):
            next(batches)  # of steps that are trained and never put
    return first, trained


@pytest.mark.parametrize("loader", [ordered, stateful])
def test_a_restart_goes_on_with_the_next_batch(config: Config, loader: Callable[[int, int], Any]) -> None:
    """Within an epoch, at its end and in later ones: as if nothing had been."""
    data = endless(loader(0, 1))
    unbroken = {step: next(data).tolist() for step in range(STEPS)}
    trained: Trained = {}
    for launch, last in enumerate((*FAILS_AFTER, STEPS - 1)):
        first, mine = train(config, loader, 0, 1, f"launch-{launch}", last)
        assert first == len(trained)
        trained |= mine
    assert trained == unbroken


def test_dcp_loads_the_position(config: Config) -> None:
    """As a part of the state like any other."""
    data, again = ordered(0, 1), ordered(0, 1)
    for _ in range(7):
        next(data)
    with connect("dcp", rank=0, world_size=1, attempt="first", config=config) as store:
        dcp.save({"data": data}, storage_writer=store.dcp_writer(0), no_dist=True)
    with connect("dcp", rank=0, world_size=1, attempt="second", config=config) as store:
        dcp.load({"data": again}, storage_reader=store.dcp_reader(), no_dist=True)
    assert again.state_dict() == data.state_dict() == {**data.state_dict(), "epoch": 1, "consumed": 12}
    assert next(again).tolist() == next(data).tolist()


def test_another_number_of_ranks_goes_on_with_the_next_samples(config: Config) -> None:
    """Ranks that share a shard put one position for all: two, three and one of them train as one would."""
    data = ordered(0, 1)
    unbroken = {step: next(data).tolist() for step in range(STEPS)}
    trained: Trained = {}
    for world_size, last in zip((2, 3, 1, 2), (*FAILS_AFTER, STEPS - 1), strict=True):
        with ThreadPoolExecutor(world_size) as pool:
            calls = [
                pool.submit(
                    train, config, ordered, rank, world_size, f"launch-{last}", last, shard_rank=0, shard_count=1
                )
                for rank in range(world_size)
            ]
            results = [call.result(timeout=CALL_S) for call in calls]
        assert [first for first, _ in results] == [len(trained)] * world_size
        trained |= {step: [sample for _, mine in results for sample in mine[step]] for step in results[0][1]}
    assert trained == unbroken
