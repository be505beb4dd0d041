"""One drill from setup to cleanup, each phase with its seconds in the report.

The runner decides pass or fail from what the ranks compared and what was promised; the only thing it asks the store
for is its status. If the drill itself fails, the outcome is a DrillError and never a pass.
"""

from __future__ import annotations

import contextlib
import queue
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from memstore.cli.output import size_text
from memstore.core.wire.calls import AskPlan, NoteDrill
from memstore.core.wire.replies import Plan, Status
from memstore.core.wire.status_rows import JobRow
from memstore.drills.model import report as phases
from memstore.drills.model.catalogue import GOES_ON, IN_PLACE, RESTART, Options, find, promised
from memstore.drills.model.report import BROKEN, ERROR, PASS, Report, Timeline
from memstore.drills.run.flows import FLOWS
from memstore.drills.scenes import scenes_hosts, scenes_in_place, scenes_network, scenes_processes, scenes_storage
from memstore.drills.scenes.scene import Scene
from memstore.drills.sites.scratch import SETTLE_S, DrillContext, ScratchJob
from memstore.drills.sites.site import Site
from memstore.errors import DrillError, MemstoreError
from memstore.testing.faults.kept_up import KeptUp

# -- scenes -------------------------------------------------------------------------------------------
# The table of all scenes by the name of their drill.


_FILES = (scenes_processes, scenes_hosts, scenes_storage, scenes_network, scenes_in_place)
SCENES: dict[str, type[Scene]] = {
    scene.name: scene
    for file in _FILES
    for scene in vars(file).values()
    if isinstance(scene, type) and issubclass(scene, Scene) and "name" in vars(scene)
}


# -- safety -------------------------------------------------------------------------------------------
# The check before a fault: a drill may not destroy another job's last copy of a shard, unless the user allows it.
#
# The decision uses a dry run of the controller's recovery planner, right before the fault.


def endangered(jobs: Sequence[JobRow], plans: Mapping[str, Plan], hosts: Sequence[str]) -> list[str]:
    """Return, as text, each job that would lose a committed step together with the memory of the hosts.

    Args:
        jobs: Rows of the store's status, without the drill's own job.
        plans: By job, the controller's plan for a restore after the loss of these hosts.
        hosts: Hosts whose memory the drill would destroy.
    """
    found = []
    for job in jobs:
        name, plan = job.job, plans.get(job.job)
        if plan is None:  # without an attempt there is no plan; so none of the job's copies may be lost
            held = sorted({h for step in job.steps for h in step.hosts} & set(hosts))
            if held:
                found.append(f"{name}: no attempt of it is known, and {', '.join(held)} holds copies of it")
            continue
        step, committed = plan.step, plan.committed_step
        if committed is None:
            continue
        if plan.verdict == "wait" or step is None:
            found.append(f"{name}: committed step {committed} could not be restored any more ({plan.why})")
        elif step < committed:
            found.append(f"{name}: it would fall back from committed step {committed} to step {step}")
    return found


def check_last_copies(site: Site, hosts: Sequence[str], *, own_job: str, allows_data_loss: bool) -> None:
    """Raise DrillError if the loss of the hosts' memory would cost another job its last copy of a shard."""
    if not hosts or allows_data_loss:
        return
    jobs = [job for job in site.status().jobs if job.job != own_job]
    plans = {job.job: site.ask(AskPlan(job=job.job, lose=tuple(hosts))) for job in jobs if job.attempt is not None}
    found = endangered(jobs, plans, hosts)
    if found:
        look = site.config.commands("`memstore status`")
        raise DrillError(
            f"refused before anything was broken: destroying the memory of {', '.join(hosts)} would cost "
            f"{'; '.join(found[:5])}. Name another host with --victim, wait until its copies are complete "
            f"({look}), or pass --allow-data-loss"
        )


# -- runner -------------------------------------------------------------------------------------------


WATCH_S = 0.05
TELL_S = 2.0


class Teller:
    """Tells the store what a drill does, on a thread of its own, for those who watch `memstore page` or `events`.

    What cannot be sent soon is dropped: the controller may be the victim, and no drill waits for its spectators.
    """

    def __init__(self, site: Site, job: str) -> None:
        self._site, self._job = site, job
        self._lines: queue.SimpleQueue[tuple[str, str] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="drill-teller", daemon=True)
        self._thread.start()

    def tell(self, phase: str, text: str) -> None:
        """Queue one line."""
        self._lines.put((phase, text))

    def end(self) -> None:
        """Tell what waits, as far as that goes soon."""
        self._lines.put(None)
        self._thread.join(TELL_S)

    def _run(self) -> None:
        while (line := self._lines.get()) is not None:
            with contextlib.suppress(Exception):  # it is a spectator's
                self._site.ask(NoteDrill(job=self._job, phase=line[0], text=line[1]), TELL_S)


class Watch(KeptUp):
    """A thread that polls the store's status from before the fault on, until a check finds the fault in it."""

    def __init__(self, site: Site, check: Callable[[Status, float], str | None]) -> None:
        super().__init__()
        self._site, self._check = site, check
        self.found = threading.Event()
        self.started_s, self.seconds, self.why = 0.0, 0.0, ""

    def start(self) -> None:
        """Begin to poll."""
        self.started_s = time.monotonic()
        super().start()

    def work(self) -> None:
        """Look once; end when the fault is found."""
        why = None
        if not self.stopping.wait(WATCH_S):
            with contextlib.suppress(MemstoreError):  # the controller may be the victim
                why = self._check(self._site.status(), self.started_s)
        if why:
            self.seconds, self.why = time.monotonic() - self.started_s, why
            self.found.set()
            self.stopping.set()


def drill_context(name: str, site: Site, options: Options, print_line: Callable[[str], None]) -> DrillContext:
    """Return the context of one run of a drill; ConfigError if there is no such drill."""
    drill = find(name)
    config = options.config.with_fields(dict(SCENES[name].job_fields))
    promise = promised(drill, is_beyond=options.is_beyond, has_durable=config.durable is not None)
    report = Report(name, options.seed, promise.words, options.is_beyond)
    made: Callable[..., ScratchJob] = ScratchJob
    if drill.flow == IN_PLACE:
        from memstore.drills.sites.in_place_job import InPlaceJob  # imports torch

        made = partial(InPlaceJob, is_altered=options.is_altered, group_options=SCENES[name].group_options)
    return DrillContext(
        drill,
        site,
        options,
        config,
        promise,
        rng=random.Random(f"{name} {options.seed} {options.is_beyond}"),
        report=report,
        timeline=Timeline(report, print_line),
        job=made(site, f"drill-{name}", config, seed=options.seed, nbytes=options.nbytes),
    )


class DrillRun:
    """One run of one drill: calls the hooks of its scene and its flow, phase by phase."""

    def __init__(self, context: DrillContext, print_line: Callable[[str], None]) -> None:
        drill, self.context, self.print_line = context.drill, context, print_line
        self.scene = SCENES[drill.name](context)
        # The play beyond the tolerance is judged by its restore, in every drill.
        flow = RESTART if context.options.is_beyond and drill.flow == GOES_ON else drill.flow
        self.flow = FLOWS[flow](context, self.scene)
        self.watch = Watch(context.site, self.scene.detected)
        self.teller = Teller(context.site, context.job.name)
        context.timeline.tell = self.teller.tell

    def run(self) -> Report:
        """Play the drill; return its report, which also holds a MemstoreError if one was raised on the way."""
        context, report, play = (
            self.context,
            self.context.report,
            (
                (phases.SETUP, self._setup),
                (phases.INJECT, self._inject),
                (phases.WAIT_FOR_EFFECT, self._wait_for_effect),
                (phases.RECOVER, self.flow.recover),
                (phases.WAIT_FOR_RECOVERY, self._wait_for_recovery),
                (phases.CHECK, self._check),
            ),
        )
        try:
            for name, act in play:
                with context.timeline.phase(name):
                    act()
            report.outcome = BROKEN if context.broken_promises else PASS
            report.words = "; ".join(context.broken_promises) if context.broken_promises else self.flow.pass_words()
        except MemstoreError as exc:
            report.outcome, report.error, report.message = ERROR, type(exc).__name__, str(exc)
            report.words = f"{type(exc).__name__}: {exc}"
        finally:
            with context.timeline.phase(phases.CLEANUP):
                self._cleanup()
            self.teller.tell(report.outcome, report.words)
            self.teller.end()
        return report

    # -- the phases ---------------------------------------------------------------------------

    def _setup(self) -> None:
        """Let the ranks put some steps, wait for every copy of the newest, draw victims, check what may be lost."""
        context, job, options, report = self.context, self.context.job, self.context.options, self.context.report
        live = self.scene.places()
        self._check_site(live)
        context.places = live
        job.start([live[i % len(live)] for i in range(options.ranks_count)])
        last = 2 + context.rng.randrange(4)
        if context.config.durable is not None:
            job.put(0, 0, "first put")
            job.wait("durable", "first durable step")
        job.train(0 if context.config.durable is None else 1, last, "before the fault")
        context.job_before = job.wait_redundant()
        report.step_before = context.job_before.committed_step
        self.scene.setup()
        report.victims = self.scene.victims()
        check_last_copies(context.site, self.scene.hosts, own_job=job.name, allows_data_loss=options.allows_data_loss)
        context.site.reach(self.scene.holders)
        self.flow.setup()
        self._show_setup(live)

    def _check_site(self, live: list[str]) -> None:
        drill, config = self.context.drill, self.context.config
        if len(live) < config.replicas:
            raise DrillError(f"{len(live)} hosts are live, replicas={config.replicas}: start more hosts")
        if drill.needs_durable and config.durable is None:
            raise DrillError(f"{drill.name} breaks a durable directory: name one that every host reaches, --durable")

    def _show_setup(self, live: list[str]) -> None:
        context, job, options, report = self.context, self.context.job, self.context.options, self.context.report
        where = "the drill's own cluster" if context.site.is_own else "scratch job on your cluster"
        name = f"{context.drill.name}{' --beyond' if options.is_beyond else ''}"
        self.print_line(
            f"drill {name} · seed {options.seed} · {where} "
            f"({len(live)} hosts) · victim {', '.join(report.victims)} · promised: {context.promise.words}"
        )
        context.timeline.line(
            "before",
            f"step {report.step_before} committed, {job.copies_text()} everywhere, "
            f"{len(job.ranks)} ranks of {size_text(options.nbytes)}",
        )

    def _inject(self) -> None:
        if self.scene.is_noticed:
            self.watch.start()
        self.context.timeline.line("inject", self.flow.inject())

    def _wait_for_effect(self) -> None:
        """Wait until the fault is checked to be there, and until the store has noticed it, if it can notice it."""
        timeline = self.context.timeline
        timeline.line("effect", self.scene.wait_for_effect())
        if not self.scene.is_noticed:
            return
        if not self.watch.found.wait(SETTLE_S):
            raise DrillError(f"the store did not notice the fault within {SETTLE_S:g} s")
        self.context.report.seconds["detect"] = round(self.watch.seconds, 3)
        timeline.line("detected", self.watch.why, f"{self.watch.seconds:.1f} s")

    def _wait_for_recovery(self) -> None:
        self.flow.wait_for_recovery()
        self.scene.wait_for_recovery()

    def _check(self) -> None:
        self.scene.check()
        self.flow.check()

    def _cleanup(self) -> None:
        """Remove everything of the drill: faults, the scratch job, lost hosts."""
        context = self.context
        end_drill = partial(context.site.end_drill, context.places)
        for undo in (self.watch.end, self.scene.cleanup, context.job.remove, end_drill):
            try:
                undo()
            except (MemstoreError, OSError) as exc:
                context.timeline.line("cleanup", f"not undone: {type(exc).__name__}: {exc}")


def run_drill(name: str, site: Site, options: Options, print_line: Callable[[str], None] = lambda line: None) -> Report:
    """Run one drill and return its report; `print_line` gets each line as it happens.

    Raises:
        ConfigError: there is no such drill.
    """
    return DrillRun(drill_context(name, site, options, print_line), print_line).run()
