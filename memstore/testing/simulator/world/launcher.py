"""The launcher of the simulation: starts all ranks, waits until one ends, ends the others, starts again."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING

from memstore.testing.simulator.rank.natural_rank import NaturalRank
from memstore.testing.simulator.rank.rank import SimRank

if TYPE_CHECKING:
    from memstore.testing.simulator.world.world import Simulation, Wait


def launches(world: Simulation) -> Generator[Wait, None, None]:
    """One launch after the other until the end: what Ray Train does. None while the job is said to be over."""
    while not world.is_over:
        yield lambda: not world.is_job_over and any(h.is_serving for h in world.holders.values())
        hosts = [n for n, h in sorted(world.holders.items()) if h.is_serving]
        key = f"key-{next(world.ids)}"
        world.ranks = _ranks(world, hosts, key)
        place = _place_of_replaced(world)
        for rank in world.ranks:
            world.start_rank(rank)
        if place is not None:
            yield from _replace(world, place, hosts)
        yield lambda: any(r.is_dead or r.is_left for r in world.ranks)
        yield world.rng.uniform(0.1, 1.5)
        for rank in [r for r in world.ranks if not r.is_left]:
            world.kill_rank(rank, "another rank ended")
        for rank in world.ranks:
            world.note(f"rank {rank.rank} of attempt {rank.attempt} ended: {rank.why[:120]}")
        yield world.rng.uniform(0.2, 1.0)


def _ranks(world: Simulation, hosts: list[str], key: str) -> list[SimRank]:
    if not world.scenario.shards:
        return [SimRank(world, r, hosts[r % len(hosts)], key) for r in range(world.scenario.world_size)]
    shard_of = world.natural.dealt()
    return [NaturalRank(world, r, hosts[r % len(hosts)], key, shard_of) for r in range(len(shard_of))]


def _place_of_replaced(world: Simulation) -> int | None:
    """Now and then one process is stuck before its get, and another takes its place in the launch (R20)."""
    if not world.scenario.shards or world.natural.rng.random() > 0.3:
        return None
    place = world.natural.rng.randrange(len(world.ranks))
    stuck = world.ranks[place]
    if isinstance(stuck, NaturalRank):
        stuck.stuck_at = world.natural.rng.choice(["mesh_order", "get"]) if world.scenario.is_ordered else "get"
    return place


def _replace(world: Simulation, place: int, hosts: list[str]) -> Generator[Wait, None, None]:
    yield world.natural.rng.uniform(0.02, 2.0)
    old = world.ranks[place]
    host = old.host_id if world.scenario.racks else world.natural.rng.choice(hosts)  # else a rack may have no rank left
    if isinstance(old, NaturalRank):
        world.kill_rank(old, "it is replaced")
        world.ranks[place] = NaturalRank(world, place, host, old.key, old.shard_of)
        world.start_rank(world.ranks[place])
