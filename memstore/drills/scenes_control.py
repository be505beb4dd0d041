"""Faults of the control plane: the controller, Ray's head."""

from __future__ import annotations

from typing import Any

from memstore.drills.scene import Scene


class KillController(Scene):
    """The controller, while all ranks put."""

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
            self.run.commit_again()


SCENES = {scene.name: scene for scene in (KillController,)}
