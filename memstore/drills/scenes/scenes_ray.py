"""Faults of Ray itself: all of it at once, or its head and then the rest. The hosts' memory stays (R5, R17, R24)."""

from __future__ import annotations

from memstore.drills.scenes.scene import Scene
from memstore.errors import DrillError
from memstore.testing.faults.arena_files import arena_identity

ENDED_S = 90.0  # with Ray's default, a raylet waits a minute for a head that is gone


class RayScene(Scene):
    """A death of all of Ray; Ray is started again on the same hosts, and `late` joins when ranks wait in get()."""

    is_noticed = False  # no controller is left that could notice it
    late = ""

    def setup(self) -> None:
        super().setup()
        self.hosts = []  # no host loses its memory
        self.rank_hosts = [r.host for r in self.job.ranks]

    def end_ray(self) -> int:
        """Kill what this scene kills; return how many processes."""
        raise NotImplementedError

    def inject(self) -> str:
        site = self.own_site
        # A later call through a handle of this Ray's actors would start another Ray here.
        self.job.ranks, self.job.spares = [], []
        self.before = {host: arena_identity(site.folder(host)) for host in site.cluster.labels}
        return f"SIGKILL to {self.end_ray()} processes of {', '.join(self.victims())}"

    def wait_for_effect(self) -> str:
        gone = [h for h, known in self.before.items() if arena_identity(self.site.folder(h)) != known]
        if gone:
            raise DrillError(f"the arenas of {', '.join(gone)} are not what they were: only processes were to go")
        return f"all gone, {len(self.before)} arena files are still there (both checked)"

    def recover(self) -> None:
        self.own_site.start_ray(without=self.late)
        others = [host for host in self.site.places() if host != self.late]
        self.job.stand_by([h if h != self.late else others[i % len(others)] for i, h in enumerate(self.rank_hosts)])
        self.say("started", f"Ray and the store run again on all hosts{f' but {self.late}' if self.late else ''}")


class RestartRay(RayScene):
    """SIGKILL to every process of every host at once; Ray is started again, and one host joins late."""

    name = "restart-ray"
    struck = "Ray on every host, {0.late} late"

    def setup(self) -> None:
        super().setup()
        self.late = self.rng.choice([host for host in self.rank_hosts if host != self.own_site.head])

    def end_ray(self) -> int:
        return self.own_site.end_ray()

    def meanwhile(self) -> None:
        """Let the late host join."""
        self.own_site.join_late(self.late)
        self.say("joined", f"{self.late}, while ranks wait in get()")

    def cleanup(self) -> None:
        self.own_site.join_late(self.late)


class HeadNode(RayScene):
    """SIGKILL to Ray's head. Without it every other raylet ends; then Ray is started again on the same hosts."""

    name = "head-node"
    struck = "Ray's head on {0.own_site.head}"

    def end_ray(self) -> int:
        return self.own_site.end_head()

    def wait_for_effect(self) -> str:
        took_s = self.own_site.wait_ray_ended(ENDED_S)
        return f"every other raylet and holder ended by itself within {took_s:.0f} s; {super().wait_for_effect()}"
