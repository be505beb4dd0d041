"""What the ranks do around a fault: a launcher restarts them, or they go on training."""

from __future__ import annotations

import contextlib
import itertools
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from memstore.drills.model.catalogue import GOES_ON, IN_PLACE, REFUSED, RESTART
from memstore.drills.model.report import Report
from memstore.drills.ranks.in_place import LEFT, RESTORED, TRAINED
from memstore.drills.run.judgement import (
    Played,
    broken_in_place,
    judge_bytes,
    judge_refusal,
    judge_restore,
    record_comparison,
    record_restore,
)
from memstore.drills.scenes.scene import Scene
from memstore.drills.scenes.scenes_in_place import InPlaceScene
from memstore.drills.sites.scratch import DrillContext
from memstore.errors import DrillError, MemstoreError
from memstore.testing.ranks.rank import Restored

if TYPE_CHECKING:
    from memstore.drills.sites.in_place_job import InPlaceJob

READ_TRIES = 5  # each put from before the check can replace the newest step once


class Flow:
    """The ranks' part in a drill: one hook for each phase. The docstring of drills/run has their order."""

    def __init__(self, context: DrillContext, scene: Scene) -> None:
        self.context, self.scene = context, scene

    def setup(self) -> None:
        """Prepare the ranks; the scene has drawn its victims by now."""

    def inject(self) -> str:
        """Let the scene break something; return what was done, as text."""
        return self.scene.inject()

    def recover(self) -> None:
        """Let the scene end the fault, and bring the ranks through it."""
        raise NotImplementedError

    def wait_for_recovery(self) -> None:
        """Wait until the copies are complete and steps are committed; the scene's hook runs after this one."""
        raise NotImplementedError

    def wait_copies(self) -> bool:
        """Wait until the copies are complete; note the seconds, or that the promise is broken."""
        started_s = time.monotonic()
        try:
            self.context.job.wait_redundant()
        except DrillError as exc:
            self.context.broken_promises.append(f"copies are not complete again: {exc}")
            return False
        self.context.report.seconds["redundant"] = round(time.monotonic() - started_s, 3)
        return True

    def check(self) -> None:
        """Compare what was found with the promise; the scene's hook has run before this one."""
        raise NotImplementedError

    def pass_words(self) -> str:
        """Return what was proved, as text."""
        raise NotImplementedError


class Restart(Flow):
    """A launcher that ends the attempt's processes and starts the next attempt, which gets, compares and trains on."""

    results: tuple[Restored, ...] = ()
    moved_to: frozenset[str] = frozenset()  # hosts on which the lost host's ranks start again

    def setup(self) -> None:
        context, job, scene = self.context, self.context.job, self.scene
        gone = {host for host in scene.hosts if scene.leaves(host)}
        left = [host for host in context.places if host not in gone]
        # If a rank moved to a host that has its copy already, no byte would cross the network; so prefer the others.
        others = [host for host in left if host not in scene.holders]
        if gone and not others and not scene.is_beyond:  # with two hosts there is no other, and no byte needs to cross
            promise = context.promise
            context.promise = replace(promise, verdicts=promise.verdicts | {"local"}, needs=None)
        others = others or left
        taken = itertools.cycle(others)
        places = [r.host if r.host not in gone else next(taken) for r in job.ranks]
        self.moved_to = frozenset(place for r, place in zip(job.ranks, places, strict=True) if r.host in gone)
        job.stand_by(places)

    def recover(self) -> None:
        report, job = self.context.report, self.context.job
        self.scene.recover()
        with contextlib.suppress(MemstoreError):
            report.step_before = max(report.step_before or 0, job.newest().committed_step or 0)
        job.restart()
        self.results = tuple(self.scene.restore())
        record_restore(self.context, self.results)

    def wait_for_recovery(self) -> None:
        """Wait until the copies are complete again, and put the next step until it is committed."""
        report, job = self.context.report, self.context.job
        if any(r.error for r in self.results) or not report.is_verified:
            return
        # A host on probation gets its second copy only with the next put, not by repair (R29).
        flapping = self.context.site.on_probation()
        if not flapping and not self.wait_copies():
            return
        step = (report.step_restored or 0) + 1
        job.put(step, step, "put after the restore")
        job.wait("committed", "commit after the restore")
        took = f"{report.seconds['redundant'] or 0.0:.1f} s after restore"
        if flapping:
            job.wait_redundant()
            took = f"by the next put ({', '.join(flapping)} died too often lately for repair to trust, R29)"
        self.context.timeline.line("redundant", f"{job.copies_text()} again, {took}; training went on with step {step}")

    def check(self) -> None:
        if any(r.error for r in self.results):
            judge_refusal(self.context, self.results, rank=self.scene.rank, holders=self.scene.holders)
            return
        if self.results[0].verdict == "local" and self.moved_to and self.moved_to.isdisjoint(self.scene.holders):
            # These hosts had no copy of the shard: repair brought it from a peer before the slow restart asked for it.
            promise = self.context.promise
            self.context.promise = replace(promise, verdicts=promise.verdicts | {"local"}, needs=None)
            self.context.timeline.line("repaired", f"before the restart, on {', '.join(sorted(self.moved_to))}")
        judge_restore(self.context, self.results)

    def pass_words(self) -> str:
        report = self.context.report
        if report.verdict == REFUSED:
            return refused_words(report)
        lost = f"{report.rpo_steps} steps lost"
        if self.context.promise.is_lossless:
            return f"{lost} (promised 0) · {report.rto_s or 0.0:.1f} s without the launcher's restart"
        return f"{lost}: durable step {report.step_restored} restored, the newest had been {report.step_before}"


class GoesOn(Flow):
    """Ranks that are not restarted: puts never raise nor stall beyond the budget, commits go on or resume."""

    def __init__(self, context: DrillContext, scene: Scene) -> None:
        super().__init__(context, scene)
        self.puts: list[Any] = []
        self.results: list[Restored] = []

    def inject(self) -> str:
        self.puts = self.scene.begin_puts()
        return super().inject()

    def recover(self) -> None:
        scene = self.scene
        before = max(self.context.report.step_before or 0, scene.step_at_fault)
        self._hold(before)
        scene.recover()
        scene.end_puts(self.puts)
        self.puts = []

    def _hold(self, before: int) -> None:
        """Let the fault last; if commits are promised meanwhile, wait for one beyond step `before`."""
        context, promise, hold_s = self.context, self.context.promise, self.scene.hold_s
        started_s = time.monotonic()
        end_s = started_s + hold_s
        limit_s = started_s + max(promise.resume_s, hold_s)
        newest = context.job.committed_step()
        while time.monotonic() < (limit_s if promise.has_commits_meanwhile and newest <= before else end_s):
            time.sleep(0.05)
            newest = context.job.committed_step()
        if promise.has_commits_meanwhile and newest <= before:
            context.broken_promises.append(
                f"no step was committed within {promise.resume_s:g} s while the fault was there"
            )
        elif newest > before:
            context.timeline.line("committed", f"step {newest} while the fault is there")

    def wait_for_recovery(self) -> None:
        context, report = self.context, self.context.report
        report.seconds["resume"] = self.scene.commit_again()
        if report.seconds["resume"] is not None and self.wait_copies():
            context.timeline.line("redundant", context.job.copies_text(), f"{report.seconds['redundant']:.1f} s")

    def check(self) -> None:
        """Have every rank read the newest committed step: its own shard, and a neighbour's, which a peer must send."""
        context, job = self.context, self.context.job
        for _ in range(READ_TRIES):
            step = job.committed_step()
            self.results = [*job.read(step, 0, is_altered=context.options.is_altered), *job.read(step, 1)]
            # If an earlier put is committed meanwhile, retention drops the step that is being read (R19); so try again.
            if job.committed_step() == step:
                break
        context.report.step_restored, context.report.verdict = step, GOES_ON
        record_comparison(context, self.results)
        errors = [r for r in self.results if r.error]
        if errors:
            context.broken_promises.append(f"reading step {step} of rank {errors[0].rank} raised {errors[0].message}")
        judge_bytes(context, self.results)

    def pass_words(self) -> str:
        report = self.context.report
        return (
            f"training went on · longest stall {report.stall_s or 0.0:.2f} s · next commit "
            f"{report.rto_s or 0.0:.1f} s after the fault · step {report.step_restored} equal in every byte"
        )


class InPlaceFlow(Flow):
    """Ranks that recover in place: those that are lost are replaced, all others enter the training function again."""

    def __init__(self, context: DrillContext, scene: Scene) -> None:
        super().__init__(context, scene)
        self.faults, self.job = cast(InPlaceScene, scene), cast("InPlaceJob", context.job)
        self.pids: dict[int, int] = {}  # by rank, before the fault
        self.results: list[Restored] = []  # of the last restore
        self.played: Played | None = None
        self.error = ""  # that ended the training

    def setup(self) -> None:
        self.pids = {number: rank.pid for number, rank in enumerate(self.job.ranks)}

    def recover(self) -> None:
        """Let the scene end the fault, wait for the end of the training, and take what the ranks noted."""
        context, job = self.context, self.job
        self.scene.recover()
        ends, self.error = job.finish()
        notes = job.notes()
        last = max(note.generation for note in notes)
        self.played = Played(notes, ends, pids=self.pids, lost=self.faults.lost, last_step=job.limit)
        found = {n.rank: n.restored for n in notes if n.what == RESTORED and n.generation == last}
        self.results = [restored for _, restored in sorted(found.items()) if restored is not None]
        left_s = min((n.at_s for n in notes if n.what == LEFT), default=None)
        if left_s is not None:
            context.report.seconds["detect"] = detect_s = round(left_s - self.faults.fault_s, 3)
            first = f"generation 0, by the first rank {detect_s:.1f} s after the fault"
            context.timeline.line("left", f"{first}; generation {last} trained to the end" if ends else first)
        if self.results:
            record_restore(context, self.results)
        if ends:
            again_s = min(n.at_s for n in notes if n.what == TRAINED and n.generation == last)
            if left_s is not None:
                context.report.seconds["resume"] = round(again_s - self.faults.fault_s, 3)
            record_comparison(context, [*self.results, *(end.read for end in ends)])

    def wait_for_recovery(self) -> None:
        if not self.error and self.wait_copies():
            line = self.context.timeline.line
            line("redundant", f"{self.job.copies_text()} of step {self.job.committed_step()}")

    def check(self) -> None:
        from memstore.drills.ranks.in_place_model import unbroken

        context, played = self.context, self.played
        assert played is not None
        if self.error and any(r.error for r in self.results):
            judge_refusal(context, self.results, rank=self.scene.rank, holders=self.scene.holders)
        elif self.error:
            context.broken_promises.append(f"the training ended by {self.error}")
        else:
            read = [end.read for end in played.ends]
            if self.results:
                judge_restore(context, self.results, read)
            else:
                context.report.verdict = IN_PLACE
                judge_bytes(context, read)
        steps_count = 0 if self.error else self.job.limit + 1
        oracle = unbroken(context.options.seed, len(self.pids), max(steps_count, played.steps_count))
        context.broken_promises += broken_in_place(played, oracle)

    def pass_words(self) -> str:
        report, played = self.context.report, self.played
        if report.verdict == REFUSED or played is None:
            return refused_words(report)
        stayed, losses = len(self.pids) - len(played.lost), sum(n.what == TRAINED for n in played.notes)
        samples = sum(map(len, played.ends[0].history))
        again = f"{report.rpo_steps} steps lost · training again {report.rto_s or 0.0:.1f} s after the fault · "
        return (
            f"{again if self.results else ''}{stayed} of {len(self.pids)} ranks kept their processes · {losses} losses "
            f"equal, bit for bit · {samples} samples committed, each once"
        )


def refused_words(report: Report) -> str:
    """Return what was refused, as text."""
    lines = [line.strip() for line in (report.message or "").splitlines()]
    return f"refused: {lines[1] if len(lines) > 1 else ''.join(lines)}"


FLOWS: dict[str, type[Flow]] = {RESTART: Restart, GOES_ON: GoesOn, IN_PLACE: InPlaceFlow}
