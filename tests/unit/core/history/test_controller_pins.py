"""Named pins: never dropped, repaired, and there after controllers died, restarts and fresh starts (R10, R19)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from memstore.core import capacity
from memstore.core.arena.slot_table import share_of
from memstore.core.cluster.facts import AttemptOpened
from memstore.core.wire.orders import Reserve
from memstore.core.wire.reports import Reserved
from memstore.testing.controller.holder import DirectedHolder, DirectedRank
from memstore.testing.controller.world import JOB, ControllerWorld, trained
from recovery.inventory import StepId


def ask(world: ControllerWorld, rank: DirectedRank, verb: str, **body: object) -> str:
    """Ask once, wait for the end; return the error, or ""."""
    rank.answers.pop(verb, None)
    rank.errors.pop(verb, None)
    world.call(rank, verb, **body)
    assert world.run_until(lambda: bool(rank.answers.get(verb) or rank.errors.get(verb)), 20.0)
    return rank.error(verb)


def put_from(world: ControllerWorld, ranks: list[DirectedRank], first: int, last: int) -> None:
    """Commit some steps."""
    for step in range(first, last + 1):
        assert world.put_all(ranks, step)
    world.run(0.5)


def peer_slots(world: ControllerWorld, host: str) -> int:
    """The slots that the last order had a host reserve, in all."""
    order = world.holders[host].received(Reserve)[-1]
    return order.peer_slots + sum(order.ranks.values())


def claim_within(holder: DirectedHolder, limit: int, order: Reserve) -> None:
    """Claim what is ordered on a host that has room for so many slots."""
    asked = order.peer_slots + sum(order.ranks.values())
    problem = f"{asked} slots asked, {limit} there" if asked > limit else None
    if problem is None:
        holder.replicas.claim(order.job, share_of(order))
    holder.report(Reserved(job=order.job, attempt=order.attempt, number=order.number, problem=problem, is_fault=False))


def test_a_pinned_step_stays_until_it_is_unpinned() -> None:
    """Nine commits later all its copies are there; unpinned it goes at once, and its room with it (R10)."""
    world, ranks = trained(3, last=1)
    before = {host: peer_slots(world, host) for host in world.holders}
    assert ask(world, ranks[1], "pin", step=1, name="best") == ""
    assert all(peer_slots(world, host) == room + 2 * 4 for host, room in before.items())  # its own shard and a peer's
    put_from(world, ranks, 2, 10)
    assert all(len(world.holders_of(StepId(1, 1), rank)) == 2 for rank in range(3))
    assert ask(world, ranks[0], "unpin", name="best") == ""
    world.run(0.5)
    assert sorted(world.job().copies) == [StepId(1, 10)]
    assert {host: peer_slots(world, host) for host in world.holders} == before


def test_a_pin_waits_while_an_attempt_opens() -> None:
    """Both facts are on their way to the journals; the attempt's, which holds a configuration, comes first."""
    world, ranks = trained(2, last=1)
    for rank in ranks:
        world.kill_rank(rank)
    joining = [world.join(n, 2, "second") for n in range(2)]
    log = world.served.parts.journal.log
    assert world.run_until(lambda: any(isinstance(fact, AttemptOpened) for fact in log.unapplied()), 5.0)
    assert ask(world, joining[0], "pin", step=1, name="best") == ""
    assert list(world.job().pins) == ["best"]
    assert world.run_until(lambda: all(rank.answers.get("join") for rank in joining), 5.0)


@pytest.mark.parametrize("is_retired", [False, True])
def test_the_newest_step_is_pinned_without_its_number(is_retired: bool) -> None:
    """Commits are faster than a person: a step that `ls` showed is gone by the time it is named."""
    world, ranks = trained(2, last=4, keep_steps=2)
    if is_retired:
        world.call(ranks[0], "retire", attempt=1, step=4, reason="a chunk is lost")
        world.run(1.0)
    newest = 3 if is_retired else 4
    assert ask(world, ranks[0], "pin", step=None, name="best") == ""
    assert world.job().pins["best"].step == newest
    assert "no committed step" in ask(world, ranks[0], "pin", step=None, name="other", of_attempt=7)


def test_a_pinned_step_survives_controllers_and_a_restart_of_everything() -> None:
    """The pin is a fact: a successor knows it, and so does one that starts from journals alone (R16)."""
    world, ranks = trained(3, last=2)
    assert ask(world, ranks[0], "pin", step=2, name="best") == ""
    world.crash_controller()
    assert world.run_until(lambda: world.machine is not None and world.served.is_settled, 20.0)
    put_from(world, ranks, 3, 5)
    assert world.holders_of(StepId(1, 2), 0) != []
    world.crash_controller(restart_after_s=None)
    for host in world.holders:
        world.kill_host(host, keep_memory=True)
    for host in world.holders:
        world.return_host(host)
    world.start_controller()
    assert world.run_until(lambda: world.served.is_settled and JOB in world.served.jobs, 20.0)
    again = world.launch(3)
    assert world.get(again)[0]["step"] == 5
    put_from(world, again, 6, 8)
    assert {pin.step for pin in world.job().pins.values()} == {2}
    assert all(world.holders_of(StepId(1, 2), rank) for rank in range(3))
    answers = world.get(again, step=2)
    world.check_restored(answers)
    assert answers[0]["step"] == 2


@pytest.mark.parametrize("is_unpinned", [False, True])
@pytest.mark.parametrize("known", [-1, 0, 1])
def test_a_pin_that_only_a_late_host_knows_is_known_again(known: int, is_unpinned: bool) -> None:
    """All that its successor reads is of before the pin: of no attempt, of an older step, or of the step (R16)."""
    world = ControllerWorld(3)
    ranks = world.launch(3)
    world.get(ranks)
    before = [0]
    for step in (1, 2):
        assert world.put_all(ranks, step)
        before.append(len(world.served.parts.journal.log.entries))
    assert ask(world, ranks[0], "pin", step=2, name="best") == ""
    if is_unpinned:
        assert ask(world, ranks[0], "unpin", name="best") == ""
    world.run(1.0)
    world.leave_to_late_host("h2", before[known + 1])
    assert world.job().newest_number == 1
    assert world.job().pins == {}
    world.return_host("h2")
    world.run(3.0)
    assert StepId(1, 2) in world.job().commits
    assert list(world.job().pins) == ([] if is_unpinned else ["best"])


def test_the_pin_of_a_late_host_whose_end_is_forgotten_is_not_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was taken back while the host was away, and journals were shortened since: training is far beyond it."""
    world, ranks = trained(4, 3, last=2)
    assert ask(world, ranks[0], "pin", step=2, name="best") == ""
    world.run(0.5)
    world.kill_host("h3", keep_memory=True)
    assert ask(world, ranks[0], "unpin", name="best") == ""
    monkeypatch.setattr(capacity, "JOURNAL_NBYTES_MIN", 0)
    put_from(world, ranks, 3, 12)
    world.crash_controller()
    world.run(8.0)
    world.return_host("h3")
    world.run(3.0)
    assert world.job().pins == {}


def test_a_fresh_start_keeps_pins_and_can_go_back_to_them() -> None:
    """connect(fresh=True) drops what the older lineage had, but the pinned step, which rewind and get() reach (R22)."""
    world, ranks = trained(3, last=3, keep_steps=2)
    assert ask(world, ranks[0], "pin", step=2, name="best") == ""
    fresh = world.launch(3, fresh=True)
    put_from(world, fresh, 1, 2)
    assert sorted(world.job().copies) == [StepId(1, 2), StepId(2, 1), StepId(2, 2)]
    assert world.get(fresh, step=2)[0]["attempt"] == 2
    for rank in fresh:
        body = {"step": 2, "of_attempt": 1, "nonce": rank.nonce, "key": rank.key}
        world.call(rank, "rewind", **body)
    assert world.run_until(lambda: all(rank.attempt == 3 for rank in fresh), 20.0)
    answers = world.get(fresh)
    world.check_restored(answers)
    assert (answers[0]["attempt"], answers[0]["step"]) == (1, 2)


def test_missing_copies_of_a_pinned_step_are_rebuilt() -> None:
    """A host dies for good: the pinned step gets its second copies elsewhere, as the kept ones do (R29)."""
    world, ranks = trained(4, world_size=2, last=1)
    assert ask(world, ranks[0], "pin", step=1, name="best") == ""
    put_from(world, ranks, 2, 4)
    victim = next(h for h in world.holders_of(StepId(1, 1), 0) if h != ranks[0].host_id)
    assert victim not in {ranks[0].host_id}
    world.kill_host(victim)
    alive = [r for r in (0, 1) if len(world.holders_of(StepId(1, 1), r)) < 2]
    assert alive
    assert world.run_until(lambda: all(len(world.holders_of(StepId(1, 1), r)) == 2 for r in (0, 1)), 30.0)


def test_a_pinned_step_of_another_world_size_is_repaired_too() -> None:
    """Three ranks put it, two go on afresh: its third shard is no rank's any more, and still gets its copies."""
    world, ranks = trained(4, world_size=3, last=1)
    assert ask(world, ranks[0], "pin", step=1, name="wide") == ""
    two = world.launch(2, fresh=True)
    put_from(world, two, 1, 3)
    victim = world.holders_of(StepId(1, 1), 2)[0]
    world.kill_host(victim)
    assert world.run_until(lambda: all(len(world.holders_of(StepId(1, 1), r)) == 2 for r in range(3)), 40.0)


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ({"step": 9, "name": "best"}, "no committed step 9: its committed steps are 3"),
        ({"step": 4, "name": "best"}, "no committed step 4: it was put and is not committed"),
        ({"step": 3, "name": "a/b"}, "pin name 'a/b' is not allowed"),
    ],
)
def test_what_cannot_be_pinned_is_refused(body: dict[str, object], why: str) -> None:
    """Unknown and uncommitted steps and bad names; nothing is recorded."""
    world, ranks = trained(2, last=3)
    world.put(ranks[0], 4)
    world.run(0.5)
    assert why in ask(world, ranks[0], "pin", **body)
    assert world.job().pins == {}


def test_a_step_on_durable_storage_alone_is_refused_by_that_name() -> None:
    """A pin keeps bytes in RAM; it does not fetch them."""
    world, ranks = trained(2, last=1, durable="/durable", durable_every=1, durable_keep=10)
    assert world.run_until(lambda: StepId(1, 1) in world.job().markers, 30.0)
    put_from(world, ranks, 2, 4)
    assert world.run_until(lambda: StepId(1, 1) not in world.job().copies, 30.0)
    why = ask(world, ranks[0], "pin", step=1, name="old")
    assert "it is on durable storage only" in why


def test_a_name_belongs_to_one_step() -> None:
    """The same pin again is the same pin; another step under that name is refused, another name for the step is not."""
    world, ranks = trained(2, last=2, keep_steps=2)
    assert ask(world, ranks[0], "pin", step=1, name="best") == ""
    assert ask(world, ranks[1], "pin", step=1, name="best") == ""
    why = ask(world, ranks[0], "pin", step=2, name="best")
    assert why.startswith("ConfigError: job 'train' has a pin 'best', on step 1 of attempt 1")
    assert ask(world, ranks[0], "pin", step=1, name="first") == ""
    assert ask(world, ranks[0], "unpin", name="best") == ""
    put_from(world, ranks, 3, 5)
    assert world.holders_of(StepId(1, 1), 0) != []
    assert "has no pin 'best': it has first (step 1)" in ask(world, ranks[0], "unpin", name="best")


def test_a_pin_without_room_is_refused_with_the_numbers_and_changes_nothing() -> None:
    """One host has no room: CapacityError names it, and the hosts that had room give it back (R10)."""
    world, ranks = trained(3, last=2)
    before = {host: peer_slots(world, host) for host in world.holders}
    world.holders["h1"].refuses_room = "needs 9.00 GiB, may take 8.00 GiB"
    why = ask(world, ranks[0], "pin", step=2, name="best")
    assert why.startswith("CapacityError: step 2 of job 'train' cannot be pinned: a pin takes room of its own")
    assert "does not fit on h1: needs 9.00 GiB, may take 8.00 GiB" in why
    world.run(1.0)
    assert {host: peer_slots(world, host) for host in world.holders} == before
    world.holders["h1"].refuses_room = ""
    put_from(world, ranks, 3, 4)
    assert sorted(world.job().copies) == [StepId(1, 4)]
    assert world.job().pins == {}


def test_a_step_is_not_dropped_while_its_pin_is_made() -> None:
    """Its room is being claimed on a slow host while newer steps commit: it is there when the pin is."""
    world, ranks = trained(3, last=1)
    world.silence("h2")
    world.call(ranks[0], "pin", step=1, name="best")
    world.run(0.5)
    world.thaw("h2")
    put_from(world, ranks, 2, 3)
    assert world.run_until(lambda: "best" in world.job().pins, 20.0)
    assert all(world.holders_of(StepId(1, 1), rank) for rank in range(3))


def test_a_controller_that_dies_while_a_pin_is_made_is_asked_again() -> None:
    """The call waits for the successor, as every call does: in the end the pin is there once."""
    world, ranks = trained(3, last=1)
    ranks[0].answers.pop("pin", None)
    world.call(ranks[0], "pin", step=1, name="best")
    world.run(0.01)
    world.crash_controller()
    assert world.run_until(lambda: bool(ranks[0].answers.get("pin") or ranks[0].errors.get("pin")), 30.0)
    assert ranks[0].error("pin") == ""
    put_from(world, ranks, 2, 4)
    assert all(world.holders_of(StepId(1, 1), rank) for rank in range(3))


def test_removing_a_job_says_which_pins_would_be_lost() -> None:
    """`memstore rm` names the pins and does nothing without --force; with it they go too."""
    world, ranks = trained(2, last=2)
    assert ask(world, ranks[0], "pin", step=2, name="best") == ""
    for rank in ranks:
        world.call(rank, "close")
    world.run(1.0)
    why = ask(world, ranks[0], "rm")
    assert "job 'train' has pins that would be lost with it: best (step 2)" in why
    assert ask(world, ranks[0], "rm", force=True) == ""
    assert ranks[0].answers["rm"][-1]["pins"] == {"best": {"attempt": 1, "step": 2}}
    world.run(1.0)
    assert all(not holder.held for holder in world.holders.values())


@pytest.mark.parametrize("has_room", [True, False])
def test_two_hosts_full_of_each_others_pinned_copies_do_not_wait_for_ever(has_room: bool) -> None:
    """Ranks moved: a pinned copy has room of its own where it was, and gives it back once it is where it belongs.

    A host that has no such room reserves the rest all the same.
    """
    world, ranks = trained(4, last=1)
    hosts = sorted(world.holders)
    for step in range(1, 6):
        assert ask(world, ranks[0], "pin", step=step, name=f"p{step}") == ""
        put_from(world, ranks, step + 1, step + 1)
    before = {host: peer_slots(world, host) for host in hosts}
    for host in hosts:
        world.holders[host].refuses_copies = "busy"  # nothing moves before the first puts
        if not has_room:
            world.holders[host].instead[Reserve] = partial(claim_within, world.holders[host], before[host])
    for rank in ranks:
        world.kill_rank(rank)
    moved = [world.join(rank, 4, "moved", host=hosts[place]) for rank, place in enumerate((0, 2, 1, 3))]
    assert world.run_until(lambda: all(rank.answers.get("join") for rank in moved), 15.0)
    world.get(moved)
    put_from(world, moved, 7, 8)
    asked = {host: peer_slots(world, host) for host in hosts}
    assert asked == ({host: room + 5 * 4 for host, room in before.items()} if has_room else before)
    for host in hosts:
        world.holders[host].refuses_copies = ""
    if has_room:
        put_from(world, moved, 9, 9)
        assert world.run_until(lambda: all(len(world.holders_of(StepId(2, 9), r)) == 2 for r in range(4)), 90.0)
        assert world.run_until(lambda: {host: peer_slots(world, host) for host in hosts} == before, 90.0)
    assert len(world.job().pins) == 5


def test_an_answer_is_of_the_order_that_it_names() -> None:
    """Two orders ask a host for room of pinned copies that are to move, which it lacks: both are asked for less.

    The second refusal comes after the order for the rest, and is none of it.
    """
    world, ranks = trained(4, last=1)
    hosts = sorted(world.holders)
    for step in range(1, 6):
        assert ask(world, ranks[0], "pin", step=step, name=f"p{step}") == ""
        put_from(world, ranks, step + 1, step + 1)
    limits = {host: peer_slots(world, host) + 10 for host in hosts}  # for one more pin, and not for all that is to move
    waiting: list[Callable[[], None]] = []
    is_slow = True

    def later(holder: DirectedHolder, order: Reserve) -> None:
        claim = partial(claim_within, holder, limits[holder.host_id], order)
        waiting.append(claim) if is_slow else claim()

    for host in hosts:
        world.holders[host].refuses_copies = "busy"
        world.holders[host].instead[Reserve] = partial(later, world.holders[host])
    for rank in ranks:
        world.kill_rank(rank)
    moved = [world.join(rank, 4, "moved", host=hosts[place]) for rank, place in enumerate((0, 2, 1, 3))]
    assert world.run_until(lambda: all(rank.answers.get("join") for rank in moved), 15.0)
    world.get(moved)
    waiting.clear()
    for rank in moved:
        world.call(rank, "reserve", slots=4)
    assert world.run_until(lambda: len(waiting) == len(hosts), 5.0)
    world.call(moved[0], "pin", step=6, name="p6")
    assert world.run_until(lambda: len(waiting) == 2 * len(hosts), 5.0)
    is_slow = False
    for claim in waiting:
        claim()
    world.run(5.0)
    assert not moved[0].errors.get("pin")
    assert sorted(world.job().pins) == [f"p{number}" for number in range(1, 7)]
