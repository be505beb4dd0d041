"""Faults of ranks, the training processes."""

from __future__ import annotations

import tempfile
import time
from typing import Any

from memstore.core.wire.replies import Status
from memstore.drills.scenes.scene import Scene
from memstore.testing.faults.processes import Process, freeze_in_put, remove_mark


class KillRank(Scene):
    """SIGKILL to one rank in the middle of its puts."""

    name = "kill-rank"

    def begin(self, **marks: Any) -> Process:
        """Let the ranks put without a pause; return the victim at a random moment, between two puts or inside one."""
        self.begin_puts(pause_s=0.0, **marks)
        time.sleep(self.rng.uniform(0.0, 0.3))
        return self.victim.pid, self.victim.start

    def inject(self) -> str:
        victim = self.victim
        self.kill(victim.host, (victim.pid, victim.start) if self.is_beyond else self.begin())
        return "; ".join([f"SIGKILL to rank {self.rank} (pid {victim.pid}) on {victim.host}", *self.lose_memories()])

    def detected(self, status: Status, injected_s: float) -> str | None:
        count, newest = len(self.job.ranks), self.newest_attempt(status)
        if newest is None or newest.ranks_alive >= count or super().detected(status, injected_s) is None:
            return None
        return f"{newest.ranks_alive} of {count} ranks alive"

    def dying(self) -> list[str]:
        return self.hosts


class KillRankMidPut(KillRank):
    """SIGKILL to one rank inside a put, which is checked while the rank is stopped."""

    name = "kill-rank-mid-put"
    puts_count = 400  # enough until the rank is caught inside one; the flow ends the other ranks' puts

    def setup(self) -> None:
        super().setup()
        self.mark = f"{tempfile.gettempdir()}/{self.job.name}-put"

    def inject(self) -> str:
        host, process = self.victim_host, self.begin(marks={self.rank: self.mark})
        step = self.site.do(host, freeze_in_put, process, self.mark)
        self.kill(host, process)
        return (
            f"SIGKILL to rank {self.rank} (pid {process[0]}) on {host} inside its put of step {step} (checked while it "
            "was stopped)"
        )

    def cleanup(self) -> None:
        if self.holders:
            self.site.do(self.victim_host, remove_mark, self.mark)


class HangRank(KillRank):
    """A stop of one rank in the middle of its puts, until the launcher gives it up and kills it."""

    name = "hang-rank"
    is_noticed = False  # to find a hanging process is the task of the launcher's watchdog

    def inject(self) -> str:
        self.freeze(self.victim_host, self.begin())
        return f"SIGSTOP to rank {self.rank} (pid {self.victim.pid}) on {self.victim_host}"

    def recover(self) -> None:
        """Kill the hanging rank, as a launcher's watchdog does; the flow kills the rest of the attempt."""
        [(host, process)] = self.frozen
        self.kill(host, process)
        self.frozen = []
        words = self.wait_for_effect()
        self.say("launcher", f"gave rank {self.rank} up, SIGKILL: {words}")
