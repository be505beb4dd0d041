"""A thread beside a training run that prints its progress, kills a host, and measures how the store notices that."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import memstore
from memstore.demo.checks import Kill
from memstore.demo.records import Run, StepRun, read_run
from memstore.errors import MemstoreError
from memstore.testing.clusters.embedded import EmbeddedCluster

POLL_S = 0.05
SHOW_S = 0.5  # between two reads of the journals
LINES_PER_RUN = 4  # of progress
PrintLine = Callable[[str], None]


class Watcher:
    """A context manager with a thread, for one training run. It raises an error of the thread at the end."""

    def __init__(
        self, cluster: EmbeddedCluster, *, job: str, journal: Path, steps: int, print_line: PrintLine, victim: str = "",
        kill_after: int = -1,
    ) -> None:  # fmt: skip
        self.cluster, self.job, self.journal, self.steps, self.print_line = cluster, job, journal, steps, print_line
        self.victim, self.kill_after = victim, kill_after
        self.kill: Kill | None = None
        self.lost: dict[str, Any] = {}
        self.detect_s: float | None = None
        self.detect_why = ""
        self._is_restore_shown = False
        self._shown_step = -1
        self._looked_s = 0.0
        self._error: BaseException | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memstore-demo-watcher", daemon=True)

    def __enter__(self) -> Watcher:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._stop.set()
        self._thread.join(timeout=60.0)
        if kind is None and self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            while not self._stop.wait(POLL_S):
                self._look()
            self._show(read_run(self.journal), self._job())
        except BaseException as exc:
            self._error = exc

    def _look(self) -> None:
        job = self._job()
        if self.victim and self.kill is None and job.get("phase") == "open":
            committed = job.get("committed_step")
            if committed is not None and committed >= self.kill_after:
                self._kill(committed)
        elif self.kill is not None and self.detect_s is None:
            self._detect(self.kill)
        if time.monotonic() - self._looked_s > SHOW_S:
            self._looked_s = time.monotonic()
            self._show(read_run(self.journal), job)

    def _status(self) -> memstore.ClusterStatus | None:
        try:
            return memstore.status(config=self.cluster.config)
        except MemstoreError:
            return None  # the next look asks again

    def _job(self) -> dict[str, Any]:
        status = self._status()
        return next((j for j in status.jobs if j["job"] == self.job), {}) if status is not None else {}

    def _kill(self, committed: int) -> None:
        self.kill = Kill(self.victim, committed, time.time())
        rack = self.cluster.labels[self.victim]["rack"]
        self.lost = self.cluster.lose_host(self.victim)
        self.print_line(
            f"[kill]    step {committed:3d} committed: host {self.victim} (rack {rack}) lost: "
            f"{self.lost['processes']} processes killed, {mib(self.lost['nbytes'])} of its memory destroyed"
        )

    def _detect(self, kill: Kill) -> None:
        status = self._status()
        host = next((h for h in status.hosts if h["host"] == kill.host), None) if status is not None else None
        if host is not None and host["status"] == "dead":
            self.detect_s = max(0.0, time.time() - float(host["status_s"]) - kill.wall_s)
            self.detect_why = str(host["why"])
            self.print_line(
                f"[detect]  {self.detect_s:.2f} s after the kill: {kill.host} {host['status']}, {self.detect_why}"
            )

    def _show(self, run: Run, job: dict[str, Any]) -> None:
        if not self._is_restore_shown and run.restored and len(run.restored) == len({j.rank for j in run.joined}):
            self._is_restore_shown = True
            self._show_restore(run)
        last = max((s for s in run.steps if s.rank == 0), key=lambda s: s.wall_s, default=None)
        if last is None or not job:
            return
        is_due = last.step >= self._shown_step + max(1, self.steps // LINES_PER_RUN) or last.step == self.steps - 1
        if is_due and last.step != self._shown_step:
            self._shown_step = last.step
            self.print_line(progress_line(run, last, job, self.steps))

    def _show_restore(self, run: Run) -> None:
        got = run.restored[0]
        tiers = ", ".join(f"{mib(nbytes)} {tier}" for tier, nbytes in got.bytes_by_tier.items())
        self.print_line(
            f"[restore] step {got.step:3d}, attempt {got.attempt}: {got.steps_lost} steps lost · {got.source} · "
            f"{tiers} · every digest ok · {restore_seconds(run):.2f} s"
        )


def progress_line(run: Run, last: StepRun, job: dict[str, Any], steps: int) -> str:
    """Return a line with the step, the loss, the stall of a put, and what is committed."""
    stall_ms = statistics.median(s.stall_s for s in run.steps if s.attempt == last.attempt) * 1e3
    return (
        f"[train]   step {last.step:3d}/{steps - 1}  loss {float.fromhex(last.loss):.3f}  put {stall_ms:.0f} ms stall "
        f"· committed {job.get('committed_step')} · {job.get('copies')} of {job.get('replicas')} copies"
    )


def restore_seconds(run: Run) -> float:
    """Return the seconds from the plan until the last rank had loaded its state, by the results of get()."""
    slowest = max((r.seconds_by_phase.get("load", 0.0) for r in run.restored), default=0.0)
    return slowest + max((r.seconds_by_phase.get("transfer", 0.0) for r in run.restored), default=0.0)


def mib(nbytes: int) -> str:
    """Return bytes as text in MiB."""
    return f"{nbytes / (1 << 20):.1f} MiB"
