"""Connect is collective, attempts are numbered by the store, and opening one fences the older ones (R20, R21)."""

from __future__ import annotations

import pytest

from memstore.core.cluster.facts import AttemptOpened
from memstore.core.report.event_kinds import KINDS
from memstore.core.wire.calls import Called
from memstore.core.wire.messages import Received
from memstore.core.wire.orders import ListMarkers, Order
from memstore.core.wire.reports import RankArrived
from memstore.testing.controller.holder import DirectedRank
from memstore.testing.controller.world import JOB, ControllerWorld, trained
from memstore.testing.requests import request_of
from recovery.inventory import StepId


def test_ranks_gather_and_get_one_number() -> None:
    """No process is let in before all ranks are there; then all are in attempt 1."""
    world = ControllerWorld(3)
    first = [world.join(r, 3, "k") for r in range(2)]
    world.run(5.0)
    assert not any(r.answers for r in first)
    last = world.join(2, 3, "k")
    world.run(1.0)
    assert [r.attempt for r in (*first, last)] == [1, 1, 1]


def test_a_late_rank_is_named_when_the_deadline_passes() -> None:
    """A gathering that misses ranks ends with an error that names them."""
    world = ControllerWorld(3)
    ranks = [world.join(r, 3, "k") for r in (0, 2)]
    world.run(25.0)
    for rank in ranks:
        assert rank.error("join").startswith("GatherTimeout")
        assert "2 of 3 ranks have connected, missing: rank 1." in rank.error("join")


def test_a_second_launch_is_refused_while_the_first_trains() -> None:
    """Another launcher gets JobBusyError naming rank and host, and takeover fences the first."""
    world = ControllerWorld(3)
    first = world.launch(3)
    world.get(first)
    assert world.put_all(first, 1)
    other = world.join(0, 1, "other", launcher="another")
    world.run(1.0)
    assert other.error("join").startswith("JobBusyError")
    assert "is alive on host h0 (pid 1000, step 1)" in other.error("join")
    taker = world.join(0, 1, "third", launcher="another", takeover=True)
    world.run(1.0)
    assert taker.attempt == 2
    assert all(rank.is_fenced for rank in first)
    opened, taken = [event for event in world.events() if event["event"] == "attempt"]
    assert opened["taken"] == {}
    assert taken["taken"] == {"rank": 0, "host": "h0", "pid": 1000, "others": 2}
    assert KINDS["attempt"].text(taken).endswith("; TAKEN from rank 0 on h0 (pid 1000) and 2 others")


def test_dead_ranks_do_not_make_a_job_busy() -> None:
    """A launch by another launcher is let in once the processes of the first are proved dead."""
    world = ControllerWorld(3)
    first = world.launch(3)
    world.get(first)
    for rank in first:
        world.kill_rank(rank)
    world.run(1.0)
    again = world.launch(3, launcher="another")
    assert [r.attempt for r in again] == [2, 2, 2]
    assert [event["taken"] for event in world.events() if event["event"] == "attempt"] == [{}, {}]


def test_a_rank_that_restarts_before_its_first_get_keeps_the_attempt() -> None:
    """A newer join of the same rank takes its place; the process it replaced cannot come back after a takeover."""
    world = ControllerWorld(3)
    ranks = world.launch(3, "k")
    world.kill_rank(ranks[1])
    newcomer = world.join(1, 3, "k", host="h2")
    world.run(2.0)
    assert newcomer.attempt == 1
    world.crash_controller()
    world.run(5.0)
    member = world.job().attempts[1].members[1]
    assert (member.nonce, member.host_id) == (newcomer.nonce, "h2")
    assert world.get([ranks[0], newcomer, ranks[2]]) == [{"step": None}] * 3


def test_a_rank_that_restarts_while_the_attempt_is_written_down_keeps_it() -> None:
    """Its join comes between the attempt's fact and its replication: it takes the place, and gathers for no other."""
    world = ControllerWorld(3)
    ranks = [world.join(rank, 3, "k") for rank in range(3)]
    log = world.served.parts.attempts.journal.log
    assert world.run_until(lambda: any(isinstance(fact, AttemptOpened) for fact in log.unapplied()))
    world.kill_rank(ranks[1])
    newcomer = world.join(1, 3, "k", host="h2")
    assert world.run_until(lambda: JOB in world.served.parts.attempts.gatherings)
    assert JOB not in world.served.jobs
    world.run(2.0)
    assert [rank.attempt for rank in (ranks[0], newcomer, ranks[2])] == [1, 1, 1]
    assert JOB not in world.served.parts.attempts.gatherings
    assert world.get([ranks[0], newcomer, ranks[2]]) == [{"step": None}] * 3


def test_a_rank_that_restarts_after_its_get_waits_for_the_others() -> None:
    """Once the attempt has restored, a newer join starts the next gathering, which all ranks must join."""
    world = ControllerWorld(3)
    ranks = world.launch(3, "k")
    world.get(ranks)
    world.kill_rank(ranks[1])
    newcomer = world.join(1, 3, "k")
    world.run(2.0)
    assert not newcomer.answers
    others = [world.join(r, 3, "k") for r in (0, 2)]
    world.run(2.0)
    assert [r.attempt for r in (newcomer, *others)] == [2, 2, 2]
    third = [world.join(r, 3, "k") for r in range(3)]
    world.run(2.0)
    assert [r.attempt for r in third] == [2, 2, 2]  # untouched: the same launch again


def test_the_key_of_a_closed_attempt_is_spent() -> None:
    """A launch that reuses the key of an attempt that was closed, or overtaken, is refused."""
    world = ControllerWorld(2)
    ranks = world.launch(2, "first")
    for rank in ranks:
        world.call(rank, "close")
    world.run(1.0)
    late = world.join(0, 2, "first")
    world.run(1.0)
    assert "every launch needs a new key" in late.error("join")
    second = world.launch(2, "second")
    assert [r.attempt for r in second] == [2, 2]


def test_ranks_that_disagree_on_the_world_are_refused() -> None:
    """All ranks of one launch must name the same world size, and a rank inside it."""
    world = ControllerWorld(2)
    world.join(0, 2, "k")
    world.run(0.1)  # the first to arrive says how many they are
    other = world.join(1, 3, "k")
    outside = world.join(5, 3, "x")
    world.run(1.0)
    assert "all ranks of one launch must agree" in other.error("join")
    assert "rank 5 is outside the world of 3" in outside.error("join")


def test_a_newer_launch_dismisses_an_incomplete_one() -> None:
    """Ranks that gathered for an older launch are informed at once, not at their deadline."""
    world = ControllerWorld(3)
    old = world.join(0, 3, "old")
    world.run(1.0)
    ranks = [world.join(r, 3, "new") for r in range(3)]
    world.run(1.0)
    assert old.error("join").startswith("FencedError")
    assert [r.attempt for r in ranks] == [1, 1, 1]


def test_a_late_rank_of_an_older_generation_does_not_dismiss_the_newer_one() -> None:
    """Its join is refused: it may come late, as a holder asks again what a rank has given up meanwhile."""
    world = ControllerWorld(3)
    newer = [world.join(r, 3, "in-place:run:3") for r in range(2)]
    world.run(1.0)
    late = world.join(2, 3, "in-place:run:2")
    world.run(1.0)
    assert not any(rank.errors for rank in newer)
    assert late.error("join") == (
        "FencedError: job 'train': rank 2 joins an older generation, and generation 3 has begun: a rank was lost "
        "meanwhile"
    )
    newer.append(world.join(2, 3, "in-place:run:3"))
    world.run(1.0)
    assert [rank.attempt for rank in newer] == [1, 1, 1]
    after = world.join(0, 3, "in-place:run:1")
    world.run(1.0)
    assert "generation 3 has begun" in after.error("join")


@pytest.mark.parametrize("key", ["in-place:run:10", "in-place:later:0", "placement-group"])
def test_a_newer_generation_or_another_launch_takes_the_place_of_a_generation(key: str) -> None:
    """Numbers are compared within one run, as numbers; what else begins is newer."""
    world = ControllerWorld(2)
    older = world.join(0, 2, "in-place:run:9")
    world.run(1.0)
    ranks = [world.join(r, 2, key) for r in range(2)]
    world.run(1.0)
    assert older.error("join") == "FencedError: job 'train': a newer launch began to connect"
    assert [rank.attempt for rank in ranks] == [1, 1]


def join_again(world: ControllerWorld, rank: DirectedRank, world_size: int, key: str | None) -> None:
    """The process connects once more, without having closed."""
    body = {
        "job": JOB,
        "rank": rank.rank,
        "world_size": world_size,
        "nonce": rank.nonce,
        "key": key,
        "pid": 1,
        "launcher": "launcher",
        "config": world.config,
    }
    rank.ask("join", **body)


def test_another_world_size_from_the_same_process_begins_another_launch() -> None:
    """Without a key too: it is no repeated question, and waits for the ranks that it says there are."""
    world = ControllerWorld(2)
    alone = world.join(0, 1, None)
    world.run(1.0)
    assert alone.attempt == 1
    alone.answers.clear()
    join_again(world, alone, 2, None)
    world.run(1.0)
    assert not alone.answers
    other = world.join(1, 2, None)
    world.run(1.0)
    assert (alone.attempt, other.attempt) == (2, 2)


def test_another_key_from_the_same_processes_begins_another_launch() -> None:
    """A restart inside the processes: the next attempt opens when all have that key, and not before (R20, D133)."""
    world = ControllerWorld(2)
    ranks = world.launch(2, "first")
    world.get(ranks)
    assert world.put_all(ranks, 1)
    join_again(world, ranks[0], 2, "second")
    world.run(2.0)
    assert [rank.attempt for rank in ranks] == [1, 1]
    join_again(world, ranks[1], 2, "second")
    world.run(2.0)
    assert [rank.attempt for rank in ranks] == [2, 2]
    assert {answer["step"] for answer in world.get(ranks)} == {1}
    join_again(world, ranks[0], 2, "first")
    world.run(1.0)
    assert "every launch needs a new key" in ranks[0].error("join")


@pytest.mark.parametrize("key", ["first", None])
def test_the_same_process_joins_its_attempt_again(key: str | None) -> None:
    """A join that is asked again, or without a key, is one join (R20)."""
    world = ControllerWorld(2)
    ranks = world.launch(2, "first")
    world.get(ranks)
    join_again(world, ranks[0], 2, key)
    world.run(1.0)
    assert [answer["attempt"] for answer in ranks[0].answers["join"]] == [1, 1]


def test_two_launches_at_once_get_two_numbers() -> None:
    """A launch that completes while the fact of the one before still spreads gets a number of its own."""
    world = ControllerWorld(2)
    world.run(2.0)
    world.has_lease = False
    machine = world.served
    machine.lease.until_s = -1.0
    for state in machine.hosts.states.values():
        state.was_with_us_s = -100.0  # no lease and no host answered: facts wait
    for number, key in enumerate(("a", "b")):
        body = {
            "job": JOB,
            "rank": 0,
            "world_size": 1,
            "nonce": f"x{key}",
            "key": key,
            "pid": 1,
            "launcher": "l",
            "fresh": False,
            "takeover": False,
            "config": world.config,
        }
        machine.handle(world.now, Received("h0", Called(id=100 + number, call=request_of("join", body))))
    assert [fact.attempt for fact in machine.parts.journal.log.unapplied()] == [1, 2]  # type: ignore[union-attr]


def test_a_frozen_host_is_fenced_before_it_serves_again() -> None:
    """Fencing does not wait for a silent host for ever; its ranks are fenced when it comes back."""
    world = ControllerWorld(3)
    old = world.launch(3)
    world.silence("h2")
    world.run(8.0)
    ranks = [world.join(r, 2, "new", host=f"h{r}") for r in range(2)]
    world.run(2.0)
    assert [r.attempt for r in ranks] == [2, 2]
    world.thaw("h2")
    world.run(3.0)
    assert old[2].is_fenced


def test_a_removed_job_forgets_all_who_waits() -> None:
    """Removing a job answers its callers, and a new job of that name never reuses an attempt number."""
    world = ControllerWorld(2)
    ranks = world.launch(2)
    world.get(ranks)
    assert world.put_all(ranks, 1)
    world.call(ranks[0], "get", step=1, timeout_s=60.0)
    world.run(0.5)
    world.call(ranks[1], "rm", force=True)
    world.run(2.0)
    assert "was removed" in ranks[0].error("get")
    assert world.served.jobs == {}
    assert all(not holder.held for holder in world.holders.values())
    again = world.launch(2)
    assert [r.attempt for r in again] == [2, 2]


@pytest.mark.parametrize("rank", [0, 1])
def test_rewinding_ranks_must_name_the_same_step(rank: int) -> None:
    """A rank that rewinds elsewhere than the ranks that wait ends their wait at once."""
    world = ControllerWorld(2, keep_steps=2)
    ranks = world.launch(2)
    world.get(ranks)
    assert world.put_all(ranks, 1)
    assert world.put_all(ranks, 2)
    for number, step in ((rank, 1), (1 - rank, 2)):
        process = ranks[number]
        world.call(process, "rewind", step=step, nonce=process.nonce, key=process.key)
        world.run(0.5)
    assert "another rank rewinds" in ranks[rank].error("rewind")


@pytest.mark.parametrize("new", ["controller", "holder"])
def test_a_rank_that_died_unseen_does_not_count_as_alive(new: str) -> None:
    """Its host cannot prove dead a process that it never saw: status and rm go by those that it knows (R20)."""
    world = ControllerWorld(3)
    ranks = world.launch(3, "k")
    world.get(ranks)
    if new == "controller":
        world.crash_controller(restart_after_s=2.0)
        ranks[0].is_dead = ranks[1].is_dead = True  # it is reported to no controller
    else:
        for host in ("h0", "h1"):
            world.kill_host(host, keep_memory=True)
            world.run(1.0)
            world.return_host(host)
    world.run(8.0)
    assert ranks_alive(world) == 1
    world.served.handle(0.0, Received("h1", RankArrived(nonce=ranks[1].nonce)))
    assert ranks_alive(world) == 2


def ranks_alive(world: ControllerWorld) -> int:
    """What `memstore status` says."""
    return int(world.status()["jobs"][0]["ranks_alive"])


def test_a_launch_that_gathers_says_who_is_awaited() -> None:
    """Ranks that wait can ask, and status shows which ranks of the launch have come."""
    world = ControllerWorld(3)
    ranks = [world.join(r, 4, "k") for r in (0, 2)]
    world.run(1.0)
    row = world.status()["launches"][0]
    assert (row["job"], row["phase"], row["ranks"], row["world_size"]) == (JOB, "gathering", 2, 4)
    assert row["missing"] == [1, 3]
    assert not [problem for problem in world.status()["problems"] if problem["kind"] == "launch_waits"]
    world.run(6.0)
    world.call(ranks[0], "roll_call", of="join")
    world.run(0.5)
    answer = ranks[0].answers["roll_call"][-1]
    assert answer == {"come": "2 of 4 ranks have come", "awaited": "ranks 1, 3", "is_complete": False}
    [problem] = [problem for problem in world.status()["problems"] if problem["about"] == JOB]
    assert problem["cause"] == "a launch gathers: 2 of 4 ranks have come after 7 s, waiting for ranks 1, 3"
    assert (problem["kind"], problem["severity"]) == ("launch_waits", "note")
    assert problem["remedy"].startswith("start ranks 1, 3, or see")
    ranks += [world.join(r, 4, "k") for r in (1, 3)]
    world.run(1.0)
    assert {rank.attempt for rank in ranks} == {1}
    assert world.status()["launches"] == []
    assert "launch_waits" not in {problem["kind"] for problem in world.status()["problems"]}


def test_a_launch_that_waits_for_a_host_names_it() -> None:
    """While a silent host is awaited to refuse older ranks, or to list markers, the ranks that wait can ask for it."""
    world = ControllerWorld(3, durable="/durable")
    first = world.launch(3)
    world.get(first)
    world.silence("h1")
    ranks = [world.join(r, 3, "again", host="h0") for r in range(3)]
    seen = set()
    for _ in range(2000):
        world.run(0.01)
        seen |= {(row["phase"], row["awaited"]) for row in world.status()["launches"]}
        if all(rank.answers.get("join") for rank in ranks):
            break
    assert ("fencing", "1 host to refuse ranks of older attempts (h1)") in seen
    assert ("listing", "host h0 to list what durable storage has of the job") in seen


def test_a_rank_gives_up_when_what_is_left_of_its_connect_is_over() -> None:
    """Finding the holder took most of connect_timeout_s: gathering has the rest, not all of it again."""
    world = ControllerWorld(2)
    rank = world.join(0, 2, "k", limit_s=3.0)
    world.run(5.0)
    assert rank.error("join").startswith("GatherTimeout")


# -- ended --------------------------------------------------------------------------------------------
# Leaving by an exception is a death with a reason: it counts, and it is named wherever people look (R25).


NAN = "ValueError: the loss is NaN"


def leave(world: ControllerWorld, ranks: list[DirectedRank], error: str = NAN) -> None:
    for rank in ranks:
        world.call(rank, "close", error=error)
    world.run(1.0)


def kinds(world: ControllerWorld) -> list[str]:
    return [row["event"] for row in world.events("train")]


def test_a_job_that_dies_of_an_exception_is_moved_off_its_bad_step() -> None:
    """Three restores of step 2 end by the same exception: the fourth gets step 1, and says why."""
    world, _ = trained(3, last=2, keep_steps=2)
    for _ in range(3):
        ranks = world.launch(3)
        assert world.get(ranks)[0]["step"] == 2
        leave(world, ranks)
    answers = world.get(world.launch(3))
    world.check_restored(answers)
    assert answers[0]["step"] == 1
    assert "the training dies of it" in str(answers[0]["rejected"])


def test_a_good_end_is_no_death() -> None:
    """Ranks that close without an exception may restore a step as often as they like."""
    world, _ = trained(3, last=2, keep_steps=2)
    for _ in range(5):
        ranks = world.launch(3)
        assert world.get(ranks)[0]["step"] == 2
        leave(world, ranks, error="")
    assert "closed" in kinds(world)
    assert "ended" not in kinds(world)


def test_the_exception_and_its_rank_are_named_and_outlive_the_controller() -> None:
    """status and events say who ended and by what, not "closed by all its ranks", also under a successor."""
    world, ranks = trained(3, last=2)
    leave(world, ranks[1:2])
    leave(world, [ranks[0], ranks[2]], error="")
    for _ in range(2):
        newest = world.status()["jobs"][0]["newest"]
        assert (newest["phase"], newest["ended_by"]) == ("closed", "ValueError on rank 1: the loss is NaN")
        world.crash_controller()
        world.run(5.0)
    rows = {row["event"]: row for row in world.events("train")}
    assert "closed" not in rows


def test_a_rank_that_ends_by_an_exception_frees_the_others_at_once() -> None:
    """A get of the others does not wait for it until their deadline."""
    world, _ = trained(3, last=2)
    ranks = world.launch(3)
    ranks[0].loads = False
    for rank in ranks:
        world.call(rank, "get", step=None, timeout_s=600.0)
    assert world.run_until(lambda: all(rank.answers.get("get") for rank in ranks))
    leave(world, ranks[:1])
    assert "rank 0 died" in ranks[1].error("get")
    row = next(row for row in world.events("train") if row["event"] == "rank_ended")
    assert (row["rank"], row["why"]) == (0, NAN)


def test_the_last_close_is_answered_once_it_is_recorded() -> None:
    """A status that is asked for after it shows a closed job; the ranks before it do not wait for the others."""
    world, ranks = trained(3, last=1)
    world.call(ranks[0], "close")
    assert world.run_until(lambda: "close" in ranks[0].answers, 5.0)
    assert world.job().attempts[1].phase != "closed"
    for rank in ranks[1:]:
        world.call(rank, "close")
    assert world.run_until(lambda: all("close" in rank.answers for rank in ranks), 5.0)
    assert world.job().attempts[1].phase == "closed"


# -- late hosts ---------------------------------------------------------------------------------------
# A launch waits for hosts that are on their way and may know more of its job, then leaves them numbers (R20).


def restarted_without_memory() -> ControllerWorld:
    """Return a cluster of two that trained to step 3: all restarted, h0 has lost its memory, h1 has not come yet."""
    world, _ = trained(2, last=3)
    world.crash_controller(restart_after_s=None)
    world.kill_host("h1", keep_memory=True)
    world.kill_host("h0")
    world.return_host("h0")
    world.start_controller()
    assert world.run_until(lambda: world.served.is_settled, 20.0)
    assert JOB not in world.served.state.jobs
    return world


def test_a_launch_waits_for_the_host_that_has_everything() -> None:
    """It takes the number after those that the late host knows, and restores what only that host has."""
    world = restarted_without_memory()
    ranks = [world.join(rank, 2, "again", host="h0") for rank in range(2)]
    world.run(3.0)
    assert [(row["awaited"], row["missing"]) for row in world.status()["launches"]] == [
        ("host h1, which may know the job", [])
    ]
    world.return_host("h1")
    assert world.run_until(lambda: all(rank.attempt for rank in ranks), 5.0)
    assert {rank.attempt for rank in ranks} == {2}
    answers = world.get(ranks)
    world.check_restored(answers)
    assert {(answer["attempt"], answer["step"]) for answer in answers} == {(1, 3)}


@pytest.mark.parametrize("connect_s", [4.0, 20.0])
def test_status_says_how_long_such_a_launch_still_waits(connect_s: float) -> None:
    """Until half of its connect is over, or the time for late hosts, whichever comes first."""
    world = restarted_without_memory()
    ranks = [world.join(rank, 2, "again", host="h0", limit_s=connect_s) for rank in range(2)]
    world.run(0.5)
    [row] = world.status()["launches"]
    says_s = world.now + row["left_s"]
    assert world.run_until(lambda: all(rank.attempt for rank in ranks), 12.0)
    assert world.now == pytest.approx(says_s, abs=1.0)


def test_a_fresh_launch_waits_for_no_host() -> None:
    """It wants nothing of the past; its number is none that the late host may know."""
    world = restarted_without_memory()
    assert world.launch(2, fresh=True)[0].attempt == 1001


def test_a_launch_that_no_late_host_joined_begins_with_half_of_its_time_left() -> None:
    """It starts from nothing under a number that no other launch has, and loses to what the late host brings."""
    world = restarted_without_memory()
    began_s = world.now
    ranks = world.launch(2)
    assert {rank.attempt for rank in ranks} == {1001}
    assert world.now - began_s < 11.0  # of a connect_timeout_s of 20
    assert [answer["step"] for answer in world.get(ranks)] == [None, None]
    world.return_host("h1")
    world.run(3.0)
    assert world.job().newest_number == 1001
    assert "a late host knows of attempt 1, which attempt 1001 does not follow" in "\n".join(world.notes)
    ranks = world.launch(2, takeover=True)
    assert {rank.attempt for rank in ranks} == {1002}
    assert {(answer["attempt"], answer["step"]) for answer in world.get(ranks)} == {(1, 3)}


def test_such_a_launch_does_not_take_the_racks_that_the_job_asked_for() -> None:
    """It knew of none, and sits in one rack; once the late host is here, the next one asks for racks again (R18)."""
    labels = {"h0": {"rack": "r0"}, "h1": {"rack": "r1"}, "h2": {"rack": "r0"}, "h3": {"rack": "r0"}}
    world = ControllerWorld(4, labels=labels)
    world.get(world.launch(2))
    world.crash_controller(restart_after_s=None)
    for host in world.holders:
        world.kill_host(host, keep_memory=host == "h1")
    for host in ("h0", "h2", "h3"):
        world.return_host(host)
    world.start_controller()
    for number in (1001, 1002):
        ranks = [world.join(rank, 2, str(number), host=host, takeover=True) for rank, host in enumerate(("h0", "h2"))]
        assert world.run_until(lambda ranks=ranks: all(rank.attempt for rank in ranks), 15.0)
        world.return_host("h1")
        world.run(3.0)
    asked = {number: attempt.level_asked for number, attempt in world.job().attempts.items()}
    assert asked == {1: "rack", 1001: "host", 1002: "rack"}


def test_what_such_a_launch_committed_is_what_the_next_one_goes_on_from() -> None:
    """Two lineages have steps: the newest attempt's counts, and the late host's stays for a rewind."""
    world = restarted_without_memory()
    ranks = world.launch(2)
    world.get(ranks)
    world.return_host("h1")
    world.run(3.0)
    assert world.put_all(ranks, 1)
    answers = world.get(world.launch(2, takeover=True))
    assert {(answer["attempt"], answer["step"]) for answer in answers} == {(1001, 1)}


def test_a_launch_that_only_connected_and_the_next_one_give_way_too() -> None:
    """Neither has got anything: the launch after them restores what the late host brought meanwhile."""
    world = restarted_without_memory()
    assert world.launch(2)[0].attempt == 1001
    assert world.launch(2, takeover=True)[0].attempt == 1002
    world.return_host("h1")
    world.run(3.0)
    ranks = world.launch(2, takeover=True)
    assert {(answer["attempt"], answer["step"]) for answer in world.get(ranks)} == {(1, 3)}


def went_on_alone() -> ControllerWorld:
    """Return a cluster of two that was restarted: h0 is here and knows attempt 1, h1 is late and went on as 2."""
    world, _ = trained(2, last=3)
    world.kill_host("h0", keep_memory=True)
    world.run(7.0)
    ranks = world.launch(2, takeover=True)
    world.get(ranks)
    assert world.put_all(ranks, 5)
    world.run(1.0)
    world.crash_controller(restart_after_s=None)
    world.kill_host("h1", keep_memory=True)
    world.return_host("h0")
    world.start_controller()
    assert world.run_until(lambda: world.served.is_settled, 20.0)
    return world


def test_a_launch_waits_for_a_late_host_that_went_on_alone() -> None:
    """Attempt 2 ran on h1 while h0 was away: the launch after it goes on from there, and takes the next number."""
    world = went_on_alone()
    ranks = [world.join(rank, 2, "again", host="h0", takeover=True) for rank in range(2)]
    world.run(2.0)
    assert [row["awaited"] for row in world.status()["launches"]] == ["host h1, which may have newer steps"]
    world.return_host("h1")
    assert world.run_until(lambda: all(rank.attempt for rank in ranks), 5.0)
    assert {rank.attempt for rank in ranks} == {3}
    answers = world.get(ranks)
    world.check_restored(answers)
    assert {(answer["attempt"], answer["step"]) for answer in answers} == {(2, 5)}


def test_a_launch_waits_for_the_only_host_that_knows_of_the_newest_commit() -> None:
    """The holder of h1 was away for a moment, the step was committed on h0 alone, then all was restarted, h0 late."""
    world = ControllerWorld(2)
    ranks = [world.join(rank, 2, "k", host="h0") for rank in range(2)]
    assert world.run_until(lambda: all(rank.attempt for rank in ranks), 5.0)
    world.get(ranks)
    assert world.put_all(ranks, 3)
    world.kill_host("h1", keep_memory=True)
    assert world.put_all(ranks, 4)
    world.crash_controller(restart_after_s=None)
    world.kill_host("h0", keep_memory=True)
    world.return_host("h1")
    world.start_controller()
    assert world.run_until(lambda: world.served.is_settled, 20.0)
    assert max(world.job().commits) == StepId(1, 3)
    ranks = [world.join(rank, 2, "again", host="h1") for rank in range(2)]
    world.run(2.0)
    assert not ranks[0].attempt
    world.return_host("h0")
    assert world.run_until(lambda: all(rank.attempt for rank in ranks), 5.0)
    answers = world.get(ranks)
    world.check_restored(answers)
    assert {(answer["attempt"], answer["step"]) for answer in answers} == {(1, 4)}


def test_newer_history_of_a_known_job_is_what_the_next_launch_goes_on_from() -> None:
    """h0 knows attempt 1, the late h1 attempt 2: a launch of h0 alone that got nothing gives way to attempt 2."""
    world = went_on_alone()
    assert world.launch(2, takeover=True)[0].attempt == 1002
    world.return_host("h1")
    world.run(3.0)
    answers = world.get(world.launch(2, takeover=True))
    world.check_restored(answers)
    assert {(answer["attempt"], answer["step"]) for answer in answers} == {(2, 5)}


def test_ranks_that_only_a_late_host_knows_keep_no_other_launcher_out() -> None:
    """All machines were restarted, so they are dead; a launch of another name waits for their host, and goes on."""
    world = restarted_without_memory()
    first = world.join(0, 2, "again", host="h0", launcher="another")
    world.run(1.0)
    world.return_host("h1")
    world.run(3.0)
    second = world.join(1, 2, "again", host="h0", launcher="another")
    assert world.run_until(lambda: first.attempt > 0 and second.attempt > 0, 5.0), (first.errors, second.errors)
    assert {first.attempt, second.attempt} == {2}


@pytest.mark.parametrize("takeover", [False, True])
@pytest.mark.parametrize("phase", ["gathering", "listing"])
def test_a_launch_that_waits_is_asked_again_once_the_job_is_known(
    phase: str, monkeypatch: pytest.MonkeyPatch, *, takeover: bool
) -> None:
    """The late host was only out of reach: the rank that trains there is fenced by a takeover alone (R20)."""
    world, trains = trained(2, last=3)
    world.crash_controller(restart_after_s=None)
    world.silence("h1")
    world.kill_host("h0")
    world.return_host("h0")
    world.start_controller()
    assert world.run_until(lambda: world.served.is_settled, 20.0)
    config = {**world.config, "durable": "/durable" if phase == "listing" else None}
    first, lists, held = world.holders["h0"], world.holders["h0"].obey, list[Order]()
    monkeypatch.setattr(first, "obey", lambda order: (held.append if isinstance(order, ListMarkers) else lists)(order))
    ranks = [
        world.join(rank, 2, "again", host="h0", launcher="another", takeover=takeover, config=config)
        for rank in range(2)
    ]
    assert world.run_until(lambda: [row["phase"] for row in world.status()["launches"]] == [phase], 12.0)
    world.thaw("h1")
    assert world.run_until(lambda: JOB in world.served.state.jobs, 2.0)
    monkeypatch.undo()
    for order in held:
        first.obey(order)
    assert world.run_until(lambda: all(rank.attempt or rank.errors for rank in ranks), 8.0)
    if takeover:
        assert ({rank.attempt for rank in ranks}, trains[1].is_fenced) == ({2}, True)
    else:
        assert ["rank 1 of attempt 1 is alive on host h1" in rank.error("join") for rank in ranks] == [True, True]
        assert (world.job().newest_number, trains[1].is_fenced) == (1, False)


# -- rewind -------------------------------------------------------------------------------------------
# Going back: to kept, pinned and durable steps, and every reason to refuse, on all ranks alike (R22, R27).


def rewind(world: ControllerWorld, ranks: list[DirectedRank], step: int, attempt: int | None = None) -> str:
    """All ranks rewind; return the error that all of them got, or ""."""
    for rank in ranks:
        rank.answers.pop("rewind", None)
        rank.errors.pop("rewind", None)
        world.call(rank, "rewind", step=step, of_attempt=attempt, nonce=rank.nonce, key=rank.key)
    assert world.run_until(lambda: all(r.answers.get("rewind") or r.errors.get("rewind") for r in ranks), 30.0)
    errors = {rank.error("rewind") for rank in ranks}
    assert len(errors) == 1, errors
    for rank in ranks:
        rank.has_room = False
        rank.answers.pop("reserve", None)
    return errors.pop()


def test_three_steps_are_kept_and_the_oldest_is_gone_back_to() -> None:
    """keep_steps=3: the oldest of three is rewound to, training goes on, and a restart sees the new lineage alone."""
    world, ranks = trained(3, last=6, keep_steps=3)
    assert sorted(s.step for s in world.job().copies) == [4, 5, 6]
    assert rewind(world, ranks, 4) == ""
    answers = world.get(ranks)
    world.check_restored(answers)
    assert (answers[0]["attempt"], answers[0]["step"]) == (1, 4)
    assert world.put_all(ranks, 5)
    world.run(1.0)
    assert sorted(world.job().copies) == [StepId(1, 4), StepId(2, 5)]
    again = world.launch(3)
    answers = world.get(again)
    world.check_restored(answers)
    assert (answers[0]["attempt"], answers[0]["step"], again[0].attempt) == (2, 5, 3)
    assert [(s.attempt, s.step_max) for s in world.job().spans(3)] == [(3, None), (2, 5), (1, 4)]


@pytest.mark.parametrize(
    ("step", "why"),
    [
        (9, "no committed step 9: its committed steps are 2"),
        (3, "no committed step 3: it was put and is not committed"),
    ],
)
def test_what_is_not_committed_cannot_be_gone_back_to(step: int, why: str) -> None:
    """An unknown step and one that only one rank has put are refused with what there is; nothing changes."""
    world, ranks = trained(2, last=2)
    world.put(ranks[0], 3)
    world.run(1.0)
    assert why in rewind(world, ranks, step)
    assert world.job().newest_number == 1


def test_a_step_of_several_other_lineages_needs_its_attempt() -> None:
    """Two hidden attempts have step 2: the number alone is refused and names them, with the attempt it is found."""
    world, ranks = trained(2, last=2, keep_steps=3)
    for _ in range(2):
        assert rewind(world, ranks, 1) == ""
        world.call(ranks[0], "pin", step=1, name="start")
        assert world.put_all(ranks, 2)
        world.call(ranks[0], "pin", step=2, name=f"of-{ranks[0].attempt}")
        world.run(1.0)
    assert rewind(world, ranks, 1) == ""
    why = rewind(world, ranks, 2)
    assert "step 2 of job 'train' is not in the present lineage" in why
    assert "attempts 2, 3 each have one: name the attempt with store.rewind(2, attempt=...)" in why
    assert rewind(world, ranks, 2, attempt=2) == ""
    answers = world.get(ranks)
    world.check_restored(answers)
    assert (answers[0]["attempt"], answers[0]["step"]) == (2, 2)


def test_another_world_size_is_refused_before_an_attempt_opens() -> None:
    """Three ranks put the step, two want to go back to it (R27)."""
    world, _ = trained(3, last=2, keep_steps=2)
    two = world.launch(2)
    assert "WorldSizeError" in world.get(two)[0]["error"]
    why = rewind(world, two, 1)
    assert why.startswith("WorldSizeError: step 1 (attempt 1) of job 'train' was put by 3 ranks, this attempt has 2")
    assert world.job().newest_number == 2


def test_a_retired_step_and_a_lost_one_are_refused() -> None:
    """Else get() would quietly take an older one (R25)."""
    world, ranks = trained(3, last=3, keep_steps=3, replicas=2)
    world.call(ranks[0], "retire", attempt=1, step=2, reason="the training dies of it")
    world.run(1.0)
    assert "is retired: the training dies of it" in rewind(world, ranks, 2)
    for holder in world.holders.values():
        lost = [shard for shard in holder.held if shard.step == 1 and shard.rank == 2]
        if lost:
            holder.lose(*lost)
    world.run(0.1)
    assert "step 1 (attempt 1) of job 'train' is not whole any more" in rewind(world, ranks, 1)
    assert rewind(world, ranks, 3) == ""


def test_a_fenced_launch_cannot_rewind() -> None:
    """While another attempt runs the older one's ranks get an error that says so."""
    world, old = trained(2, last=2, keep_steps=2)
    newer = [world.join(rank, 2, "newer", takeover=True) for rank in range(2)]
    assert world.run_until(lambda: all(rank.attempt == 2 for rank in newer), 15.0)
    assert rewind(world, old, 1).startswith("FencedError")


def test_a_step_that_only_durable_storage_has_is_found_by_a_new_controller() -> None:
    """The step left RAM long ago and the controller is new: markers are listed before it is refused (R31)."""
    world, ranks = trained(2, last=4, durable="/durable", durable_every=1, durable_keep=10)
    assert world.run_until(lambda: (JOB, 1, 4) in world.durable.markers, 30.0)
    assert (JOB, 1, 1) in world.durable.markers
    assert StepId(1, 1) not in world.job().copies
    world.crash_controller()
    assert world.run_until(lambda: world.machine is not None and world.served.is_settled, 30.0)
    world.run(2.0)
    assert "no committed step 7" in rewind(world, ranks, 7)
    assert rewind(world, ranks, 1) == ""
    answers = world.get(ranks)
    world.check_restored(answers)
    assert (answers[0]["step"], answers[0]["verdict"]) == (1, "durable")


def test_an_unreadable_durable_directory_is_named() -> None:
    """A step that RAM does not have is refused with why the storage could not say."""
    world, ranks = trained(2, last=4, durable="/durable", durable_every=1)
    world.durable.problem = "Input/output error"
    why = rewind(world, ranks, 3)
    assert "Durable storage could not be read: Input/output error" in why


def test_a_rewind_while_the_newest_step_commits_leaves_room_for_the_next_put() -> None:
    """keep_steps=1: a newer step commits while the rewind holds its own, and two versions fill the share (R10)."""
    world, ranks = trained(3, last=1)
    for rank in ranks[:2]:
        world.call(rank, "rewind", step=1, of_attempt=None, nonce=rank.nonce, key=rank.key)
    assert world.put_all(ranks, 2)
    assert rewind(world, ranks, 1) == ""
    world.run(2.0)
    assert sorted(world.job().copies) == [StepId(1, 1), StepId(1, 2)]
    world.reserve(ranks)
    world.run(1.0)
    assert sorted(world.job().copies) == [StepId(1, 1)]
    assert world.put_all(ranks, 3)
