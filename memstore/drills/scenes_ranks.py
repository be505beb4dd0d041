"""Faults of ranks: the training processes themselves."""

from __future__ import annotations

import time
from typing import Any

from memstore.drills.scene import Scene
from memstore.errors import DrillError


class KillRank(Scene):
    """One rank in the middle of its puts."""

    name = "kill-rank"

    def inject(self) -> str:
        victim = self.run.job.ranks[self.rank]
        if not self.is_beyond:
            self.begin_puts(pause_s=0.0)
            time.sleep(self.rng.uniform(0.0, 0.3))  # somewhere between two puts or inside one
        self.process = (victim.pid, victim.start)
        if not self.site.do(victim.host, "kill", [self.process]):
            raise DrillError(f"rank {self.rank} (pid {victim.pid}) was gone before it was killed")
        return "; ".join([f"SIGKILL to rank {self.rank} (pid {victim.pid}) on {victim.host}", *self.lose_memories()])

    def wait_for_effect(self) -> str:
        self.site.do(self.run.job.ranks[self.rank].host, "wait_gone", [self.process])
        return "; ".join([f"pid {self.process[0]} is gone (checked)", *self.memories_gone()])

    def detected(self, body: dict[str, Any], injected_s: float) -> str | None:
        job, ranks = next((j for j in body["jobs"] if j["job"] == self.run.job.name), None), self.run.job.ranks
        if job is None or job.get("ranks_alive", 0) >= len(ranks):
            return None
        found = [self.host_noticed(host, body, injected_s) for host in self.hosts]
        return f"{job['ranks_alive']} of {len(ranks)} ranks alive" if all(found) else None


SCENES = {scene.name: scene for scene in (KillRank,)}
