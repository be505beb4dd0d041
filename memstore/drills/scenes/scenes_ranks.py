"""Faults of ranks, the training processes."""

from __future__ import annotations

import tempfile
import time
from typing import Any

from memstore.drills.breaking import faults
from memstore.drills.scenes.scene import Scene
from memstore.errors import DrillError


class KillRank(Scene):
    """SIGKILL to one rank in the middle of its puts."""

    name = "kill-rank"

    def inject(self) -> str:
        victim = self.context.job.ranks[self.rank]
        if not self.is_beyond:
            self.begin_puts(pause_s=0.0)
            time.sleep(self.rng.uniform(0.0, 0.3))  # a random moment, between two puts or inside one
        self.process = (victim.pid, victim.start)
        if not self.site.do(victim.host, "kill", [self.process]):
            raise DrillError(f"rank {self.rank} (pid {victim.pid}) was gone before it was killed")
        return "; ".join([f"SIGKILL to rank {self.rank} (pid {victim.pid}) on {victim.host}", *self.lose_memories()])

    def wait_for_effect(self) -> str:
        self.site.do(self.context.job.ranks[self.rank].host, "wait_gone", [self.process])
        return "; ".join([f"pid {self.process[0]} is gone (checked)", *self.memories_gone()])

    def detected(self, body: dict[str, Any], injected_s: float) -> str | None:
        job, ranks = next((j for j in body["jobs"] if j["job"] == self.context.job.name), None), self.context.job.ranks
        if job is None or job.get("ranks_alive", 0) >= len(ranks):
            return None
        found = [self.host_noticed(host, body, injected_s) for host in self.hosts]
        return f"{job['ranks_alive']} of {len(ranks)} ranks alive" if all(found) else None


class HangRank(Scene):
    """A stop of one rank in the middle of its puts, until the launcher gives it up and kills it."""

    name = "hang-rank"
    is_noticed = False  # to find a hanging process is the task of the launcher's watchdog
    process: faults.Process | None = None

    def inject(self) -> str:
        victim = self.context.job.ranks[self.rank]
        self.begin_puts(pause_s=0.0)
        time.sleep(self.rng.uniform(0.0, 0.3))  # a random moment, between two puts or inside one
        self.process = (victim.pid, victim.start)
        self.site.do(victim.host, "freeze", self.process)
        return f"SIGSTOP to rank {self.rank} (pid {victim.pid}) on {victim.host}"

    def wait_for_effect(self) -> str:
        if self.process is None:
            raise DrillError("nothing was frozen")
        self.site.do(self.context.job.ranks[self.rank].host, "wait_frozen", self.process)
        return f"pid {self.process[0]} is stopped (state T, checked)"

    def recover(self) -> None:
        """Kill the hanging rank, as a launcher's watchdog does; the flow kills the rest of the attempt."""
        if self.process is None:
            raise DrillError("nothing was frozen")
        host, frozen = self.context.job.ranks[self.rank].host, self.process
        self.site.do(host, "kill", [frozen])
        self.site.do(host, "wait_gone", [frozen])
        self.process = None
        self.context.timeline.line("launcher", f"gave rank {self.rank} up: pid {frozen[0]} is killed, gone (checked)")

    def cleanup(self) -> None:
        if self.process is not None:
            self.site.do(self.context.job.ranks[self.rank].host, "kill", [self.process])


class KillRankMidPut(KillRank):
    """SIGKILL to one rank inside a put, which is checked while the rank is stopped."""

    name = "kill-rank-mid-put"
    puts_count = 400  # enough until the rank is caught inside one; the flow ends the other ranks' puts

    def setup(self) -> None:
        super().setup()
        self.mark = f"{tempfile.gettempdir()}/{self.context.job.name}-put"

    def inject(self) -> str:
        victim = self.context.job.ranks[self.rank]
        self.begin_puts(pause_s=0.0, marks={self.rank: self.mark})
        time.sleep(self.rng.uniform(0.0, 0.3))
        self.process = (victim.pid, victim.start)
        step = self.site.do(victim.host, "freeze_in_put", self.process, self.mark)
        self.site.do(victim.host, "kill", [self.process])
        return (
            f"SIGKILL to rank {self.rank} (pid {victim.pid}) on {victim.host} inside its put of step {step} (checked "
            "while it was stopped)"
        )

    def cleanup(self) -> None:
        if self.holders:
            self.site.do(self.holders[0], "remove_mark", self.mark)


SCENES = {scene.name: scene for scene in (KillRank, HangRank, KillRankMidPut)}
