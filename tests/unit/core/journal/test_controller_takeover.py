"""Losing the controller loses nothing: a successor knows every fact and finishes what was begun (R16, R17)."""

from __future__ import annotations

from typing import Any

import pytest

from memstore.core.arena.slot_table import share_of
from memstore.core.capacity.retention import is_needed
from memstore.core.cluster import facts as f
from memstore.core.journal.fact_log import FactLog
from memstore.core.journal.records import Entry
from memstore.core.wire.orders import Reserve, VerifyCopies
from memstore.core.wire.reports import Reserved
from memstore.testing.controller.holder import CHUNKS
from memstore.testing.controller.trained import trained
from memstore.testing.controller.world import ControllerWorld
from recovery.inventory import StepId

MOMENTS_S = [0.001, 0.004, 0.012, 0.03, 0.06, 0.1, 0.2, 0.4]


@pytest.mark.parametrize("moment_s", MOMENTS_S)
def test_a_crash_while_ranks_connect(moment_s: float) -> None:
    """Whenever the controller dies, all ranks end in one attempt with one number."""
    world = ControllerWorld(3)
    ranks = [world.join(r, 3, "k") for r in range(3)]
    world.run(moment_s)
    world.crash_controller()
    assert world.run_until(lambda: all(r.answers.get("join") for r in ranks), 20.0)
    assert {r.attempt for r in ranks} == {1}
    assert not any(r.errors for r in ranks)


@pytest.mark.parametrize("moment_s", MOMENTS_S)
def test_a_crash_while_ranks_restore(moment_s: float) -> None:
    """All ranks get the same step, also those whose answer died with the controller."""
    world = ControllerWorld(3)
    ranks = world.launch(3)
    world.get(ranks)
    assert world.put_all(ranks, 1)
    ranks = world.launch(3)
    for rank in ranks:
        world.call(rank, "get", step=None, timeout_s=60.0)
    world.run(moment_s)
    world.crash_controller()
    assert world.run_until(lambda: all(r.answers.get("get") for r in ranks), 20.0), [r.errors for r in ranks]
    world.check_restored([r.answers["get"][-1] for r in ranks])
    assert {r.answers["get"][-1]["step"] for r in ranks} == {1}
    assert world.put_all(ranks, 2)


@pytest.mark.parametrize("moment_s", MOMENTS_S)
def test_a_crash_at_the_first_put(moment_s: float) -> None:
    """Room that was claimed stays claimed: no rank waits for one that was answered already."""
    world = ControllerWorld(3)
    ranks = world.launch(3)
    world.get(ranks)
    for rank in ranks:
        world.call(rank, "reserve", slots=4)
    world.run(moment_s)
    world.crash_controller()
    assert world.run_until(lambda: all(r.answers.get("reserve") for r in ranks), 15.0), [r.errors for r in ranks]


@pytest.mark.parametrize("moment_s", MOMENTS_S)
def test_a_crash_while_a_step_commits(moment_s: float) -> None:
    """A step that was on its way is committed by the successor, and every ticket learns of it."""
    world = ControllerWorld(3)
    ranks = world.launch(3)
    world.get(ranks)
    world.reserve(ranks)
    for rank in ranks:
        world.put(rank, 1)
    world.run(moment_s)
    world.crash_controller()
    assert world.run_until(lambda: all(r.tickets[1] == "committed" for r in ranks), 20.0)
    world.run(5.0)
    assert StepId(1, 1) in world.job().commits
    assert world.put_all(ranks, 2)


def test_the_commit_of_a_late_host_is_taken_and_given_to_all() -> None:
    """A host that comes up late with facts that no other process kept fills the gap, and its facts spread again."""
    world = ControllerWorld(3)
    ranks = world.launch(3)
    world.get(ranks)
    assert world.put_all(ranks, 1)
    world.kill_host("h2", keep_memory=True)
    for name in ("h0", "h1"):
        world.memories[name].journal = []
    world.crash_controller()
    world.run(6.0)
    assert world.job().commits == {}
    world.return_host("h2")
    world.run(3.0)
    assert StepId(1, 1) in world.job().commits
    assert {len(h.journal) for h in world.holders.values()} == {len(world.served.parts.journal.log.entries)}
    world.check_restored(world.get(world.launch(3)))


def test_a_late_fact_of_an_old_term_is_no_pending_fact_of_this_one() -> None:
    """Sequence numbers may come twice across terms: what a late host brings is neither sent nor applied again."""
    log = FactLog(term=2)
    log.adopt([[Entry(1, 1, f.JobRemoved("a"))]])
    mine = log.append(f.JobRemoved("b"))
    late = Entry(1, 2, f.JobRemoved("c"))
    assert log.merge([late]) == [late.fact]
    assert log.pending == [mine]
    log.ack("h0", mine.seq)
    assert log.replicated(lambda hosts, fact: bool(hosts)) == [mine.fact]
    assert log.replicated(lambda hosts, fact: True) == []
    assert log.append(f.JobRemoved("d")).seq == 3


def test_a_late_commit_of_a_step_that_was_skipped_meanwhile_is_refused() -> None:
    """A step that a rank skipped under the successor is never committed by an older journal (R12)."""
    world = ControllerWorld(2)
    ranks = world.launch(2)
    world.get(ranks)
    world.reserve(ranks)
    world.skip(ranks[0], 5)
    world.run(1.0)
    fact = f.StepCommitted("train", 1, 5, 2, ("x", "y"), (("h1",), ("h1",)), "host", False, "", 0.0)
    world.crash_controller()
    world.run(5.0)
    world.holders["h1"].journal.append(Entry(1, 99, fact).record)
    world.kill_host("h1", keep_memory=True)
    world.return_host("h1")
    world.run(3.0)
    assert StepId(1, 5) not in world.job().commits
    world.crash_controller()  # and it is in no journal, where the next controller would find it
    world.run(5.0)
    assert StepId(1, 5) not in world.job().commits


@pytest.mark.parametrize("is_closed", [False, True])
def test_of_an_attempt_that_only_a_late_host_knows_its_course_is_known_too(is_closed: bool) -> None:
    """It is a rewind to step 1: the next launch goes on from there, not from what was put beyond (R16, R22)."""
    world = ControllerWorld(3, keep_steps=3)
    ranks = world.launch(3)
    world.get(ranks)
    for step in (1, 2, 3):
        assert world.put_all(ranks, step)
    before = len(world.served.parts.journal.log.entries)
    for rank in ranks:
        world.call(rank, "rewind", step=1, of_attempt=None, nonce=rank.nonce, key=rank.key)
    assert world.run_until(lambda: all(rank.attempt == 2 for rank in ranks), 10.0)
    for rank in ranks if is_closed else ():
        world.call(rank, "close")
    world.run(1.0)
    for host in ("h0", "h1"):
        del world.holders[host].journal[before:]
    world.kill_host("h2", keep_memory=True)
    world.crash_controller()
    world.run(8.0)
    assert world.job().newest_number == 1
    world.return_host("h2")
    world.run(3.0)
    newest = world.job().newest
    assert newest is not None
    assert (newest.attempt_number, newest.phase) == (2, "closed" if is_closed else "open")
    answers = world.get(world.launch(3, takeover=True))
    assert {answer["step"] for answer in answers} == {1}


@pytest.mark.parametrize("has_put", [False, True])
def test_a_launch_that_only_a_late_host_knows_is_another_one(has_put: bool) -> None:
    """It went on without the hosts of now, which go on without it: its steps are not theirs (R16, R20, R22)."""
    world, _ = trained(2, last=3)
    world.kill_host("h0", keep_memory=True)
    world.run(7.0)
    ranks = world.launch(2, takeover=True)
    world.get(ranks)
    assert all(world.put_all(ranks, step) for step in range(4, 8))
    world.run(1.0)
    world.crash_controller(restart_after_s=None)
    world.kill_host("h1", keep_memory=True)
    world.return_host("h0")
    world.start_controller()
    assert world.run_until(lambda: world.served.is_settled, 20.0)
    ranks = world.launch(2, takeover=True)
    assert world.get(ranks)[0]["step"] == 3
    if has_put:
        assert world.put_all(ranks, 4)
    world.return_host("h1")
    world.run(3.0)
    assert {rank.attempt for rank in ranks}.isdisjoint({1, 2})
    assert 2 in world.job().attempts
    assert world.job().newest_number == ranks[0].attempt
    for step in range(5, 9):
        assert world.put_all(ranks, step)
    answers = world.get(world.launch(2, takeover=True))
    world.check_restored(answers)
    assert {(answer["attempt"], answer["step"]) for answer in answers} == {(ranks[0].attempt, 8)}


def test_numbers_are_left_free_once_and_only_for_hosts_that_had_the_newest_steps() -> None:
    """A host that came and died, or that never had the job, knows of no launch that this controller does not (R20)."""
    world, _ = trained(3, 2, last=2)
    world.kill_host("h2")
    world.crash_controller()
    world.run(8.0)
    assert {rank.attempt for rank in world.launch(2, takeover=True)} == {2}
    world.kill_host("h1", keep_memory=True)
    assert {rank.attempt for rank in world.launch(2, takeover=True)} == {3}
    world.crash_controller()
    world.run(8.0)
    numbers = [world.launch(2, takeover=True)[0].attempt for _ in range(3)]
    assert numbers == [1004, 1005, 1006]


def test_a_removal_that_only_a_late_host_knew_of_stays_undone() -> None:
    """No rank learned of it and training went on: the next controller does not carry it out either (R16)."""
    world = ControllerWorld(3)
    ranks = world.launch(3)
    world.get(ranks)
    world.kill_host("h2", keep_memory=True)
    world.holders["h2"].journal.append(Entry(1, 10**6, f.JobRemoved("train", 1)).record)
    world.crash_controller()
    world.run(8.0)
    ranks = world.launch(2, takeover=True)
    world.get(ranks)
    assert world.put_all(ranks, 1)
    world.return_host("h2")
    world.run(8.0)
    world.crash_controller()
    world.run(8.0)
    assert world.put_all(ranks, 2)
    assert world.served.state.removed == {}


def test_a_holder_that_is_replaced_before_its_end_is_received_of_has_died() -> None:
    """The word of the next one comes first.

    A process that waits for the first one's answer waits no longer (R3, R28).
    """
    world = ControllerWorld(3)
    ranks = world.launch(3)
    world.holders["h1"].instead[VerifyCopies] = lambda order: None
    world.call(ranks[0], "verify")
    world.run(1.0)
    assert "verify" not in ranks[0].answers
    world.return_host("h1")
    assert world.run_until(lambda: "verify" in ranks[0].answers, 5.0)
    assert world.served.hosts.is_answering("h1")


def test_what_the_end_of_a_replaced_holder_decides_is_in_its_journal_once() -> None:
    """The step that waited for its copy commits without it, in the very event that begins the next session (R16)."""
    world, ranks = trained(2, last=1)
    world.random.seed(0)
    for rank in ranks:
        world.put(rank, 2)

    def lacks_one_copy() -> bool:
        rows = world.job().copies.get(StepId(1, 2), {})
        return [sorted(rows.get(rank, ())) for rank in (0, 1)] == [["h0"], ["h0", "h1"]]

    assert world.run_until(lacks_one_copy, 2.0)
    world.return_host("h1")
    world.run(3.0)
    assert world.job().commits[StepId(1, 2)]
    for holder in world.holders.values():
        assert holder.journal == [entry.record for entry in world.served.parts.journal.log.entries]


def test_without_a_lease_nothing_is_decided() -> None:
    """A controller that neither renewed its term nor learns from all holders records nothing until it does (R17)."""
    world = ControllerWorld(3)
    ranks = world.launch(3)
    world.get(ranks)
    world.reserve(ranks)
    world.has_lease = False
    world.silence("h2")
    world.run(4.0)
    for rank in ranks[:2]:
        world.put(rank, 1)
    world.run(0.5)
    world.call(ranks[0], "skip", step=1)
    world.run(0.3)
    assert [type(fact).__name__ for fact in world.served.parts.journal.log.waiting] == ["StepSkipped"]
    world.has_lease = True
    world.run(2.0)
    assert world.served.parts.journal.log.waiting == []


@pytest.mark.parametrize(("verb", "said"), [("plan", {}), ("read_step", {"step": None})])
def test_copies_that_no_fact_explains_are_answered_for(verb: str, said: dict[str, Any]) -> None:
    """With every journal lost the copies remain and no attempt is known: a question gets that answer, not none."""
    world = ControllerWorld(2)
    ranks = world.launch(2)
    world.get(ranks)
    assert world.put_all(ranks, 1)
    world.crash_controller()
    for holder in world.holders.values():
        holder.journal.clear()
    world.run(15.0)
    world.call(ranks[0], verb, **said)
    assert world.run_until(lambda: bool(ranks[0].errors.get(verb)))
    assert "but its history is not known" in str(ranks[0].errors[verb])


def closed(hosts: int, last: int, **config: object) -> ControllerWorld:
    """A job that has trained and whose ranks have all closed."""
    world, ranks = trained(hosts, last=last, **config)
    for rank in ranks:
        world.call(rank, "close")
    assert world.run_until(lambda: world.job().attempts[1].phase == "closed", 5.0)
    return world


def replace_host_and_controller(world: ControllerWorld, host: str) -> None:
    """A machine is back without its memory, and only the next controller learns of it."""
    world.kill_host(host)
    world.crash_controller(restart_after_s=None)
    world.return_host(host)
    world.start_controller()
    assert world.run_until(lambda: world.served.is_settled, 10.0)


@pytest.mark.parametrize(("keep_steps", "last"), [(1, 3), (2, 3), (2, 1)])
def test_a_closed_job_has_room_for_what_it_holds_on_a_host_that_came_back_empty(keep_steps: int, last: int) -> None:
    """A new controller has its lost copies made again before any process connects; it writes no version more."""
    world = closed(3, last, keep_steps=keep_steps)
    replace_host_and_controller(world, "h2")
    held = range(max(1, last - keep_steps + 1), last + 1)

    def is_repaired() -> bool:
        return all(len(world.holders_of(StepId(1, step), rank)) == 2 for step in held for rank in range(3))

    assert world.run_until(is_repaired, 30.0), world.notes[-20:]
    room = world.holders["h2"].rooms["train"]
    assert (room.versions, room.ranks) == (len(held), {2: len(held) * CHUNKS})


def test_a_closed_job_that_holds_nothing_has_no_room() -> None:
    """Its ranks prepared, and closed without a put."""
    world, ranks = trained(3, last=0)
    world.reserve(ranks)
    for rank in ranks:
        world.call(rank, "close")
    world.run(1.0)
    replace_host_and_controller(world, "h2")
    world.run(5.0)
    assert world.holders["h2"].rooms["train"].total == 0


def test_a_job_that_trains_claims_the_room_of_a_new_host_before_a_closed_one() -> None:
    """What is left is for the closed job; --json says why its copies are fewer, and they come when there is room."""
    world = closed(3, last=1)
    ranks = world.launch(3, job="busy")
    world.get(ranks)
    assert world.put_all(ranks, 1)
    limit = [5 * CHUNKS]

    def limited(order: Reserve) -> None:
        holder, share = world.holders["h2"], share_of(order)
        used = sum(room.total for room in {**holder.rooms, order.job: share}.values())
        why = f"needs {used} slots, may take {limit[0]}" if used > limit[0] else None
        if why is None:
            holder.replicas.claim(order.job, share)
        holder.report(Reserved(job=order.job, attempt=order.attempt, number=order.number, problem=why))

    world.holders["h2"].instead[Reserve] = limited
    replace_host_and_controller(world, "h2")
    assert world.run_until(lambda: len(world.holders_of(StepId(1, 1), 2, "busy")) == 2, 30.0)
    world.run(20.0)
    assert list(world.holders["h2"].rooms) == ["busy"]
    world.call(ranks[0], "status")
    assert world.run_until(lambda: bool(ranks[0].answers.get("status")))
    status = ranks[0].answers["status"][-1]
    assert [row for row in status["problems"] if row["about"] == "train"] == []  # it is closed, and another one runs
    [train] = [row for row in status["jobs"] if row["job"] == "train"]
    first = train["short"][0]
    assert (first["ranks"], first["hosts"], first["why_not"]) == ([1], ["h1"], "h2: needs 24 slots, may take 20")
    assert sum("h2 has no room for job 'train' yet" in note for note in world.notes) == 1
    limit[0] = 100
    assert world.run_until(lambda: len(world.holders_of(StepId(1, 1), 2)) == 2, 30.0)


def test_what_older_attempts_reserved_is_in_no_journal_for_ever() -> None:
    """A number for every rank with every restart: only the newest attempt's says what hosts are to claim (R10, R16)."""
    world, ranks = trained(3)
    for step in (2, 3):
        ranks = world.launch(3)
        world.get(ranks)
        assert world.put_all(ranks, step)
    claimed = [
        entry.fact for entry in world.served.parts.journal.log.entries if isinstance(entry.fact, f.SlotsReserved)
    ]
    assert [fact.attempt for fact in claimed if is_needed(world.served, fact)] == [3]
    assert len(claimed) == 3
