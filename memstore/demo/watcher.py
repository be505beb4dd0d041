"""A thread beside a training run that prints its progress, kills a host, and measures how the store notices that."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from memstore.cli.output import size_text
from memstore.core.wire.status_rows import AttemptStatus, HostRow
from memstore.demo.checks import Kill
from memstore.demo.records import RunRecord, read_run
from memstore.drills.sites.site import EmbeddedSite
from memstore.errors import MemstoreError
from memstore.testing.faults.kept_up import KeptUp

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
