"""The ranks of one host take several placements by turns: who holds their copies, before and after losses (R18)."""

from __future__ import annotations

import pytest

from memstore.testing.controller.holder import DirectedRank
from memstore.testing.controller.world import JOB, ControllerWorld
from recovery.inventory import StepId

HOSTS = {f"h{n}": {"rack": f"r{n % 2}"} for n in range(6)}
RANKS = 4 * len(HOSTS)


def world_of(scatter: int, **config: object) -> ControllerWorld:
    return ControllerWorld(list(HOSTS), labels=HOSTS, scatter=scatter, **config)


def launch(world: ControllerWorld, key: str, moved_to: str = "") -> list[DirectedRank]:
    """Start four ranks on each host; those of a host that is down start on another one."""
    names = list(HOSTS)
    places = [names[rank // 4] for rank in range(RANKS)]
    ranks = [
        world.join(rank, RANKS, key, host=place if world.holders[place].is_up else moved_to)
        for rank, place in enumerate(places)
    ]
    assert world.run_until(lambda: all(rank.answers.get("join") for rank in ranks), 15.0)
    return ranks


def others(world: ControllerWorld, step: int, rank: DirectedRank) -> set[str]:
    return {*world.holders_of(StepId(rank.attempt, step), rank.rank)} - {rank.host_id}


@pytest.mark.parametrize("scatter", [1, 2, 3])
def test_the_copies_of_a_hosts_ranks_are_on_as_many_hosts(scatter: int) -> None:
    """Each of them in the other rack; every rank's step is committed with two copies."""
    world = world_of(scatter)
    ranks = launch(world, "k")
    world.get(ranks)
    assert world.put_all(ranks, 1)
    for first in range(0, RANKS, 4):
        mine = ranks[first : first + 4]
        held = [others(world, 1, rank) for rank in mine]
        assert all(len(hosts) == 1 for hosts in held)
        assert len(set.union(*held)) == scatter
        rack = HOSTS[mine[0].host_id]["rack"]
        assert all(HOSTS[host]["rack"] != rack for hosts in held for host in hosts)
        targets = world.status()["jobs"][0]["newest"]["targets"][mine[0].host_id]
        assert {*targets} == set.union(*held)


def test_a_lost_hosts_ranks_are_restored_from_several_hosts() -> None:
    """No byte is lost with any one host, and repair gives every rank its second copy again, in the other rack."""
    world = world_of(2)
    ranks = launch(world, "k")
    world.get(ranks)
    assert world.put_all(ranks, 1)
    sources = set.union(*(others(world, 1, rank) for rank in ranks[4:8]))
    assert len(sources) == 2
    for rank in ranks:
        world.kill_rank(rank)
    world.kill_host("h1")
    again = launch(world, "k2", moved_to=next(host for host in sorted(HOSTS) if host not in {"h1", *sources}))
    answers = world.get(again)
    assert {answer["step"] for answer in answers} == {1}
    world.check_restored(answers)
    assert world.put_all(again, 2)
    assert world.run_until(lambda: all(len(world.holders_of(StepId(2, 2), rank)) == 2 for rank in range(RANKS)), 60.0)
    for rank in range(RANKS):
        assert {HOSTS[host]["rack"] for host in world.holders_of(StepId(2, 2), rank)} == {"r0", "r1"}


def test_another_controller_orders_the_same_targets() -> None:
    """Nothing of a placement is journalled: it follows from the hosts."""
    world = world_of(3)
    ranks = launch(world, "k")
    world.get(ranks)
    assert world.put_all(ranks, 1)
    before = [others(world, 1, rank) for rank in ranks]
    world.crash_controller()
    assert world.run_until(lambda: world.machine is not None and world.machine.is_settled, 30.0)
    assert world.put_all(ranks, 2)
    assert [others(world, 2, rank) for rank in ranks] == before


def test_ranks_with_equal_state_keep_to_their_writers() -> None:
    """Writers of one shard are one another's targets; scatter says only where placement has to help out."""
    world = world_of(2)
    ranks = [world.join(rank, 6, "k", host=f"h{rank}", shard=0, shards=1) for rank in range(6)]
    assert world.run_until(lambda: all(rank.answers.get("join") for rank in ranks), 15.0)
    world.get(ranks)
    assert world.put_all(ranks, 1)
    writers = world.job(JOB).newest.writers  # type: ignore[union-attr]
    for rank in (ranks[number] for number in writers):
        assert others(world, 1, rank) <= {ranks[number].host_id for number in writers}
