"""A lost or frozen rank is replaced; the others keep their processes, and all losses are those of an unbroken run."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from ray.exceptions import RayTaskError
from torch.utils.data import DistributedSampler
from variants import later

from memstore.errors import RecoveryError
from memstore.inplace.ray_actors import InPlaceGroup
from memstore.testing.clusters.embedded import EmbeddedCluster
from memstore.testing.faults.processes import wait_gone, with_start_times
from memstore.testing.ranks.in_place_job import (
    DATA_STEPS,
    GLOBAL_BATCH,
    LENGTH,
    REUSE_FAULT_AT,
    REUSE_STEPS,
    SEED,
    STEPS,
    IndexedSamples,
    InPlaceRankEnd,
    ReuseEnd,
    StopsOnce,
    train,
    train_again,
    train_on_data,
)

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]


ray = pytest.importorskip("ray")


RANKS = 3
HANG_AFTER_S = 2.0
Faults = dict[tuple[int, int], str]


def run(shared_cluster: EmbeddedCluster, job: str, faults: Faults, **group: Any) -> list[InPlaceRankEnd]:
    """Train a new job; return what each rank returned."""
    actors = InPlaceGroup(RANKS, actor_options={"scheduling_strategy": "SPREAD"}, **group)
    return actors.run(train, shared_cluster.config.store, job, faults)


@pytest.fixture(scope="module")
def unbroken(shared_cluster: EmbeddedCluster) -> list[dict[int, str]]:
    """By rank, each step's loss of a run without a fault."""
    return [end.losses for end in run(shared_cluster, "unbroken", {})]


CASES: dict[str, tuple[Faults, dict[str, Any]]] = {
    "killed": ({(0, 1): "exit"}, {}),
    "rank-0-killed": ({(0, 0): "exit"}, {}),
    "spare": ({(0, 1): "exit"}, {"spares": 1}),
    "frozen": ({(0, 2): "stop"}, {"hang_after_s": HANG_AFTER_S}),
    "replacement-killed": ({(0, 1): "exit", (1, 1): "exit"}, {}),
    "two-killed": ({(0, 1): "exit", (0, 2): "exit"}, {}),
    "cannot-leave": ({(0, 1): "exit", (0, 2): "wait"}, {"leave_s": 2.0}),
    "absent": ({(0, 2): "wait"}, {"collective_timeout_s": 6.0}),
    "all-killed": ({(0, 0): "exit", (0, 1): "exit", (0, 2): "exit"}, {}),
}


QUICK = ("killed", "spare", "frozen")


@pytest.mark.parametrize("name", [*QUICK, *later(*(name for name in CASES if name not in QUICK))])
def test_the_others_keep_their_processes_and_no_loss_changes(
    shared_cluster: EmbeddedCluster, unbroken: list[dict[int, str]], name: str
) -> None:
    """Every step that is trained again, and every later one, has the loss of the unbroken run, bit for bit."""
    faults, group = CASES[name]
    ends = run(shared_cluster, name, faults, **group)
    lost = {rank for _, rank in faults}
    assert [end.is_first_here for end in ends] == [rank in lost for rank in range(RANKS)]
    assert len({end.generation for end in ends}) == 1
    assert ends[0].generation >= 1 + max(number for number, _ in faults)
    for end, losses in zip(ends, unbroken, strict=True):
        assert max(end.losses) == STEPS - 1
        assert end.losses.items() <= losses.items()
    check_events(shared_cluster, name, lost, {"frozen": "frozen", "absent": "absent"}.get(name, "ended"))


@pytest.mark.long
def test_a_rank_that_is_stopped_with_its_watchdog_is_replaced(
    shared_cluster: EmbeddedCluster, unbroken: list[dict[int, str]], tmp_path: Path
) -> None:
    """As a pause of their container does. The others speak, and it does not; its watchdog ends once it goes on."""
    stopped = tmp_path / "watchdog"
    ends = run(shared_cluster, "paused", {(0, 2): f"pause:{stopped}"}, hang_after_s=HANG_AFTER_S)
    assert [(end.generation, end.is_first_here) for end in ends] == [(1, False), (1, False), (1, True)]
    assert all(end.losses.items() <= losses.items() for end, losses in zip(ends, unbroken, strict=True))
    check_events(shared_cluster, "paused", {2}, "frozen")
    watchdog = int(stopped.read_text(encoding="ascii"))
    with contextlib.suppress(ProcessLookupError):  # Ray may have ended it with its rank
        os.kill(watchdog, signal.SIGCONT)
    wait_gone(with_start_times([watchdog]))


@pytest.mark.long
def test_a_rank_that_is_stopped_before_it_has_a_watchdog_is_replaced(
    shared_cluster: EmbeddedCluster, tmp_path: Path
) -> None:
    """The others wait for it at the start; half of that time later it is taken for frozen."""
    group = InPlaceGroup(2, meet_s=20.0)
    ends = group.run(train, shared_cluster.config.store, "stopped", {}, StopsOnce(str(tmp_path / "stopped")))
    assert [end.generation for end in ends] == [1, 1]
    assert [max(end.losses) for end in ends] == [STEPS - 1] * 2


def check_events(shared_cluster: EmbeddedCluster, job: str, lost: set[int], cause: str) -> None:
    """Every lost rank is named with why, no other is called dead; the phases take no longer than all of it."""
    events = shared_cluster.events(job)
    assert {event["rank"] for event in events if event["event"] == "rank_dead"} <= lost
    replaced = [row for event in events if event["event"] == "replaced" for row in event["replaced"]]
    assert {row["rank"] for row in replaced} == lost
    assert {row["cause"] for row in replaced} <= {cause, "ray"}  # Ray may be the first to see it
    assert {host for row in replaced for host in (row["host"], row["to_host"])} <= {"h1", "h2", "h3", "h4"}
    first = next(event for event in events if event["event"] == "recovered")
    earlier = [event for event in events if event["event"] == "commit" and event["attempt"] < first["attempt"]]
    committed_s = earlier[-1]["wall_s"]  # it died after that, or trained no further
    took_s = dict(first["seconds"])
    assert list(took_s)[-4:] == ["meet", "rebuild", "get", "first_step"]
    if cause == "frozen":  # its silence begins with its last beat, and that may come before its last commit
        assert took_s.pop("detect") >= HANG_AFTER_S
    assert sum(took_s.values()) <= first["wall_s"] - committed_s + 0.01


def test_an_exception_of_the_users_code_is_no_loss(shared_cluster: EmbeddedCluster) -> None:
    """It ends the run at once, with its traceback: nothing is replaced."""
    with pytest.raises(RayTaskError, match="a bug of the user's"):
        run(shared_cluster, "raises", {(0, 1): "raise"})


@pytest.mark.long
def test_more_losses_than_are_allowed_end_the_run(shared_cluster: EmbeddedCluster) -> None:
    """The error says how many there were, and how many are replaced."""
    with pytest.raises(RecoveryError, match="2 ranks were lost, max_losses=1 are replaced"):
        run(shared_cluster, "many", {(0, 1): "exit", (1, 1): "exit"}, max_losses=1)


def test_a_rank_that_no_host_has_room_for_is_named(shared_cluster: EmbeddedCluster) -> None:
    """The others would wait for it for good; the error says what it needs and what is free."""
    group = InPlaceGroup(1, actor_options={"num_gpus": 1}, meet_s=2.0)
    with pytest.raises(RecoveryError, match=r"rank 0 of 1 has not started within meet_s=2 s. It needs .*'num_gpus': 1"):
        group.run(train, shared_cluster.config.store, "no-room", {})


# -- in place data ------------------------------------------------------------------------------------
# A rank is killed in place while loaders have run ahead: the committed history has each sample once, in order.


DATA_RANKS, EPOCH = 3, LENGTH // GLOBAL_BATCH  # batches in an epoch
SHARE = GLOBAL_BATCH // DATA_RANKS


def ordered(epoch: int) -> list[list[int]]:
    """Return the batches of an epoch as `SampleOrder` promises them."""
    order = torch.randperm(LENGTH, generator=torch.Generator().manual_seed(SEED + epoch)).tolist()
    return [order[k * GLOBAL_BATCH : (k + 1) * GLOBAL_BATCH] for k in range(EPOCH)]


def stateful(epoch: int) -> list[list[int]]:
    """Return the batches of an epoch as torch's DistributedSampler deals them."""
    samplers = [
        DistributedSampler(IndexedSamples(), DATA_RANKS, rank, seed=SEED, drop_last=True) for rank in range(DATA_RANKS)
    ]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    shares = [list(sampler) for sampler in samplers]
    return [[sample for share in shares for sample in share[k * SHARE : (k + 1) * SHARE]] for k in range(EPOCH)]


# Of each run: its kind of loader, and (generation, rank) -> the step at which that is killed, before its put.
DATA_CASES = {
    "in-an-epoch": (ordered, {(0, 1): 10}),
    "at-an-epochs-end": (ordered, {(0, 0): 11, (1, 2): 15}),
    "before-any-commit": (ordered, {(0, 2): 0}),
    "torchdata": (stateful, {(0, 1): 10}),
}


@pytest.mark.parametrize("name", ["in-an-epoch", *later(*(name for name in DATA_CASES if name != "in-an-epoch"))])
def test_no_sample_is_doubled_and_none_is_missing(shared_cluster: EmbeddedCluster, name: str) -> None:
    """All ranks end with the samples of an unbroken run; with `SampleOrder` the workers of the others live on."""
    epoch_of, faults = DATA_CASES[name]
    if epoch_of is stateful:
        pytest.importorskip("torchdata.stateful_dataloader", reason="pip install -e '.[frameworks]'")
    group = InPlaceGroup(DATA_RANKS, actor_options={"scheduling_strategy": "SPREAD"}, hang_after_s=60.0)
    ends = group.run(train_on_data, shared_cluster.config.store, f"data-{name}", epoch_of.__name__, faults)
    unbroken = [batch for epoch in range(DATA_STEPS // EPOCH) for batch in epoch_of(epoch)]
    assert [end.trained for end in ends] == [unbroken] * DATA_RANKS
    assert {end.generation for end in ends} == {len(faults)}
    assert ends[0].first_step <= max(faults.values())
    are_kept = [bool(end.kept_worker_pids) for end in ends]
    assert are_kept == [epoch_of is ordered and (len(faults) - 1, rank) not in faults for rank in range(DATA_RANKS)]


# -- in place reuse -----------------------------------------------------------------------------------
# A rank of FSDP2 is lost: the others go on with the tensors they have, and as their replacement does.


REUSE_RANKS, LOST = 3, 1


def reuse_run(shared_cluster: EmbeddedCluster, job: str, at: Sequence[str]) -> list[ReuseEnd]:
    """Train a new job; return what each rank returned."""
    group = InPlaceGroup(REUSE_RANKS, actor_options={"scheduling_strategy": "SPREAD"}, hang_after_s=10.0)
    return group.run(train_again, shared_cluster.config.store, job, LOST, at)


def test_the_others_keep_every_tensor_and_no_loss_changes(shared_cluster: EmbeddedCluster) -> None:
    """Parameters and moments lie where they lay, and hold what the replacement's hold: all losses are equal.

    The scaler's step begins again behind its unscale_(), and dropout is on although an evaluation broke off.
    """
    at = ("backward", "clip", "evaluation")
    unbroken = reuse_run(shared_cluster, "reuse-unbroken", ())
    for rank, (end, other) in enumerate(zip(reuse_run(shared_cluster, "reuse-broken", at), unbroken, strict=True)):
        assert (end.generation, end.restored_step) == (len(at), REUSE_FAULT_AT + len(at) - 1)
        assert end.losses == {step: other.losses[step] for step in range(REUSE_FAULT_AT + len(at), REUSE_STEPS)}
        assert end.kept_count == (0 if rank == LOST else end.tensors_count)
