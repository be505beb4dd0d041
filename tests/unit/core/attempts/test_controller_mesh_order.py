"""assign_ranks(): all ranks are renumbered alike, once; every process restores what its host has (R20, R22, R27)."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from memstore.core.attempts.launches import launches
from memstore.core.wire.messages import Body
from memstore.testing.controller.holder import CHUNKS, FakeRank
from memstore.testing.controller.world import ControllerWorld
from memstore.testing.requests import request_of
from recovery.inventory import StepId

HOLDERS = ({"h0", "h2"}, {"h1", "h3"}, {"h1", "h2"}, {"h0", "h3"})  # of the four shards of `trained`
ELSEWHERE = [1, 0, 3, 2]  # every rank on a host that has not its shard
MOMENTS_S = [0.001, 0.004, 0.012, 0.03, 0.06, 0.1, 0.2, 0.4]
SHARD_BYTES = CHUNKS * 64


def ask(world: ControllerWorld, rank: FakeRank, launched: int, together: int = 1) -> None:
    body = {"job": rank.job, "attempt": rank.attempt, "rank": launched, "nonce": rank.nonce, "together": together}
    world.holders[rank.host_id].call(rank, request_of("assign_ranks", body))


def order(world: ControllerWorld, ranks: Sequence[FakeRank], together: int = 1) -> list[Body]:
    """All ranks, by their launcher's number, ask; return the answers."""
    before = [len(r.answers.get("assign_ranks", ())) for r in ranks]
    for launched, rank in enumerate(ranks):
        ask(world, rank, launched, together)
    received = [lambda r=r, n=n: len(r.answers.get("assign_ranks", ())) > n for r, n in zip(ranks, before, strict=True)]
    assert world.run_until(lambda: all(is_there() for is_there in received), 30.0), [r.errors for r in ranks]
    return [r.answers["assign_ranks"][-1] for r in ranks]


def trained() -> ControllerWorld:
    """A world whose job has committed step 1, every rank on the host of its number."""
    world = ControllerWorld(4, placement="ring")
    ranks = world.launch(4)
    world.get(ranks)
    assert world.put_all(ranks, 1)
    assert [set(world.holders_of(StepId(1, 1), rank)) for rank in range(4)] == list(HOLDERS)
    return world


def check_renumbered(world: ControllerWorld, ranks: Sequence[FakeRank]) -> None:
    """All were sent one order by which every process sits where its shard lies, and restore by it."""
    [found] = {tuple(rank.answers["assign_ranks"][-1]["order"]) for rank in ranks}
    assert [ranks[launched].rank for launched in found] == [0, 1, 2, 3]
    got = world.get(ranks)
    world.check_restored(got)
    assert [a["shard"][3] for a in got] == [rank.rank for rank in ranks]
    assert {(a["step"], a["verdict"], tuple(a["ranks_moved"]), a["moved_bytes"]) for a in got} == {(1, "local", (), 0)}


def relaunch(world: ControllerWorld, hosts: Sequence[int], key: str = "again") -> list[FakeRank]:
    """The ranks are started again, rank n on the n-th host named."""
    for rank in list(world.ranks.values()):
        world.kill_rank(rank)
    world.run(0.5)
    ranks = [world.join(n, len(hosts), key, host=f"h{host}") for n, host in enumerate(hosts)]
    assert world.run_until(lambda: all(r.answers.get("join") for r in ranks), 15.0)
    return ranks


def test_ranks_that_moved_are_renumbered_and_fetch_nothing() -> None:
    """Without an order all four shards cross the network, with it none; both restore the same step."""
    world = trained()
    moved = world.get(relaunch(world, ELSEWHERE))
    assert {tuple(a["ranks_moved"]) for a in moved} == {(0, 1, 2, 3)}
    assert {a["moved_bytes"] for a in moved} == {4 * SHARD_BYTES}

    world = trained()
    ranks = relaunch(world, ELSEWHERE)
    order(world, ranks)
    check_renumbered(world, ranks)
    assert world.put_all(ranks, 2)


def test_a_new_job_keeps_its_ranks_and_the_order_stands() -> None:
    """Nothing stored: the identity; asked again, also after the first put, it is the same and changes nothing."""
    world = ControllerWorld(3)
    ranks = world.launch(3)
    assert [a["order"] for a in order(world, ranks)] == [[0, 1, 2]] * 3
    world.get(ranks)
    assert world.put_all(ranks, 1)
    assert [a["order"] for a in order(world, ranks)] == [[0, 1, 2]] * 3
    assert world.put_all(ranks, 2)


def test_after_a_get_the_launchers_ranks_stand() -> None:
    """A rank that asks too late gets the numbers that hold, on all ranks alike."""
    world = trained()
    ranks = relaunch(world, ELSEWHERE)
    world.get(ranks)
    assert [(a["order"], a["rank"]) for a in order(world, ranks)] == [([], n) for n in range(4)]


def test_missing_ranks_and_contradictions_are_named() -> None:
    """A deadline names the ranks that did not ask; all ranks are refused another `together`, or an impossible one."""
    world = ControllerWorld(3)
    ranks = world.launch(3)
    ask(world, ranks[0], 0)
    world.run(0.5)
    ask(world, ranks[2], 2, together=3)
    world.run(30.0)
    assert "together=3" in ranks[2].error("assign_ranks")
    assert ranks[0].error("assign_ranks").startswith("GatherTimeout: assign_ranks() of job")
    assert "1 of 3 ranks have called it, missing: ranks 1, 2." in ranks[0].error("assign_ranks")
    for launched, rank in enumerate(ranks):
        ask(world, rank, launched, together=2)
    world.run(1.0)
    assert all("together=2: host h" in rank.error("assign_ranks") for rank in ranks)
    assert all(rank.error("assign_ranks").startswith("ConfigError") for rank in ranks)


@pytest.mark.parametrize("moment_s", MOMENTS_S)
def test_a_crash_while_ranks_are_renumbered(moment_s: float) -> None:
    """Whenever the controller dies, all ranks are sent one order, and restore by it."""
    world = trained()
    ranks = relaunch(world, ELSEWHERE)
    for launched, rank in enumerate(ranks):
        ask(world, rank, launched)
    world.run(moment_s)
    world.crash_controller()
    assert world.run_until(lambda: all(r.answers.get("assign_ranks") for r in ranks), 20.0), [r.errors for r in ranks]
    check_renumbered(world, ranks)


@pytest.mark.parametrize("moment_s", [0.0, *MOMENTS_S])
def test_a_process_that_takes_a_renumbered_place(moment_s: float) -> None:
    """A rank that dies around the renumbering is replaced in its place, and all has another number."""
    world = trained()
    ranks = relaunch(world, ELSEWHERE)
    for launched, rank in enumerate(ranks):
        ask(world, rank, launched)
    world.run(moment_s)
    world.kill_rank(ranks[1])
    ranks[1] = world.join(1, 4, "again", host=f"h{ELSEWHERE[1]}")
    assert world.run_until(lambda: bool(ranks[1].answers.get("join")), 15.0), ranks[1].errors
    ask(world, ranks[1], 1)
    assert world.run_until(lambda: all(r.answers.get("assign_ranks") for r in ranks), 30.0), [r.errors for r in ranks]
    check_renumbered(world, ranks)


def test_a_rewind_keeps_the_order() -> None:
    """Going back to an older step in the same processes renumbers no rank (R22)."""
    world = trained()
    ranks = relaunch(world, ELSEWHERE)
    order(world, ranks)
    before = [rank.rank for rank in ranks]
    assert before != [0, 1, 2, 3]
    world.get(ranks)
    assert world.put_all(ranks, 2)
    for rank in ranks:
        world.call(rank, "rewind", step=2, nonce=rank.nonce, key="again")
    assert world.run_until(lambda: all(r.answers.get("rewind") for r in ranks), 15.0), [r.errors for r in ranks]
    assert [r.rank for r in ranks] == before
    assert {r.attempt for r in ranks} == {3}
    assert world.put_all(ranks, 3)


def test_hosts_that_may_know_better_are_waited_for() -> None:
    """After a full restart the host that comes last is in the order too (R24)."""
    world = trained()
    for name in list(world.holders):
        world.kill_host(name, keep_memory=True)
    world.crash_controller()
    for name in ("h0", "h2"):
        world.return_host(name)
    world.run(4.0)
    assert world.run_until(lambda: world.machine is not None and world.served.is_settled, 10.0)
    ranks = [world.join(n, 4, "k", host=host) for n, host in enumerate(("h0", "h0", "h2", "h2"))]
    assert world.run_until(lambda: all(r.answers.get("join") for r in ranks), 15.0)
    for launched, rank in enumerate(ranks):
        ask(world, rank, launched)
    world.run(2.0)
    assert not any(rank.answers.get("assign_ranks") for rank in ranks)  # rank 1's copies are on h1 and h3
    world.return_host("h3")
    assert world.run_until(lambda: all(r.answers.get("assign_ranks") for r in ranks), 3.0)
    assert any("assign_ranks() moves 256 bytes instead of 256" in note for note in world.notes)  # it is on h3 alone
    world.check_restored(world.get(ranks))


def test_ranks_that_wait_for_their_new_order_are_in_status() -> None:
    """While the order is written down the launch is one of all ranks; their questions do not say how many there are."""
    world = trained()
    ranks = relaunch(world, ELSEWHERE)
    for launched, rank in enumerate(ranks):
        ask(world, rank, launched)
    seen = set()
    for _ in range(1000):
        world.run(0.001)
        seen |= {
            (row.phase, row.ranks, row.world_size) for row in launches(world.served.state, world.served.parts.attempts)
        }
        if all(rank.answers.get("assign_ranks") for rank in ranks):
            break
    assert ("opening", 4, 4) in seen
