"""Trusted steps: kept in the place of the one before, gone back to, and known after everything died (R38)."""

from __future__ import annotations

import pytest

from memstore.core.wire.orders import Reserve, WriteMarker
from memstore.testing.controller.holder import DirectedRank
from memstore.testing.controller.world import JOB, ControllerWorld, trained, written
from recovery.inventory import StepId


def trust(world: ControllerWorld, rank: DirectedRank, step: int | None, **body: object) -> str:
    """Trust a step and wait for the end; return the error, or ""."""
    for known in (rank.answers, rank.errors):
        known.pop("pin", None)
    world.call(rank, "pin", step=step, name="trusted", **body)
    assert world.run_until(lambda: bool(rank.answers.get("pin") or rank.errors.get("pin")), 20.0)
    return rank.error("pin")


def put_from(world: ControllerWorld, ranks: list[DirectedRank], first: int, last: int) -> None:
    """Commit some steps."""
    for step in range(first, last + 1):
        assert world.put_all(ranks, step)
    world.run(0.5)


def room(world: ControllerWorld) -> dict[str, int]:
    """Return the slots that the last order had each host reserve, in all."""
    last = {host: holder.received(Reserve)[-1] for host, holder in world.holders.items()}
    return {host: order.peer_slots + sum(order.ranks.values()) for host, order in last.items()}


def most_room(world: ControllerWorld, since: int = 0) -> int:
    """Return the most slots that an order had a host reserve."""
    orders = [order for holder in world.holders.values() for order in holder.received(Reserve)[since:]]
    return max(order.peer_slots + sum(order.ranks.values()) for order in orders)


def restart_everything(world: ControllerWorld, *, keep_memory: bool) -> None:
    """End every process; the hosts come back with or without their memory."""
    world.crash_controller(restart_after_s=None)
    for host in list(world.holders):
        world.kill_host(host, keep_memory=keep_memory)
    for host in list(world.holders):
        world.return_host(host, keep_memory=keep_memory)
    world.start_controller()
    assert world.run_until(lambda: world.machine is not None and world.served.is_settled, 20.0)


def test_a_trusted_step_stays_until_a_newer_one_is_trusted_in_the_same_room() -> None:
    """It costs one version, whichever step it is: moving on claims nothing more, not even for a moment (R10)."""
    world, ranks = trained(3, last=1)
    before = room(world)
    assert trust(world, ranks[1], 1) == ""
    one_more = {host: slots + 2 * 4 for host, slots in before.items()}  # its own shard and a peer's
    assert room(world) == one_more
    put_from(world, ranks, 2, 6)
    assert sorted(world.job().copies) == [StepId(1, 1), StepId(1, 6)]
    orders_before = min(len(holder.received(Reserve)) for holder in world.holders.values())
    assert trust(world, ranks[0], 6) == ""
    put_from(world, ranks, 7, 8)
    assert sorted(world.job().copies) == [StepId(1, 6), StepId(1, 8)]
    assert (room(world), most_room(world, orders_before)) == (one_more, max(one_more.values()))


def test_a_get_of_the_trusted_step_forks_the_lineage_there() -> None:
    """Steps 4 to 6 are poisoned: all ranks go back to 3, and what they put next is of the lineage (R22)."""
    world, ranks = trained(3, last=3)
    assert trust(world, ranks[0], 3) == ""
    put_from(world, ranks, 4, 6)
    again = world.launch(3)
    answers = world.get(again, is_trusted=True)
    world.check_restored(answers)
    assert {(answer["attempt"], answer["step"]) for answer in answers} == {(1, 3)}
    put_from(world, again, 4, 5)
    assert sorted(world.job().copies) == [StepId(1, 3), StepId(2, 5)]
    assert world.get(world.launch(3))[0]["step"] == 5


@pytest.mark.parametrize("is_trusted", [True, False])
def test_without_a_trusted_step_the_get_says_what_there_is(is_trusted: bool) -> None:
    """No step was ever trusted, or a rewind left it behind; a job without history starts from nothing (R23)."""
    world, ranks = trained(2, last=4, keep_steps=3)
    if is_trusted:
        assert trust(world, ranks[0], 4) == ""
        for rank in ranks:
            world.call(rank, "rewind", step=2, nonce=rank.nonce, key=rank.key)
        assert world.run_until(lambda: all(rank.attempt == 2 for rank in ranks), 20.0)
    why = world.get(world.launch(2), is_trusted=True)[0]["error"]
    assert why.startswith("RecoveryError: job 'train' has history but no whole trusted step")
    have = "step 4 (attempt 1) is trusted and not of this lineage: rewind() goes there" if is_trusted else "no step is "
    assert have in why
    assert "go on without trusted=True" in why
    fresh = ControllerWorld(2)
    assert fresh.get(fresh.launch(2), is_trusted=True)[0].get("step") is None


def test_all_ranks_ask_for_a_trusted_step_or_none() -> None:
    """One rank whose script is older would bring another step: the get fails on it by name."""
    world, ranks = trained(2, last=2)
    assert trust(world, ranks[0], 2) == ""
    one, other = world.launch(2)
    world.call(one, "get", step=None, timeout_s=60.0, is_trusted=True)
    world.run(0.5)
    world.call(other, "get", step=None, timeout_s=60.0)
    world.run(1.0)
    assert "this rank calls get() for step None, the ranks waiting get(trusted=True)" in other.error("get")


def test_a_late_rank_does_not_move_trust_back() -> None:
    """Rank 1 says of step 2 what rank 0 has said of step 3 by then; it is told which step is trusted."""
    world, ranks = trained(2, last=3, keep_steps=3)
    assert trust(world, ranks[0], 3) == ""
    assert trust(world, ranks[1], 2) == ""
    assert ranks[1].answers["pin"][-1]["step"] == 3
    assert world.job().pins["trusted"].step == 3


def test_a_trusted_step_that_was_retired_is_replaced_by_an_older_one() -> None:
    """Nothing can go back to it any more, so that an older step of the lineage may be trusted instead (R25)."""
    world, ranks = trained(2, last=3, keep_steps=3)
    assert trust(world, ranks[0], 3) == ""
    world.call(ranks[0], "retire", attempt=1, step=3, reason="its loss is NaN")
    world.run(1.0)
    assert trust(world, ranks[0], 2) == ""
    assert world.job().pins["trusted"].step == 2


def test_trust_without_room_is_refused_and_the_step_before_stays() -> None:
    """CapacityError with the numbers; no put waits for it, and what was trusted is trusted still (R10)."""
    world, ranks = trained(3, last=2)
    assert trust(world, ranks[0], 2) == ""
    put_from(world, ranks, 3, 3)
    world.holders["h1"].refuses_room = "needs 9.00 GiB, may take 8.00 GiB"
    why = trust(world, ranks[0], 3)
    assert why.startswith(
        "CapacityError: step 3 of job 'train' cannot be trusted: a trusted step takes room of its own"
    )
    world.holders["h1"].refuses_room = ""
    put_from(world, ranks, 4, 5)
    assert sorted(world.job().copies) == [StepId(1, 2), StepId(1, 5)]


def test_trust_is_known_after_a_restart_of_everything() -> None:
    """It is a fact beside every arena; the newest word of it counts (R16)."""
    world, ranks = trained(3, last=2)
    assert trust(world, ranks[0], 1 + 1) == ""
    put_from(world, ranks, 3, 4)
    assert trust(world, ranks[0], 4) == ""
    put_from(world, ranks, 5, 6)
    restart_everything(world, keep_memory=True)
    assert world.run_until(lambda: JOB in world.served.jobs, 20.0)
    answers = world.get(world.launch(3), is_trusted=True)
    world.check_restored(answers)
    assert answers[0]["step"] == 4


def test_a_newer_trust_that_only_a_late_host_knows_counts() -> None:
    """The other hosts' journals end before it; the late one's fact is newer than the trust that they know (R16)."""
    world = ControllerWorld(3)
    ranks = world.launch(3)
    world.get(ranks)
    put_from(world, ranks, 1, 1)
    assert trust(world, ranks[0], 1) == ""
    put_from(world, ranks, 2, 2)
    known = len(world.served.parts.journal.log.entries)
    assert trust(world, ranks[0], 2) == ""
    world.run(1.0)
    world.leave_to_late_host("h2", known)
    assert world.job().pins["trusted"].step == 1
    world.return_host("h2")
    world.run(3.0)
    assert world.job().pins["trusted"].step == 2


@pytest.mark.parametrize("is_marked_first", [True, False])
def test_a_trusted_durable_step_is_gone_back_to_once_ram_is_lost(is_marked_first: bool) -> None:
    """Its marker says so, written before the trust or after it, and durable_keep does not take it (R31)."""
    world, ranks = written(1, durable_keep=1)
    assert trust(world, ranks[0], 1) == ""
    if not is_marked_first:
        put_from(world, ranks, 2, 2)
        assert trust(world, ranks[0], 2) == ""
    trusted = 1 if is_marked_first else 2
    assert world.run_until(lambda: (JOB, 1, trusted) in world.durable.markers, 10.0)
    assert world.run_until(lambda: world.durable.marker(JOB, 1, trusted).is_trusted, 10.0)
    for step in (3, 4):
        put_from(world, ranks, step, step)
        world.run(3.0)
    assert sorted(step for _, _, step in world.durable.markers) == [trusted, 4]
    restart_everything(world, keep_memory=False)
    again = world.launch(2)
    answers = world.get(again, is_trusted=True)
    world.check_restored(answers)
    assert (answers[0]["step"], answers[0]["verdict"]) == (trusted, "durable")


def test_trust_that_is_taken_back_goes_from_the_marker_too() -> None:
    """unpin takes the word back: no get(trusted=True) takes the step, and its marker is written once more."""
    world, ranks = written(1)
    assert trust(world, ranks[0], 1) == ""
    assert world.run_until(lambda: world.durable.marker(JOB, 1, 1).is_trusted, 10.0)
    world.call(ranks[0], "unpin", name="trusted")
    assert world.run_until(lambda: not world.durable.marker(JOB, 1, 1).is_trusted, 60.0)
    world.run(60.0)
    orders = [order for holder in world.holders.values() for order in holder.received(WriteMarker)]
    assert sorted(order.is_trusted for order in orders if order.step.step == 1) == [False, False, True]
    assert "no step is trusted" in world.get(world.launch(2), is_trusted=True)[0]["error"]
