"""Ranks as Ray actors, one per host, for tests on real raylets."""

from __future__ import annotations

from typing import Any

import ray

from memstore.config import Config


class Rank:
    """One rank on one host; its state follows from (rank, step) alone."""

    def __init__(self, rank: int, world_size: int, config: Config) -> None:
        self.rank, self.world_size, self.config = rank, world_size, config

    def state(self, step: int) -> dict[str, Any]:
        import torch

        generator = torch.Generator().manual_seed(step * 1000 + self.rank)
        return {"weight": torch.randn(50_000, generator=generator), "step": step}

    def put(self, steps: int) -> str:
        """Put `steps` steps and return the level of the last."""
        import memstore

        with memstore.connect("job", rank=self.rank, world_size=self.world_size, config=self.config) as store:
            store.get()
            for step in range(steps):
                ticket = store.put(step, self.state(step))
                ticket.wait("committed", 30)
            return ticket.level

    def get(self) -> tuple[int, bool, str]:
        """Return the restored step, whether every byte is right, and its source."""
        import torch

        import memstore

        with memstore.connect("job", rank=self.rank, world_size=self.world_size, config=self.config) as store:
            got = store.get()
            if got is None:
                return -1, False, "none"
            return got.step, torch.equal(got.state["weight"], self.state(got.step)["weight"]), got.source


def on_hosts(hosts: list[str], config: Config) -> list[Any]:
    """Start one rank per host."""
    return [
        ray.remote(Rank).options(num_cpus=1, label_selector={"host": host}).remote(rank, len(hosts), config)
        for rank, host in enumerate(hosts)
    ]
