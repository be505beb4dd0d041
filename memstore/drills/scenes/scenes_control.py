"""Faults of the controller."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from memstore.drills.ranks.ranks import Restored
from memstore.drills.scenes.scene import Scene
from memstore.drills.scenes.scenes_ranks import KillRank
from memstore.errors import DrillError


class KillController(Scene):
    """SIGKILL to the controller, while all ranks put."""

    name = "kill-controller"

    def setup(self) -> None:
        super().setup()
        self.term = int(self.site.status()["term"])
        self.at, self.process = self.site.controller_process()

    def victims(self) -> list[str]:
        return ["the controller", *self.hosts]

    def inject(self) -> str:
        self.puts = [] if self.is_beyond else self.begin_puts()
        self.site.do(self.at, "kill", [self.process])
        killed = f"SIGKILL to the controller (pid {self.process[0]}, term {self.term})"
        return "; ".join([killed, *self.lose_memories()])

    def wait_for_effect(self) -> str:
        self.site.do(self.at, "wait_gone", [self.process])
        return "; ".join([f"pid {self.process[0]} is gone (checked)", *self.memories_gone()])

    def detected(self, body: dict[str, Any], injected_s: float) -> str | None:
        return f"a controller of term {body['term']} took over" if body["term"] > self.term else None

    def recover(self) -> None:
        if self.puts:
            self.end_puts(self.puts)
            self.commit_again()


class KillControllerRestore(KillRank):
    """SIGKILL to a rank, and to the controller in the middle of the restore that follows."""

    name = "kill-controller-restore"

    def setup(self) -> None:
        super().setup()
        self.term = int(self.site.status()["term"])
        self.at, self.controller = self.site.controller_process()

    def victims(self) -> list[str]:
        return [f"rank {self.rank} on {self.holders[0]}", "the controller during the restore"]

    def restore(self) -> list[Restored]:
        return self.context.job.restore(is_altered=self.context.options.is_altered, meanwhile=self._kill)

    def _kill(self) -> None:
        self.site.do(self.at, "kill", [self.controller])
        self.site.do(self.at, "wait_gone", [self.controller])
        self.context.timeline.line(
            "inject",
            f"SIGKILL to the controller (pid {self.controller[0]}, term {self.term}) while ranks wait in get(); gone "
            "(checked)",
        )

    def check(self) -> None:
        term = int(self.site.status()["term"])
        if term <= self.term:
            raise DrillError(f"the controller is still of term {term}: no other one took over, so nothing was proved")
        self.context.timeline.line("took over", f"a controller of term {term}")


class KillControllerPersist(KillController):
    """SIGKILL to the controller while a durable step is half written, which is checked while it is stopped."""

    name = "kill-controller-persist"
    job_fields: ClassVar[Mapping[str, Any]] = {"durable_every": 1}
    puts_count = 24

    def inject(self) -> str:
        self.durable_before = int(self.context.job.status()["durable_step"] or 0)
        folder = str(Path(str(self.context.config.durable)) / self.context.job.name)
        step = self.site.do(self.at, "freeze_in_persist", self.process, folder)
        self.site.do(self.at, "kill", [self.process])
        return (
            f"SIGKILL to the controller (pid {self.process[0]}, term {self.term}) while step {step} had parts and no "
            "marker (checked while it was stopped)"
        )

    def recover(self) -> None:
        """Do nothing: Ray starts the next controller, which finishes or gives up the half-written step."""

    def wait_for_recovery(self) -> None:
        newest = self.site.wait_for("a durable step after the controller died", self._newer_durable)
        self.context.timeline.line("durable", f"step {newest} is durable")

    def _newer_durable(self) -> int | None:
        newest = self.context.job.status()["durable_step"]
        return newest if newest is not None and newest > self.durable_before else None


SCENES = {scene.name: scene for scene in (KillController, KillControllerRestore, KillControllerPersist)}
