"""Forks: a new job over a step of another one's chunks, whole or not at all, and neither harms the other (R10, R32)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from memstore.core.wire.orders import GiveUpFork, LookAtCopies, Reserve
from memstore.testing.controller.holder import CHUNKS, FakeRank, digest_of
from memstore.testing.controller.trained import trained
from memstore.testing.controller.world import ControllerWorld
from recovery.inventory import ShardId, StepId

NEW = "exp-b"


def ask(world: ControllerWorld, rank: FakeRank, verb: str, **body: object) -> str:
    """Ask once, wait for the end; return the error, or ""."""
    rank.answers.pop(verb, None)
    rank.errors.pop(verb, None)
    world.call(rank, verb, **body)
    is_over = world.run_until(lambda: bool(rank.answers.get(verb) or rank.errors.get(verb)), 90.0)
    assert is_over, world.notes[-20:]
    return rank.error(verb)


def fork(world: ControllerWorld, rank: FakeRank, step: int, new: str = NEW, **body: object) -> str:
    """Fork a step; return the error, or ""."""
    return ask(world, rank, "fork", **{"step": step, "new_job": new, "nonce": "n", **body})


def know_the_fork(world: ControllerWorld, step: int, size: int, new: str = NEW, attempt: int = 1) -> None:
    """What a restore of the fork must give: the origin's bytes under the new name."""
    for rank in range(size):
        origin = world.put_digests[ShardId("train", 1, step, rank)]
        world.put_digests[ShardId(new, attempt, step, rank)] = digest_of(origin, new)


def restore(world: ControllerWorld, job: str, size: int = 3) -> list[dict[str, object]]:
    """Launch a job and get; return the answers, checked."""
    answers = world.get(world.launch(size, job=job))
    world.check_restored(answers)
    return answers


def copies(world: ControllerWorld, job: str) -> int:
    """Copies of a job on all hosts."""
    return sum(shard.job == job for holder in world.holders.values() for shard in holder.copies)


def test_a_fork_begins_with_the_step_and_knows_where_from() -> None:
    """Every holder of a copy makes one of the new job; its first get() returns the step, and its training goes on."""
    world, ranks = trained(3, last=3, keep_steps=2)
    assert fork(world, ranks[1], 2) == ""
    answer = ranks[1].answers["fork"][-1]
    assert (answer["job"], answer["attempt"], answer["step"], answer["copies"]) == (NEW, 1, 2, 2)
    origin = world.job(NEW).origin
    assert origin is not None
    assert (origin.from_job, origin.from_attempt, origin.step) == ("train", 1, 2)
    know_the_fork(world, 2, 3)
    answers = restore(world, NEW)
    assert (answers[0]["step"], answers[0]["attempt"]) == (2, 1)
    forked = [world.ranks[NEW, rank] for rank in range(3)]
    for step in (3, 4):
        assert world.put_all(forked, step)
    assert world.put_all(ranks, 4)
    assert restore(world, NEW)[0]["step"] == 4
    assert restore(world, "train")[0]["step"] == 4


@pytest.mark.parametrize("removed", ["train", NEW])
def test_either_job_may_be_removed(removed: str) -> None:
    """What is left restores as before, and the other's copies are gone."""
    world, ranks = trained(3, last=2)
    assert fork(world, ranks[0], 2) == ""
    know_the_fork(world, 2, 3)
    world.call(ranks[0], "rm", job=removed, force=True)
    world.run(2.0)
    left = NEW if removed == "train" else "train"
    assert copies(world, removed) == 0
    assert removed not in world.served.jobs
    assert restore(world, left)[0]["step"] == 2


def test_the_origin_may_go_on_and_drop_the_step() -> None:
    """Retention of the origin frees its own references only; the fork is repaired like any job's step (R29)."""
    world, ranks = trained(4, world_size=2, last=1)
    assert fork(world, ranks[0], 1) == ""
    know_the_fork(world, 1, 2)
    for step in range(2, 6):
        assert world.put_all(ranks, step)
    world.run(1.0)
    assert world.holders_of(StepId(1, 1), 0) == []
    victim = world.holders_of(StepId(1, 1), 0, NEW)[-1]
    world.kill_host(victim)
    is_repaired = world.run_until(lambda: all(len(world.holders_of(StepId(1, 1), r, NEW)) == 2 for r in (0, 1)), 40.0)
    assert is_repaired
    assert restore(world, NEW, 2)[0]["step"] == 1


@pytest.mark.parametrize(
    ("step", "new", "why"),
    [
        (3, "train", "ConfigError: job 'train' exists: fork to another name"),
        (9, NEW, "no committed step 9: its committed steps are 3"),
        (4, NEW, "no committed step 4: it was put and is not committed"),
        (3, "a b", "job name 'a b' is not allowed"),
    ],
)
def test_what_cannot_be_forked_is_refused(step: int, new: str, why: str) -> None:
    """A name that is taken or bad, a step that is unknown or not committed; nothing is left of it."""
    world, ranks = trained(2, last=3)
    world.put(ranks[0], 4)
    world.run(0.5)
    assert why in fork(world, ranks[0], step, new)
    assert list(world.served.jobs) == ["train"]


def test_a_second_fork_of_the_name_is_refused_and_a_repeated_call_is_not() -> None:
    """The nonce tells them apart: a call that is asked again after its controller died is the same fork."""
    world, ranks = trained(2, last=3)
    assert fork(world, ranks[0], 3) == ""
    assert fork(world, ranks[0], 3) == ""
    assert "job 'exp-b' exists" in fork(world, ranks[0], 3, nonce="another")


def test_a_step_on_durable_storage_alone_is_refused_by_that_name() -> None:
    """A fork shares chunks that are in RAM; it fetches none."""
    world, ranks = trained(2, last=1, durable="/durable", durable_every=1, durable_keep=10)
    assert world.run_until(lambda: StepId(1, 1) in world.job().markers, 30.0)
    for step in range(2, 5):
        assert world.put_all(ranks, step)
    assert world.run_until(lambda: StepId(1, 1) not in world.job().copies, 30.0)
    assert "cannot be forked: it is on durable storage only" in fork(world, ranks[0], 1)


def test_a_name_that_durable_storage_knows_is_refused() -> None:
    """RAM forgot that job long ago; its markers would be mixed with the fork's history (D23)."""
    world, ranks = trained(2, last=1, durable="/durable", durable_every=1)
    assert world.run_until(lambda: ("train", 1, 1) in world.durable.markers, 30.0)
    world.durable.markers["old", 7, 70] = world.durable.markers["train", 1, 1]
    assert "job 'old' has steps on durable storage" in fork(world, ranks[0], 1, "old")
    world.durable.problem = "Input/output error"
    assert "is unknown: Input/output error" in fork(world, ranks[0], 1)
    world.durable.problem = ""
    assert fork(world, ranks[0], 1) == ""


def test_a_fork_claims_room_for_the_one_step_it_begins_with() -> None:
    """Its origin may keep any number of steps.

    No process writes to it before a process connects, and then a first put claims (R10).
    """
    world, ranks = trained(3, last=3, keep_steps=2)
    assert fork(world, ranks[0], 3) == ""
    for holder in world.holders.values():
        claims = [order for order in holder.received(Reserve) if order.job == NEW]
        assert claims
        assert all(order.versions == 1 for order in claims)
        assert all(row.slots == CHUNKS for order in claims for row in order.ranks)


def test_a_fork_without_room_is_refused_and_leaves_no_claim() -> None:
    """It shares every chunk, and still needs room for the day when the origin drops them (R10)."""
    world, ranks = trained(3, last=2)
    world.holders["h2"].refuses_room = "needs 9.00 GiB, may take 8.00 GiB"
    why = fork(world, ranks[0], 2)
    assert why.startswith("CapacityError: exp-b does not fit on h2: it shares the chunks of train")
    world.run(1.0)
    assert NEW not in world.served.jobs
    for holder in world.holders.values():
        assert holder.orders[-1] == GiveUpFork(job=NEW, attempt=1)  # so the next job of this name is not fenced
    world.holders["h2"].refuses_room = ""
    assert fork(world, ranks[0], 2) == ""


def test_attempt_numbers_of_a_removed_name_go_on() -> None:
    """A fork to the name of a removed job: late copies of the old one are not taken for its own (D23)."""
    world, ranks = trained(2, last=1)
    assert fork(world, ranks[0], 1) == ""
    world.call(ranks[0], "rm", job=NEW, force=True)
    world.run(1.0)
    assert fork(world, ranks[0], 1, nonce="again") == ""
    assert ranks[0].answers["fork"][-1]["attempt"] == 2
    know_the_fork(world, 1, 2, attempt=2)
    answers = restore(world, NEW, 2)
    assert (answers[0]["attempt"], world.job(NEW).newest_number) == (2, 3)


@pytest.mark.parametrize("crash_after_s", [0.01, 0.03, 0.05, 0.08, 0.12, 0.2, 0.3, 0.45])
@pytest.mark.parametrize("victim", ["controller", "holder", "everything", "controller, and the caller is gone"])
def test_a_crash_leaves_a_whole_fork_or_none(crash_after_s: float, victim: str) -> None:
    """Wherever it strikes: get() of the new name gives the step, or no host knows of it."""
    world, ranks = trained(3, last=2, seed=int(1000 * crash_after_s))
    know_the_fork(world, 2, 3)
    world.run(0.5)  # orders to drop step 1 are carried out
    world.call(ranks[0], "fork", step=2, new_job=NEW, nonce="n")
    world.run(crash_after_s)
    if "controller" in victim:
        if "caller" in victim:
            world.kill_rank(ranks[0])
        world.crash_controller()
    elif victim == "holder":
        world.kill_host("h1", keep_memory=True)
        world.return_host("h1")
    else:
        world.crash_controller(restart_after_s=None)
        for host in world.holders:
            world.kill_host(host, keep_memory=True)
        for host in world.holders:
            world.return_host(host)
        world.start_controller()
    assert world.run_until(lambda: world.machine is not None and world.served.is_settled, 20.0)
    world.run(15.0)
    is_there = NEW in world.served.jobs
    assert is_there == (copies(world, NEW) > 0)
    assert copies(world, NEW) in (0, 6)
    assert copies(world, "train") == 6
    if is_there:
        assert restore(world, NEW)[0]["step"] == 2
    else:
        assert world.get(world.launch(3, job=NEW)) == [{"step": None}] * 3
    answers = restore(world, "train")
    assert answers[0]["step"] == 2


def test_the_origin_is_kept_until_the_fork_is_whole() -> None:
    """A holder that cannot make its part at once, and the origin trains on: the step waits for the fork."""
    world, ranks = trained(2, last=1, replicas=1)
    slow = world.holders["h1"]
    made, slow._fork = slow._fork, lambda order: made(order) if isinstance(order, LookAtCopies) else None  # type: ignore[method-assign]
    world.call(ranks[0], "fork", step=1, new_job=NEW, nonce="n")
    assert world.run_until(lambda: NEW in world.served.jobs, 20.0)
    for step in range(2, 5):
        assert world.put_all(ranks, step)
    assert world.holders_of(StepId(1, 1), 1) == ["h1"]
    assert "is being forked to 'exp-b', which is not whole yet" in ask(world, ranks[1], "rm", force=True)
    slow._fork = made  # type: ignore[method-assign]
    assert world.run_until(lambda: bool(ranks[0].answers.get("fork")), 20.0)
    assert world.put_all(ranks, 5)
    world.run(1.0)
    assert world.holders_of(StepId(1, 1), 1) == []
    know_the_fork(world, 1, 2)
    assert restore(world, NEW, 2)[0]["step"] == 1


@pytest.mark.parametrize("rots", ["both", "the fork's"])
def test_a_chunk_that_rotted_in_both_keeps_no_step_of_the_origin(rots: str) -> None:
    """The fork can have no more from its origin, whose training would find no room; else it may yet get it."""
    world, ranks = trained(2)
    assert fork(world, ranks[0], 1) == ""
    world.kill_host("h1")
    holder = world.holders["h0"]
    holder._fork = lambda order: None  # type: ignore[method-assign]
    for job in ("train", NEW) if rots == "both" else (NEW,):
        holder.keep(replace(holder.copies[ShardId(job, 1, 1, 0)], missing=frozenset({1})))
    world.run(1.0)
    assert world.served.parts.forks.needed(world.job()) == {StepId(1, 1)}, "h1 may come back"
    world.run(world.rules.dead_after_s)
    needed = set() if rots == "both" else {StepId(1, 1)}
    assert world.served.parts.forks.needed(world.job()) == needed
    assert world.served.parts.forks.unfinished(world.job()) == ([] if rots == "both" else [NEW])


@pytest.mark.parametrize("where", ["here", "elsewhere"])
def test_a_fork_whose_last_copy_lost_a_chunk_gets_it_from_its_origin(where: str) -> None:
    """The origin's was repaired where the fork's lies, or is whole on a host that made none of the fork."""
    world, ranks = trained(3)
    assert fork(world, ranks[0], 1) == ""
    here, gone = world.holders_of(StepId(1, 1), 0, NEW)
    [other] = world.holders.keys() - {here, gone}
    world.kill_host(gone)
    holder, torn = world.holders[here], frozenset({1})
    if where == "elsewhere":
        origin = holder.copies[ShardId("train", 1, 1, 0)]
        holder.keep(replace(origin, missing=torn))
        world.holders[other].keep(replace(origin, host=other))
    holder.keep(replace(holder.copies[ShardId(NEW, 1, 1, 0)], missing=torn))
    world.run(2.0 * world.rules.dead_after_s)
    assert (here if where == "here" else other) in world.holders_of(StepId(1, 1), 0, NEW)
    assert not world.served.parts.forks.unfinished(world.job())


def test_the_origin_is_kept_for_a_host_that_a_new_controller_has_not_seen_yet() -> None:
    """What the fork lost may come with a host that was announced; when its time is over the origin's step may go."""
    world, ranks = trained(2)
    assert fork(world, ranks[0], 1) == ""
    world.kill_host("h1", keep_memory=True)
    world.run(1.0)
    for job in ("train", NEW):
        world.holders["h0"].keep(replace(world.holders["h0"].copies[ShardId(job, 1, 1, 0)], missing=frozenset({1})))
    world.run(1.0)
    world.crash_controller()
    world.run(world.rules.recovery_grace_s - 1.0)
    assert world.served.parts.forks.needed(world.job()) == {StepId(1, 1)}
    world.run(2.0)
    assert world.served.parts.forks.needed(world.job()) == set()
