"""Connect is collective, attempts are numbered by the store, and opening one fences the older ones (R20, R21)."""

from __future__ import annotations

import pytest

from memstore.core.cluster.facts import AttemptOpened
from memstore.core.wire.calls import Called
from memstore.core.wire.messages import Received
from memstore.core.wire.reports import RankArrived
from memstore.testing.controller.holder import DirectedRank
from memstore.testing.controller.world import JOB, ControllerWorld
from memstore.testing.requests import request_of


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
