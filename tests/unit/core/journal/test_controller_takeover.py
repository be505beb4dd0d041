"""Losing the controller loses nothing: a successor knows every fact and finishes what was begun (R16, R17)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from memstore.config import Config
from memstore.core.arena.slot_table import share_of
from memstore.core.capacity import is_needed
from memstore.core.cluster import facts as f
from memstore.core.journal.fact_log import FactLog
from memstore.core.journal.records import Entry
from memstore.core.wire.messages import Event, HostBeat, HostLost, LeaseRenewed, Tick
from memstore.core.wire.orders import Reserve, VerifyCopies
from memstore.core.wire.reports import Reserved
from memstore.testing.controller.holder import CHUNKS, DirectedRank
from memstore.testing.controller.world import JOB, ControllerWorld, trained
from recovery.inventory import ShardId, StepId

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
    # No get() of a rank returns before all ranks have loaded.
    assert world.run_until(lambda: world.machine is not None and JOB in world.served.jobs, 20.0)
    assert world.run_until(lambda: world.job().newest.is_released, 20.0)
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
    assert all(holder.journal == world.journal_of(host) for host, holder in world.holders.items())
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
    fact = f.StepCommitted("train", 1, 5, 2, f.ByRank.of(("x", "y"), (("h1",), ("h1",))), "host", False, "", 0.0)
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
    world.leave_to_late_host("h2", before)
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
    for host, holder in world.holders.items():
        assert holder.journal == world.journal_of(host)


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


# -- histories ----------------------------------------------------------------------------------------
# What RAM and durable storage know of a job may be of different times, or of different runs (R22, R31, D136).


def train(world: ControllerWorld, *steps: int, **more: Any) -> list[DirectedRank]:
    """A launch of two ranks that gets and puts these steps; durable ones are waited for."""
    ranks = world.launch(2, **more)
    if not more.get("fresh"):
        world.get(ranks)
    for step in steps:
        assert world.put_all(ranks, step, until="durable" if world.config["durable"] else "committed")
    return ranks


def forget_ram(world: ControllerWorld, *hosts: str, back: str = "") -> None:
    """Machines lose their memory; `back` comes back with what it had."""
    for host in hosts:
        world.kill_host(host)
        world.return_host(host, keep_memory=False)
    if back:
        world.return_host(back)
    world.crash_controller()
    world.run(6.0)


def digests(answers: list[dict[str, Any]]) -> list[str]:
    return [answer["digest"] for answer in answers]


@pytest.mark.parametrize("clock_s", [0.0, -3600.0, 86_400.0])
@pytest.mark.parametrize("fresh", [False, True])
def test_a_host_that_comes_back_with_old_memory_hides_no_newer_durable_step(fresh: bool, clock_s: float) -> None:
    """It knows attempt 1 alone.

    Storage has attempt 3: that is gone on from, regardless of what the clock said meanwhile.
    """
    world = ControllerWorld(3, durable="/durable", durable_every=1)
    train(world, 1)
    world.kill_host("h0", keep_memory=True)
    world.served.state.wall_offset_s += clock_s
    train(world, 2)
    train(world, 3, 4)
    forget_ram(world, "h1", "h2", back="h0")
    assert sorted(world.job().attempts) == [1]
    ranks = world.launch(2, fresh=fresh)
    assert [rank.attempt for rank in ranks] == [4, 4]
    if fresh:
        return
    answers = world.get(ranks)
    world.check_restored(answers)
    assert {(a["attempt"], a["step"], a["verdict"]) for a in answers} == {(3, 4, "durable")}
    assert world.put_all(ranks, 5, until="durable")


@pytest.mark.parametrize("clock_s", [0.0, -3600.0])
@pytest.mark.parametrize("old_launches", [1, 3])
def test_an_older_run_of_the_name_on_storage_is_never_restored(old_launches: int, clock_s: float) -> None:
    """RAM was lost, the job started over without durable=, then with it: its own steps count, not those of then."""
    world = ControllerWorld(2, durable="/durable", durable_every=1)
    for number in range(old_launches):
        train(world, 10 * number + 8, 10 * number + 9)
    forget_ram(world, "h0", "h1")
    world.served.state.wall_offset_s += clock_s
    config = dict(world.config)
    world.config["durable"] = None
    world.put_contents.clear()
    train(world, 1)
    put = [world.put_contents[ShardId("train", 1, 1, rank)] for rank in range(2)]
    world.config.update(config)
    ranks = world.launch(2)
    answers = world.get(ranks)
    assert {(a["attempt"], a["step"]) for a in answers} == {(1, 1)}
    assert [answer["bytes"] for answer in answers] == put
    assert any("another, older run" in note for note in world.notes)
    assert ranks[0].attempt == old_launches + 1
    assert world.put_all(ranks, 2, until="durable")
    forget_ram(world, "h0", "h1")
    answers = world.get(world.launch(2))
    world.check_restored(answers)
    assert {(a["attempt"], a["step"], a["verdict"]) for a in answers} == {(old_launches + 1, 2, "durable")}


def test_storage_that_cannot_be_read_keeps_no_process_from_what_ram_knows() -> None:
    """Only a job that no host knows must learn from storage before it opens (R23)."""
    world = ControllerWorld(2, durable="/durable", durable_every=1)
    train(world, 1)
    world.durable.problem = "permission denied"
    ranks = world.launch(2)
    assert {(a["step"], a["verdict"]) for a in world.get(ranks)} == {(1, "local")}


@pytest.mark.parametrize("damaged", [{1, 2}, {2}])
def test_markers_that_cannot_be_read_are_no_empty_storage(damaged: set[int]) -> None:
    """All empty after a power cut: no job starts from nothing. One: an older step, and status says why (R23)."""
    world = ControllerWorld(2, durable="/durable", durable_every=1)
    train(world, 1, 2)
    forget_ram(world, "h0", "h1")
    world.durable.damaged = {(1, step) for step in damaged}
    ranks = world.launch(2)
    if damaged == {1, 2}:
        assert ranks[0].error("join").startswith("RecoveryError")
        assert "marker of step 2 is torn" in ranks[0].error("join")
        return
    assert {(a["step"], a["verdict"]) for a in world.get(ranks)} == {(1, "durable")}
    assert world.served.parts.durable_states.of("train").unread == "marker of step 2 is torn"


def test_a_rank_that_dies_while_storage_is_listed_is_named_to_those_who_wait() -> None:
    """The launch gathers again: the rank that takes its place opens the attempt."""
    world = ControllerWorld(2, durable="/durable", durable_every=1)
    train(world, 1)
    world.kill_rank(world.ranks["train", 0])
    world.kill_rank(world.ranks["train", 1])
    ranks = [world.join(rank, 2, "key") for rank in range(2)]
    gatherings = world.served.parts.attempts.gatherings
    assert world.run_until(lambda: "train" in gatherings and gatherings["train"].markers_call > 0, 5.0)
    world.kill_rank(ranks[0])
    world.run(25.0)
    assert ranks[1].error("join").startswith("GatherTimeout")
    assert "missing: rank 0" in ranks[1].error("join")


# -- lease --------------------------------------------------------------------------------------------
# A controller records facts while it provably is the newest, and what a socket kept proves nothing (R17).


LONG_S = 30.0


class SleepyWorld(ControllerWorld):
    """Its controller can be frozen: what comes meanwhile waits in the sockets."""

    def __init__(self, hosts: int, **rules: float) -> None:
        self.is_frozen = False
        self.waiting: list[Event] = []
        super().__init__(hosts, rules=rules)

    def _handle(self, event: Event) -> None:
        if not self.is_frozen:
            super()._handle(event)
        elif not isinstance(event, Tick | LeaseRenewed):
            self.waiting.append(event)

    def wake(self) -> None:
        self.is_frozen = False
        waiting, self.waiting = self.waiting, []
        for event in waiting:
            self._handle(event)

    def recorded_within(self, seconds: float) -> bool:
        """True if the controller may record a fact at any moment of that time."""
        return self.run_until(lambda: self.served.lease.may_record(), seconds)


def without_membership(hosts: int = 3) -> SleepyWorld:
    """All hosts are received, the membership is not."""
    world = SleepyWorld(hosts)
    world.has_lease = False
    world.run(LONG_S)
    return world


def test_a_controller_that_receives_all_hosts_needs_no_membership() -> None:
    """They are asked before the membership's word runs out: there is no gap."""
    world = SleepyWorld(3, lease_s=Config().lease_s)
    world.run(2.0)
    world.has_lease = False
    for _ in range(50):
        world.run(0.2)
        assert world.served.lease.may_record()


def test_hosts_are_not_asked_while_the_membership_answers() -> None:
    world = SleepyWorld(3)
    world.run(LONG_S)
    orders = [kind for holder in world.holders.values() for kind, _ in holder.orders[10:]]
    assert "clock" not in orders


def test_what_was_said_before_a_freeze_is_not_received_when_it_ends() -> None:
    """The far side of a partition said it, and may have elected a newer controller since."""
    world = without_membership()
    world.is_frozen = True
    world.run(1.2)
    world.silence("h2")
    assert any(isinstance(event, HostBeat) and event.host_id == "h2" for event in world.waiting)
    world.run(LONG_S)
    world.wake()
    assert not world.recorded_within(10.0)


def test_a_connection_that_ended_during_a_freeze_says_nothing_of_its_host() -> None:
    """The holder may have given it up for a newer controller, or because it was not read (R17)."""
    world = without_membership()
    world.is_frozen = True
    world.run(LONG_S)
    world.silence("h2")
    world.waiting.append(HostLost("h2", "connection reset"))
    world.wake()
    assert not world.recorded_within(10.0)


def test_a_host_that_ended_before_the_eyes_of_its_controller_is_left_out() -> None:
    """No other process was in charge: its process is gone, and the others decide (D45)."""
    world = without_membership()
    world.kill_host("h2")
    world.run(LONG_S)
    assert world.served.lease.may_record()


def test_a_controller_that_wakes_blames_no_process_and_goes_on() -> None:
    """What arrived counts against suspicion as ever (R28), and every host soon proves that it is here."""
    world = without_membership()
    world.is_frozen = True
    world.run(LONG_S)
    world.wake()
    assert not world.served.lease.may_record()
    assert {state.status for state in world.served.hosts.states.values()} == {"live"}
    assert world.recorded_within(2.0)


@pytest.mark.parametrize("clock_s", [1e12, float("nan")])
def test_an_echo_of_what_was_never_sent_proves_nothing(clock_s: float) -> None:
    world = without_membership()
    reported = world.served.hosts.states["h2"].was_with_us_s
    world._handle(HostBeat("h2", clock_s=clock_s))
    assert world.served.hosts.states["h2"].was_with_us_s == reported


def test_a_successor_waits_from_when_the_first_host_came_to_it() -> None:
    """Up to then that host may have answered the predecessor that it was with it."""
    world = SleepyWorld(2)
    held: list[Callable[[], None]] = []
    dial, world._dial = world._dial, lambda holder: held.append(lambda: dial(holder))  # type: ignore[method-assign]
    world.crash_controller(restart_after_s=0.0)
    world.run(2.5)
    world._dial = dial  # type: ignore[method-assign]
    began_s = world.now
    for work in held:
        work()
    assert world.run_until(lambda: world.served.is_settled, 10.0)
    assert world.now - began_s >= world.rules.outlast_s
