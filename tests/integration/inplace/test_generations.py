"""Generations of recovery in place, as the store sees them: attempts of one launch (R20)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from repository import ROOT
from reuse_program import BREAKS, LAYOUTS, LOST, STEPS
from variants import later

import memstore
from memstore.core.attempts.in_place import generation_key
from memstore.core.wire.calls import InPlace
from memstore.inplace.membership import may_be_loss
from memstore.shell.rank.launch import IN_PLACE, Launch, give_launch
from memstore.testing.clusters.processes import ProcessCluster, wait_for

WAIT_S = 60.0


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ProcessCluster]:
    monkeypatch.setenv("MEMSTORE_HOST", "h1")
    with ProcessCluster(tmp_path, {"h1": {}}, arena_bytes=16 << 20) as made:
        yield made
    give_launch(None)


def enter(run: str, number: int) -> None:
    """Be the only rank of a generation."""
    in_place = (
        InPlace(generation=number, losses=(), detect_s=None, abort_s=None, replace_s=None, meet_s=0.0, build_s=0.0)
        if number
        else None
    )
    give_launch(
        Launch(0, 1, generation_key(run, number), f"launcher-{run}", IN_PLACE, in_place, may_be_loss=may_be_loss)
    )


def train(cluster: ProcessCluster, steps: list[int], **options: Any) -> int | None:
    """Connect, get, put these steps; return the step that was restored."""
    state = {"weight": torch.zeros(16)}
    config = cluster.config.with_fields({"replicas": 1, "connect_timeout_s": WAIT_S})
    with memstore.connect("job", config=config, **options) as store:
        got = store.get(into=state)
        restored = state["weight"][0].clone()
        for step in steps:
            state["weight"].fill_(float(step))
            store.put(step, state).wait("committed", WAIT_S)
    if got is not None:
        assert float(restored) == float(got.step)
    return got.step if got is not None else None


def test_a_later_generation_goes_on_from_a_fresh_start(cluster: ProcessCluster) -> None:
    """`fresh=True` stands in the function that is entered again: it starts the job over once, not at each loss."""
    enter("first", 0)
    assert train(cluster, [0, 1]) is None
    enter("second", 0)
    assert train(cluster, [0, 1, 2], fresh=True) is None
    enter("second", 1)
    assert train(cluster, [3], fresh=True) == 2
    enter("second", 2)
    assert train(cluster, [], fresh=True) == 3
    enter("third", 0)
    assert train(cluster, [], fresh=True) is None


def test_a_later_generation_of_a_fresh_start_without_a_commit_finds_nothing(cluster: ProcessCluster) -> None:
    """What was before the fresh start stays out of reach."""
    enter("first", 0)
    assert train(cluster, [0, 1]) is None
    enter("second", 0)
    assert train(cluster, [], fresh=True) is None
    enter("second", 1)
    assert train(cluster, [], fresh=True) is None


@pytest.mark.parametrize(
    ("fault", "event"),
    [(lambda: torch.zeros(2) @ torch.zeros(3), "rank_left"), (lambda: int("x"), "rank_ended")],
    ids=["torch", "own"],
)
def test_a_rank_that_leaves_a_generation_because_a_peer_may_be_lost_is_not_called_dead(
    cluster: ProcessCluster, fault: Callable[[], object], event: str
) -> None:
    """What a collective raises is no end of training in place; an exception of the function's own code is one."""

    def leave() -> None:
        with memstore.connect("job", config=cluster.config.with_fields({"replicas": 1})) as store:
            store.put(0, {"weight": torch.zeros(16)}).wait("committed", WAIT_S)
            fault()

    enter("run", 0)
    with pytest.raises((RuntimeError, ValueError)):
        leave()
    gone = ("rank_left", "rank_ended", "rank_dead")
    wait_for(lambda: [row["event"] for row in cluster.events("job") if row["event"] in gone] == [event], event)


# -- reuse breaks -------------------------------------------------------------------------------------
# Training that breaks off anywhere goes on with the model it has, bit-equal to a run that never broke.


PROGRAM = ROOT / "tests" / "support" / "reuse_program.py"
PLAYED = {"tensor-parallel", "scattered"}


def ranks_of(layout: str, folder: Path) -> tuple[list[dict[str, Any]], str]:
    """Play a layout's ranks; return what each found, and what was logged."""
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(folder), layout],
        env=env,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(LAYOUTS[layout][0])], done.stderr


@pytest.mark.parametrize("layout", [*sorted(PLAYED), *later(*sorted(LAYOUTS.keys() - PLAYED))])
def test_a_model_goes_on_from_wherever_it_broke_off(layout: str, tmp_path: Path) -> None:
    """It broke off in forward, backward, clip_grad_norm_ and the optimizer's step; one rank was replaced each time.

    The survivors' tensors are those that they had (the program asserts it), and nothing of an old group is left. With
    "scattered" no rank can keep its model.
    """
    found, logged = ranks_of(layout, tmp_path)
    is_reused = layout != "scattered"
    for rank, one in enumerate(found):
        assert one["losses"] == one["unbroken"]
        assert len(one["losses"]) == STEPS
        assert one["different"] == []
        assert [error.split(":")[0] for error in one["errors"]] == list(BREAKS.values())
        assert one["builds"] == (1 if is_reused and rank != LOST else len(BREAKS) + 1)
        if is_reused:
            assert one["counts"][-1] <= one["counts"][0], "a thread or socket of an old group is left"
    assert ("builds model again" in logged) == (not is_reused)
    assert is_reused or "give parallelize_module() and distribute_tensor() src_data_rank=None" in logged
