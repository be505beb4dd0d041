"""Missing copies come back where placement wants them, surplus ones go, the last good step never does (R19, R29)."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from memstore.core.arena.slot_table import share_of
from memstore.core.cluster.job import Job
from memstore.core.wire.ids import WireCopy
from memstore.core.wire.messages import HostLost
from memstore.core.wire.orders import DropJob, FreeCopies, FreeStep, Order, PushCopy, Reserve
from memstore.core.wire.reports import Fenced, Sealed
from memstore.testing.controller.holder import CHUNKS, DirectedHolder, DirectedRank
from memstore.testing.controller.world import JOB, ControllerWorld, trained
from recovery.inventory import Copy, ShardId, ShardSpec, StepId


def test_a_stand_in_takes_the_copies_of_a_dead_host() -> None:
    """Without any process asking, an idle host gets what a dead one held, after it is dead for good."""
    world, _ = trained(4, 3)
    world.kill_host("h1")
    world.run(2.0)
    assert "h3" not in world.holders_of(StepId(1, 1), 1)
    world.run(10.0)
    assert all(len(world.holders_of(StepId(1, 1), rank)) == 2 for rank in range(3))


def test_copies_are_rebuilt_while_a_rank_is_awaited_at_get() -> None:
    """The others may wait ten minutes for it; until all have asked nothing is brought to them, and nothing spared."""
    world, _ = trained(4, 3)
    world.kill_host("h1")
    ranks = world.launch(3)
    for rank in ranks[:2]:
        world.call(rank, "get", step=None, timeout_s=600.0, is_agreement=False)
    world.run(20.0)
    assert [len(world.holders_of(StepId(1, 1), rank)) >= 2 for rank in range(3)] == [True] * 3
    world.call(ranks[2], "get", step=None, timeout_s=600.0, is_agreement=False)
    assert world.run_until(lambda: all(rank.answers.get("get") for rank in ranks))
    world.check_restored([rank.answers["get"][-1] for rank in ranks])


def test_a_host_that_is_back_in_time_costs_no_copying() -> None:
    """A holder that restarts with its memory within dead_after_s gets nothing and loses nothing."""
    world, _ = trained(4, 3)
    for holder in world.holders.values():
        holder.orders.clear()
    world.kill_host("h1", keep_memory=True)
    world.run(2.0)
    world.return_host("h1")
    world.run(10.0)
    assert not any(holder.received(PushCopy) for holder in world.holders.values())
    assert world.holders["h3"].held == {}


def test_a_rank_that_moved_gets_its_copies_moved_and_the_old_ones_freed() -> None:
    """Ownership moves at once, copies follow: new hosts are filled first, then the old copies go (R27)."""
    world, _ = trained(4, 2)
    ranks = [world.join(r, 2, "k", host=f"h{2 + r}", launcher="launcher") for r in range(2)]
    world.run(2.0)
    world.check_restored(world.get(ranks))
    world.run(20.0)
    for rank in range(2):
        assert world.holders_of(StepId(1, 1), rank) == ["h2", "h3"]


def test_repair_leaves_the_network_to_a_get_until_all_ranks_have_loaded() -> None:
    """Then it makes up for the lost host at once: the next loss must not find a shard with one copy (R29)."""
    world, _ = trained(4, 3)
    world.kill_host("h1")
    ranks = world.launch(3)
    ranks[2].loads = False
    for holder in world.holders.values():
        holder.orders.clear()
    for rank in ranks:
        world.call(rank, "get", step=None, timeout_s=600.0, is_agreement=False)
    assert world.run_until(lambda: all(rank.answers.get("get") for rank in ranks))
    world.run(30.0)
    assert not any(holder.received(PushCopy) for holder in world.holders.values())
    number = ranks[2].last_reply.report.round
    world.call(ranks[2], "shard_loaded", round=number, is_adopting=True, problem=None)
    world.run(2.0)
    assert all(len(world.holders_of(StepId(1, 1), rank)) == 2 for rank in range(3))


def test_a_lost_replica_is_rebuilt() -> None:
    """A copy that its host's inventory lacks is pushed again (R30)."""
    world, _ = trained(2, 2)
    world.holders["h1"].lose(ShardId(JOB, 1, 1, 0))
    world.run(3.0)
    assert world.holders_of(StepId(1, 1), 0) == ["h0", "h1"]


def test_a_push_of_what_was_dropped_holds_up_no_other() -> None:
    """It ends without a word, at its source; what came after it is rebuilt at once, not when a deadline is over."""
    world, ranks = trained(2, 2)
    source, other = world.holders["h0"], world.holders["h1"]

    def push_but_the_first(order: PushCopy) -> None:
        if order.shard.step > 1:
            source.carry_out(order)

    source.instead[PushCopy] = push_but_the_first
    other.lose(*(ShardId(JOB, 1, 1, rank) for rank in range(2)))
    world.run(2.0)
    assert world.put_all(ranks, 2)
    world.run(2.0)
    assert not world.holders_of(StepId(1, 1), 0)
    other.lose(*(ShardId(JOB, 1, 2, rank) for rank in range(2)))
    world.run(3.0)
    assert all(world.holders_of(StepId(1, 2), rank) == ["h0", "h1"] for rank in range(2))


def test_nothing_is_dropped_before_a_newer_commit() -> None:
    """The last committed step stays whole while newer ones are put, skipped and abandoned (I5)."""
    world, ranks = trained(2, 2)
    world.put(ranks[0], 2)
    world.skip(ranks[1], 2)
    world.run(2.0)
    world.put(ranks[0], ranks[0].resume_step)
    world.run(2.0)
    assert world.holders_of(StepId(1, 1), 0) == world.holders_of(StepId(1, 1), 1) == ["h0", "h1"]
    assert world.put_all(ranks, ranks[0].resume_step)
    world.run(1.0)
    assert world.holders_of(StepId(1, 1), 0) == []


def test_a_relaunch_keeps_the_restored_step_until_its_first_commit() -> None:
    """Neither a restore nor the first put of a new attempt drops what was restored."""
    world, _ = trained(2, 2)
    ranks = world.launch(2)
    world.get(ranks)
    world.reserve(ranks)
    world.put(ranks[0], 2)
    world.run(3.0)
    assert world.holders_of(StepId(1, 1), 1) == ["h0", "h1"]


def test_the_first_put_frees_the_step_that_the_restored_one_replaces() -> None:
    """keep_steps=1: a whole uncommitted step that was restored is what is kept, so the commit before it goes (R10)."""
    world = ControllerWorld(3, min_copies=2, keep_steps=1)
    ranks = world.launch(3)
    world.get(ranks)
    assert world.put_all(ranks, 1)
    for holder in world.holders.values():
        holder.refuses_copies = "full"  # step 2 is sealed by all ranks and misses its second copies
    assert not world.put_all(ranks, 2, limit_s=2.0)
    assert StepId(1, 2) not in world.job().commits
    ranks = world.launch(3)
    answers = world.get(ranks)
    world.check_restored(answers)
    assert {a["step"] for a in answers} == {2}
    assert all(world.holders_of(StepId(1, 1), rank) for rank in range(3))
    world.reserve(ranks)
    world.run(1.0)
    assert [world.holders_of(StepId(1, 1), rank) for rank in range(3)] == [[], [], []]
    assert all(world.holders_of(StepId(1, 2), rank) for rank in range(3))


def test_the_commit_of_a_retired_step_stays_history() -> None:
    """A step that may not be offered any more is still history: the job does not start from nothing."""
    world, ranks = trained(2, 2)
    world.call(ranks[0], "retire", attempt=1, step=1, reason="its bytes are bad")
    world.run(1.0)
    answers = world.get(world.launch(2))
    assert "its bytes are bad" in answers[0]["error"]


def test_copies_stay_while_the_cluster_cannot_hold_enough_apart() -> None:
    """With too few hosts for the replicas asked, no copy is surplus."""
    world, _ = trained(3, 2, replicas=3)
    assert len(world.holders_of(StepId(1, 1), 0)) == 3
    world.kill_host("h0")
    world.run(10.0)
    assert world.holders_of(StepId(1, 1), 0) == ["h1", "h2"]


@pytest.mark.parametrize("seed", range(4))
def test_a_rack_replaced_host_by_host_before_the_job_dies_is_filled(seed: int) -> None:
    """Copies of a step that no rank will finish take no room of the newest commit's: it has two copies again (R29)."""
    labels = {f"h{n}": {"rack": f"r{n // 2}"} for n in range(4)}
    world, ranks = trained(4, last=5, labels=labels, keep_steps=1, seed=seed)
    for rank in (ranks[0], ranks[2], ranks[3]):
        world.put(rank, 6)
    for lost in ("h1", "h0"):
        world.kill_host(lost)
        world.run(0.2)
        world.return_host(lost)
        world.run(0.1)
    for rank in ranks[2:]:
        world.kill_rank(rank)
    world.run(20.0)
    assert [len(world.holders_of(StepId(1, 5), rank)) for rank in range(4)] == [2, 2, 2, 2]
    world.kill_host("h3")
    answers = world.get(world.launch(4))
    world.check_restored(answers)
    assert {answer["step"] for answer in answers} <= {5, 6}


@pytest.mark.parametrize("is_ended", [True, False])
def test_a_full_host_gives_up_what_no_rank_will_finish(is_ended: bool) -> None:
    """A kept step's copy that is refused takes the room of an open step's, but only once a rank is dead (R29)."""
    world, ranks = trained(2)
    world.put(ranks[0], 2)
    world.run(1.0)
    if is_ended:
        world.kill_rank(ranks[1])
    full, kept = world.holders["h1"], ShardId(JOB, 1, 1, 0)
    full.replicas.claim(JOB, replace(full.rooms[JOB], peer_slots=CHUNKS))
    full.lose(kept)
    world.run(20.0)
    assert world.holders_of(StepId(1, 1), 0) == (["h0", "h1"] if is_ended else ["h0"])
    assert world.holders_of(StepId(1, 2), 0) == (["h0"] if is_ended else ["h0", "h1"])


def test_a_commit_that_is_being_written_down_gives_no_copy_up() -> None:
    """Where a kept step's copy is refused, the room is not taken of a step whose commit is on its way (R19, R29)."""
    world, ranks = trained(3, 2)
    world.has_lease = False
    world.silence("h2")
    world.run(6.0)
    for rank in ranks:
        world.put(rank, 2)
    world.run(1.0)
    assert world.job().newest.steps[2] == "committing"
    world.kill_rank(ranks[1])
    full, kept = world.holders["h1"], ShardId(JOB, 1, 1, 0)
    full.replicas.claim(JOB, replace(full.rooms[JOB], peer_slots=CHUNKS))
    full.lose(kept)
    world.run(3.0)
    assert world.holders_of(StepId(1, 2), 0) == ["h0", "h1"]
    world.has_lease = True
    world.thaw("h2")
    assert world.run_until(lambda: StepId(1, 2) in world.job().commits)
    world.kill_host("h0")
    answers = world.get(world.launch(2))
    world.check_restored(answers)
    assert {answer.get("step") for answer in answers} == {2}


def test_surplus_copies_of_an_open_step_go() -> None:
    """What was pushed to a substitute while a host was away is freed once that host has its copies again (R29)."""
    world, ranks = trained(4)
    world.put(ranks[0], 2)
    world.run(1.0)
    before = world.holders_of(StepId(1, 2), 0)
    substitute = next(host for host in ("h1", "h2", "h3") if host not in before)
    copy = WireCopy.of(world.holders["h0"].held[ShardId(JOB, 1, 2, 0)])
    world.holders["h0"].obey(PushCopy(shard=copy.shard, digest=copy.spec.digest, target=substitute))
    assert world.run_until(lambda: substitute in world.holders_of(StepId(1, 2), 0), 1.0)
    world.run(5.0)
    assert world.holders_of(StepId(1, 2), 0) == before


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [3, 4])
def test_a_host_that_dies_often_keeps_no_step_at_one_copy(hosts: int) -> None:
    """What it would hold goes to another host of the job while it is on probation, and back when that ends (R29)."""
    world, _ = trained(hosts, last=2, keep_steps=1)
    step, flaky = StepId(1, 2), "h1"
    for _ in range(3):
        world.kill_host(flaky)
        world.run(0.2)
        world.return_host(flaky)
        world.run(0.1)
    world.run(20.0)
    for rank in range(hosts):
        trusted = [h for h in world.holders_of(step, rank) if h != flaky]
        assert len(trusted) == 2, f"rank {rank}"
    world.run(600.0)
    assert [len(world.holders_of(step, rank)) for rank in range(hosts)] == [2] * hosts


def test_a_host_that_has_no_room_beside_its_share_stands_in_for_nobody() -> None:
    """It refuses the room, keeps its share, and the host that dies often is sent the copies after all (R10, D293)."""
    world, _ = trained(3, last=2)
    for host in ("h0", "h2"):

        def limited(order: Reserve, holder: DirectedHolder = world.holders[host]) -> None:
            holder.refuses_room = "full" if share_of(order).total > 4 * CHUNKS else ""
            holder.carry_out(order)

        world.holders[host].instead[Reserve] = limited
    for _ in range(3):
        world.kill_host("h1")
        world.run(0.2)
        world.return_host("h1")
        world.run(0.1)
    world.run(20.0)
    assert {room.state for room in world.served.parts.room.rebuilds.values()} == {"refused"}
    assert all(world.holders[host].rooms[JOB].total == 4 * CHUNKS for host in ("h0", "h2"))
    assert [len(world.holders_of(StepId(1, 2), rank)) for rank in range(3)] == [2, 2, 2]


@pytest.mark.parametrize("hosts", [2, 3])
def test_a_host_that_dies_often_holds_what_no_other_has_room_for(hosts: int) -> None:
    """A copy that may go soon is better than none: of two hosts, or of the older of two kept steps (D214)."""
    world, _ = trained(hosts, last=4, keep_steps=2)
    for _ in range(3):
        world.kill_host("h1")
        world.run(0.2)
        world.return_host("h1")
        world.run(0.1)
    world.run(20.0)
    for step in (3, 4):
        assert min(len(world.holders_of(StepId(1, step), rank)) for rank in range(hosts)) == 2


def test_a_host_that_dies_often_is_a_target_where_too_few_others_are_there() -> None:
    """All ranks are on the other of two hosts: their steps had one copy, beside a live host (D218)."""
    world, _ = trained(2, last=2)
    for _ in range(3):
        world.kill_host("h1")
        world.run(0.2)
        world.return_host("h1")
        world.run(0.1)
    ranks = [world.join(rank, 2, "again", host="h0", takeover=True) for rank in range(2)]
    assert world.run_until(lambda: all(rank.answers.get("join") for rank in ranks), 15.0)
    world.get(ranks)
    assert world.put_all(ranks, 3)
    world.run(5.0)
    attempt = world.job().newest_number
    assert [world.holders_of(StepId(attempt, 3), rank) for rank in range(2)] == [["h0", "h1"]] * 2


@pytest.mark.slow
def test_what_is_held_for_a_host_that_dies_often_takes_no_room_of_puts() -> None:
    """No host holds more beside what placement asks of it than its room for repairs: one version of its own (R10)."""
    world, _ = trained(3, last=4, keep_steps=3)
    for _ in range(3):
        world.kill_host("h1")
        world.run(0.2)
        world.return_host("h1")
        world.run(0.1)
    world.run(20.0)
    job, view = world.job(), world.served.parts.view
    attempt = job.newest
    assert attempt is not None
    beside: Counter[str] = Counter()
    for step in job.copies:
        for rank, member in attempt.members.items():
            asked = {member.host_id, *view.wanted(job, attempt, rank)}
            beside.update(host for host in world.holders_of(step, rank) if host not in asked)
    assert beside
    assert max(beside.values()) == 1


def test_status_counts_copies_of_committed_steps_as_repair_and_no_put() -> None:
    """A put under way lacks copies too, and its host is ordered to send them: nothing is lost that is to be rebuilt."""
    world, ranks = trained(4, 3)
    for holder in world.holders.values():
        holder.refuses_copies = "busy"
        holder.instead[PushCopy] = lambda order: None
    world.put(ranks[0], 2)
    world.run(3.0)
    assert any(holder.received(PushCopy) for holder in world.holders.values())
    assert sum(pushes(world, ranks[0])) == 0
    world.kill_host("h1")
    world.run(12.0)
    assert sum(pushes(world, ranks[0])) > 0


def pushes(world: ControllerWorld, rank: DirectedRank) -> list[int]:
    """Return what status says that each host sends."""
    world.call(rank, "status")
    world.run(0.5)
    return [row["pushes"] for row in rank.answers["status"][-1]["hosts"]]


# -- drop ---------------------------------------------------------------------------------------------
# Copies that hosts are ordered to free count no more, and a removed job goes from every host (R7, R10, R19).


STEP = StepId(1, 1)


def drop(world: ControllerWorld, host: str, kind: type[Order] = FreeCopies) -> None:
    """Drop a host's copy of rank 0, or all of the step; repair leaves the host alone for a moment, so that it shows."""
    parts, shards = world.served.parts, [ShardId(JOB, STEP.attempt, STEP.step, rank) for rank in (0, 1)]
    parts.out.actions = []
    if kind is FreeStep:
        parts.drops.order_step(JOB, STEP, [host])
        world.job().drop_step_on(host, STEP)
    else:
        parts.drops.order(host, shards[:1])
        world.job().drop_copy(shards[0], host)
    parts.repair.pushes.refused_s.update(((shard, host), world.now) for shard in shards)
    [order] = parts.out.actions
    world._send_down(order)
    world.run(0.3)


def counted(world: ControllerWorld) -> list[str]:
    """The hosts that count as having a copy of rank 0."""
    return sorted(world.job().copies[STEP][0])


@pytest.mark.parametrize("of", [FreeCopies, FreeStep])
@pytest.mark.parametrize("kind", ["sealed", "fenced"])
def test_a_report_that_crosses_the_order_to_drop_counts_no_copy(kind: str, of: type[Order]) -> None:
    """The host said that it has the copy before it obeyed.

    Counted, the copy would be there for no process (R7, R19).
    """
    world, _ = trained(2)
    holder = world.holders["h0"]

    def cross(order: Order) -> None:
        copies = tuple(map(WireCopy.of, holder.held.values()))
        if kind == "fenced":
            holder.report(Fenced(job=JOB, attempt=1, copies=copies))
        else:
            for copy in copies:
                holder.report(Sealed(copy=copy, put=None))
        holder.carry_out(order)

    holder.instead[of] = cross
    drop(world, "h0", of)
    world.run(2.0)
    assert not any(shard.rank == 0 for shard in holder.held)
    assert world.holders_of(STEP, 0) == ["h1"]
    assert counted(world) == ["h1"]
    world.run(15.0)
    assert world.holders_of(STEP, 0) == ["h0", "h1"]
    assert any(shard.rank == 0 for shard in holder.held)


@pytest.mark.parametrize("of", [FreeCopies, FreeStep])
@pytest.mark.parametrize("is_ordered_again", [False, True])
def test_a_drop_that_outlives_its_session_leaves_no_copy_counted(is_ordered_again: bool, of: type[Order]) -> None:
    """The host joins again with the copy in its inventory, and only then obeys the order of before (R7, R19)."""
    world, _ = trained(2)
    holder = world.holders["h0"]
    copies, late = list(map(WireCopy.of, holder.held.values())), list[Order]()
    holder.instead[of] = late.append
    drop(world, "h0", of)
    world._forget(world._sessions["h0"])  # it is dialled again with the next beat
    world._handle(HostLost("h0", "connection reset"))
    assert world.run_until(lambda: counted(world) == ["h0", "h1"]), "the inventory names the copy"
    if is_ordered_again:
        drop(world, "h0", of)
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
