"""One key for all slices of a durable step: hosts that have another one fail with theirs, and are named (R31)."""

from __future__ import annotations

import math
from typing import Any

import pytest

from memstore.core.durable.paths import other_key
from memstore.core.durable.writes import REMOVAL_S, DurableOrders
from memstore.core.schedule.durable_interval import retire
from memstore.core.wire.ids import WireStep
from memstore.core.wire.reports import SliceWritten
from memstore.testing.controller.holder import DirectedRank
from memstore.testing.controller.world import ControllerWorld
from recovery.inventory import StepId

A, B = "a" * 16, "b" * 16


def encrypted(keys: dict[str, str], hosts: int = 2, **config: Any) -> tuple[ControllerWorld, list[DirectedRank]]:
    """A running job with an encrypted durable directory, whose hosts have these keys."""
    world = ControllerWorld(hosts, durable="/durable", durable_every=1, durable_key_file="/key", **config)
    for host, key in keys.items():
        world.durable.keys[host] = key
    ranks = world.launch(hosts)
    world.get(ranks)
    return world, ranks


def keys_on_storage(world: ControllerWorld, step: int) -> set[str]:
    """Keys that slices of a step were written under."""
    return {key for shard, _, key, _ in world.durable.slices if shard.step == step}


def job_row(world: ControllerWorld, rank: DirectedRank) -> dict[str, Any]:
    """The job in the answer to `memstore status`."""
    rank.answers.pop("status", None)
    world.call(rank, "status")
    world.run(0.5)
    status = rank.answers["status"][-1]
    return {**status["jobs"][0], "problems": status["problems"]}


def test_a_step_is_written_under_one_key_and_the_other_host_is_named() -> None:
    """Every shard is on both hosts, so one of them writes all; status names the other, both keys and the remedy."""
    world, ranks = encrypted({"h0": A, "h1": B})
    for step in (1, 2, 3):
        assert world.put_all(ranks, step, until="durable", limit_s=20.0)
        assert world.durable.markers["train", 1, step][1] in keys_on_storage(world, step)
    [key] = {key for _, key, _ in world.durable.markers.values()}
    other, its = ("h1", B) if key == A else ("h0", A)
    [problem] = [problem for problem in job_row(world, ranks[0])["problems"] if problem["kind"] == "durable_failed"]
    assert f"host {other} wrote nothing of step 3: {other_key(key, its)}" in problem["cause"]
    world.durable.keys[other] = key  # the remedy
    assert world.put_all(ranks, 4, until="durable", limit_s=20.0)
    assert "durable_failed" not in {problem["kind"] for problem in job_row(world, ranks[0])["problems"]}


def test_a_step_that_fits_under_no_key_is_not_durable() -> None:
    """Each shard has one copy, on hosts with different keys: no marker, and the reason names a host and both keys."""
    world, ranks = encrypted({"h0": A, "h1": B}, replicas=1)
    assert world.put_all(ranks, 1)
    world.run(5.0)
    assert world.durable.markers == {}
    problem = world.served.parts.durable_states.of("train").problem
    assert problem.startswith(("host h0 wrote nothing of step 1", "host h1 wrote nothing of step 1"))
    assert A in problem
    assert B in problem
    failed = [event for event in world.events("train") if event["event"] == "durable_failed"]
    assert len(failed) == 1  # not again and again: storage and network have better to do
    world.durable.keys["h1"] = A
    assert world.put_all(ranks, 2, until="durable", limit_s=20.0)
    assert job_row(world, ranks[0])["durable_problem"] == ""


def test_a_key_replaced_while_a_step_is_written_makes_no_mixed_step() -> None:
    """Hosts read the new file between two of their slices: the write fails, and the next one has the new key."""
    world, ranks = encrypted({"h0": A, "h1": A})
    assert world.put_all(ranks, 1, until="durable", limit_s=20.0)
    world.work_s = (1.0, 1.5)
    for rank in ranks:
        world.put(rank, 2)
    writing = lambda: (w := world.served.parts.durable_states.of("train").active) is not None and w.phase == "writing"  # noqa: E731
    assert world.run_until(writing, 20.0)
    for holder in world.holders.values():
        world.durable.keys[holder.host_id] = B
    assert world.run_until(lambda: ("train", 1, 2) in world.durable.markers, 20.0)
    assert world.durable.markers["train", 1, 2][1] == B


@pytest.mark.parametrize("is_reported", [True, False])
def test_a_step_is_written_again_once_its_remains_are_removed(
    monkeypatch: pytest.MonkeyPatch, is_reported: bool
) -> None:
    """The removal would take the new slices; a host that never says that it has removed holds the write up 30 s."""
    if not is_reported:
        monkeypatch.setattr(DurableOrders, "step_removed", lambda self, host, report: None)
    world, ranks = encrypted({"h0": A, "h1": A})
    world.durable.problem = "no space left"
    assert world.put_all(ranks, 1)
    assert world.run_until(lambda: world.served.parts.durable_states.of("train").failures_count == 1, 20.0)
    failed_s, world.durable.problem = world.now, ""
    world.served.parts.durable_states.of("train").failed_s = -math.inf  # as if it had waited for its next try
    assert world.run_until(lambda: ("train", 1, 1) in world.durable.markers, REMOVAL_S + 10.0)
    assert (world.now - failed_s >= REMOVAL_S) is not is_reported


def test_a_key_replaced_host_by_host_never_mixes() -> None:
    """One host's file first, the other's steps later: every step is under one key, in the end the new one."""
    world, ranks = encrypted({"h0": A, "h1": A}, durable_keep=9)
    for step in range(1, 7):
        if step in (3, 5):
            world.durable.keys["h0" if step == 3 else "h1"] = B
        assert world.put_all(ranks, step, until="durable", limit_s=20.0)
    assert all(len(keys_on_storage(world, step)) == 1 for step in range(1, 7))
    assert world.durable.markers["train", 1, 6][1] == B


def test_nothing_older_goes_while_hosts_differ_or_the_present_key_has_too_few() -> None:
    """durable_keep counts steps under the present key only, and waits while it is open which key that is."""
    assert retire({StepId(1, 1): A, StepId(1, 2): A, StepId(1, 3): B}, 2, B) == ()
    assert retire({StepId(1, 1): A, StepId(1, 2): B, StepId(1, 3): A, StepId(1, 4): B}, 2, B) == (StepId(1, 1),)
    world, ranks = encrypted({"h0": A, "h1": A}, durable_keep=1)
    assert world.put_all(ranks, 1, until="durable", limit_s=20.0)
    world.durable.keys["h0"] = B
    for step in (2, 3):
        assert world.put_all(ranks, step, until="durable", limit_s=20.0)
    world.run(2.0)
    assert sorted(step for _, _, step in world.durable.markers) == [1, 2, 3]
    world.durable.keys["h1"] = B
    assert world.put_all(ranks, 4, until="durable", limit_s=20.0)
    assert world.run_until(lambda: [step for _, _, step in world.durable.markers] == [4], 5.0)


def test_a_look_says_which_key_the_newest_step_needs() -> None:
    """After all memory is lost the hosts have a new key: status names the old one, which the marker knows."""
    world, ranks = encrypted({"h0": A, "h1": A})
    assert world.put_all(ranks, 1, until="durable", limit_s=20.0)
    for host in list(world.holders):
        world.kill_host(host)
        world.return_host(host, keep_memory=False)
        world.durable.keys[host] = B
    world.crash_controller()
    world.run(6.0)
    world.launch(2)
    world.run(2.0)
    assert f"step 1: {other_key(A, B)}" in world.served.parts.durable_states.of("train").unread


def test_late_slices_of_a_write_are_no_mixture() -> None:
    """A report under another key than the first one's counts as that host's failure."""
    world, ranks = encrypted({"h0": A, "h1": A})
    world.reserve(ranks)
    world.work_s = (1.0, 1.5)
    for rank in ranks:
        world.put(rank, 1)
    durable = world.served.parts.durable
    assert world.run_until(lambda: durable.states.of("train").active is not None, 20.0)
    write = durable.states.of("train").active
    assert write is not None
    pieces = {host: piece for piece, host in write.waits.items()}
    for host, key in (("h0", A), ("h1", B)):
        rank, number = pieces[host]
        report = SliceWritten(job="train", step=WireStep(1, 1), rank=rank, number=number, key=key, problem=None)
        durable.slice_written(host, report)
    assert (write.key, write.other_keys) == (A, {"h1": B})
    assert "h1" in write.failed[pieces["h1"]]
