"""The demo from start to end: a run without a loss, two that lose a host, a control run that does not restore.

This file imports Ray; so `cli.py` sets Ray's environment before it imports this file.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ray.train import FailureConfig, RunConfig, ScalingConfig, TrainingFailedError
from ray.train.torch import TorchConfig, TorchTrainer

from memstore.adapters.ray_train import InPlaceTorchConfig
from memstore.cli.output import size_text
from memstore.config import MIB
from memstore.core.wire.status_rows import AttemptStatus, HostRow
from memstore.demo.records import (
    NEED_RESTORE,
    DemoCheck,
    Kill,
    RunRecord,
    check_all,
    check_in_place,
    check_kept,
    read_run,
)
from memstore.demo.training import ModelSize, Settings, parameters_count, train
from memstore.drills.sites.site import EmbeddedSite
from memstore.drills.sites.site_options import embedded_site
from memstore.errors import ConfigError, MemstoreError
from memstore.testing.faults.kept_up import KeptUp

# -- watcher ------------------------------------------------------------------------------------------
# A thread beside a training run that prints its progress, kills a host, and measures how the store notices that.


POLL_S = 0.05
LINES_PER_RUN = 4  # of progress
PrintLine = Callable[[str], None]


class DemoWatcher(KeptUp):
    """The thread of one training run; it kills `victim`, if there is one, when step `kill_after` is committed."""

    def __init__(
        self,
        site: EmbeddedSite,
        job: str,
        journal: Path,
        steps: int,
        print_line: PrintLine,
        victim: str = "",
        kill_after: int = -1,
    ) -> None:
        super().__init__()
        self.site, self.job, self.journal, self.steps, self.print_line = site, job, journal, steps, print_line
        self.victim, self.kill_after = victim, kill_after
        self.kill: Kill | None = None
        self.done = ""  # what was killed and destroyed, as text
        self.detect_s: float | None = None
        self.detect_why = ""
        self._is_restore_shown = False
        self._shown_step = -1
        self._newest: AttemptStatus | None = None

    def work(self) -> None:
        """Look once at the status and the journals; kill, or note how the store noticed the kill."""
        self.stopping.wait(POLL_S)
        self._newest, hosts = None, list[HostRow]()
        with contextlib.suppress(MemstoreError):  # the next look asks again
            status = self.site.status()
            self._newest, hosts = next((row.newest for row in status.jobs if row.job == self.job), None), status.hosts
        newest = self._newest
        committed = newest.committed_step if newest is not None and newest.phase == "open" else None
        if self.kill is not None and self.detect_s is None:
            self._detect(self.kill, hosts)
        elif self.victim and self.kill is None and committed is not None and committed >= self.kill_after:
            self.kill = Kill(self.victim, committed, time.time())
            self.done = self.site.lose_host(self.victim, [])
            self.print_line(f"[kill]    step {committed:3d} committed: {self.done}")
        self._show()

    def undo(self) -> None:
        """Show how the run ended."""
        self._show()

    def _detect(self, kill: Kill, hosts: list[HostRow]) -> None:
        row = next((row for row in hosts if row.host == kill.host and row.status == "dead"), None)
        if row is not None:
            self.detect_s, self.detect_why = max(0.0, time.time() - row.status_s - kill.wall_s), row.why
            self.print_line(f"[detect]  {self.detect_s:.2f} s after the kill: {kill.host} dead, {self.detect_why}")

    def _show(self) -> None:
        """Print the restore once all ranks have restored, and a line of progress if one is due."""
        run = read_run(self.journal)
        if not self._is_restore_shown and run.restored and len(run.restored) == len({j.rank for j in run.joined}):
            self._is_restore_shown, got = True, run.restored[0]
            self.print_line(
                f"[restore] step {got.step:3d}, attempt {got.attempt}: {got.steps_lost} steps lost · {got.verdict} · "
                f"{tiers_text(got.bytes_by_tier)} · every digest ok · {restore_seconds(run):.2f} s"
            )
        newest = self._newest
        last = next((s for s in reversed(run.steps) if s.rank == 0), None)
        if last is None or newest is None or last.step == self._shown_step:
            return
        if last.step >= self._shown_step + max(1, self.steps // LINES_PER_RUN) or last.step == self.steps - 1:
            self._shown_step = last.step
            stall_ms = statistics.median(s.stall_s for s in run.steps if s.attempt == last.attempt) * 1e3
            self.print_line(
                f"[train]   step {last.step:3d}/{self.steps - 1}  loss {float.fromhex(last.loss):.3f}  put "
                f"{stall_ms:.0f} ms stall · committed {newest.committed_step} · {newest.copies} of "
                f"{newest.replicas} copies"
            )


def restore_seconds(run: RunRecord) -> float:
    """Return the seconds from the plan until the last rank had loaded its state, by the results of get()."""
    return sum(max((r.seconds_by_phase.get(p, 0.0) for r in run.restored), default=0.0) for p in ("transfer", "load"))


def tiers_text(nbytes_by_tier: dict[str, int]) -> str:
    """Return bytes by tier as text."""
    return " · ".join(f"{size_text(nbytes)} {tier}" for tier, nbytes in nbytes_by_tier.items())


# -- run ----------------------------------------------------------------------------------------------


HOSTS = ("h1", "h2", "h3", "h4")  # by turns in two racks; the first is Ray's head. One rank on each
# Longer than a restart of the ranks; so the restore, not repair, brings the lost copies.
REPAIR_AFTER_S = 180.0


@dataclass(frozen=True)
class DemoOptions:
    """The length of the training and the moment of the kill; the defaults are those of `make demo`."""

    folder: Path  # for the journals and Ray Train's own files
    steps: int = 80
    kill_after: int = 35  # the kill happens once this step is committed
    control_steps: int = 10
    control_kill_after: int = 3
    is_restoring: bool = True
    has_in_place: bool = True
    has_control: bool = True
    size: ModelSize = field(default_factory=ModelSize)

    def __post_init__(self) -> None:
        if not 0 <= self.kill_after < self.steps - 2:
            raise ConfigError(
                f"kill_after={self.kill_after} must leave steps to train after the kill: 0 to {self.steps - 3} of "
                f"steps={self.steps}"
            )


@dataclass(frozen=True)
class LostHostRun:
    """A training run that lost a host, with the checks of the claims about it."""

    run: RunRecord
    kill: Kill
    checks: list[DemoCheck]
    detect_s: float | None
    detect_why: str
    done: str  # what was killed and destroyed


@dataclass(frozen=True)
class DemoOutcome:
    """The result of all runs, for the report."""

    options: DemoOptions
    undisturbed: RunRecord
    disturbed: LostHostRun
    in_place: LostHostRun | None
    control: LostHostRun | None
    total_s: float

    @property
    def control_failed(self) -> list[str]:
        """Return the names of the checks that need a restore and failed on the control run."""
        checks = self.control.checks if self.control is not None else []
        return [c.name for c in checks if not c.is_ok and c.name in NEED_RESTORE]

    @property
    def is_ok(self) -> bool:
        """Return whether every check holds, and whether each that must fail on some run failed there."""
        has_proof = self.control is None or set(self.control_failed) == set(NEED_RESTORE)
        if self.in_place is not None:  # Ray's restart keeps no process: what finds them kept there proves nothing
            has_proof = has_proof and not check_kept(self.disturbed.run, self.disturbed.kill).is_ok
        checks = [*self.disturbed.checks, *(self.in_place.checks if self.in_place is not None else ())]
        return has_proof and all(check.is_ok for check in checks)


@dataclass(frozen=True)
class HostChoice:
    """The host to lose, the host with its copies, and for each worker the hosts it may use (Ray label selectors)."""

    victim: str
    partner: str
    selectors: list[dict[str, str]]


def choose_hosts(targets: Mapping[str, Sequence[str]]) -> HostChoice:
    """Choose the victim, and place the workers so that its rank cannot come back on the host with its copy.

    Ray Train numbers its ranks host by host, in the order of the workers. If the victim's worker is the third and its
    partner's the last, rank 2 comes back on the second host, wherever the third worker goes.
    """
    victim = next((host for host in sorted(targets) if host != HOSTS[0] and targets[host]), None)
    if victim is None or len(targets) != len(HOSTS):
        raise ConfigError(f"the demo needs a copy of every host on another one, placement says {dict(targets)}")
    partner = targets[victim][0]
    first, second = (host for host in HOSTS if host not in (victim, partner))
    allowed = [first, second, f"in({victim},{first},{second})", partner]
    return HostChoice(victim, partner, [{"host": value} for value in allowed])


class Demo:
    """The training runs of the demo on one cluster."""

    def __init__(self, site: EmbeddedSite, options: DemoOptions, print_line: PrintLine) -> None:
        self.site, self.options, self.print_line = site, options, print_line

    def lose_host(
        self,
        job: str,
        choice: HostChoice,
        undisturbed: RunRecord,
        *,
        steps: int,
        kill_after: int,
        is_restoring: bool = True,
        is_in_place: bool = False,
    ) -> LostHostRun:
        """Train, and lose the victim on the way; return the run with its checks."""
        watcher = self.watcher(job, steps, choice.victim, kill_after)
        run = self.fit(watcher, choice, is_restoring=is_restoring, is_in_place=is_in_place)
        if watcher.kill is None:
            raise MemstoreError(f"{job}: the training ended before step {kill_after} was committed: use more steps")
        checks = (check_in_place if is_in_place else check_all)(run, undisturbed, watcher.kill, steps)
        return LostHostRun(run, watcher.kill, checks, watcher.detect_s, watcher.detect_why, watcher.done)

    def watcher(self, job: str, steps: int, victim: str = "", kill_after: int = -1) -> DemoWatcher:
        """Return the watcher of a run that is yet to start."""
        return DemoWatcher(self.site, job, self.options.folder / job, steps, self.print_line, victim, kill_after)

    def fit(
        self,
        watcher: DemoWatcher,
        choice: HostChoice | None = None,
        *,
        is_restoring: bool = True,
        is_in_place: bool = False,
    ) -> RunRecord:
        """Train one job under Ray Train to its end, with restarts; return the records of its ranks."""
        job, journal, options = watcher.job, watcher.journal, self.options
        journal.mkdir(parents=True)
        settings = Settings(
            job, str(journal), self.site.config, watcher.steps, is_restoring=is_restoring, size=options.size
        )
        trainer = TorchTrainer(
            train,
            train_loop_config={"settings": settings},
            torch_config=(InPlaceTorchConfig if is_in_place else TorchConfig)(backend="gloo"),
            scaling_config=ScalingConfig(
                num_workers=len(HOSTS),
                resources_per_worker={"CPU": 1},
                placement_strategy="SPREAD",
                label_selector=choice.selectors if choice is not None and not is_in_place else None,
            ),
            run_config=RunConfig(
                name=job, storage_path=str(options.folder / "ray"), failure_config=FailureConfig(max_failures=2)
            ),
        )
        watcher.start()
        try:
            trainer.fit()
        except TrainingFailedError as exc:
            raise MemstoreError(f"{job}: Ray Train gave up after its restarts: {exc}") from exc
        finally:
            watcher.end()
        return read_run(journal)


def run_demo(options: DemoOptions, print_line: PrintLine) -> DemoOutcome:
    """Run everything and return the outcome; `print_line` gets each line as it happens.

    Raises:
        MemstoreError: the demo itself did not work; a failed check is no error, but in `DemoOutcome.is_ok`.
    """
    started_s = time.monotonic()
    print_line(
        f"{len(HOSTS)} hosts in 2 racks (simulated: {len(HOSTS)} raylets on this machine) · FSDP2 transformer, "
        f"{parameters_count(options.size) / 1e6:.1f} M parameters, {len(HOSTS)} ranks · put every step, 2 copies, "
        "different racks"
    )
    with embedded_site(len(HOSTS), 512 * MIB, detect=REPAIR_AFTER_S) as site:
        demo = Demo(site, options, print_line)
        print_line(f"[start]   cluster and store up after {time.monotonic() - started_s:.1f} s")
        undisturbed = demo.fit(demo.watcher("undisturbed", options.steps))
        newest = site.job("undisturbed").newest
        choice = choose_hosts(newest.targets if newest is not None else {})
        print_line(
            f"[hosts]   {choice.victim} will be lost; its copies are on {choice.partner}. Its rank is kept off "
            f"{choice.partner}, so that the bytes have to cross the wire;\n"
            f"          repair waits {REPAIR_AFTER_S:g} s after a death, so that it does not bring them before"
        )
        disturbed = demo.lose_host(
            "demo",
            choice,
            undisturbed,
            steps=options.steps,
            kill_after=options.kill_after,
            is_restoring=options.is_restoring,
        )
        in_place = control = None
        if options.has_in_place and options.is_restoring:
            print_line("[inplace] the same loss once more, in place: the other ranks keep their processes")
            site.heal()
            in_place = demo.lose_host(
                "in-place", choice, undisturbed, steps=options.steps, kill_after=options.kill_after, is_in_place=True
            )
        if options.has_control and options.is_restoring:
            print_line("[control] the same with restore switched off, a few steps only: the checks must fail")
            site.heal()
            control = demo.lose_host(
                "control",
                choice,
                undisturbed,
                steps=options.control_steps,
                kill_after=options.control_kill_after,
                is_restoring=False,
            )
    return DemoOutcome(options, undisturbed, disturbed, in_place, control, time.monotonic() - started_s)
