"""Readers that follow a job: they wait for its next step without asking again, and lease the one they read (R36)."""

from __future__ import annotations

from typing import Any

import pytest

from memstore.core.report.event_kinds import KINDS
from memstore.core.restore.followers import ROOM_S, STEPS_MAX
from memstore.core.wire.orders import Reserve
from memstore.testing.controller.holder import DirectedRank
from memstore.testing.controller.world import ControllerWorld, trained
from recovery.inventory import StepId


def ask(world: ControllerWorld, rank: DirectedRank, verb: str, /, **body: Any) -> Any:
    """Ask once and wait for the end; return the answer, or the refusal as text."""
    rank.answers.pop(verb, None)
    rank.errors.pop(verb, None)
    world.call(rank, verb, **body)
    assert world.run_until(lambda: bool(rank.answers.get(verb) or rank.errors.get(verb)), 20.0)
    return rank.answers[verb][-1] if rank.answers.get(verb) else rank.error(verb)


def lease(
    world: ControllerWorld, rank: DirectedRank, name: str, step: int | None = None, limit_s: float = 600.0
) -> Any:
    """Lease a step; return why it is not kept, "" if it is, or the refusal."""
    answer = ask(world, rank, "lease_step", step=step, lease=name, limit_s=limit_s)
    return answer if isinstance(answer, str) else answer["why_not_kept"]


def put(world: ControllerWorld, ranks: list[DirectedRank], first: int, last: int) -> None:
    """Commit some steps."""
    for step in range(first, last + 1):
        assert world.put_all(ranks, step)
    world.run(0.5)


def steps(world: ControllerWorld) -> list[int]:
    """Return the steps that have all their copies."""
    return [s.step for s in sorted(world.job().copies) if len(world.holders_of(s, 0)) == 2]


def reserved(world: ControllerWorld) -> dict[str, int]:
    """Return the slots that the last order had each host reserve."""
    orders = {host: holder.received(Reserve)[-1] for host, holder in world.holders.items()}
    return {host: order.peer_slots + sum(order.ranks.values()) for host, order in orders.items()}


def test_a_leased_step_stays_beside_what_is_kept_until_it_is_let_go_of() -> None:
    """keep_steps=1 and nine commits: it has room of its own, and a second reader of it takes no more."""
    world, ranks = trained(3, last=1)
    before = reserved(world)
    assert [lease(world, ranks[n], f"r{n}") for n in (0, 1)] == ["", ""]
    assert {host: room - before[host] for host, room in reserved(world).items()} == dict.fromkeys(before, 2 * 4)
    put(world, ranks, 2, 10)
    assert steps(world) == [1, 10]
    for n, left in ((0, [1, 10]), (1, [10])):
        ask(world, ranks[n], "end_lease", lease=f"r{n}")
        world.run(0.5)
        assert steps(world) == left


def test_the_next_lease_claims_nothing_and_the_room_goes_when_no_reader_comes() -> None:
    """A follower leases step after step in the room of the first, which is given back a while after the last."""
    world, ranks = trained(3, last=1)
    before = reserved(world)
    orders: list[int] = []
    for step in range(1, 6):
        assert lease(world, ranks[0], f"at {step}") == ""
        put(world, ranks, step + 1, step + 1)
        assert steps(world) == [step, step + 1]
        ask(world, ranks[0], "end_lease", lease=f"at {step}")
        orders.append(sum(len(holder.received(Reserve)) for holder in world.holders.values()))
    assert len(set(orders)) == 1
    world.run(ROOM_S + 1.0)
    assert reserved(world) == before


def test_readers_that_lease_more_steps_than_have_room() -> None:
    """Retention drops a named one as ever; who wants the newest shares one, until a place is free for a newer one."""
    world, ranks = trained(2, last=1)
    for step in range(1, STEPS_MAX + 1):
        assert lease(world, ranks[0], f"at {step}") == ""
        put(world, ranks, step + 1, step + 1)
    assert "other steps" in lease(world, ranks[0], "late", step=STEPS_MAX + 1)
    assert ask(world, ranks[0], "lease_step", step=None, lease="newest", limit_s=60.0)["step"] == STEPS_MAX
    ask(world, ranks[0], "end_lease", lease=f"at {STEPS_MAX}")
    put(world, ranks, STEPS_MAX + 2, STEPS_MAX + 3)
    assert steps(world) == [*range(1, STEPS_MAX + 1), STEPS_MAX + 3]
    ask(world, ranks[0], "end_lease", lease="at 1")
    assert ask(world, ranks[0], "lease_step", step=None, lease="next", limit_s=60.0)["step"] == STEPS_MAX + 3


def test_where_a_host_has_no_room_puts_keep_theirs() -> None:
    """Retention drops the step when a newer one is committed, as if it were not leased."""
    world, ranks = trained(2, last=1)
    before = reserved(world)
    world.holders["h1"].refuses_room = "its limit is reached"
    assert lease(world, ranks[0], "follower") == "h1: its limit is reached"
    put(world, ranks, 2, 4)
    assert steps(world) == [4]
    assert reserved(world) == before


@pytest.mark.parametrize("how", ["limit", "host", "first put", "removed"])
def test_what_ends_a_lease(how: str) -> None:
    """Its limit, its reader's host, a launch that needs the room for its puts, and the end of the job."""
    world, ranks = trained(3, last=1)
    reader = world.launch(3, job="reader")[2]
    reader.job = "train"
    assert lease(world, reader, "follower", limit_s=30.0) == ""
    put(world, ranks, 2, 3)
    assert steps(world) == [1, 3]
    if how == "limit":
        world.run(31.0)
    elif how == "host":
        world.kill_host("h2", keep_memory=True)
        world.run(1.0)
    elif how == "first put":
        for rank in ranks:
            world.kill_rank(rank)
        again = world.launch(3)
        world.get(again)
        assert 1 in {step.step for step in world.job().copies}
        put(world, again, 4, 4)
        ranks = again
        [ended] = [event for event in world.events("train") if event["event"] == "leases_ended"]
        assert KINDS["leases_ended"].text(ended) == "leases of 1 reader ENDED: puts of train need their room"
    else:
        ask(world, ranks[0], "rm", force=True)
        assert "train" not in world.served.jobs
        return
    assert 1 not in {step.step for step in world.job().copies}
    assert lease(world, ranks[0], "again", step=1).startswith("StepDropped: job 'train' has no step 1 any")


def test_a_lease_that_is_asked_for_again_is_the_same_lease() -> None:
    """As after a link broke: its step is the one that it was given, newer ones or not, and one end ends it."""
    world, ranks = trained(2, last=1)
    assert lease(world, ranks[0], "mine") == ""
    put(world, ranks, 2, 3)
    assert ask(world, ranks[0], "lease_step", step=None, lease="mine", limit_s=60.0)["step"] == 1
    ask(world, ranks[0], "end_lease", lease="mine")
    world.run(0.5)
    assert steps(world) == [3]


def test_a_new_controller_knows_no_lease_and_training_goes_on() -> None:
    """Leases are in no journal: the step goes with the next commit, and can be leased again before that."""
    world, ranks = trained(2, last=1)
    assert lease(world, ranks[0], "old") == ""
    world.crash_controller()
    assert world.run_until(lambda: world.machine is not None and world.served.is_settled, 20.0)
    assert lease(world, ranks[0], "new") == ""
    put(world, ranks, 2, 3)
    assert steps(world) == [1, 3]
    ask(world, ranks[0], "end_lease", lease="old")
    assert steps(world) == [1, 3]


def wait_for_newer(world: ControllerWorld, rank: DirectedRank, than: int | None, **body: Any) -> None:
    """Begin to wait."""
    world.call(rank, "await_step", **{"than": than, "of_attempt": None, "within_s": 60.0, **body})


def test_a_wait_is_answered_by_the_commit() -> None:
    """Not before; and at its end if nothing came."""
    world, ranks = trained(2, last=3)
    assert ask(world, ranks[0], "await_step", than=None, of_attempt=None, within_s=0.0)["step"] == 3
    ranks[0].answers.pop("await_step")
    wait_for_newer(world, ranks[0], 3)
    world.run(20.0)
    assert not ranks[0].answers.get("await_step")
    put(world, ranks, 4, 4)
    assert ranks[0].answers["await_step"][-1]["step"] == 4
    assert ask(world, ranks[1], "await_step", than=4, of_attempt=1, within_s=5.0)["step"] is None


def test_a_wait_outlives_the_controller_and_begins_before_the_job() -> None:
    """A follower may come first."""
    world = ControllerWorld(2)
    first = world.launch(2, job="other")
    wait_for_newer(world, first[0], None, job="train")
    world.run(2.0)
    world.crash_controller()
    assert world.run_until(lambda: world.machine is not None and world.served.is_settled, 20.0)
    ranks = world.launch(2)
    world.get(ranks)
    put(world, ranks, 0, 0)
    assert [answer["step"] for answer in first[0].answers["await_step"]] == [0]


def test_a_step_of_a_later_launch_is_newer_whatever_its_number() -> None:
    """After a rewind a follower that has step 3 is given step 2 of the new attempt, not nothing until step 4 (R22)."""
    world, ranks = trained(2, last=3, keep_steps=3)
    for rank in ranks:
        world.call(rank, "rewind", step=1, key=None, nonce=rank.nonce)
    assert world.run_until(lambda: all(rank.answers.get("rewind") for rank in ranks), 20.0)
    world.run(1.0)
    wait_for_newer(world, ranks[0], 3, of_attempt=1)
    wait_for_newer(world, ranks[1], 3)
    world.run(1.0)
    assert not ranks[0].answers.get("await_step")
    put(world, ranks, 2, 2)
    assert [(a["attempt"], a["step"]) for a in ranks[0].answers["await_step"]] == [(2, 2)]
    assert not ranks[1].answers.get("await_step")


def test_a_step_that_has_gone_is_named_so() -> None:
    """A race that followers lose is StepDropped; a number that is still to come is not."""
    world, ranks = trained(2, last=4)
    for step, words in ((2, "StepDropped: job 'train' has no step 2 any"), (9, "RecoveryError: job 'train' has no")):
        assert lease(world, ranks[0], "x", step=step).startswith(words)
        world.call(ranks[0], "read_step", step=step, rank=0)
        world.run(1.0)
        assert ranks[0].error("read_step").startswith(words)
        ranks[0].errors.clear()
    assert StepId(1, 4) in world.job().copies
