"""Copies that hosts are ordered to free count no more, and a removed job goes from every host (R7, R10, R19)."""

from __future__ import annotations

import pytest

from memstore.core.cluster.job import Job
from memstore.core.wire.ids import WireCopy
from memstore.core.wire.messages import HostLost
from memstore.core.wire.orders import DropJob, FreeCopies
from memstore.core.wire.reports import Fenced, Sealed
from memstore.testing.controller.trained import trained
from memstore.testing.controller.world import JOB, ControllerWorld
from recovery.inventory import Copy, ShardId, ShardSpec, StepId

STEP = StepId(1, 1)


def drop(world: ControllerWorld, host: str) -> None:
    """Drop a host's copy of rank 0 as a surplus one; repair leaves the host alone for a moment, so that it shows."""
    parts, shard = world.served.parts, ShardId(JOB, STEP.attempt, STEP.step, 0)
    parts.out.actions = []
    parts.drops.order(host, [shard])
    world.job().drop_copy(shard, host)
    parts.repair.pushes.refused_s[shard, host] = world.now
    [order] = parts.out.actions
    world._send_down(order)
    world.run(0.3)


def counted(world: ControllerWorld) -> list[str]:
    """The hosts that count as having a copy of rank 0."""
    return sorted(world.job().copies[STEP][0])


@pytest.mark.parametrize("kind", ["sealed", "fenced"])
def test_a_report_that_crosses_the_order_to_drop_counts_no_copy(kind: str) -> None:
    """The host said that it has the copy before it obeyed.

    Counted, the copy would be there for no process (R7, R19).
    """
    world, _ = trained(2)
    holder = world.holders["h0"]

    def cross(order: FreeCopies) -> None:
        copies = tuple(map(WireCopy.of, holder.held.values()))
        if kind == "fenced":
            holder.report(Fenced(job=JOB, attempt=1, copies=copies))
        else:
            for copy in copies:
                holder.report(Sealed(copy=copy, put=None))
        holder.carry_out(order)

    holder.instead[FreeCopies] = cross
    drop(world, "h0")
    world.run(2.0)
    assert not any(shard.rank == 0 for shard in holder.held)
    assert world.holders_of(STEP, 0) == ["h1"]
    assert counted(world) == ["h1"]
    world.run(15.0)
    assert world.holders_of(STEP, 0) == ["h0", "h1"]
    assert any(shard.rank == 0 for shard in holder.held)


@pytest.mark.parametrize("is_ordered_again", [False, True])
def test_a_drop_that_outlives_its_session_leaves_no_copy_counted(is_ordered_again: bool) -> None:
    """The host joins again with the copy in its inventory, and only then obeys the order of before (R7, R19)."""
    world, _ = trained(2)
    holder = world.holders["h0"]
    copies, late = list(map(WireCopy.of, holder.held.values())), list[FreeCopies]()
    holder.instead[FreeCopies] = late.append
    drop(world, "h0")
    world._forget(world._sessions["h0"])  # it is dialled again with the next beat
    world._handle(HostLost("h0", "connection reset"))
    assert world.run_until(lambda: counted(world) == ["h0", "h1"]), "the inventory names the copy"
    if is_ordered_again:
        drop(world, "h0")
    holder.carry_out(late[0])
    if is_ordered_again:  # the first order is not the second: what is reported until that is obeyed goes with it
        for copy in copies:
            holder.report(Sealed(copy=copy, put=None))
    world.run(0.5)
    assert world.holders_of(STEP, 0) == ["h1"]
    assert counted(world) == ["h1"]


def rooms_freed(world: ControllerWorld, host: str) -> list[tuple[str, int]]:
    """The jobs, with their last attempt, whose room a host was ordered to give up."""
    return [(order.job, order.attempt) for order in world.holders[host].received(DropJob)]


def test_a_removed_job_frees_its_room_on_every_host() -> None:
    """All hosts learn it with the order to drop; one that was out of reach, when it shows a copy again (R10)."""
    world, ranks = trained(2)
    world.silence("h1")
    world.run(10.0)
    world.call(ranks[0], "rm", force=True)
    world.run(1.0)
    assert rooms_freed(world, "h0") == [("train", 1)]
    assert rooms_freed(world, "h1") == []
    world.thaw("h1")
    world.run(5.0)
    assert ("train", 1) in rooms_freed(world, "h1")
    assert not world.holders["h1"].held


def test_a_host_out_of_reach_at_a_removal_frees_the_room_when_it_is_back() -> None:
    """It held no copy that could tell of the job, only a reservation (R10)."""
    world, ranks = trained(3, 2)
    world.kill_host("h2", keep_memory=True)
    world.run(8.0)
    world.call(ranks[0], "rm", force=True)
    world.run(1.0)
    assert JOB not in world.served.jobs
    world.return_host("h2")
    world.run(1.0)
    assert DropJob(job=JOB, attempt=1, shards=()) in world.holders["h2"].orders


def test_a_removal_is_answered_once_the_job_is_gone() -> None:
    """Until the fact has spread nothing is dropped and no rank is notified; then the job is in no status (R16)."""
    world, ranks = trained(2)
    world.silence("h1")
    world.call(ranks[0], "rm", force=True)
    world.run(1.0)
    assert "rm" not in ranks[0].answers
    assert rooms_freed(world, "h0") == []
    assert world.holders["h0"].held
    world.thaw("h1")
    assert world.run_until(lambda: "rm" in ranks[0].answers)
    assert JOB not in world.served.jobs
    world.run(1.0)
    assert ranks[0].answers["rm"] == [{"job": JOB, "pins": {}, "shards": 2}]
    assert not any(holder.held for holder in world.holders.values())


def test_a_removed_job_stays_away_though_a_step_was_given_up_meanwhile() -> None:
    """What was decided of it while the word of its end spread has no effect, nor with a new controller (R16)."""
    world, ranks = trained(2)
    world.silence("h1")
    world.call(ranks[0], "rm", force=True)
    world.run(0.1)
    world.skip(ranks[0], 2)
    world.call(ranks[0], "retire", attempt=1, step=1, reason="torn", is_torn=True)
    world.run(0.1)
    world.thaw("h1")
    world.run(2.0)
    assert ranks[0].answers["retire"] == [{}]
    assert JOB not in world.served.jobs
    world.crash_controller()
    world.run(10.0)
    assert JOB not in world.served.jobs


def test_a_host_that_has_no_copy_of_a_step_any_more_is_not_remembered_with_it() -> None:
    """A job whose surplus copies are dropped one by one, step after step, does not grow with every step."""
    job = Job(JOB)
    for step in range(3):
        shard = ShardId(JOB, 1, step, 0)
        job.add_copy(Copy(shard, ShardSpec("d", 64, 64, 1, 1), "h0"))
        job.drop_copy(shard, "h0")
    assert (job.copies, job.on_host) == ({}, {"h0": {}})
