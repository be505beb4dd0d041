"""One drill from setup to cleanup, each phase with its seconds in the report.

The runner decides pass or fail from what the ranks compared and what was promised; it asks the store for
nothing but its status. Whatever goes wrong with the drill itself is a DrillError and never a pass.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any

from memstore.drills.model import report as phases
from memstore.drills.model.catalogue import find
from memstore.drills.model.options import Options
from memstore.drills.model.promises import RESTART, promised
from memstore.drills.model.report import BROKEN, ERROR, PASS, Report, Timeline, gib
from memstore.drills.run.flows import FLOWS
from memstore.drills.run.safety import check_last_copies
from memstore.drills.scenes.scenes import SCENES
from memstore.drills.sites.scratch import SETTLE_S, ScratchJob
from memstore.drills.sites.site import Site
from memstore.errors import DrillError, MemstoreError

WATCH_S = 0.05
COMMIT_PAUSE_S = 0.25


class Watch:
    """Polls the status from before the fault on, and notes when the store noticed."""

    def __init__(self, site: Site, check: Callable[[dict[str, Any], float], str | None]) -> None:
        self._site, self._check = site, check
        self._stop, self.found = threading.Event(), threading.Event()
        self.seconds, self.why = 0.0, ""
        self._thread = threading.Thread(target=self._run, name="drill-watch", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self.started_s = time.monotonic()
        self._thread.start()

    def stop(self) -> None:
        """Look no more; may be called twice, or without a start."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(timeout=SETTLE_S)

    def _run(self) -> None:
        while not self._stop.wait(WATCH_S):
            try:
                why = self._check(self._site.status(), self.started_s)
            except MemstoreError:
                continue  # the controller may be the victim
            if why:
                self.seconds, self.why = time.monotonic() - self.started_s, why
                self.found.set()
                return


class DrillRun:
    """One run of one drill on one site."""

    def __init__(self, name: str, site: Site, options: Options, tell: Callable[[str], None]) -> None:
        self.drill, self.site, self.options, self.tell = find(name), site, options, tell
        self.rng = random.Random(f"{name} {options.seed} {options.is_beyond}")
        self.config = options.config.with_fields(dict(SCENES[name].job_fields))
        self.promise = promised(self.drill, is_beyond=options.is_beyond, has_durable=self.config.durable is not None)
        self.report = Report(name, options.seed, self.promise.words, options.is_beyond)
        self.timeline = Timeline(self.report, tell)
        self.job = ScratchJob(site, f"drill-{name}", self.config, seed=options.seed, nbytes=options.nbytes)
        self.job_before: dict[str, Any] = {}  # its status right before the fault
        self.places: list[str] = []  # live hosts, in the order in which ranks are given to them
        self.broken: list[str] = []  # promises that were not kept
        self.scene = SCENES[name](self)
        self.flow = FLOWS[RESTART if options.is_beyond else self.drill.flow](self)  # a twin is judged by its restore
        self.watch = Watch(site, self.scene.detected)

    def run(self) -> Report:
        """Play the drill; never raises for what the drill found, only for what nobody could expect."""
        report, play = self.report, (
            (phases.SETUP, self._setup),
            (phases.INJECT, self._inject),
            (phases.WAIT_FOR_EFFECT, self._wait_for_effect),
            (phases.RECOVER, self.flow.recover),
            (phases.WAIT_FOR_RECOVERY, self._wait_for_recovery),
            (phases.CHECK, self._check),
        )  # fmt: skip
        try:
            for name, act in play:
                with self.timeline.phase(name):
                    act()
            report.outcome = BROKEN if self.broken else PASS
            report.words = "; ".join(self.broken) if self.broken else self.flow.pass_words()
        except MemstoreError as exc:
            report.outcome, report.error, report.message = ERROR, type(exc).__name__, str(exc)
            report.words = f"{type(exc).__name__}: {exc}"
        finally:
            with self.timeline.phase(phases.CLEANUP):
                self._cleanup()
        return report

    # -- the phases ---------------------------------------------------------------------------

    def _setup(self) -> None:
        """Ranks put a few steps; the newest is committed with every copy where it should be; victims are drawn."""
        live, options = self.scene.places(), self.options
        if len(live) < self.config.replicas:
            raise DrillError(f"{len(live)} hosts are live, replicas={self.config.replicas}: start more hosts")
        if self.drill.needs_durable and self.config.durable is None:
            raise DrillError(
                f"{self.drill.name} breaks a durable directory: name one that every host reaches, --durable"
            )
        self.places = live
        self.job.start([live[i % len(live)] for i in range(options.ranks_count)])
        last = 2 + self.rng.randrange(4)
        if self.config.durable is not None:
            self.job.put(0, 0, "first put")
            self.job.wait("durable", "first durable step")
        self.job.train(0 if self.config.durable is None else 1, last, "before the fault")
        self.job_before = self.job.wait_redundant()
        self.report.step_before = int(self.job_before["committed_step"])
        self.scene.setup()
        self.report.victims = self.scene.victims()
        check_last_copies(self.site, self.scene.hosts, own_job=self.job.name, allows_data_loss=options.allows_data_loss)
        self.site.reach(self.scene.holders)
        self.flow.setup()
        where = "the drill's own cluster" if self.site.is_own else "scratch job on your cluster"
        name = f"{self.drill.name}{' --beyond' if options.is_beyond else ''}"
        self.tell(
            f"drill {name} · seed {options.seed} · {where} "
            f"({len(live)} hosts) · victim {', '.join(self.report.victims)} · promised: {self.promise.words}"
        )
        self.timeline.line(
            "before",
            f"step {self.report.step_before} committed, {self.job.copies_text()} everywhere, "
            f"{len(self.job.ranks)} ranks of {gib(options.nbytes)}",
        )

    def _inject(self) -> None:
        self.watch.start()
        self.timeline.line("inject", self.flow.inject())

    def _wait_for_effect(self) -> None:
        """The fault is there, checked, and the store has noticed what it can notice."""
        self.timeline.line("effect", self.scene.wait_for_effect())
        if not self.scene.is_noticed:
            return
        if not self.watch.found.wait(SETTLE_S):
            raise DrillError(f"the store did not notice the fault within {SETTLE_S:g} s")
        self.report.seconds["detect"] = round(self.watch.seconds, 3)
        self.timeline.line("detected", self.watch.why, f"{self.watch.seconds:.1f} s")

    def _wait_for_recovery(self) -> None:
        self.flow.wait_for_recovery()
        self.scene.wait_for_recovery()

    def _check(self) -> None:
        self.scene.check()
        self.flow.check()

    def _cleanup(self) -> None:
        """Leave nothing of the drill: no fault, no scratch job, no lost host."""
        self.watch.stop()
        for undo in (self.scene.cleanup, self.job.remove, lambda: self.site.end_drill(self.places)):
            try:
                undo()
            except (MemstoreError, OSError) as exc:
                self.timeline.line("cleanup", f"not undone: {type(exc).__name__}: {exc}")

    # -- for scenes and flows -----------------------------------------------------------------

    def commit_again(self) -> float | None:
        """One more step by all ranks must be committed; return the seconds until it was, None if the promise broke."""
        step = first = (self.report.step_before or 0) + self.scene.puts_count + 1
        started_s = time.monotonic()
        while True:
            self.job.put(step, step, "put after the outage")
            newest = self.job.committed_step()
            took_s = time.monotonic() - started_s
            if newest >= first:
                break
            if took_s > self.promise.resume_s:
                self.broken.append(f"no step was committed within {self.promise.resume_s:g} s after the outage")
                return None
            step += 1
            time.sleep(COMMIT_PAUSE_S)
        self.timeline.line("resumed", f"step {newest} committed after the outage", f"{took_s:.1f} s")
        return round(took_s, 3)


def run_drill(name: str, site: Site, options: Options, tell: Callable[[str], None] = lambda line: None) -> Report:
    """Run one drill; `tell` gets each line as it happens.

    Raises:
        ConfigError: there is no such drill.
    """
    return DrillRun(name, site, options, tell).run()
