"""The canary: a scratch job of real size on the real hosts, which loses one copy of each shard and is restored.

It is safe in production: it checks for free memory before it starts a process, kills no process of others, and drops
only copies of its own job, through the controller, which refuses to drop a last one. See `headroom.py` for the check.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from memstore.cli.output import size_text
from memstore.config import MIB, Config
from memstore.core.wire.replies import Status
from memstore.drills.canary.headroom import copies_nbytes, machine_refusals, store_refusals
from memstore.drills.model.report import BROKEN, ERROR, EXIT_CODES, PASS
from memstore.drills.ranks.ranks import PutRow, Restored
from memstore.drills.sites.scratch import ScratchJob
from memstore.drills.sites.site import Site
from memstore.errors import CapacityError, DrillError, MemstoreError

NBYTES_DEFAULT = 64 * MIB  # if the store holds no shard from which to take the size
JOB = "canary"
REFUSED = "REFUSED"  # refused before anything was touched


@dataclass(frozen=True)
class CanaryOptions:
    """The choices of a person for the canary."""

    seed: int = 0
    nbytes: int | None = None  # per rank; None for the size of the largest shard in the store
    replicas: int | None = None  # None for the largest value of the store's jobs


@dataclass
class Step:
    """One phase of the canary, as one printed line."""

    phase: str
    text: str
    seconds: float | None = None
    nbytes: int | None = None

    @property
    def gbytes_per_s(self) -> float | None:
        """Return decimal gigabytes per second of all ranks together; None if no bytes were moved."""
        if self.nbytes is None or not self.seconds:
            return None
        return self.nbytes / self.seconds / 1e9


@dataclass
class CanaryReport:
    """The findings of the canary."""

    job: str = ""
    hosts: list[str] = field(default_factory=list)
    nbytes: int = 0
    replicas: int = 0
    outcome: str = ERROR
    words: str = "the canary did not run"
    is_verified: bool = False
    bytes_compared: int = 0
    bytes_by_tier: dict[str, int] = field(default_factory=dict)
    phases: list[Step] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        """Return 0 if every byte came back, 1 if the canary was refused or did not work, 3 for a broken promise."""
        return EXIT_CODES.get(self.outcome, 1)

    def to_dict(self) -> dict[str, Any]:
        """Return the plain values that `drill canary --json` prints."""
        return {
            "job": self.job, "hosts": self.hosts, "nbytes_per_rank": self.nbytes, "replicas": self.replicas,
            "outcome": self.outcome, "words": self.words, "verified": self.is_verified,
            "bytes_compared": self.bytes_compared, "bytes": self.bytes_by_tier,
            "phases": [
                {
                    "phase": p.phase, "text": p.text,
                    "seconds": round(p.seconds, 6) if p.seconds is not None else None, "nbytes": p.nbytes,
                    "gbytes_per_s": round(p.gbytes_per_s, 3) if p.gbytes_per_s is not None else None,
                }
                for p in self.phases
            ],
        }  # fmt: skip


def line_of(step: Step) -> str:
    """Return the line of a phase: its name, what was done, seconds, GB/s."""
    seconds = f"{step.seconds:9.3f} s" if step.seconds is not None else ""
    speed = f"{step.gbytes_per_s:8.2f} GB/s" if step.gbytes_per_s is not None else ""
    return f"  {step.phase:<11}{step.text:<76}{seconds}{speed}".rstrip()


class Canary:
    """One run of the canary on one site."""

    def __init__(self, site: Site, options: CanaryOptions, print_line: Callable[[str], None]) -> None:
        self.site, self.options, self.print_line = site, options, print_line
        self.report = CanaryReport()
        self.broken: list[str] = []

    def run(self) -> CanaryReport:
        """Play the canary, remove its job, return the report; that also holds a MemstoreError if one was raised."""
        report = self.report
        try:
            config = self._look()
        except CapacityError as exc:
            report.outcome, report.words = REFUSED, str(exc)
            return report
        except MemstoreError as exc:
            report.words = f"{type(exc).__name__}: {exc}"
            return report
        job = ScratchJob(self.site, JOB, config, seed=self.options.seed, nbytes=report.nbytes)
        report.job = job.name
        self.print_line(
            f"  job {job.name}, {len(report.hosts)} ranks of {size_text(report.nbytes)}, {report.replicas} copies"
        )
        try:
            self._play(job)
            report.outcome = BROKEN if self.broken else PASS
            back = size_text(report.bytes_by_tier.get("peer"))
            words = f"{back} came back over the network, each byte equal to a state made again"
            report.words = "; ".join(self.broken) or words
        except MemstoreError as exc:
            report.outcome, report.words = ERROR, f"{type(exc).__name__}: {exc}"
        finally:
            self._remove(job)
        return report

    # -- phases -------------------------------------------------------------------------------

    def _look(self) -> Config:
        """Decide the sizes, and return the job's Config; nothing is started or claimed yet.

        Raises:
            CapacityError: there are too few hosts, or hosts or machines lack memory; names each with its numbers.
        """
        report = self.report
        status = self.site.wait_for("every live host to say how much memory it has", self._status_with_memory)
        live = [row for row in status.hosts if row.status == "live"]
        report.hosts = [row.host for row in live]
        asked = [job.newest.replicas for job in status.jobs if job.newest is not None]
        report.replicas = self.options.replicas or max([2, *asked])
        report.nbytes = self.options.nbytes or largest_shard(status) or NBYTES_DEFAULT
        if report.replicas < 2 or len(live) < report.replicas:
            raise CapacityError(
                f"{report.replicas} copies on {len(live)} live hosts: the canary drops a copy and needs another host "
                "that has one, so at least 2 copies and as many hosts. Nothing was touched"
            )
        config = self.site.config.with_fields({"replicas": report.replicas, "durable": None})
        need = copies_nbytes(report.nbytes, config)
        refusals = store_refusals(live, need)
        if not refusals:
            refusals = machine_refusals(
                live, need, report.nbytes, {row.host: self._available(row.host) for row in live}
            )
        if refusals:
            raise CapacityError(
                f"no room for {size_text(report.nbytes)} per rank: {'; '.join(refusals[:10])}. Nothing was touched; "
                "try a smaller --nbytes"
            )
        self._done(Step("room", f"{size_text(need)} more per host fit on {len(live)} hosts"))
        return config

    def _status_with_memory(self) -> Status | None:
        """Return the status once it has the memory numbers of every live host; None before."""
        status = self.site.status()
        return status if all(row.stats is not None for row in status.hosts if row.status == "live") else None

    def _available(self, host: str) -> int:
        return int(self.site.do(host, "memory_available"))

    def _play(self, job: ScratchJob) -> None:
        with self._timed("connect", f"{len(self.report.hosts)} ranks, one per host"):
            job.start(self.report.hosts)
        self._show_put("first put", "room claimed and first touched, copied", job.put_measured(0, "committed"))
        rows = job.put_measured(1, "committed")
        self._show_put("put", "memory copied; the ranks were blocked for this long", rows)
        total = sum(row.nbytes for row in rows)
        copies = total * (self.report.replicas - 1)
        self._done(Step("committed", "digested, sent, sealed on peers", max(r.level_s for r in rows), copies))
        job.wait_redundant()
        job.rejoin()
        with self._timed("drop", "the copy of every shard on its own host, through controller and holder"):
            kept = [job.drop(rank, host).left_on for rank, host in enumerate(self.report.hosts)]
        if not all(kept):
            raise DrillError("a copy was dropped that had no other: nothing can be proved")
        self._restore(job.restore())
        with self._timed("redundant", f"{self.report.replicas} copies of every shard again"):
            job.wait_redundant()

    def _show_put(self, phase: str, text: str, rows: list[PutRow]) -> None:
        self._done(Step(phase, text, max(r.stall_s for r in rows), sum(r.nbytes for r in rows)))

    def _restore(self, results: list[Restored]) -> None:
        """Record what the ranks got; require that bytes came from a peer, and that every byte is equal."""
        report, first = self.report, results[0]
        errors = [r for r in results if r.error]
        if errors:
            self.broken.append(f"get() of rank {errors[0].rank} raised {errors[0].error}: {errors[0].message}")
            return
        report.bytes_by_tier = dict(first.bytes_by_tier)
        seconds = first.seconds_by_phase
        self._done(Step("plan", f"step {first.step} · {first.verdict}", seconds["gather"]))
        self._done(Step("transfer", "from the other copies, over the network", seconds["transfer"],
                        report.bytes_by_tier.get("peer", 0)))  # fmt: skip
        load_s = max(r.seconds_by_phase["load"] for r in results)
        report.bytes_compared = sum(r.nbytes for r in results)
        self._done(Step("load", "into new tensors", load_s, report.bytes_compared))
        right = sum(not r.problem for r in results)
        report.is_verified = right == len(results)
        self._done(Step("compared", f"{sum(r.bytes_equal for r in results):,} of {report.bytes_compared:,} bytes equal "
                                    f"on {right} of {len(results)} ranks"))  # fmt: skip
        if not report.is_verified:
            found = [f"rank {r.rank}: {d}" for r in results for d in r.differences]
            self.broken.append(f"restored state differs from the one made again: {'; '.join(found[:3])}")
        if len({r.step for r in results}) != 1 or first.step != 1:
            self.broken.append(f"steps {sorted({str(r.step) for r in results})} came back, step 1 was committed")
        if not report.bytes_by_tier.get("peer"):
            self.broken.append("no byte came from a peer: the copies that were dropped were still used")

    def _remove(self, job: ScratchJob) -> None:
        """Remove the job, and wait until the store has forgotten it."""
        try:
            with self._timed("removed", f"job {job.name}, every copy of it"):
                job.remove()
                self.site.wait_for("the job to be gone", lambda: job.name not in self._jobs())
        except MemstoreError as exc:
            self.report.outcome = ERROR
            remedy = self.site.config.commands(f"remove it with `memstore rm {job.name}`")
            self.report.words = f"the job {job.name} is still there, {remedy}: {exc}"

    def _jobs(self) -> set[str]:
        return {row.job for row in self.site.status().jobs}

    def _done(self, step: Step) -> None:
        self.report.phases.append(step)
        self.print_line(line_of(step))

    @contextmanager
    def _timed(self, phase: str, text: str) -> Iterator[None]:
        started_s = time.monotonic()
        yield
        self._done(Step(phase, text, time.monotonic() - started_s))


def largest_shard(status: Status) -> int:
    """Return the bytes of the largest shard of all jobs; 0 if the store holds no shard."""
    return max((step.shard_nbytes_max for job in status.jobs for step in job.steps), default=0)


def run_canary(
    site: Site, options: CanaryOptions, print_line: Callable[[str], None] = lambda line: None
) -> CanaryReport:
    """Run the canary and return its report; `print_line` gets each line as it happens."""
    return Canary(site, options, print_line).run()
