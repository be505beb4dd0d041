"""Ranks that share the state of a shard with others and have some state of their own."""

from __future__ import annotations

import zlib
from typing import Any

import torch

from memstore.testing.ranks.rank import RankProgram
from memstore.testing.ranks.rank_process import nursery_main


class SharedShardProcess(RankProgram):
    """A rank whose state follows from its shard and step; `own` names the rank."""

    @property
    def shard(self) -> int:
        """Return the shard that every rank of it puts alike."""
        return int(self.store.shared_shard.shard)

    def do_role(self) -> dict[str, Any]:
        """Return the shard, its writers and whether this rank is one."""
        shared_shard = self.store.shared_shard
        return {"shard": self.shard, "writers": list(shared_shard.writers), "is_writer": shared_shard.is_writer}

    def do_put_own(self, step: int, poke: str = "", of_step: int | None = None) -> dict[str, Any]:
        """Put the shard's state, or that of another step, and change one element of a tensor if asked."""
        state = self.state(step if of_step is None else of_step)
        if poke:
            state["model"][poke].view(torch.uint8).view(-1)[5] ^= 1
        own = {"rank": self.store.rank, "noise": torch.full((1000,), float(self.store.rank + step))}
        # No other rank, step or job has the same bytes, so that each of these parts travels.
        own["noise"][:3] = torch.tensor([self.store.rank, step, zlib.crc32(self.store.job.encode()) % 65536])
        return self._put(step, state, rank_state=own, timeout_s=30.0)

    def do_get_own(self, into: bool = False, **options: Any) -> dict[str, Any]:
        """Get both parts; `into` fills live tensors."""
        target = {"into": self.state(0), "rank_state_into": {"rank": -1, "noise": torch.zeros(1000)}} if into else {}
        got = self.store.get(**target, **options)
        if got is None:
            return {"step": None}
        own = got.rank_state
        return {
            **self.compared(got, self.shard).reply(),
            "own": None if own is None else own["rank"],
            "noise": None if own is None else float(own["noise"][-1]),
        }


if __name__ == "__main__":
    nursery_main(SharedShardProcess)
