"""A step is committed when it is as safe as the cluster allows, and the word acts only once it has spread (R15-R18)."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from msgspec.structs import replace

from memstore.core.targets import targets
from memstore.core.wire.ids import WireCopy
from memstore.core.wire.messages import HostBeat, HostLost, HostUp, Received, SendOrder, Tick
from memstore.core.wire.orders import Order, PushTargets, Reserve, StepLevel, WriteJournal
from memstore.core.wire.reports import FactsWritten, Reserved, Sealed
from memstore.testing.controller.fleet import JOB, ControllerFleet
from memstore.testing.controller.holder import DirectedRank
from memstore.testing.controller.world import ControllerWorld, trained
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


# -- losses -------------------------------------------------------------------------------------------
# Hosts that come and go in a row: placed together, orders sent piecewise, as if placed at once (R13, R18).


HOSTS = 12


@pytest.fixture
def placements(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many hosts each placement was made for."""
    real, found = targets.scattered, list[int]()

    def counted(before: Any, topology: Any, **kwargs: Any) -> Any:
        found.append(len(topology.hosts))
        return real(before, topology, **kwargs)

    monkeypatch.setattr(targets, "scattered", counted)
    return found


def lose(fleet: ControllerFleet, host: str) -> None:
    fleet.targets.pop(host, None)
    fleet.rooms.pop(host, None)
    fleet.handle(HostLost(host, "reset"))


def come_back(fleet: ControllerFleet, host: str) -> None:
    info = fleet.machine.hosts.states[host].info
    fleet.handle(HostUp(dataclasses.replace(info, incarnation=info.incarnation + 1)))


def tick(fleet: ControllerFleet) -> None:
    """Time passes, and the controller learns which hosts live."""
    fleet.now += 0.1
    fleet.handle(Tick(tuple(HostBeat(host) for host in fleet.machine.hosts.live_ids())))


def sent_whole(fleet: ControllerFleet) -> list[tuple[str, Order]]:
    """What every host would be sent now: targets and room."""
    machine, found = fleet.machine, list[tuple[str, Order]]()
    job = machine.jobs[JOB]
    assert job.newest is not None
    machine.out.actions = []
    machine.parts.room.order(job, job.newest)
    machine.parts.view.send_targets(job)
    for action in machine.actions:
        assert isinstance(action, SendOrder)
        found.append((action.host_id, action.order))
    return found


def test_a_rack_that_dies_host_by_host_is_placed_twice(placements: list[int]) -> None:
    """The first loss is placed at once; all others that come before the next tick are placed with it."""
    fleet = ControllerFleet(96, ranks_per_host=1)
    fleet.put(1)
    tick(fleet)
    placements.clear()
    for host in fleet.hosts[:32]:
        lose(fleet, host)
    assert placements == [95]
    tick(fleet)
    # Substitutes there are none: 64 hosts have ranks of their own.
    assert placements == [95, 64]
    tick(fleet)
    assert placements == [95, 64]


def test_a_change_tells_only_those_whom_it_concerns() -> None:
    """The targets and the room of most hosts stay what they were when one is lost (R13)."""
    fleet = ControllerFleet(64)
    fleet.put(1)
    tick(fleet)
    fleet.targets.clear()
    fleet.rooms.clear()
    lose(fleet, fleet.hosts[3])
    assert 0 < len(fleet.targets) <= 8
    assert 0 < len(fleet.rooms) <= 16


def test_a_host_that_refused_its_room_is_reported_again_with_the_next_change() -> None:
    """It does not go by the order: that another one would say the same is no reason to be silent (R10)."""
    fleet = ControllerFleet(8)
    fleet.put(1)
    tick(fleet)
    refused = fleet.rooms[fleet.hosts[7]]
    full = Reserved(job=JOB, attempt=refused.attempt, number=refused.number, problem="full")
    fleet.machine.parts.room.reserved(fleet.hosts[7], full)
    fleet.rooms.clear()
    lose(fleet, fleet.hosts[0])
    tick(fleet)
    assert fleet.hosts[7] in fleet.rooms


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["lose", "lose", "return", "tick"]), st.integers(0, HOSTS - 1)), max_size=25))
def test_what_is_reported_piecewise_is_what_all_would_be_sent(story: list[tuple[str, int]]) -> None:
    """For any order of losses, returns and ticks: every live host goes by the placement of now."""
    fleet = ControllerFleet(HOSTS, ranks_per_host=2)
    fleet.put(1)
    for what, number in story:
        host = fleet.hosts[number]
        is_live = fleet.machine.hosts.is_live(host)
        if what == "tick":
            tick(fleet)
        elif what == "lose" and is_live and len(fleet.machine.hosts.live_ids()) > 1:
            lose(fleet, host)
        elif what == "return" and not is_live:
            come_back(fleet, host)
    tick(fleet)
    tick(fleet)
    for host, order in sent_whole(fleet):
        if isinstance(order, PushTargets):
            assert fleet.targets[host] == list(order.targets)
        if isinstance(order, Reserve):
            assert replace(fleet.rooms[host], number=order.number) == order


def test_nothing_commits_before_it_is_known_who_is_to_have_copies() -> None:
    """A target that died is not one copy less: another takes its place with the next tick, and the step waits (R18)."""
    fleet = ControllerFleet(8, ranks_per_host=1)
    owner = fleet.hosts[5]
    target = fleet.targets[owner][0]
    other = next(host for host in fleet.hosts if host not in (owner, target))
    for rank in range(fleet.world_size):
        fleet.seal(fleet.hosts[rank], rank, 1, is_own=True)
        if fleet.hosts[rank] != owner:
            for host in fleet.targets[fleet.hosts[rank]]:
                fleet.seal(host, rank, 1, is_own=False)
    lose(fleet, other)
    lose(fleet, target)
    assert fleet.machine.state.is_placement_stale
    for rank, host in enumerate(fleet.hosts):  # for any order of the seals
        if fleet.machine.hosts.is_live(host):
            fleet.seal(host, rank, 1, is_own=True)
    assert not fleet.machine.jobs[JOB].commits
    tick(fleet)
    assert fleet.targets[owner] != [target]
    assert not fleet.machine.jobs[JOB].commits


# -- skip ---------------------------------------------------------------------------------------------
# Skipping is collective: what one rank has no room for is committed by no process, and commits go on (R12).


def reserved(hosts: int = 2, **config: object) -> tuple[ControllerWorld, list[DirectedRank]]:
    """A job that has asked for its past and reserved its room."""
    world = ControllerWorld(hosts, **config)
    ranks = world.launch(hosts)
    world.get(ranks)
    world.reserve(ranks)
    return world, ranks


def test_a_step_one_rank_skips_is_abandoned_everywhere() -> None:
    """The other rank's copies go, its ticket ends skipped with the reason, and both put again from one step."""
    world, ranks = reserved()
    world.put(ranks[0], 1)
    world.run(0.5)
    world.skip(ranks[1], 1)
    world.run(1.0)
    assert [r.tickets[1] for r in ranks] == ["skipped", "skipped"]
    reported = [order for order in world.holders["h0"].received(StepLevel) if order.level == "skipped"]
    assert reported[-1].reason == "rank 1 gave up step 1: no room"
    assert world.holders_of(StepId(1, 1), 0) == []
    assert ranks[0].resume_step == ranks[1].resume_step == 2
    assert world.put_all(ranks, 2)


def skip_row(world: ControllerWorld, rank: DirectedRank) -> tuple[str, str]:
    """Return what status says of skipped steps, and what to do."""
    world.call(rank, "status")
    world.run(0.5)
    [row] = [row for row in rank.answers["status"][-1]["problems"] if "skipped" in row["cause"]]
    return row["cause"], row["remedy"]


def test_status_tells_why_a_step_was_skipped() -> None:
    """Room, a put that failed, a rank that passed over a step: each with its own words; and one from before."""
    world, ranks = reserved()
    world.skip(ranks[1], 1)
    world.run(1.0)
    cause, remedy = skip_row(world, ranks[0])
    assert cause == "1 step skipped; the newest: rank 1 gave up step 1: no room"
    assert "raise stall_budget_s" in remedy
    world.skip(ranks[0], 2, is_failed=True)
    world.run(1.0)
    cause, remedy = skip_row(world, ranks[0])
    assert cause == "2 steps skipped; the newest: rank 0 gave up step 2: its state was changed"
    assert "stall_budget_s" not in remedy
    world.put(ranks[0], 3)
    world.put(ranks[1], 4)
    world.run(1.0)
    assert "rank 1 put step 4 without having put it" in skip_row(world, ranks[0])[0]
    assert "rank 1 put step 4 without having put it" in str(world.holders["h0"].orders)
    world.crash_controller()
    world.run(10.0)
    assert "the controller that got the reason is gone" in skip_row(world, ranks[0])[0]


@pytest.mark.parametrize("is_first_ahead", [True, False], ids=["behind", "ahead"])
def test_a_step_that_a_rank_passed_over_is_given_up_whichever_put_comes_first(is_first_ahead: bool) -> None:
    """Rank 0 puts step 2 and not 1, rank 1 step 1: if that stayed open, rank 1 would have no room to put step 2."""
    world, ranks = reserved()
    for rank, step in ((0, 2), (1, 1)) if is_first_ahead else ((1, 1), (0, 2)):
        world.put(ranks[rank], step)
        world.run(1.0)
    assert ranks[1].tickets[1] == "skipped"
    assert "rank 0 put step 2 without having put it" in str(world.holders["h1"].orders)
    assert world.holders_of(StepId(1, 1), 1) == []
    world.put(ranks[1], 3)
    world.run(1.0)
    assert ranks[0].tickets[2] == "skipped"
    assert world.put_all(ranks, 4)


@pytest.mark.parametrize("is_first_ahead", [True, False], ids=["behind", "ahead"])
def test_a_successor_gives_up_a_step_that_a_rank_passed_over(is_first_ahead: bool) -> None:
    """The controller ends before it learns of either put: the hosts' inventories alone say who passed over what."""
    world, ranks = reserved()
    for rank, step in ((0, 2), (1, 1)) if is_first_ahead else ((1, 1), (0, 2)):
        world.put(ranks[rank], step)
    world.crash_controller()
    world.run(10.0)
    assert ranks[1].tickets[1] == "skipped"
    assert "rank 0 put step 2 without having put it" in str(world.holders["h1"].orders)


def test_a_controller_that_is_new_gives_up_what_a_rank_passed_over_before() -> None:
    """Its predecessor died before it could: the next rank without room makes the new one look."""
    world, ranks = reserved()
    world.put(ranks[0], 2)
    world.run(1.0)
    world.crash_controller()
    world.put(ranks[1], 1)
    world.run(10.0)
    world.skip(ranks[1], 3)
    world.run(1.0)
    assert ranks[1].tickets[1] == "skipped"
    assert "rank 0 put step 2 without having put it" in str(world.holders["h1"].orders)
    assert world.holders_of(StepId(1, 1), 1) == []


def test_puts_that_fail_do_not_widen_the_pause() -> None:
    """Skips for want of room space the puts out ever more; failures of other causes cost their own step only (R12)."""
    world, ranks = reserved()
    for step in (1, 2, 3, 4):
        world.put(ranks[0], step)
        world.run(0.5)
        world.skip(ranks[1], step, is_failed=True)
        world.run(1.0)
        assert ranks[0].resume_step == ranks[1].resume_step == step + 1
    for step, resume in ((5, 6), (6, 8), (8, 12)):
        world.skip(ranks[1], step)
        world.run(1.0)
        assert ranks[0].resume_step == ranks[1].resume_step == resume
    world.skip(ranks[1], 12, is_failed=True)
    world.run(1.0)
    assert ranks[0].resume_step == 13
    assert world.put_all(ranks, 13)


def test_a_put_that_fails_late_leaves_the_newer_step_that_another_rank_has_put() -> None:
    """Its rank puts that step too: only the failed one is given up (R12)."""
    world, ranks = reserved()
    world.put(ranks[0], 1)
    world.put(ranks[0], 2)
    world.run(0.5)
    world.skip(ranks[1], 1, is_failed=True)
    world.run(0.5)
    assert (ranks[0].tickets[1], ranks[0].resume_step) == ("skipped", 2)
    world.put(ranks[1], 2)
    assert world.run_until(lambda: [rank.tickets[2] for rank in ranks] == ["committed"] * 2, 10.0)


def widest_gap(step_s: float, first: int = 1) -> int:
    """How far ahead ranks are sent while one of them never finds room, at a pace."""
    world, ranks = reserved()
    step, widest = first, 0
    for _ in range(12):
        world.skip(ranks[1], step)
        world.run(step_s)
        widest = max(widest, ranks[0].resume_step - step)
        for _ in range(step + 1, ranks[0].resume_step):
            world.run(step_s)
        step = ranks[0].resume_step
    return widest


def test_the_pause_is_bounded_by_time_as_well() -> None:
    """Ranks wait a minute at the most until they put again, for any length of a step, and learn of it before
    (R12).
    """
    assert widest_gap(0.2) == 64
    assert widest_gap(10.0) in (6, 7)
    assert widest_gap(45.0) == 2
    assert widest_gap(300.0) == 1


def test_the_pace_of_seals_bounds_the_pause() -> None:
    """What was put before the trouble tells how long a step takes; a pause among the steps changes little."""
    world, ranks = reserved()
    for step in range(1, 8):
        assert world.put_all(ranks, step)
        world.run(400.0 if step == 3 else 20.0)
    widest = 0
    for _ in range(6):
        at = max(8, ranks[0].resume_step)
        world.skip(ranks[1], at)
        world.run(1.0)
        widest = max(widest, ranks[0].resume_step - at)
        world.run(20.0 * (ranks[0].resume_step - at))
    assert widest == 3


def test_the_pause_is_short_while_the_pace_is_unknown() -> None:
    """Until two steps are known, ranks are not kept from putting for many (R12)."""
    world, ranks = reserved()
    for step in (50, 40, 30, 20, 10):  # words of older steps that come late tell no pace
        world.skip(ranks[1], step)
        world.run(1.0)
    assert ranks[0].resume_step == 50 + 4


def test_a_seal_after_the_skip_is_not_counted() -> None:
    """A rank that learns of the skip too late puts in vain: its copy is freed and its ticket ends."""
    world, ranks = reserved()
    world.skip(ranks[1], 1)
    world.run(1.0)
    ranks[0].resume_step = 0  # the word has not reached it
    world.put(ranks[0], 1)
    world.run(2.0)
    assert ranks[0].tickets[1] == "skipped"
    assert world.holders_of(StepId(1, 1), 0) == []


def test_no_rank_is_sent_a_skip_before_its_fact_is_replicated() -> None:
    """Neither a copy that comes late nor a host that joins again brings it: a successor may commit the step (R16)."""
    world, ranks = reserved(4, replicas=2)
    world.skip(ranks[1], 1)
    world.run(1.0)
    for holder in world.holders.values():
        holder.instead[WriteJournal] = lambda _: None  # the next fact is on its way
    world.skip(ranks[1], 2)
    world.run(0.2)
    assert ranks[1].resume_step == 4
    world.put(ranks[0], 3)  # its rank knows of no such skip
    world.kill_host("h3", keep_memory=True)
    world.return_host("h3")
    world.run(0.5)
    assert ranks[0].tickets[3] == "replicated"
    assert world.holders_of(StepId(1, 3), 0)
    given_up = [order for holder in world.holders.values() for order in holder.received(StepLevel)]
    assert {order.step for order in given_up if order.level == "skipped"} == {1}

    for holder in world.holders.values():
        holder.instead.clear()
        for order in holder.received(WriteJournal):
            holder.carry_out(order)
    world.run(1.0)
    assert ranks[0].tickets[3] == "skipped"
    assert world.holders_of(StepId(1, 3), 0) == []


def test_a_skip_of_a_step_a_newer_one_overtook_changes_nothing() -> None:
    """A skip that arrives after a newer step was committed abandons nothing and moves no process."""
    world, ranks = reserved()
    assert world.put_all(ranks, 2)
    world.skip(ranks[0], 1)
    world.run(1.0)
    assert ranks[0].resume_step == 0
    assert world.put_all(ranks, 3)


def test_a_newer_commit_ends_older_open_steps() -> None:
    """An older step that lacks a rank is given up when all go on past it, and its copies go."""
    world, ranks = reserved(keep_steps=1)
    world.put(ranks[0], 1)
    world.run(1.0)
    assert world.put_all(ranks, 2)
    world.run(1.0)
    assert ranks[0].tickets[1] == "skipped"
    assert world.holders_of(StepId(1, 1), 0) == []


@pytest.mark.parametrize(("step_s", "steps"), [(0.1, 400), (10.0, 100)])
def test_alternate_skipping_under_steady_overload_still_commits(step_s: float, steps: int) -> None:
    """Ranks that run out of room at different steps are brought to one step together, and commits go on."""
    world, ranks = reserved(3)
    world.work_s = (3 * step_s, 8 * step_s)  # a push takes longer than a step
    for step in range(1, steps):
        for rank in ranks:
            if step < rank.resume_step:
                rank.tickets[step] = "skipped"
            elif room(world, rank):
                world.put(rank, step)
            else:
                world.skip(rank, step)
        world.run(step_s)
    world.run(50 * step_s)
    committed = sum(ranks[0].tickets.get(step) == "committed" for step in range(steps))
    assert committed >= 5
    job = world.job()
    assert not any(job.is_abandoned(step) for step in job.commits)


def room(world: ControllerWorld, rank: DirectedRank) -> bool:
    """A rank has room for keep_steps + 1 versions on its host (R10)."""
    mine = [s for s in world.holders[rank.host_id].held if s.rank == rank.rank]
    return len(mine) < 2


def test_a_skip_outlives_the_controller() -> None:
    """A successor keeps the abandoned step abandoned and tells ranks that come back where to put again."""
    world, ranks = reserved()
    world.put(ranks[0], 1)
    world.skip(ranks[1], 1)
    world.run(1.0)
    ranks[0].resume_step = 0
    world.crash_controller()
    world.run(5.0)
    assert ranks[0].resume_step == 2
    assert world.job().is_abandoned(StepId(1, 1))
    assert world.put_all(ranks, 2)


def test_a_step_that_one_rank_never_put_does_not_hold_the_room_for_ever() -> None:
    """A rank that goes on past a step without having sealed it gives it up for all; later steps commit (R12)."""
    world, ranks = reserved(keep_steps=1)
    assert world.put_all(ranks, 1)
    world.put(ranks[0], 2)  # rank 1's copy of step 2 failed: no rank skipped it, no rank will ever seal it
    world.run(1.0)
    world.put(ranks[1], 3)
    world.run(1.0)

    assert ranks[0].tickets[2] == "skipped"
    assert world.holders_of(StepId(1, 2), 0) == []
    assert world.put_all(ranks, 4)
