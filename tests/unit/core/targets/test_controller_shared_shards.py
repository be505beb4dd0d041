"""Ranks that name one shard: which of them copies it, where to, what is refused, what a loss leaves (R16, R18, R34)."""

from __future__ import annotations

from typing import Any

import pytest

from memstore.core.wire.ids import WireShard
from memstore.core.wire.orders import Bring
from memstore.testing.controller.holder import DirectedRank
from memstore.testing.controller.world import JOB, ControllerWorld
from recovery.inventory import StepId


def launch(world: ControllerWorld, shards_of: list[int], key: str = "k", **more: Any) -> list[DirectedRank]:
    """Rank n on host n, naming shards_of[n]."""
    count = max(shards_of) + 1
    hosts = sorted(h for h, x in world.holders.items() if x.is_up)
    ranks = [
        world.join(n, len(shards_of), key, host=hosts[n % len(hosts)], **{"shard": shard, "shards": count, **more})
        for n, shard in enumerate(shards_of)
    ]
    world.run_until(lambda: all(r.answers.get("join") or r.errors.get("join") for r in ranks), 15.0)
    return ranks


def writers(rank: DirectedRank) -> list[int]:
    """The ranks that copy this rank's shard, as it was sent last."""
    found: list[int] = rank.answers["join"][-1]["shared_shard"][2]
    return found


def test_writers_keep_one_anothers_copies_and_the_rest_go_where_placement_says() -> None:
    """Two of four hold the shared state, on two racks; what the other two put is replicated as always."""
    labels = {"h0": {"rack": "a"}, "h1": {"rack": "a"}, "h2": {"rack": "b"}, "h3": {"rack": "b"}}
    world = ControllerWorld(4, labels=labels)
    ranks = launch(world, [0, 0, 0, 0])
    assert [writers(rank) for rank in ranks] == [[0, 2]] * 4
    assert ranks[0].answers["join"][-1]["shared_shard"][3] == [[0, 2]]
    world.get(ranks)
    assert world.put_all(ranks, 1)
    step = StepId(1, 1)
    assert world.holders_of(step, 0) == world.holders_of(step, 2) == ["h0", "h2"]
    assert all(len(world.holders_of(step, rank)) == 2 for rank in (1, 3))
    assert world.status()["jobs"][0]["writers"] == [0, 2]


def test_a_lost_writers_host_leaves_the_shared_state_and_others_copy_next() -> None:
    """replicas - 1 domains may go: the next launch restores all shards, and copies on hosts that are there."""
    world = ControllerWorld(4)
    ranks = launch(world, [0, 0, 0, 0])
    world.get(ranks)
    assert world.put_all(ranks, 1)
    world.kill_host("h0")
    for rank in ranks:
        world.kill_rank(rank)
    again = launch(world, [0, 0, 0, 0], "again")
    got = world.get(again)
    world.check_restored(got)
    assert {answer["step"] for answer in got} == {1}
    assert world.put_all(again, 2)
    chosen = writers(again[0])
    assert {again[rank].host_id for rank in chosen} == set(world.holders_of(StepId(2, 2), chosen[0]))
    assert "h0" not in world.holders_of(StepId(2, 2), chosen[0])


def test_a_shared_part_is_read_from_a_writer_without_a_barrier() -> None:
    """As a rank that did not copy gets it: the writer's shard of the restored step, on its own host."""
    world = ControllerWorld(4)
    ranks = launch(world, [0, 0, 0, 0])
    world.get(ranks)
    assert world.put_all(ranks, 1)
    for rank in ranks:
        world.kill_rank(rank)
    ranks = launch(world, [0, 0, 0, 0], "again")
    world.get(ranks)
    world.call(ranks[3], "read_step", rank=0, step=1, of_attempt=1)
    assert world.run_until(lambda: bool(ranks[3].answers.get("read_step")), 10.0), ranks[3].errors
    [order] = [order for order in world.holders["h3"].received(Bring) if order.use == "read"]
    assert order.shard == WireShard(JOB, 1, 1, 0)


def test_a_new_controller_and_a_replaced_rank_are_sent_the_same_writers() -> None:
    """They stand in the attempt's fact; a process that takes a rank's place must hold the same shard."""
    world = ControllerWorld(4)
    ranks = launch(world, [0, 1, 0, 1])
    before = [writers(rank) for rank in ranks]
    assert before == [[0, 2], [1, 3], [0, 2], [1, 3]]
    world.crash_controller()
    world.run(5.0)
    wrong = world.join(1, 4, "k", host="h1", shard=0, shards=2)
    world.run_until(lambda: bool(wrong.errors.get("join")), 5.0)
    assert "rank 1 named shard 1 of 2" in wrong.error("join")
    right = world.join(1, 4, "k", host="h1", shard=1, shards=2)
    assert world.run_until(lambda: bool(right.answers.get("join")), 15.0)
    assert writers(right) == [1, 3]
    ranks[1] = right
    world.get(ranks)
    assert world.put_all(ranks, 1)


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ([(0, 2), (1, 2), (0, 2), (0, 4)], "ranks 0, 1, 2 name shard_count=2; rank 3 names shard_count=4"),
        ([(0, 1), (0, 1), (0, 1), (None, None)], "ranks 0, 1, 2 name shard_count=1; rank 3 names none"),
        ([(0, 3), (1, 3), (0, 3), (1, 3)], "no rank names shard_rank 2 of shard_count=3"),
        ([(0, 2), (1, 2), (2, 2), (1, 2)], "shards are numbered 0 to 1, but rank 2 names shard_rank=2"),
        ([(0, 1), (3, 1), (0, 1), (1, 1)], "the only shard is 0, but rank 1 names shard_rank=3, rank 3"),
        ([(0, 5), (1, 5), (2, 5), (3, 5)], "shard_count=5, but 4 ranks can hold at most 4 shards"),
    ],
)
def test_ranks_that_do_not_agree_are_all_refused(named: list[tuple[int | None, int | None]], message: str) -> None:
    """Every rank learns what each rank said; nothing is opened."""
    world = ControllerWorld(4)
    ranks = [world.join(n, 4, "k", shard=i, shards=count) for n, (i, count) in enumerate(named)]
    world.run_until(lambda: all(r.errors.get("join") for r in ranks), 5.0)
    assert all(message in rank.error("join") for rank in ranks), ranks[0].error("join")
    assert JOB not in world.served.jobs


def test_a_shard_without_a_count_is_no_shard() -> None:
    """What some ranks of a foreign client name without a count is ignored on all ranks; nothing of it is recorded."""
    world = ControllerWorld(4)
    ranks = [world.join(n, 4, "k", shard=0 if n < 2 else None, shards=None) for n in range(4)]
    assert world.run_until(lambda: all(r.answers.get("join") for r in ranks), 5.0)
    assert world.served.jobs[JOB].newest.shard_of == ()
    assert world.put_all(ranks, 1)


def test_ranks_that_rewind_keep_their_shards() -> None:
    """A rank's number says which shard it holds, independently of its process; writers are chosen again (R22)."""
    world = ControllerWorld(4, placement="ring")
    ranks = launch(world, [0, 1, 0, 1])
    world.get(ranks)
    assert world.put_all(ranks, 1)
    assert world.put_all(ranks, 2)
    for rank in ranks:
        body = {"nonce": rank.nonce, "key": rank.key, "step": 2, "of_attempt": None}
        world.call(rank, "rewind", **body)
    assert world.run_until(lambda: all(rank.answers.get("rewind") for rank in ranks), 20.0), ranks[0].errors
    assert [rank.answers["rewind"][-1]["shared_shard"][:2] for rank in ranks] == [[0, 2], [1, 2], [0, 2], [1, 2]]
    newest = world.job().newest
    assert newest is not None
    assert (newest.attempt_number, newest.shard_of, newest.writers) == (2, (0, 1, 0, 1), (0, 1, 2, 3))


def test_what_differs_is_reported_once_until_it_is_equal_again() -> None:
    """One event and one row of status for a pair of ranks, from the first step that differed."""
    world = ControllerWorld(3)
    ranks = launch(world, [0, 0, 0])
    world.get(ranks)
    report = {"job": JOB, "attempt": 1, "ranks": [0, 1], "chunks": 3, "names": ["model.weight"]}
    for step in (5, 6):
        world.call(ranks[0], "report_differing", **report, step=step)
    world.run(1.0)
    happened = [h for h in world.served.parts.recorder.recent_events.since(0) if h.event.startswith("replicas_")]
    assert [(h.event, h.step, h.fields["names"]) for h in happened] == [("replicas_differ", 5, ["model.weight"])]
    status = world.status()["jobs"][0]["replicas_differ"]
    assert [(row["ranks"], row["step"], row["names"]) for row in status] == [([0, 1], 5, ["model.weight"])]
    world.call(ranks[0], "report_differing", **{**report, "step": 7, "chunks": 0, "names": []})
    world.run(1.0)
    happened = [h for h in world.served.parts.recorder.recent_events.since(0) if h.event.startswith("replicas_")]
    assert [h.event for h in happened] == ["replicas_differ", "replicas_agree"]
    assert not world.status()["jobs"][0]["replicas_differ"]
