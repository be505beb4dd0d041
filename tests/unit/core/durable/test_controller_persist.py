"""A step is made durable out of turn, when a process asks for it (R31)."""

from __future__ import annotations

from typing import Any

import pytest

from memstore.core.durable.checks import CHECK_DEADLINE_S
from memstore.core.durable.departures import LOOK_AGAIN_S
from memstore.core.report.problems import NOTE
from memstore.core.wire.messages import DrainsSeen
from memstore.core.wire.orders import DurableOrder, ListMarkers, WriteSlices
from memstore.testing.controller.holder import WRITES, DirectedRank
from memstore.testing.controller.world import ControllerWorld, written


def hourly(last: int, **config: Any) -> tuple[ControllerWorld, list[DirectedRank]]:
    """A job whose first step alone is durable by its schedule, and which has committed steps 1 to `last`."""
    return written(last, **{"durable_every": "1h", **config})


def answers(rank: DirectedRank) -> list[Any]:
    """What the rank got for its requests, and the refusals as text."""
    return [*rank.answers.get("persist", ()), *rank.errors.get("persist", ())]


def persist(world: ControllerWorld, rank: DirectedRank, step: int | None = None, within_s: float = 30.0) -> Any:
    """Ask for a step; return the answer or the refusal."""
    count = len(answers(rank))
    world.call(rank, "persist", step=step, within_s=within_s)
    assert world.run_until(lambda: len(answers(rank)) > count, within_s + 10.0)
    return answers(rank)[-1]


def test_the_newest_committed_step_is_written_now() -> None:
    """Ahead of the schedule; the answer comes with the marker, and no other rank has to ask."""
    world, ranks = hourly(last=6)
    assert sorted(step for _, _, step in world.durable.markers) == [1]
    answer = persist(world, ranks[1])
    assert (answer["step"], answer["is_durable"], answer["problem"]) == (6, True, "")
    assert ("train", 1, 6) in world.durable.markers


def test_asking_twice_is_one_write() -> None:
    """Both ranks wait for the same one, and asking for what is durable writes nothing."""
    world, ranks = hourly(last=3)
    for rank in ranks:
        world.call(rank, "persist", step=None, within_s=30.0)
    assert world.run_until(lambda: all(answers(rank) for rank in ranks), 20.0)
    assert persist(world, ranks[0], 3)["is_durable"]
    wrote = [hosts for (shard, _), hosts in world.durable.writers.items() if shard.step == 3]
    assert wrote
    assert all(len(hosts) == 1 for hosts in wrote)


def test_what_the_storage_lost_since_is_written_again() -> None:
    """The storage is looked at before the answer says that a step is durable."""
    world, ranks = hourly(last=3)
    assert persist(world, ranks[0])["is_durable"]
    world.durable.markers.clear()
    assert persist(world, ranks[0])["is_durable"]
    assert ("train", 1, 3) in world.durable.markers


@pytest.mark.parametrize(
    ("fate", "within_s"), [("dies", 20.0), ("hangs", CHECK_DEADLINE_S + 20.0), ("is silent already", 2.0)]
)
def test_a_host_that_never_says_what_the_storage_has_is_not_waited_for(fate: str, within_s: float) -> None:
    """It dies while it looks, or its way to the storage hangs: another look follows. A silent one is not asked."""
    world, ranks = hourly(last=2)
    assert persist(world, ranks[1])["is_durable"]
    world.holders["h0"].instead[ListMarkers] = lambda order: None
    if fate == "is silent already":
        world.silence("h0")
        assert world.run_until(lambda: not world.served.hosts.is_answering("h0"), 10.0)
    elif fate == "dies":
        world.at(1.0, lambda: world.kill_host("h0"))
    else:
        world.at(1.0, world.holders["h0"].instead.clear)
    assert persist(world, ranks[1], within_s=within_s)["is_durable"]


@pytest.mark.parametrize(
    ("hangs", "says"),
    [(ListMarkers, "waiting for h0, asked whether durable storage has all of it"), (WriteSlices, "h0, h1 still write")],
)
def test_who_waits_in_vain_is_reported_for_which_host(hangs: type[DurableOrder], says: str) -> None:
    """A host does not say what the storage has, or all write for too long."""
    world, ranks = hourly(last=2)
    if hangs is ListMarkers:
        assert persist(world, ranks[0])["is_durable"]
        world.holders["h0"].instead[ListMarkers] = lambda order: None
    else:
        for holder in world.holders.values():
            holder.instead[WriteSlices] = lambda order: None
    assert persist(world, ranks[0], within_s=3.0)["problem"] == says


def test_a_scheduled_write_makes_way_and_a_requested_one_does_not() -> None:
    """Steps come faster than the storage writes: what a process asked for is finished all the same."""
    world, ranks = hourly(last=2, durable_every=1, keep_steps=2)
    for holder in world.holders.values():
        holder.delay(4.0, *WRITES)
    assert world.put_all(ranks, 3)
    world.run(0.5)
    assert world.put_all(ranks, 4)
    world.call(ranks[0], "persist", step=None, within_s=60.0)
    world.run(0.5)
    write = world.served.parts.durable_states.of("train").active
    assert write is not None
    assert write.step.step == 4
    for step in range(5, 12):
        assert world.put_all(ranks, step)
        world.run(1.0)
    assert world.run_until(lambda: bool(answers(ranks[0])), 30.0)
    assert (answers(ranks[0])[0]["step"], answers(ranks[0])[0]["is_durable"]) == (4, True)
    assert ("train", 1, 4) in world.durable.markers


@pytest.mark.parametrize("is_asked", [True, False])
def test_a_write_that_made_way_is_no_problem(is_asked: bool) -> None:
    """A newer step was due, which is counted and noted, or a process asked for it: status has nothing to repair."""
    world = ControllerWorld(2, durable="/durable", durable_every=100 if is_asked else 1, keep_steps=2)
    ranks = world.launch(2)
    world.get(ranks)
    for holder in world.holders.values():
        holder.delay(9.0, *WRITES)
    for step in (1, 2):
        assert world.put_all(ranks, step)
        world.run(0.5)
    if is_asked:
        world.call(ranks[0], "persist", step=None, within_s=60.0)
        world.run(0.5)
    write = world.served.parts.durable_states.of("train").active
    assert write is not None
    assert write.step.step == 2
    rows = [row for row in world.status()["problems"] if "durable" in row["cause"]]
    assert [row["severity"] for row in rows] == ([] if is_asked else [NOTE])
    events = world.events("train")
    assert [event["step"] for event in events if event["event"] == "durable_abandoned"] == [1]


def test_storage_that_fails_for_a_while_is_tried_again_until_the_time_is_over() -> None:
    """The answer says what went wrong, if it went wrong all the time."""
    world, ranks = hourly(last=2)
    world.durable.problem = "no space left"
    answer = persist(world, ranks[0], within_s=10.0)
    assert not answer["is_durable"]
    assert "no space left" in answer["problem"]
    world.at(5.0, lambda: setattr(world.durable, "problem", ""))
    assert persist(world, ranks[0], within_s=30.0)["is_durable"]


def test_a_new_controller_is_asked_again() -> None:
    """The one that was asked dies in the middle of the write."""
    world, ranks = hourly(last=3)
    world.work_s = (2.0, 2.5)
    world.call(ranks[0], "persist", step=None, within_s=60.0)
    world.run(0.5)
    world.crash_controller()
    assert world.run_until(lambda: bool(answers(ranks[0])), 60.0)
    assert answers(ranks[0])[0]["is_durable"]
    assert ("train", 1, 3) in world.durable.markers


@pytest.mark.parametrize(
    ("case", "word"),
    [
        ("off", "Config(durable="),
        ("absent", "no committed step 9"),
        ("retired", "it is retired: it diverges"),
        ("too old", "durable_keep=1 keeps 1 newer steps"),
        ("no time", "must have some time"),
    ],
)
def test_what_cannot_be_made_durable_is_refused_with_the_remedy(case: str, word: str) -> None:
    """At once, and nothing is written."""
    world, ranks = hourly(
        last=3, durable=None if case == "off" else "/durable", keep_steps=3, durable_keep=1 if case == "too old" else 3
    )
    step, within_s = {"absent": 9, "too old": 2}.get(case, 3), 0.0 if case == "no time" else 30.0
    if case == "retired":
        world.call(ranks[0], "retire", attempt=1, step=3, reason="it diverges")
        world.run(2.0)
    if case == "too old":
        assert persist(world, ranks[0], 3)["is_durable"]
    before = dict(world.durable.markers)
    assert word in str(persist(world, ranks[0], step, within_s))
    assert world.durable.markers == before


def test_a_marker_that_cannot_be_looked_at_makes_no_step_durable() -> None:
    """The storage is away: what was written once is not said to be there."""
    world, ranks = hourly(last=2)
    assert persist(world, ranks[0])["is_durable"]
    world.durable.problem = "not mounted"
    answer = persist(world, ranks[0], within_s=10.0)
    assert (answer["is_durable"], "not mounted" in answer["problem"]) == (False, True)


def test_a_step_that_lost_its_last_copy_is_refused_at_once() -> None:
    """No host can write it any more, however long one waits."""
    world, ranks = hourly(last=3, replicas=1)
    world.kill_host("h1")
    world.run(0.5)
    asked_s = world.now
    assert isinstance(persist(world, ranks[0]), tuple)
    assert world.now - asked_s < 1.0


@pytest.mark.parametrize("news", ["retired", "a newer step"])
def test_who_waits_for_a_step_that_cannot_stay_learns_of_it(news: str) -> None:
    """While storage fails the step is retired, or a newer one is asked for and takes its only place there."""
    world, ranks = hourly(last=2, keep_steps=2, durable_keep=1)
    world.durable.problem = "no space left"
    world.call(ranks[0], "persist", step=2, within_s=600.0)
    world.run(5.0)
    assert not answers(ranks[0])
    if news == "retired":
        world.call(ranks[1], "retire", attempt=1, step=2, reason="it diverges")
    else:
        assert world.put_all(ranks, 3)
        world.call(ranks[1], "persist", step=3, within_s=600.0)
        world.durable.problem = ""
    assert world.run_until(lambda: bool(answers(ranks[0])), 60.0)
    [answer] = answers(ranks[0])
    if news == "retired":
        assert "it is retired: it diverges" in str(answer)
    else:
        assert "keeps 1 newer steps" in str(answer)
        assert max(step for _, _, step in world.durable.markers) == 3


def test_a_step_that_the_job_went_back_behind_is_refused() -> None:
    """A rewind left it outside the lineage, where no restore would look for it on the storage."""
    world, ranks = hourly(last=3, keep_steps=3)
    for rank in ranks:
        world.call(rank, "rewind", step=2, of_attempt=None, nonce=rank.nonce, key=rank.key)
    assert world.run_until(lambda: all(rank.answers.get("rewind") for rank in ranks), 30.0)
    assert "the job went on without it" in str(persist(world, ranks[0], 3))
    assert ("train", 1, 3) not in world.durable.markers


def test_hosts_without_one_key_are_refused_by_name() -> None:
    """No key can write all shards: the answer names a host, the keys and what to do, at once."""
    world = ControllerWorld(2, durable="/durable", durable_every="1h", durable_key_file="/key", replicas=1)
    world.durable.keys = {"h0": "a" * 16, "h1": "b" * 16}
    ranks = world.launch(2)
    world.get(ranks)
    assert world.put_all(ranks, 1)
    refused = str(persist(world, ranks[0]))
    assert "wrote nothing of step 1: it is under key" in refused
    assert all(key * 16 in refused for key in "ab")
    assert "a new key belongs on every host" in refused


def test_a_removed_job_leaves_no_process_waiting() -> None:
    """A rank that waits learns that the job is gone."""
    world, ranks = hourly(last=2)
    world.durable.problem = "no space left"
    world.call(ranks[0], "persist", step=None, within_s=600.0)
    world.run(3.0)
    world.call(ranks[1], "rm", force=True)
    world.run(3.0)
    assert "was removed" in str(answers(ranks[0])[0])


@pytest.mark.parametrize("loss", ["none", "a part is gone", "unreadable"])
def test_a_host_goes_for_a_durable_step_only_if_the_storage_has_it_now(loss: str) -> None:
    """Both hosts have notice, and a marker was seen once: without its parts it is no copy elsewhere."""
    world, ranks = hourly(last=1)
    if loss == "a part is gone":
        world.durable.lacks = "rank-0.0 is gone"
    elif loss == "unreadable":
        world.durable.problem = "not mounted"
    for host in ("h0", "h1"):
        world.call(ranks[0], "drain", host=host, within_s=600.0)
    world.run(5.0)
    remains = world.served.parts.departures.remains("h1")
    assert bool(remains.short) == (loss != "none")
    assert bool(remains.durable) == (loss == "none")


def test_ranks_that_ask_while_training_goes_on_wait_for_two_writes_at_most() -> None:
    """Each means the newest step of its moment, which training leaves behind: the newest of then stands for all."""
    world, ranks = hourly(last=2)
    for holder in world.holders.values():
        holder.delay(2.0, *WRITES)
    for step in range(3, 8):
        world.call(ranks[step % 2], "persist", step=None, within_s=60.0)
        world.run(0.1)
        assert world.put_all(ranks, step)
    assert world.run_until(lambda: sum(len(answers(rank)) for rank in ranks) == 5, 60.0)
    assert sorted(a["step"] for rank in ranks for a in answers(rank)) == [2, 7, 7, 7, 7]
    assert sorted(step for _, _, step in world.durable.markers) == [1, 2, 7]


def test_a_host_that_is_back_at_once_leaves_no_process_waiting_for_its_look() -> None:
    """The order to look at the storage died with its holder, whose successor is there before the next tick."""
    world, ranks = hourly(last=1)
    world.call(ranks[1], "persist", step=None, within_s=60.0)
    assert world.run_until(lambda: bool(world.served.parts.durable_checks.checks), 5.0)
    world.kill_host("h0", keep_memory=True)
    world.return_host("h0")
    assert world.run_until(lambda: bool(answers(ranks[1])), 20.0)
    assert answers(ranks[1])[-1]["is_durable"]


def test_a_look_for_an_earlier_notice_says_nothing_for_a_later_one() -> None:
    """The cluster manager gives notice to one host after another; the storage was emptied between them."""
    world, _ = hourly(last=1)
    moment_s = world.served.state.wall_s
    world._handle(DrainsSeen({"h0": moment_s + 40.0}))
    world.run(20.0)
    assert world.served.parts.departures.remains("h0").durable
    assert world.run_until(lambda: not world.served.state.is_draining("h0"), 200.0)
    world.durable.lacks = "rank-0.0 is gone"
    world._handle(DrainsSeen({"h1": world.served.state.wall_s + 600.0}))
    assert world.run_until(lambda: world.served.state.is_draining("h1"), 5.0)
    assert not world.served.parts.departures.remains("h1").durable


@pytest.mark.parametrize("way", ["as time goes by", "with a new notice"])
def test_the_storage_is_looked_at_again_while_a_host_may_go(way: str) -> None:
    """A part goes after the first look: the host may not go any more."""
    world, ranks = hourly(last=1)
    for host in ("h0", "h1"):
        world.call(ranks[0], "drain", host=host, within_s=600.0)
    world.run(5.0)
    assert world.served.parts.departures.remains("h1").durable
    world.durable.lacks = "rank-0.0 is gone"
    if way == "with a new notice":
        world.call(ranks[0], "drain", host="h1", within_s=500.0)
    world.run(3.0 if way == "with a new notice" else LOOK_AGAIN_S + 5.0)
    assert world.served.parts.departures.remains("h1").short
