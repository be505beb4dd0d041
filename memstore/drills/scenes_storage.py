"""Faults of what is stored: bytes at rest, and the durable tier."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from memstore.drills.scene import Scene
from memstore.errors import DrillError

VERIFY_S = 300.0
ASIDE = ".aside"  # where the job's durable folder waits while a file stands in its place


class CorruptChunk(Scene):
    """One chunk of one copy; beyond: the same chunk of every copy."""

    name = "corrupt-chunk"

    def setup(self) -> None:
        super().setup()
        self.hosts = []  # nobody loses a whole memory here
        self.where = self.rng.random()
        self.flips: dict[str, dict[str, Any]] = {}
        self.answer: dict[str, Any] | None = None
        self.hit = self.holders if self.is_beyond else [self.rng.choice(self.holders)]

    def victims(self) -> list[str]:
        return [f"rank {self.rank}'s copy on {host}" for host in self.hit]

    def inject(self) -> str:
        step, name = self.run.report.step_before, self.run.job.name
        flips = {
            host: self.site.do(host, "flip_chunk", self.site.folder(host), name, step, self.rank, self.where)
            for host in self.hit
        }
        self.flips = flips
        return (
            f"one bit of chunk {flips[self.hit[0]]['chunk']} of rank {self.rank}, step {step}, on {', '.join(self.hit)}"
        )

    def wait_for_effect(self) -> str:
        # flip_chunk() read the bytes back and found another digest before it returned.
        count = len(self.flips)
        return f"its slot in {count} arena file{'s' * (count > 1)} has another digest now (checked)"

    def detected(self, body: dict[str, Any], injected_s: float) -> str | None:
        if not self.flips:
            return None
        if self.answer is None:
            self.answer = self.site.ask("verify", {"job": self.run.job.name}, VERIFY_S)
        for host, flip in self.flips.items():
            if self.site.do(host, "is_sealed_damage", self.site.folder(host), flip):
                return None
        found = {host: self.answer["hosts"][host]["damaged"] for host in self.hit}
        by_verify = ", ".join(f"{count} on {host}" for host, count in found.items() if count)
        return f"verify took out {by_verify}" if by_verify else "the scrubber had taken it out before verify came"

    def recover(self) -> None:
        if not self.is_beyond:
            self.run.job.wait_redundant()
            self.run.timeline.line("repaired", f"{self.run.job.copies_text()} again, from a peer")


class DurableError(Scene):
    """A file stands where the scratch job's durable folder was: every write of a part fails until it is mended."""

    name = "durable-error"
    job_fields: ClassVar[Mapping[str, Any]] = {"durable_every": 1}
    puts_count = 16
    hold_s = 1.0

    def victims(self) -> list[str]:
        return ["the durable directory of the scratch job"]

    @property
    def folder(self) -> Path:
        """Where the durable parts of the job lie."""
        return Path(str(self.run.config.durable)) / self.run.job.name

    def inject(self) -> str:
        self.durable_before = self.run.job.status()["durable_step"]
        self.folder.rename(self.folder.with_name(self.folder.name + ASIDE))
        self.folder.write_text("a file where a directory should be\n")
        return f"a file in the place of {self.folder.name} in the durable directory"

    def wait_for_effect(self) -> str:
        if not self.folder.is_file():
            raise DrillError(f"{self.folder} is no file: the fault did not take effect")
        return "nothing can be created below it (checked)"

    def detected(self, body: dict[str, Any], injected_s: float) -> str | None:
        job = next((row for row in body["jobs"] if row["job"] == self.run.job.name), None)
        return f"durable: {job['durable_problem']}" if job is not None and job["durable_problem"] else None

    def recover(self) -> None:
        self.cleanup()
        self.run.timeline.line("mended", "the directory is back")

    def wait_for_recovery(self) -> None:
        before = self.durable_before

        def look() -> int | None:
            job = self.run.job.status()
            newest = job["durable_step"]
            return newest if newest is not None and newest > (-1 if before is None else before) else None

        newest = self.site.wait_for("a durable step after the directory was mended", look)
        self.run.timeline.line("durable", f"step {newest} is durable again")

    def cleanup(self) -> None:
        aside = self.folder.with_name(self.folder.name + ASIDE)
        if aside.exists():
            self.folder.unlink(missing_ok=True)
            aside.rename(self.folder)


SCENES = {scene.name: scene for scene in (CorruptChunk, DurableError)}
