"""Faults of Ray itself: all of it at once, or its head and then the rest. The hosts' memory stays (R5, R17, R24)."""

from __future__ import annotations

from typing import Any

from memstore.drills.breaking import faults
from memstore.drills.ranks.ranks import Restored
from memstore.drills.scenes.scene import Scene
from memstore.errors import DrillError

ENDED_S = 90.0  # with Ray's default, a raylet waits a minute for a head that is gone


class RestartRay(Scene):
    """SIGKILL to every process of every host at once; Ray is started again, and one host joins late."""

    name = "restart-ray"
    is_noticed = False  # no controller is left that could notice it

    def setup(self) -> None:
        super().setup()
        site = self.own_site()
        self.hosts = []  # no host loses its memory
        self.late = self._draw_late([r.host for r in self.context.job.ranks if r.host != site.head])
        self.before: dict[str, Any] = {}
        self.seats = [r.host for r in self.context.job.ranks]

    def _draw_late(self, hosts: list[str]) -> str:
        return self.rng.choice(hosts)

    def victims(self) -> list[str]:
        return [f"Ray on every host, {self.late} late"]

    def inject(self) -> str:
        site = self.own_site()
        self._let_go()
        self.before = {host: faults.arena_identity(site.folder(host)) for host in site.cluster.labels}
        count = site.end_ray()
        return f"SIGKILL to all {count} processes of Ray and of the store"

    def _let_go(self) -> None:
        """Drop every handle of this Ray's actors: a later call through one would start another Ray here."""
        self.context.job.ranks, self.context.job.spares = [], []

    def wait_for_effect(self) -> str:
        site = self.own_site()
        gone = [host for host, known in self.before.items() if faults.arena_identity(site.folder(host)) != known]
        if gone:
            raise DrillError(f"the arenas of {', '.join(gone)} are not what they were: only processes were to go")
        return f"all gone, {len(self.before)} arena files are still there (both checked)"

    def recover(self) -> None:
        site = self.own_site()
        site.start_ray(without=self.late)
        others = [host for host in site.places() if host != self.late]
        seats = [host if host != self.late else others[i % len(others)] for i, host in enumerate(self.seats)]
        self.context.job.stand_by(seats)
        left_out = f"all hosts but {self.late}" if self.late else "all hosts"
        self.context.timeline.line("started", f"Ray and the store run again on {left_out}")

    def restore(self) -> list[Restored]:
        return self.context.job.restore(is_altered=self.context.options.is_altered, meanwhile=self._join_late)

    def _join_late(self) -> None:
        self.own_site().join_late(self.late)
        self.context.timeline.line("joined", f"{self.late}, while ranks wait in get()")

    def cleanup(self) -> None:
        self.own_site().join_late(self.late)


class HeadNode(RestartRay):
    """SIGKILL to Ray's head. Without it every other raylet ends; then Ray is started again on the same hosts."""

    name = "head-node"

    def _draw_late(self, hosts: list[str]) -> str:
        return ""  # no host joins late

    def victims(self) -> list[str]:
        return [f"Ray's head on {self.own_site().head}"]

    def inject(self) -> str:
        site = self.own_site()
        self._let_go()
        self.before = {host: faults.arena_identity(site.folder(host)) for host in site.cluster.labels}
        count = site.end_head()
        return f"SIGKILL to the {count} processes of Ray's head"

    def wait_for_effect(self) -> str:
        took_s = self.own_site().wait_ray_ended(ENDED_S)
        return f"every other raylet and holder ended by itself within {took_s:.0f} s; {super().wait_for_effect()}"

    def restore(self) -> list[Restored]:
        return Scene.restore(self)


SCENES = {scene.name: scene for scene in (RestartRay, HeadNode)}
