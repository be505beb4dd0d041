"""What the ranks do around a fault: their launcher restarts them, or their training goes on."""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from memstore.drills.model.promises import GOES_ON, REFUSED, RESTART
from memstore.drills.ranks.ranks import Restored
from memstore.drills.run.judgement import judge_bytes, judge_refusal, judge_restore, tell_compared, tell_restore
from memstore.errors import DrillError, MemstoreError

if TYPE_CHECKING:
    from memstore.drills.run.runner import DrillRun


READ_TRIES = 5  # each put of before the check can replace the newest step once


class Flow:
    """One way to go on. The methods are called in the phases of their names, before or after the scene's as told."""

    def __init__(self, run: DrillRun) -> None:
        self.run = run

    def setup(self) -> None:
        """After the scene has drawn its victims."""

    def inject(self) -> str:
        """Let the scene do it; return what was done."""
        return self.run.scene.inject()

    def recover(self) -> None:
        """Let the scene end the fault, and bring the ranks through it."""
        raise NotImplementedError

    def wait_for_recovery(self) -> None:
        """Before the scene: copies complete again, commits under way."""
        raise NotImplementedError

    def check(self) -> None:
        """After the scene: hold what was found against the promise."""
        raise NotImplementedError

    def pass_words(self) -> str:
        """Say what was proved."""
        raise NotImplementedError


class Restart(Flow):
    """The launcher ends the attempt's processes and starts the next, which gets, compares and trains on."""

    results: tuple[Restored, ...] = ()

    def setup(self) -> None:
        run, job, scene = self.run, self.run.job, self.run.scene
        gone = {host for host in scene.hosts if scene.leaves(host)}
        left = [host for host in run.places if host not in gone]
        # Not to a host that has the copy already, else no byte would need to move; with two hosts there is no other.
        others = [host for host in left if host not in scene.holders]
        if gone and not others and not scene.is_beyond:
            run.promise = replace(run.promise, verdicts=run.promise.verdicts | {"local"}, needs=None)
        others = others or left
        hosts = [r.host for r in job.ranks]
        job.stand_by([host if host not in gone else others[i % len(others)] for i, host in enumerate(hosts)])

    def recover(self) -> None:
        run = self.run
        run.scene.recover()
        with contextlib.suppress(MemstoreError):
            committed = run.job.status()["committed_step"]
            run.report.step_before = max(run.report.step_before or 0, int(committed or 0))
        run.job.restart()
        self.results = tuple(run.scene.restore())
        tell_restore(run, list(self.results))

    def wait_for_recovery(self) -> None:
        """Copies complete again, and training goes on: the next step is committed."""
        run = self.run
        if any(r.error for r in self.results) or not run.report.is_verified:
            return
        started_s = time.monotonic()
        flapping = run.site.on_probation()
        try:
            if not flapping:  # such a host is given no second copy by repair, only by the next put (R29)
                run.job.wait_redundant()
        except DrillError as exc:
            run.broken.append(f"copies are not complete again: {exc}")
            return
        run.report.seconds["redundant"] = round(time.monotonic() - started_s, 3)
        step = (run.report.step_restored or 0) + 1
        run.job.put(step, step, "put after the restore")
        run.job.wait("committed", "commit after the restore")
        took = f"{run.report.seconds['redundant']:.1f} s after restore"
        if flapping:
            run.job.wait_redundant()
            took = f"by the next put ({', '.join(flapping)} died too often lately for repair to trust, R29)"
        run.timeline.line("redundant", f"{run.job.copies_text()} again, {took}; training went on with step {step}")

    def check(self) -> None:
        judge = judge_refusal if any(r.error for r in self.results) else judge_restore
        judge(self.run, list(self.results))

    def pass_words(self) -> str:
        report = self.run.report
        if report.verdict == REFUSED:
            lines = [line.strip() for line in (report.message or "").splitlines()]
            return f"refused: {lines[1] if len(lines) > 1 else lines[0]}"
        lost = f"{report.rpo_steps} steps lost"
        if self.run.promise.is_lossless:
            return f"{lost} (promised 0) · {report.rto_s or 0.0:.1f} s without the launcher's restart"
        return f"{lost}: durable step {report.step_restored} restored, the newest had been {report.step_before}"


class GoesOn(Flow):
    """No rank is restarted: puts never raise nor stall beyond the budget, commits go on or resume."""

    def __init__(self, run: DrillRun) -> None:
        super().__init__(run)
        self.puts: list[Any] = []
        self.results: list[Restored] = []

    def inject(self) -> str:
        self.puts = self.run.scene.begin_puts()
        return super().inject()

    def recover(self) -> None:
        run, scene = self.run, self.run.scene
        before = max(run.report.step_before or 0, scene.step_at_fault)
        self._hold(before)
        scene.recover()
        scene.end_puts(self.puts)
        self.puts = []

    def _hold(self, before: int) -> None:
        """Let the fault last; where commits were promised meanwhile, wait for one, or break the promise."""
        run, promise = self.run, self.run.promise
        started_s = time.monotonic()
        end_s = started_s + run.scene.hold_s
        limit_s = started_s + max(promise.resume_s, run.scene.hold_s)
        newest = run.job.committed_step()
        while time.monotonic() < (limit_s if promise.has_commits_meanwhile and newest <= before else end_s):
            time.sleep(0.05)
            newest = run.job.committed_step()
        if promise.has_commits_meanwhile and newest <= before:
            run.broken.append(f"no step was committed within {promise.resume_s:g} s while the fault was there")
        elif newest > before:
            run.timeline.line("committed", f"step {newest} while the fault is there")

    def wait_for_recovery(self) -> None:
        run = self.run
        run.report.seconds["resume"] = run.commit_again()
        if run.report.seconds["resume"] is None:
            return
        started_s = time.monotonic()
        try:
            run.job.wait_redundant()
        except DrillError as exc:
            run.broken.append(f"copies are not complete again: {exc}")
            return
        run.report.seconds["redundant"] = round(time.monotonic() - started_s, 3)
        run.timeline.line("redundant", f"{run.job.copies_text()}", f"{run.report.seconds['redundant']:.1f} s")

    def check(self) -> None:
        """Every rank reads its own shard of the newest committed step, and a neighbour's, which a peer has to send."""
        run = self.run
        for _ in range(READ_TRIES):
            step = run.job.committed_step()
            self.results = [*run.job.read(step, 0, is_altered=run.options.is_altered), *run.job.read(step, 1)]
            if run.job.committed_step() == step:
                break  # else a put of before was committed meanwhile, and retention dropped what was being read (R19)
        run.report.step_restored, run.report.verdict = step, GOES_ON
        tell_compared(run, self.results)
        errors = [r for r in self.results if r.error]
        if errors:
            run.broken.append(f"reading step {step} of rank {errors[0].rank} raised {errors[0].message}")
        judge_bytes(run, self.results)

    def pass_words(self) -> str:
        report = self.run.report
        return (
            f"training went on · longest stall {report.stall_s or 0.0:.2f} s · next commit "
            f"{report.rto_s or 0.0:.1f} s after the fault · step {report.step_restored} equal in every byte"
        )


FLOWS: dict[str, type[Flow]] = {RESTART: Restart, GOES_ON: GoesOn}
