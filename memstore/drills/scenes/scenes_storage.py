"""Faults of stored bytes, in the arenas and in the durable tier."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from memstore.cli.output import size_text
from memstore.config import MIB
from memstore.core.wire.calls import VerifyStore
from memstore.core.wire.replies import Status, VerifyResult
from memstore.drills.scenes.scene import Scene
from memstore.drills.sites.scratch import ScratchJob, put_rows
from memstore.drills.sites.site_tight import TightSite, memory_in_use
from memstore.errors import DrillError
from memstore.shell.arena.lock import is_alive
from memstore.testing.faults.arena_files import flip_chunk, has_manifest, is_sealed_damage, tear_manifest
from memstore.testing.faults.kept_up import FullFileSystem, SlowFileSystem
from memstore.testing.faults.mounts import check_full, make_ext4, mount, mount_tmpfs, unmount
from memstore.testing.faults.processes import Process

VERIFY_S = 300.0
SLOW_WRITE_S = 0.5  # a small write that takes this long was delayed by the fault
PROBE_S = 10.0
ASIDE = ".aside"  # suffix of the job's durable folder while a file has its place


class CopyScene(Scene):
    """Damage of one copy of the victim's shard; beyond: of every copy."""

    what: ClassVar[str]

    def setup(self) -> None:
        super().setup()
        self.hosts = []  # no host loses its whole memory
        self.where = self.rng.random()
        self.hit = self.holders if self.is_beyond else [self.rng.choice(self.holders)]

    def victims(self) -> list[str]:
        return [f"{self.what} of rank {self.rank} on {host}" for host in self.hit]

    def damage(self, host: str, fault: Callable[[str, str, int, int, float], dict[str, Any]]) -> dict[str, Any]:
        """Run a fault on the copy of a host; return what it did."""
        step = int(self.context.report.step_before or 0)
        return self.site.do(host, fault, self.site.folder(host), self.job.name, step, self.rank, self.where)

    def wait_repaired(self) -> None:
        """Wait until all copies are there again."""
        self.job.wait_redundant()
        self.say("repaired", f"{self.job.copies_text()} again, from a peer")


class CorruptChunk(CopyScene):
    """A flipped bit in one chunk of one copy; beyond: in the same chunk of every copy."""

    name = "corrupt-chunk"
    what = "the copy"
    flips: dict[str, dict[str, Any]] | None = None
    answer: VerifyResult | None = None

    def inject(self) -> str:
        self.flips = {host: self.damage(host, flip_chunk) for host in self.hit}
        return (
            f"one bit of chunk {self.flips[self.hit[0]]['chunk']} of rank {self.rank}, step "
            f"{self.context.report.step_before}, on {', '.join(self.hit)}"
        )

    def wait_for_effect(self) -> str:
        # flip_chunk() has read the bytes back and compared their digest.
        count = len(self.hit)
        return f"its slot in {count} arena file{'s' * (count > 1)} has another digest now (checked)"

    def detected(self, status: Status, injected_s: float) -> str | None:
        if self.flips is None:
            return None
        if self.answer is None:
            self.answer = self.site.ask(VerifyStore(job=self.job.name), VERIFY_S)
        for host, flip in self.flips.items():
            if self.site.do(host, is_sealed_damage, self.site.folder(host), flip):
                return None
        found = {host: self.answer.found[host].damaged for host in self.hit}
        by_verify = ", ".join(f"{count} on {host}" for host, count in found.items() if count)
        return f"verify took out {by_verify}" if by_verify else "the scrubber had taken it out before verify came"

    def recover(self) -> None:
        if not self.is_beyond:
            self.wait_repaired()


class TornManifest(CopyScene):
    """A manifest that is cut short as by a crash in mid-write, and SIGKILL to the holder, so that it is read again."""

    name = "torn-manifest"
    what = "the manifest"

    def setup(self) -> None:
        super().setup()
        self.processes: dict[str, Process] = {}

    def dying(self) -> list[str]:
        return self.hit

    def inject(self) -> str:
        words = []
        for host in self.hit:
            torn = self.damage(host, tear_manifest)  # which has tried to read the rest as a manifest, and failed
            self.processes[host] = self.holder(host)
            self.kill(host, self.processes[host])
            words.append(
                f"manifest of rank {self.rank}, step {self.context.report.step_before}, on {host} cut from "
                f"{torn['nbytes']} to {torn['left_nbytes']} bytes, SIGKILL to its holder"
            )
        return "; ".join(words)

    def recover(self) -> None:
        self.wait_replaced(self.processes)
        if self.is_beyond:
            return
        [host] = self.hit
        if host in self.site.on_probation():  # such a host gets its second copy with the next put, not by repair (R29)
            self.say("repaired", f"not yet: {host} died too often lately for repair to trust")
            return
        self.wait_repaired()
        step = int(self.context.report.step_before or 0)
        if not self.site.do(host, has_manifest, self.site.folder(host), self.job.name, step, self.rank):
            self.broken(f"{host} counts as holding rank {self.rank} of step {step} and has no manifest of it")


class DurableScene(Scene):
    """A fault of the scratch job's durable folder, which `cleanup` undoes; then a newer durable step must come."""

    struck = "the durable directory of the scratch job"
    job_fields: ClassVar[Mapping[str, Any]] = {"durable_every": 1}
    puts_count = 16
    hold_s = 1.0
    durable_before = -1
    mounted: Path | None = None

    @property
    def folder(self) -> Path:
        """Return the folder of the job's durable parts."""
        return Path(str(self.context.config.durable)) / self.job.name

    def wait_newest_durable(self) -> None:
        """Wait until the newest step from before the fault is durable."""
        newest = self.context.report.step_before
        self.site.wait_for("the newest step to be durable", lambda: self.job.newest().durable_step == newest)

    def note_durable(self) -> None:
        """Note the newest durable step, which a later one must follow."""
        step = self.job.newest().durable_step
        self.durable_before = -1 if step is None else step

    def detected(self, status: Status, injected_s: float) -> str | None:
        newest = self.newest_attempt(status)
        return f"durable: {newest.durable_problem}" if newest is not None and newest.durable_problem else None

    def recover(self) -> None:
        self.cleanup()
        self.say("repaired", "the directory is back")

    def wait_for_recovery(self) -> None:
        self.wait_durable(self.durable_before, "a durable step after the directory was repaired")

    def cleanup(self) -> None:
        if self.mounted is not None:
            unmount(self.mounted)
            self.mounted = None


class DurableError(DurableScene):
    """A file in the place of the scratch job's durable folder, so that every write fails until it is removed."""

    name = "durable-error"

    @property
    def aside(self) -> Path:
        """Return where the folder is while a file has its place."""
        return self.folder.with_name(self.folder.name + ASIDE)

    def inject(self) -> str:
        self.note_durable()
        self.folder.rename(self.aside)
        self.folder.write_text("a file where a directory should be\n")
        return f"a file in the place of {self.folder.name} in the durable directory"

    def wait_for_effect(self) -> str:
        if not self.folder.is_file():
            raise DrillError(f"{self.folder} is no file: the fault did not take effect")
        return "nothing can be created below it (checked)"

    def cleanup(self) -> None:
        if self.aside.exists():
            self.folder.unlink(missing_ok=True)
            self.aside.rename(self.folder)


class DurableFull(DurableScene):
    """A small full file system over the scratch job's durable folder, so that every write ends in ENOSPC."""

    name = "durable-full"

    def inject(self) -> str:
        self.note_durable()
        mount_tmpfs(self.folder, "64k")
        self.mounted = self.folder
        return f"a full file system of 64 KiB over {self.folder.name} in the durable directory"

    def wait_for_effect(self) -> str:
        return check_full(self.folder, 128 << 10)


class DurableSlow(DurableScene):
    """A file system under the scratch job's durable folder that is frozen for most of the time."""

    name = "durable-slow"
    is_noticed = False  # a slow write is no error; it only makes the store pass over the steps in between
    puts_count = 24
    hold_s = 4.0
    slow: SlowFileSystem | None = None
    scratch: Path | None = None

    def setup(self) -> None:
        """Move the durable folder onto a file system of its own, while the store writes nothing there."""
        super().setup()
        options = self.context.options
        self.wait_newest_durable()
        self.scratch = Path(tempfile.mkdtemp(prefix="memstore-drill-"))
        image, way = self.scratch / "image", self.scratch / "way"
        way.mkdir()
        make_ext4(image, (64 << 20) + 8 * options.ranks_count * options.nbytes)
        mount(["-o", "loop"], str(image), way)
        try:
            (way / "lost+found").rmdir()
            shutil.copytree(self.folder, way, dirs_exist_ok=True)
        finally:
            unmount(way)
        mount(["-o", "loop"], str(image), self.folder)
        self.mounted = self.folder

    def inject(self) -> str:
        self.slow = SlowFileSystem(self.folder)
        self.slow.start()
        cycle = f"frozen for {self.slow.frozen_s:g} s, thawed for {self.slow.thawed_s:g} s"
        return f"the file system of {self.folder.name} in the durable directory is {cycle}, in turns"

    def wait_for_effect(self) -> str:
        probe, deadline_s = self.folder / ".drill-probe", time.monotonic() + PROBE_S
        while (started_s := time.monotonic()) < deadline_s:  # a write between two freezes is not delayed; so try again
            probe.write_bytes(b"?")
            probe.unlink()
            took_s = time.monotonic() - started_s
            if took_s >= SLOW_WRITE_S:
                return f"a write of one byte below it took {took_s:.1f} s (checked)"
        raise DrillError(f"no small write took {SLOW_WRITE_S:g} s within {PROBE_S:g} s: the fault did not take effect")

    def recover(self) -> None:
        newest = self.job.newest()
        self.note_durable()
        words = f"step {newest.durable_step} is durable, {newest.durable_abandoned} writes were given up"
        self.say("meanwhile", words)
        if self.slow is not None:
            self.slow.end()
        self.say("thawed", "the file system is as fast as before")

    def cleanup(self) -> None:
        try:
            if self.slow is not None:
                self.slow.end()
        finally:
            super().cleanup()
            if self.scratch is not None:
                shutil.rmtree(self.scratch)
                self.scratch = None


class DurableTorn(DurableScene):
    """A slice of the newest durable step that is cut short, and the loss of every copy of that shard in RAM."""

    name = "durable-torn"
    struck = "rank {0.rank}'s part of durable step {0.newest}"
    job_fields: ClassVar[Mapping[str, Any]] = {"durable_every": 1, "durable_keep": 3}

    def setup(self) -> None:
        super().setup()
        self.hosts = list(self.holders)
        self.wait_newest_durable()
        *self.older, self.newest = sorted(row.step for row in self.site.job(self.job.name).steps if row.durable)
        if not self.older:
            raise DrillError(f"only step {self.newest} is durable: there is no older one to fall back on")

    def inject(self) -> str:
        step = self.newest
        self.part = self.rng.choice(sorted(self.folder.glob(f"*/{step}/rank-{self.rank}.*")))
        before = self.part.stat().st_size
        self.left = int(before * self.rng.uniform(0.1, 0.9))
        os.truncate(self.part, self.left)
        torn = f"slice of the part of rank {self.rank}, durable step {step}, cut from {before:,} to {self.left:,} bytes"
        return "; ".join([torn, *self.lose_memories()])

    def wait_for_effect(self) -> str:
        if self.part.stat().st_size != self.left:
            raise DrillError(f"{self.part} has another size than it was cut to: the fault did not take effect")
        return f"the part has {self.left:,} bytes (checked); {super().wait_for_effect()}"

    def detected(self, status: Status, injected_s: float) -> str | None:
        return Scene.detected(self, status, injected_s)

    def recover(self) -> None:
        """Do nothing: what is torn stays torn."""

    def wait_for_recovery(self) -> None:
        """Wait for nothing beside the flow."""

    def check(self) -> None:
        restored = self.context.report.step_restored
        if restored is not None and restored not in self.older:
            self.broken(f"step {restored} was restored, whole are only the durable {self.older}")


class ArenaFull(Scene):
    """A second job that asks for more arena memory than a host can ever give, while the first one trains."""

    name = "arena-full"
    struck = "a second scratch job, too large for the arenas"
    is_noticed = False  # only the ranks that ask get an error; the store itself is healthy
    puts_count = 24
    hold_s = 1.0
    greedy: ScratchJob | None = None

    def inject(self) -> str:
        limit = max(row.stats.limit_bytes for row in self.site.status().hosts if row.stats is not None)
        nbytes = limit // 3  # each host needs room for 3 versions at least, and other jobs have some already
        seed = self.context.options.seed
        self.greedy = ScratchJob(self.site, "drill-greedy", self.context.config, seed=seed, nbytes=nbytes)
        self.greedy.start([r.host for r in self.job.ranks[:2]])
        return f"job {self.greedy.name} of 2 ranks wants {nbytes >> 20} MiB each in arenas of {limit >> 20} MiB"

    def wait_for_effect(self) -> str:
        if self.greedy is None:
            raise DrillError("no second job was started")
        rows = put_rows(self.greedy.begin_puts(0, 0, 0.0), "first put of the second job")
        refused = [row for row in rows if row.error.startswith("CapacityError")]
        if len(refused) != len(rows):
            raise DrillError(f"the second job was not refused on every rank: {[row.error for row in rows]}")
        self.say("refused", refused[0].error[:300])
        return f"CapacityError at the first put on {len(refused)} of {len(rows)} of its ranks (checked)"

    def recover(self) -> None:
        self.cleanup()

    def cleanup(self) -> None:
        if self.greedy is not None:
            self.greedy.remove()
            self.greedy = None


# -- tight --------------------------------------------------------------------------------------------
# Faults of scarce memory, on the cluster of `site_tight.py`.


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
