"""Faults of stored bytes, in the arenas and in the durable tier."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from memstore.drills.breaking import faults
from memstore.drills.breaking.kept_up import SlowFileSystem
from memstore.drills.breaking.mounts import make_ext4, mount, mount_tmpfs, unmount
from memstore.drills.ranks.ranks import PutRow, collect
from memstore.drills.scenes.scene import Scene
from memstore.drills.sites.scratch import ScratchJob
from memstore.errors import DrillError

VERIFY_S = 300.0
SLOW_WRITE_S = 0.5  # a small write that takes this long was delayed by the fault
PROBE_S = 10.0
ASIDE = ".aside"  # suffix of the job's durable folder while a file has its place


class CorruptChunk(Scene):
    """A flipped bit in one chunk of one copy; beyond: in the same chunk of every copy."""

    name = "corrupt-chunk"

    def setup(self) -> None:
        super().setup()
        self.hosts = []  # no host loses its whole memory
        self.where = self.rng.random()
        self.flips: dict[str, dict[str, Any]] = {}
        self.answer: dict[str, Any] | None = None
        self.hit = self.holders if self.is_beyond else [self.rng.choice(self.holders)]

    def victims(self) -> list[str]:
        return [f"rank {self.rank}'s copy on {host}" for host in self.hit]

    def inject(self) -> str:
        step, name = self.context.report.step_before, self.context.job.name
        flips = {
            host: self.site.do(host, "flip_chunk", self.site.folder(host), name, step, self.rank, self.where)
            for host in self.hit
        }
        self.flips = flips
        return (
            f"one bit of chunk {flips[self.hit[0]]['chunk']} of rank {self.rank}, step {step}, on {', '.join(self.hit)}"
        )

    def wait_for_effect(self) -> str:
        # flip_chunk() has read the bytes back and compared their digest.
        count = len(self.flips)
        return f"its slot in {count} arena file{'s' * (count > 1)} has another digest now (checked)"

    def detected(self, body: dict[str, Any], injected_s: float) -> str | None:
        if not self.flips:
            return None
        if self.answer is None:
            self.answer = self.site.ask("verify", {"job": self.context.job.name}, VERIFY_S)
        for host, flip in self.flips.items():
            if self.site.do(host, "is_sealed_damage", self.site.folder(host), flip):
                return None
        found = {host: self.answer["hosts"][host]["damaged"] for host in self.hit}
        by_verify = ", ".join(f"{count} on {host}" for host, count in found.items() if count)
        return f"verify took out {by_verify}" if by_verify else "the scrubber had taken it out before verify came"

    def recover(self) -> None:
        if not self.is_beyond:
            self.context.job.wait_redundant()
            self.context.timeline.line("repaired", f"{self.context.job.copies_text()} again, from a peer")


class DurableError(Scene):
    """A file in the place of the scratch job's durable folder, so that every write fails until it is removed."""

    name = "durable-error"
    job_fields: ClassVar[Mapping[str, Any]] = {"durable_every": 1}
    puts_count = 16
    hold_s = 1.0

    def victims(self) -> list[str]:
        return ["the durable directory of the scratch job"]

    @property
    def folder(self) -> Path:
        """Return the folder of the job's durable parts."""
        return Path(str(self.context.config.durable)) / self.context.job.name

    def inject(self) -> str:
        self.durable_before = self.context.job.status()["durable_step"]
        self.folder.rename(self.folder.with_name(self.folder.name + ASIDE))
        self.folder.write_text("a file where a directory should be\n")
        return f"a file in the place of {self.folder.name} in the durable directory"

    def wait_for_effect(self) -> str:
        if not self.folder.is_file():
            raise DrillError(f"{self.folder} is no file: the fault did not take effect")
        return "nothing can be created below it (checked)"

    def detected(self, body: dict[str, Any], injected_s: float) -> str | None:
        job = next((row for row in body["jobs"] if row["job"] == self.context.job.name), None)
        return f"durable: {job['durable_problem']}" if job is not None and job["durable_problem"] else None

    def recover(self) -> None:
        self.cleanup()
        self.context.timeline.line("mended", "the directory is back")

    def wait_for_recovery(self) -> None:
        before = self.durable_before

        def look() -> int | None:
            job = self.context.job.status()
            newest = job["durable_step"]
            return newest if newest is not None and newest > (-1 if before is None else before) else None

        newest = self.site.wait_for("a durable step after the directory was repaired", look)
        self.context.timeline.line("durable", f"step {newest} is durable again")

    def cleanup(self) -> None:
        aside = self.folder.with_name(self.folder.name + ASIDE)
        if aside.exists():
            self.folder.unlink(missing_ok=True)
            aside.rename(self.folder)


class DurableFull(DurableError):
    """A small full file system over the scratch job's durable folder, so that every write ends in ENOSPC."""

    name = "durable-full"
    mounted: Path | None = None

    def inject(self) -> str:
        self.durable_before = self.context.job.status()["durable_step"]
        mount_tmpfs(self.folder, "64k")
        self.mounted = self.folder
        return f"a full file system of 64 KiB over {self.folder.name} in the durable directory"

    def wait_for_effect(self) -> str:
        probe = self.folder / ".drill-probe"
        try:
            probe.write_bytes(bytes(1 << 17))
        except OSError as exc:
            if exc.errno == errno.ENOSPC:
                return "a write below it ends in ENOSPC (checked)"
            raise DrillError(f"a write below it ended in {exc}, not in ENOSPC") from exc
        finally:
            probe.unlink(missing_ok=True)
        raise DrillError("128 KiB fitted into 64 KiB: the fault did not take effect")

    def cleanup(self) -> None:
        if self.mounted is not None:
            unmount(self.mounted)
            self.mounted = None


class DurableSlow(DurableError):
    """A file system under the scratch job's durable folder that is frozen for most of the time."""

    name = "durable-slow"
    is_noticed = False  # a slow write is no error; it only makes the store pass over the steps in between
    puts_count = 24
    hold_s = 4.0
    slow: SlowFileSystem | None = None
    mounted: Path | None = None
    scratch: Path | None = None

    def setup(self) -> None:
        """Move the durable folder onto a file system of its own, while the store writes nothing there."""
        super().setup()
        newest, options = self.context.report.step_before, self.context.options
        self.site.wait_for("the newest step to be durable", lambda: self.context.job.status()["durable_step"] == newest)
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
        probe = self.folder / ".drill-probe"
        deadline_s = time.monotonic() + PROBE_S
        while (started_s := time.monotonic()) < deadline_s:  # a write between two freezes is not delayed; so try again
            probe.write_bytes(b"?")
            probe.unlink()
            took_s = time.monotonic() - started_s
            if took_s >= SLOW_WRITE_S:
                return f"a write of one byte below it took {took_s:.1f} s (checked)"
        raise DrillError(f"no small write took {SLOW_WRITE_S:g} s within {PROBE_S:g} s: the fault did not take effect")

    def recover(self) -> None:
        job = self.context.job.status()
        self.context.timeline.line(
            "meanwhile", f"step {job['durable_step']} is durable, {job['durable_abandoned']} writes were given up"
        )
        self.durable_before = job["durable_step"]
        if self.slow is not None:
            self.slow.end()
        self.context.timeline.line("thawed", "the file system is as fast as before")

    def cleanup(self) -> None:
        try:
            if self.slow is not None:
                self.slow.end()
        finally:
            if self.mounted is not None:
                unmount(self.mounted)
                self.mounted = None
            if self.scratch is not None:
                shutil.rmtree(self.scratch)
                self.scratch = None


class DurableTorn(Scene):
    """A slice of the newest durable step that is cut short, and the loss of every copy of that shard in RAM."""

    name = "durable-torn"
    job_fields: ClassVar[Mapping[str, Any]] = {"durable_every": 1, "durable_keep": 3}

    def setup(self) -> None:
        super().setup()
        self.hosts = list(self.holders)
        newest = self.context.report.step_before
        self.site.wait_for("the newest step to be durable", lambda: self.context.job.status()["durable_step"] == newest)
        self.durable = sorted(row["step"] for row in self.context.job.status()["steps"] if row["durable"])
        if len(self.durable) < 2:
            raise DrillError(f"only step {newest} is durable: there is no older one to fall back on")

    def victims(self) -> list[str]:
        return [f"rank {self.rank}'s part of durable step {self.durable[-1]}", *self.hosts]

    def inject(self) -> str:
        step = self.durable[-1]
        folder = Path(str(self.context.config.durable)) / self.context.job.name
        part = self.rng.choice(sorted(folder.glob(f"*/{step}/rank-{self.rank}.*")))
        before = part.stat().st_size
        self.part, self.left = part, int(before * self.rng.uniform(0.1, 0.9))
        os.truncate(part, self.left)
        torn = f"slice of the part of rank {self.rank}, durable step {step}, cut from {before:,} to {self.left:,} bytes"
        return "; ".join([torn, *self.lose_memories()])

    def wait_for_effect(self) -> str:
        if self.part.stat().st_size != self.left:
            raise DrillError(f"{self.part} has another size than it was cut to: the fault did not take effect")
        return "; ".join([f"the part has {self.left:,} bytes (checked)", *self.memories_gone()])

    def detected(self, body: dict[str, Any], injected_s: float) -> str | None:
        found = [self.host_noticed(host, body, injected_s) for host in self.hosts]
        return "; ".join(str(why) for why in found) if all(found) else None

    def check(self) -> None:
        restored = self.context.report.step_restored
        if restored is not None and restored not in self.durable[:-1]:
            self.context.broken_promises.append(
                f"step {restored} was restored, whole are only the durable {self.durable[:-1]}"
            )


class TornManifest(Scene):
    """A manifest that is cut short as by a crash in mid-write, and SIGKILL to the holder, so that it is read again."""

    name = "torn-manifest"

    def setup(self) -> None:
        super().setup()
        self.hosts = []  # no host loses its whole memory
        self.where = self.rng.random()
        self.hit = self.holders if self.is_beyond else [self.rng.choice(self.holders)]
        self.processes: dict[str, faults.Process] = {}

    def victims(self) -> list[str]:
        return [f"the manifest of rank {self.rank} on {host}" for host in self.hit]

    def inject(self) -> str:
        step, words = self.context.report.step_before, []
        for host in self.hit:
            folder = self.site.folder(host)
            torn = self.site.do(host, "tear_manifest", folder, self.context.job.name, step, self.rank, self.where)
            self.processes[host] = self.site.do(host, "holder_process", folder)
            self.site.do(host, "kill", [self.processes[host]])
            words.append(f"manifest of rank {self.rank}, step {step}, on {host} cut from {torn['nbytes']} to "
                         f"{torn['left_nbytes']} bytes, SIGKILL to its holder")  # fmt: skip
        return "; ".join(words)

    def wait_for_effect(self) -> str:
        for host, process in self.processes.items():
            self.site.do(host, "wait_gone", [process])
        # tear_manifest() has tried to read the file as a manifest, and failed.
        return f"no manifest any more (checked), holders of {', '.join(self.hit)} gone (checked)"

    def detected(self, body: dict[str, Any], injected_s: float) -> str | None:
        found = [self.host_noticed(host, body, injected_s) for host in self.hit]
        return "; ".join(str(why) for why in found) if all(found) else None

    def recover(self) -> None:
        self.site.wait_for(f"new holders on {', '.join(self.hit)}", self._are_replaced)
        if self.is_beyond:
            return
        [host] = self.hit
        if (
            host in self.site.on_probation()
        ):  # a host on probation gets its second copy with the next put, not by repair (R29)
            self.context.timeline.line("repaired", f"not yet: {host} died too often lately for repair to trust")
            return
        self.context.job.wait_redundant()
        step = int(self.context.report.step_before or 0)
        if not self.site.do(host, "has_manifest", self.site.folder(host), self.context.job.name, step, self.rank):
            self.context.broken_promises.append(
                f"{host} counts as holding rank {self.rank} of step {step} and has no manifest of it"
            )
        self.context.timeline.line("repaired", f"{self.context.job.copies_text()} again, from a peer")

    def _are_replaced(self) -> bool:
        is_new = all(int(self.site.record(host)["pid"]) != pid for host, (pid, _) in self.processes.items())
        return is_new and set(self.processes) <= set(self.site.live_hosts())


class ArenaFull(Scene):
    """A second job that asks for more arena memory than a host can ever give, while the first one trains."""

    name = "arena-full"
    is_noticed = False  # only the ranks that ask get an error; the store itself is healthy
    puts_count = 24
    hold_s = 1.0
    greedy: ScratchJob | None = None

    def victims(self) -> list[str]:
        return ["a second scratch job, too large for the arenas"]

    def inject(self) -> str:
        limit = max(int(row["stats"]["limit_bytes"]) for row in self.site.status()["hosts"])
        nbytes = limit // 3  # each host needs room for 3 versions at least, and other jobs have some already
        self.greedy = ScratchJob(
            self.site, "drill-greedy", self.context.config, seed=self.context.options.seed, nbytes=nbytes
        )
        self.greedy.start([r.host for r in self.context.job.ranks[:2]])
        return f"job {self.greedy.name} of 2 ranks wants {nbytes >> 20} MiB each in arenas of {limit >> 20} MiB"

    def wait_for_effect(self) -> str:
        if self.greedy is None:
            raise DrillError("no second job was started")
        calls = self.greedy.begin_puts(0, 0, 0.0)
        rows: list[PutRow] = [row for mine in collect(calls, "first put of the second job") for row in mine]
        refused = [row for row in rows if row.error.startswith("CapacityError")]
        if len(refused) != len(rows):
            raise DrillError(f"the second job was not refused on every rank: {[row.error for row in rows]}")
        self.context.timeline.line("refused", refused[0].error[:300])
        return f"CapacityError at the first put on {len(refused)} of {len(rows)} of its ranks (checked)"

    def recover(self) -> None:
        self.cleanup()

    def cleanup(self) -> None:
        if self.greedy is not None:
            self.greedy.remove()
            self.greedy = None


SCENES = {
    scene.name: scene
    for scene in (CorruptChunk, TornManifest, ArenaFull, DurableError, DurableFull, DurableSlow, DurableTorn)
}
