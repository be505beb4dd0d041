"""Reads of single shards: what is answered is what was asked for, also if much happened meanwhile (R17, R27)."""

from __future__ import annotations

from memstore.core.arena.slot_table import PeerShare
from memstore.core.wire.orders import Bring, PushCopy
from memstore.testing.controller.trained import trained
from memstore.testing.controller.world import JOB
from recovery.inventory import StepId


def test_what_a_former_controller_ordered_answers_no_read_of_its_successor() -> None:
    """A slow staging of its time ends when the successor has as many reads: the reader gets the shard it asked for."""
    world, ranks = trained(3, last=1)
    reader = ranks[0]
    holder = world.holders[reader.host_id]
    world.work_s = (6.0, 6.0)
    world.call(reader, "read_step", step=1, rank=1)
    world.run(0.5)
    assert isinstance(holder.orders[-1], Bring)
    holder.calls.forget(reader.owner)  # the reader of rank 1 is gone
    world.crash_controller(restart_after_s=0.1)
    assert world.run_until(lambda: world.machine is not None and world.machine.is_settled, 5.0)
    world.work_s = (20.0, 20.0)
    world.call(reader, "read_step", step=1, rank=2)
    assert world.run_until(lambda: bool(reader.answers.get("read_step")), 60.0)
    assert reader.answers["read_step"][-1]["shard"] == [JOB, 1, 1, 2]


def test_a_read_whose_host_was_replaced_is_forgotten() -> None:
    """A holder that is back at once has lost the order; its reader asks again, and no copy is kept for ever (R7)."""
    world, ranks = trained(3, last=1)
    holder = world.holders[ranks[0].host_id]
    world.work_s = (5.0, 5.0)
    world.call(ranks[0], "read_step", step=1, rank=1)
    assert world.run_until(lambda: bool(world.served.state.reads), 5.0)
    world.kill_host(holder.host_id, keep_memory=True)
    world.return_host(holder.host_id)
    assert world.run_until(lambda: world.served.hosts.is_live(holder.host_id), 5.0)
    world.run(10.0)
    assert not world.served.state.reads


def test_a_shard_of_another_world_size_comes_without_its_step_being_named() -> None:
    """A reader, or a rank of a launch that has another size, on a host that has no copy of it (R27)."""
    world, _ = trained(4, 3)
    ranks = [world.join(r, 2, "k", host=f"h{3 - r}", launcher="launcher") for r in range(2)]
    world.run(2.0)
    for step in (None, 1):
        world.holders["h3"].orders.clear()
        world.call(ranks[0], "read_step", step=step, rank=2)
        world.run(2.0)
        [order] = world.holders["h3"].received(Bring)
        assert order.shard.step == 1
        assert sum(run.count for run in order.runs if run.tier == "peer") == order.spec.chunks_count


def test_what_is_read_is_surplus_nowhere_until_the_read_has_ended() -> None:
    """A host that placement has left keeps the copy that a read was planned to come from (R7)."""
    world, _ = trained(6, 3)
    for host in ("h3", "h4", "h5"):  # memory of another job that is gone
        world.holders[host].replicas.claim(JOB, PeerShare(attempt=1, ranks={}, peer_slots=100, world_size=3))
    world.work_s = (3.0, 3.0)  # of the pushes to where the ranks are now
    ranks = [world.join(r, 3, "k", host=f"h{3 + r}", launcher="launcher") for r in range(3)]
    sources = [world.holders[source] for source in ("h0", "h1", "h2")]
    assert world.run_until(lambda: all(source.received(PushCopy) for source in sources), 2.0)
    world.work_s = (30.0, 30.0)  # of the read
    world.call(ranks[2], "read_step", step=1, rank=1)
    world.run(15.0)
    assert world.holders_of(StepId(1, 1), 0) == ["h3", "h5"]
    assert world.holders_of(StepId(1, 1), 1) == ["h1", "h2", "h3", "h4"]
    world.run(30.0)
    assert world.holders_of(StepId(1, 1), 1) == ["h3", "h4"]


def test_a_plan_of_another_world_size_counts_the_bytes_of_the_step() -> None:
    """A launch of two ranks after a step of three: the plan names both sizes and says where the step's bytes are."""
    world, _ = trained(4, 3)
    ranks = [world.join(r, 2, "k", host=f"h{r}", launcher="launcher") for r in range(2)]
    world.run(2.0)
    world.call(ranks[0], "plan", lose=[])
    assert world.run_until(lambda: bool(ranks[0].answers.get("plan")), 5.0)
    [plan] = ranks[0].answers["plan"]
    assert (plan["step"], plan["step_world_size"], plan["world_size"]) == (1, 3, 2)
    assert sum(plan["bytes"].values()) > 0


def test_a_reader_whose_step_was_dropped_on_the_way_is_reported_so() -> None:
    """Puts wait for no reader: the chunks that did not come any more are gone for newer steps, not damaged (R27)."""
    world, ranks = trained(3, 3)
    world.work_s = (3.0, 3.0)  # of the read
    world.call(ranks[2], "read_step", step=1, rank=0)
    world.run(0.5)
    world.work_s = (0.01, 0.02)
    assert world.put_all(ranks, 2)
    assert world.run_until(lambda: not world.holders_of(StepId(1, 1), 0), 2.0)
    assert world.run_until(lambda: "read_step" in ranks[2].errors, 20.0)
    [(name, why)] = ranks[2].errors["read_step"]
    assert name == "StepDropped"
    assert "step 1 of job 'train' was dropped while it was read" in why
