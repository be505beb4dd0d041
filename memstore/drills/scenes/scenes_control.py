"""Faults of the controller."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from memstore.core.wire.replies import Status
from memstore.drills.scenes.scene import Scene
from memstore.drills.scenes.scenes_ranks import KillRank
from memstore.errors import DrillError
from memstore.testing.faults.processes import freeze_in_persist


class ControllerScene(Scene):
    """A death of the controller of a term."""

    struck = "the controller"

    def setup(self) -> None:
        super().setup()
        self.term = self.site.status().term
        self.at, self.process = self.site.controller_process()

    def kill_controller(self) -> str:
        """Kill it; return what was done, as text."""
        self.kill(self.at, self.process)
        return f"SIGKILL to the controller (pid {self.process[0]}, term {self.term})"

    def detected(self, status: Status, injected_s: float) -> str | None:
        return f"a controller of term {status.term} took over" if status.term > self.term else None

    def check(self) -> None:
        term = self.site.status().term
        if term <= self.term:
            raise DrillError(f"the controller is still of term {term}: no other took over, so nothing was proved")


class KillController(ControllerScene):
    """SIGKILL to the controller, while all ranks put."""

    name = "kill-controller"

    def inject(self) -> str:
        self.puts = [] if self.is_beyond else self.begin_puts()
        return "; ".join([self.kill_controller(), *self.lose_memories()])

    def recover(self) -> None:
        if self.puts:
            self.end_puts(self.puts)
            self.commit_again()


class KillControllerPersist(ControllerScene):
    """SIGKILL to the controller while a durable step is half written, which is checked while it is stopped."""

    name = "kill-controller-persist"
    job_fields: ClassVar[Mapping[str, Any]] = {"durable_every": 1}
    puts_count = 24

    def inject(self) -> str:
        self.durable_before = self.job.newest().durable_step or 0
        folder = str(Path(str(self.context.config.durable)) / self.job.name)
        step = self.site.do(self.at, freeze_in_persist, self.process, folder)
        return f"{self.kill_controller()} while step {step} had parts and no marker (checked while it was stopped)"

    def wait_for_recovery(self) -> None:
        """Wait: the next controller finishes the half-written step or gives it up, and persists a newer one."""
        self.wait_durable(self.durable_before, "a durable step after the controller died")


class KillControllerRestore(ControllerScene, KillRank):
    """SIGKILL to a rank, and to the controller in the middle of the restore that follows."""

    name = "kill-controller-restore"
    struck = "rank {0.rank} on {0.victim_host}, and the controller during the restore"

    def detected(self, status: Status, injected_s: float) -> str | None:
        return KillRank.detected(self, status, injected_s)

    def meanwhile(self) -> None:
        """Kill the controller while ranks wait in get()."""
        self.killed = []
        words = self.kill_controller()
        self.say("inject", f"{words} while ranks wait in get(); {self.wait_for_effect()}")

    def check(self) -> None:
        super().check()
        self.say("took over", f"a controller of term {self.site.status().term}")
