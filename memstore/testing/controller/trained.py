"""Worlds whose job has trained for some steps, the start of most tests."""

from __future__ import annotations

from typing import Any

from memstore.testing.controller.holder import DirectedRank
from memstore.testing.controller.world import ControllerWorld, describe


def trained(
    hosts: int, world_size: int | None = None, last: int = 1, *, pause_s: float = 0.0, **config: Any
) -> tuple[ControllerWorld, list[DirectedRank]]:
    """Return a world whose job has committed steps 1 to `last`, and its ranks: one a host by default."""
    world = ControllerWorld(hosts, **config)
    ranks = world.launch(world_size or hosts)
    world.get(ranks)
    for step in range(1, last + 1):
        if not world.put_all(ranks, step):
            raise AssertionError(describe(world))
        world.run(pause_s)
    return world, ranks


def written(last: int = 1, **config: Any) -> tuple[ControllerWorld, list[DirectedRank]]:
    """Return a world whose job of two ranks has committed and durably written steps 1 to `last`, and its ranks."""
    return trained(2, last=last, pause_s=2.0, **{"durable": "/durable", "durable_every": 1, **config})
