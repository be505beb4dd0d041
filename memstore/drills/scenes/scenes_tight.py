"""Faults of scarce memory, on the cluster of `site_tight.py`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from memstore.cli.output import size_text
from memstore.config import MIB
from memstore.drills.scenes.scene import Scene
from memstore.drills.sites.site_tight import TightSite, memory_in_use
from memstore.errors import DrillError
from memstore.shell.arena.lock import is_alive
from memstore.testing.faults.kept_up import FullFileSystem
from memstore.testing.faults.mounts import check_full

HOG_LIMIT_BYTES = 4096 * MIB  # the task takes no more than this from the machine, also if the monitor fails to kill it
HOG_STEP_BYTES = 64 * MIB
HOG_WAITS_S = 5.0  # time for the monitor to kill the task at its limit; it looks every 0.1 s
HOG_S = 60.0
PAGE_BYTES = 4096


def take_memory(limit_bytes: int) -> int:
    """Take memory up to a limit and write to it; return how much it was. Runs as the drill's own task on the victim."""
    taken: list[bytes] = []
    while (nbytes := sum(len(block) for block in taken)) < limit_bytes:
        taken.append(b"\x01" * HOG_STEP_BYTES)
    time.sleep(HOG_WAITS_S)
    return nbytes


class TightScene(Scene):
    """A fault through which every holder and its arena must stay the same."""

    def setup(self) -> None:
        super().setup()
        if not isinstance(self.site, TightSite):
            raise DrillError(f"{self.name} is played on a cluster with little memory only (--embedded)")
        self.tight = self.site
        self.lives = {host: (self.holder(host), self.arena(host)) for host in self.site.live_hosts()}

    def check(self) -> None:
        for host, before in self.lives.items():
            now = (self.holder(host), self.arena(host))
            if now != before:
                self.broken(f"the holder and arena of {host} were {before} and are {now}")
        flapped = self.site.on_probation()
        if flapped:
            self.broken(f"{', '.join(flapped)} counted as dead several times, though no holder died")


class TmpfsFull(TightScene):
    """No free page in the arenas' file system, while all ranks put: holders write to the pages they have in reserve."""

    name = "tmpfs-full"
    struck = "the file system of the arenas"
    is_noticed = False  # the pages in reserve are enough for every put
    puts_count = 16
    hold_s = 2.0
    filler: FullFileSystem | None = None

    def begin_puts(self, pause_s: float | None = None, marks: Mapping[int, str] | None = None) -> list[Any]:
        """Fill the file system, then start the puts: every commit is made without a free page."""
        self.filler = FullFileSystem(self.tight.arenas)
        self.filler.start()
        return super().begin_puts(pause_s, marks)

    def inject(self) -> str:
        if self.filler is None:
            raise DrillError("nothing was filled")
        return f"a file of {size_text(self.filler.nbytes)} takes all the room beside the arenas"

    def wait_for_effect(self) -> str:
        return check_full(self.tight.arenas, PAGE_BYTES)

    def recover(self) -> None:
        """Require that the last of the puts is committed without a free page and read, then give the space back."""
        step = (self.context.report.step_before or 0) + self.puts_count
        what = f"step {step} to be committed while the file system is full"
        self.site.wait_for(what, lambda: self.job.committed_step() == step)
        found = self.job.read(step, 0)
        self.check_read(found, "while the file system was full")
        self.say("readable", f"step {step}, {sum(not r.problem for r in found)} of {len(found)} shards equal")
        self.cleanup()
        self.say("room", "the file that took it is gone")

    def cleanup(self) -> None:
        if self.filler is not None:
            self.filler.end()


class MemoryPressure(TightScene):
    """A task on one host, outside the store, that takes memory until Ray's memory monitor kills it."""

    name = "memory-pressure"
    struck = "a task of the drill's own on {0.tight.pressed}"
    is_noticed = False  # the fault hits no process of the store
    puts_count = 32
    hold_s = 1.0
    hog: Any = None

    def inject(self) -> str:
        host, (used, total) = self.tight.pressed, memory_in_use(self.tight.arenas)
        node = NodeAffinitySchedulingStrategy(self.site.nodes()[host], soft=False)
        task = ray.remote(take_memory).options(num_cpus=0, max_retries=1, scheduling_strategy=node)
        self.hog = task.remote(HOG_LIMIT_BYTES)
        return (
            f"a task on {host} takes memory; its raylet kills at {self.tight.threshold:.1%} of {size_text(total)}, "
            f"{size_text(self.tight.threshold * total - used)} from here"
        )

    def wait_for_effect(self) -> str:
        try:
            nbytes = ray.get(self.hog, timeout=HOG_S)
        except ray.exceptions.OutOfMemoryError as exc:
            words = next((line for line in str(exc).splitlines() if "emory" in line), "")
            return f"Ray killed it: OutOfMemoryError: {words.strip()[:160]}"
        except ray.exceptions.RayError as exc:
            raise DrillError(f"the task ended otherwise than by Ray's memory monitor: {exc}") from exc
        raise DrillError(f"the task was given {size_text(nbytes)} and was not killed: the fault did not take effect")

    def check(self) -> None:
        super().check()
        gone = [r.host for r in self.job.ranks if not is_alive(r.pid, r.start)]
        if gone:
            self.broken(f"ranks of {', '.join(gone)} are not the processes they were")

    def cleanup(self) -> None:
        if self.hog is not None:
            with contextlib.suppress(ray.exceptions.RayError):
                ray.cancel(self.hog, force=True)
