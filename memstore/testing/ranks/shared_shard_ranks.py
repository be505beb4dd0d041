"""Ranks that share the state of a shard with others and have some state of their own."""

from __future__ import annotations

import zlib
from typing import Any

from memstore.testing.ranks.rank_process import Rank, arrays, digest, nursery_main


class SharedShardRank(Rank):
    """A rank whose state follows from its shard and step; `own` names the rank."""

    def state(self, step: int) -> dict[str, Any]:
        """Return what every rank of the shard holds at a step."""
        import torch

        made = arrays(self.seed, self.store.shared_shard.shard, abs(step), self.kib)
        return {"model": {name: torch.from_numpy(value) for name, value in made.items()}, "step": step}

    def do_role(self) -> dict[str, Any]:
        """Return the shard, its writers and whether this rank is one."""
        shared_shard = self.store.shared_shard
        return {"shard": shared_shard.shard, "writers": list(shared_shard.writers), "is_writer": shared_shard.is_writer}

    def do_put_own(self, step: int, poke: str = "", of_step: int | None = None) -> dict[str, Any]:
        """Put the shard's state, or that of another step, and change one element of a tensor if asked."""
        import torch

        state = self.state(step if of_step is None else of_step)
        if poke:
            state["model"][poke].view(-1)[5] += 1
        own = {"rank": self.store.rank, "noise": torch.full((1000,), float(self.store.rank + step))}
        # No other rank, step or job has the same bytes, so that each of these parts travels.
        own["noise"][:3] = torch.tensor([self.store.rank, step, zlib.crc32(self.store.job.encode()) % 65536])
        self.tickets[step] = self.store.put(step, state, rank_state=own, timeout_s=30.0)
        return self._ticket(self.tickets[step])

    def do_get_own(self, into: bool = False, **options: Any) -> dict[str, Any]:
        """Get both parts; `into` fills live tensors."""
        import torch

        target = {"into": self.state(0), "rank_state_into": {"rank": -1, "noise": torch.zeros(1000)}} if into else {}
        got = self.store.get(**target, **options)
        if got is None:
            return {"step": None}
        state = target["into"] if into else got.state
        noise = None if got.rank_state is None else (target["rank_state_into"] if into else got.rank_state)["noise"]
        return {
            "step": got.step, "verdict": got.source, "steps_lost": got.steps_lost,
            "digest": digest({name: tensor.numpy() for name, tensor in state["model"].items()}, int(got.state["step"])),
            "own": None if got.rank_state is None else got.rank_state["rank"],
            "noise": None if noise is None else float(noise[-1]),
        }  # fmt: skip


if __name__ == "__main__":
    nursery_main(SharedShardRank)
