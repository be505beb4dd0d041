"""A step is committed when it is as safe as the cluster allows, and the word acts only once it has spread (R15-R18)."""

from __future__ import annotations

import pytest
from msgspec import structs

from memstore.core.wire.ids import WireCopy
from memstore.core.wire.messages import Received, SendOrder
from memstore.core.wire.orders import PushTargets, StepLevel
from memstore.core.wire.reports import FactsWritten, Sealed
from memstore.testing.controller.trained import trained
from memstore.testing.controller.world import ControllerWorld
from recovery.inventory import ShardId, StepId
from recovery.planner import plan

RACKS = {f"h{n}": {"rack": f"r{n // 2}"} for n in range(4)}


@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize("hosts", [3, 5, 7])
def test_a_commit_survives_any_loss_it_promises(hosts: int, replicas: int) -> None:
    """A committed step that is not degraded is whole after losing any `replicas - 1` hosts (promise 2)."""
    world = ControllerWorld(hosts, replicas=replicas)
    ranks = world.launch(hosts)
    world.get(ranks)
    assert world.put_all(ranks, 1)
    assert not any(r.degraded[1] for r in ranks)
    job = world.job()
    for first in range(hosts):
        lost = {f"h{(first + n) % hosts}" for n in range(replicas - 1)}
        left = [h for h in world.holders if h not in lost]
        verdict = plan(
            job.inventory(live=left, silent=()),
            job.spans(1),
            world_size=hosts,
            rank_hosts=dict.fromkeys(range(hosts), left[0]),
        )
        assert verdict.step == StepId(1, 1), verdict.why


def test_no_ticket_rises_before_the_fact_has_spread() -> None:
    """While only one host has journalled the commit, no rank learns of it; with the second they do (R16)."""
    world = ControllerWorld(3)
    ranks = world.launch(3)
    world.get(ranks)
    world.reserve(ranks)
    machine = world.served
    acks: list[Received] = []
    handle = machine.handle

    def without_acks(now: float, event: object) -> list[object]:
        if isinstance(event, Received) and isinstance(event.message, FactsWritten) and event.host_id != "h0":
            acks.append(event)
            return []
        return handle(now, event)  # type: ignore[arg-type, return-value]

    machine.handle = without_acks  # type: ignore[assignment, method-assign]
    for rank in ranks:
        world.put(rank, 1)
    world.run(3.0)
    assert world.job().attempts[1].steps[1] == "committing"
    assert {r.tickets[1] for r in ranks} == {"replicated"}
    actions = handle(world.now, acks[0])
    assert any(
        isinstance(a, SendOrder) and isinstance(a.order, StepLevel) and a.order.level == "committed" for a in actions
    )


def test_a_shard_without_its_copy_holds_the_commit_back() -> None:
    """A step waits for every copy the cluster can hold, also when all ranks have sealed it."""
    world = ControllerWorld(2)
    ranks = world.launch(2)
    world.get(ranks)
    world.reserve(ranks)
    world.work_s = (5.0, 5.0)
    for rank in ranks:
        world.put(rank, 1)
    world.run(4.0)
    assert {r.tickets[1] for r in ranks} == {"sealed"}
    world.run(3.0)
    assert {r.tickets[1] for r in ranks} == {"committed"}


def test_losing_a_rack_degrades_to_hosts_and_recovers() -> None:
    """With one rack left steps commit over its hosts, degraded; when the rack is back they are not (R18)."""
    world = ControllerWorld(4, labels=RACKS)
    ranks = world.launch(4)
    world.get(ranks)
    assert world.put_all(ranks, 1)
    assert world.job().commits[StepId(1, 1)].level == "rack"
    for host in ("h2", "h3"):
        world.kill_host(host)
    world.run(1.0)
    ranks = world.launch(2)
    answers = world.get(ranks)
    assert "4 ranks" in answers[0]["error"]  # another world size is refused by name (R27)
    ranks = world.launch(4)
    world.check_restored(world.get(ranks))
    assert world.put_all(ranks, 2)
    fact = world.job().commits[StepId(3, 2)]
    assert fact.is_degraded
    assert "copies are spread over hosts, not racks" in fact.reason
    assert ranks[0].degraded[2]
    for host in ("h2", "h3"):
        world.return_host(host)
    world.run(20.0)
    assert not world.job().commits[StepId(3, 2)].is_degraded
    assert world.put_all(ranks, 3)
    assert not any(r.degraded[3] for r in ranks)


def test_a_suspect_host_is_waited_for_and_a_dead_one_is_not() -> None:
    """A commit waits while a target is only suspect, at most until it counts as dead."""
    world = ControllerWorld(2)
    ranks = [world.join(0, 1, "k", host="h0")]
    world.run(1.0)
    world.get(ranks)
    world.reserve(ranks)
    world.silence("h1")
    world.put(ranks[0], 1)
    world.run(3.0)
    assert world.served.hosts.states["h1"].status == "suspect"
    assert ranks[0].tickets[1] == "sealed"
    world.run(4.0)
    assert ranks[0].tickets[1] == "committed"
    assert ranks[0].degraded[1]


def test_a_target_that_refuses_degrades_the_commit_with_its_reason() -> None:
    """A full peer costs a copy and is named; it does not stop the training."""
    world = ControllerWorld(3)
    ranks = world.launch(3)
    world.get(ranks)
    for holder in world.holders.values():
        holder.refuses_copies = "peer share full: 8 of 8 slots used"
    assert world.put_all(ranks, 1)
    assert all(r.degraded[1] for r in ranks)
    assert "peer share full" in ranks[0].reasons[1]
    for holder in world.holders.values():
        holder.refuses_copies = ""
    world.run(15.0)
    assert not world.job().commits[StepId(1, 1)].is_degraded  # repaired and said so


def test_min_copies_holds_a_commit_back() -> None:
    """With min_copies=2 and no host to take the second copy, nothing is called committed."""
    world = ControllerWorld(3, min_copies=2)
    ranks = world.launch(3)
    world.get(ranks)
    for holder in world.holders.values():
        holder.refuses_copies = "full"
    assert not world.put_all(ranks, 1, limit_s=3.0)
    for holder in world.holders.values():
        holder.refuses_copies = ""
    assert world.run_until(lambda: ranks[0].tickets[1] == "committed", 15.0)
    assert not ranks[0].degraded[1]


def test_a_job_on_one_host_uses_another_for_its_copies() -> None:
    """Ranks on fewer hosts than replicas get substitutes: as many copies as the cluster allows, not the job's hosts."""
    world = ControllerWorld(3)
    ranks = [world.join(r, 2, "k", host="h1") for r in range(2)]
    world.run(1.0)
    world.get(ranks)
    assert world.put_all(ranks, 1)
    assert not ranks[0].degraded[1]
    assert len(world.holders_of(StepId(1, 1), 0)) == 2


def test_commits_only_go_forward() -> None:
    """A step that becomes whole after a newer one was committed is given up, never committed (I6)."""
    world = ControllerWorld(2)
    ranks = world.launch(2)
    world.get(ranks)
    world.reserve(ranks)
    world.put(ranks[0], 1)
    for rank in ranks:
        world.put(rank, 2)
    assert world.run_until(lambda: ranks[0].tickets[2] == "committed")
    world.put(ranks[1], 1)
    world.run(3.0)
    assert StepId(1, 1) not in world.job().commits
    assert world.holders_of(StepId(1, 1), 1) == []
    assert ranks[0].tickets[1] in ("skipped", "superseded")


def test_copies_of_other_bytes_do_not_count() -> None:
    """Two shard digests for one rank are two shards: the step is not committed with either (R14)."""
    world = ControllerWorld(2)
    ranks = world.launch(2)
    world.get(ranks)
    world.reserve(ranks)
    for holder in world.holders.values():
        holder.carry_out(PushTargets(job="train", attempt=1, targets=(), ranks=()))
        holder.refuses_copies = "wait"
    world.put(ranks[0], 1)
    world.run(0.5)
    assert world.job().attempts[1].steps[1] == "open"
    copy = WireCopy.of(world.holders["h0"].held[ShardId("train", 1, 1, 0)])
    other = structs.replace(copy, spec=structs.replace(copy.spec, digest="0" * 32))
    world._handle(Received("h1", Sealed(copy=other, put=None)))
    world.put(ranks[1], 1)
    world.run(3.0)
    assert StepId(1, 1) not in world.job().commits


def test_neighbouring_steps_are_distinguished_however_large() -> None:
    """Above 2**24 a float32 takes two steps for one, above 2**53 a float64: steps are whole numbers all the way."""
    world = ControllerWorld(2)
    ranks = world.launch(2)
    world.get(ranks)
    for step in (1 << 24, (1 << 24) + 1, 1 << 53, (1 << 53) + 1):
        assert world.put_all(ranks, step)
        assert world.job().newest_commit(1) == step
    world.kill_rank(ranks[0])
    world.kill_rank(ranks[1])
    again = world.launch(2, "again")
    assert [answer["step"] for answer in world.get(again)] == [(1 << 53) + 1] * 2


def test_what_was_submitted_before_the_last_close_is_committed() -> None:
    """Every rank closes before its holder has sealed: the step is whole a moment later, and the next launch gets it."""
    world, ranks = trained(3, last=1)
    for rank in ranks:
        world.put(rank, 2)
        world.call(rank, "close")
    assert world.run_until(lambda: StepId(1, 2) in world.job().commits, 20.0)
    assert {answer["step"] for answer in world.get(world.launch(3))} == {2}


def test_a_job_that_begins_while_a_rack_is_lost_is_degraded_until_it_is_back() -> None:
    """Copies in two hosts of one rack are fewer than the racks asked for: a lost rack's labels still count (R18)."""
    world = ControllerWorld(4, labels=RACKS)
    world.run(2.0)
    for host in ("h2", "h3"):
        world.kill_host(host)
    world.run(12.0)
    ranks = world.launch(2)
    world.get(ranks)
    assert world.put_all(ranks, 1)
    assert ranks[0].degraded[1], "one rack has both copies"
    for host in ("h2", "h3"):
        world.return_host(host)
    assert world.run_until(lambda: not world.job().commits[StepId(1, 1)].is_degraded, 60.0)


@pytest.mark.parametrize("is_cancelled", [True, False])
def test_a_rack_that_went_with_notice_is_no_loss_and_one_that_was_to_stay_is(is_cancelled: bool) -> None:
    """The notices of a rack's hosts were taken back before they died: they are missed like any other."""
    world = ControllerWorld(4, labels=RACKS)
    [rank] = world.launch(1, job="other")
    world.get([rank])
    for host in ("h2", "h3"):
        world.call(rank, "drain", host=host, within_s=10.0)
    world.run(2.0)
    for host in ("h2", "h3") if is_cancelled else ():
        world.call(rank, "drain", host=host, within_s=None)
    world.run(2.0)
    for host in ("h2", "h3"):
        world.kill_host(host)
    world.run(12.0)
    assert not world.served.state.draining
    ranks = world.launch(2)
    world.get(ranks)
    assert world.put_all(ranks, 1)
    assert bool(ranks[0].degraded[1]) == is_cancelled
