"""The phases of a drill, in order: setup, before, inject, effect, detected, planned, restored, compared, redundant.

The runner decides pass or fail from what the ranks compared and what was promised; it asks the store for
nothing but its status. Whatever goes wrong with the drill itself is a DrillError and never a pass.
"""

from __future__ import annotations

import contextlib
import random
import secrets
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from memstore.cluster import ask
from memstore.config import MIB, Config
from memstore.drills.catalogue import REFUSED, find, promised
from memstore.drills.ranks import CALL_S, Rank, Restored, collect, kill_actors
from memstore.drills.report import BROKEN, ERROR, PASS, Report, Timeline, gib
from memstore.drills.scenes import SCENES
from memstore.drills.site import Site
from memstore.errors import DrillError, MemstoreError

RESTORE_S = 120.0
SETTLE_S = 60.0  # copies complete before the drill, noticed after the fault, complete again after the restore
WATCH_S = 0.05
DURABLE_EVERY = 1_000_000_000  # steps: the first committed step only, so that the durable step is an older one


@dataclass(frozen=True)
class Options:
    """What a person may choose. Sizes are per rank and step."""

    seed: int = 0
    is_beyond: bool = False
    ranks_count: int = 4
    nbytes: int = 8 * MIB
    config: Config = field(default_factory=Config)  # its job fields are the drill's
    victim: str | None = None
    allows_data_loss: bool = False
    is_altered: bool = False  # spoil one restored bit, so that a test sees the comparison fail


class Watch:
    """Polls the status from before the fault on, and notes when the store noticed."""

    def __init__(self, site: Site, check: Callable[[dict[str, Any], float], str | None]) -> None:
        self._site, self._check = site, check
        self._stop, self.found = threading.Event(), threading.Event()
        self.seconds, self.why = 0.0, ""
        self._thread = threading.Thread(target=self._run, name="drill-watch", daemon=True)

    def __enter__(self) -> Watch:
        self.started_s = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
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
        self.job = f"drill-{name}-{secrets.token_hex(4)}"
        self.config = options.config
        self.promise = promised(self.drill, is_beyond=options.is_beyond, has_durable=self.config.durable is not None)
        self.report = Report(name, options.seed, self.promise.words, options.is_beyond)
        self.timeline = Timeline(self.report, tell)
        self.broken: list[str] = []  # promises that were not kept
        self.ranks: list[Rank] = []
        self.spares: list[Rank] = []
        self.hosts: list[str] = []
        self.job_before: dict[str, Any] = {}
        self.scene = SCENES[name](self)

    def run(self) -> Report:
        """Play the drill; never raises for what the drill found, only for what nobody could expect."""
        report = self.report
        try:
            self._play()
            report.outcome = BROKEN if self.broken else PASS
            report.words = "; ".join(self.broken) if self.broken else self._pass_words()
        except MemstoreError as exc:
            report.outcome, report.error, report.message = ERROR, type(exc).__name__, str(exc)
            report.words = f"{type(exc).__name__}: {exc}"
        finally:
            self._clean_up()
        return report

    def _play(self) -> None:
        self._before()
        with Watch(self.site, self.scene.detected) as watch:
            done = self.scene.inject()
            self.timeline.line("inject", done)
            self.timeline.line("effect", self.scene.effect)
            if not watch.found.wait(SETTLE_S):
                raise DrillError(f"the store did not notice the fault within {SETTLE_S:g} s: {done}")
        self.report.seconds["detect"] = round(watch.seconds, 3)
        self.timeline.line("detected", watch.why, f"{watch.seconds:.1f} s")
        self.scene.settle()
        results = self._restart()
        self._judge(results)
        if not any(r.error for r in results) and not self.broken:
            self._redundant()

    # -- before -------------------------------------------------------------------------------

    def _before(self) -> None:
        """Ranks put a few steps; the newest is committed with every copy where it should be."""
        live = self.site.places()
        if len(live) < self.config.replicas:
            raise DrillError(f"{len(live)} hosts are live, replicas={self.config.replicas}: start more hosts")
        self.hosts = [live[i % len(live)] for i in range(self.options.ranks_count)]
        nodes = self.site.nodes()
        self.ranks = self.site.pool.take(self.hosts, nodes)
        self._join(self.ranks, fresh=True)
        last = 2 + self.rng.randrange(4)
        if self.config.durable is not None:
            collect([r.actor.put.remote(0, 0) for r in self.ranks], "first put")
            collect([r.actor.wait.remote("durable", SETTLE_S) for r in self.ranks], "first durable step")
        rows = collect([r.actor.put.remote(0 if self.config.durable is None else 1, last) for r in self.ranks], "put")
        errors = [row.error for mine in rows for row in mine if row.error]
        if errors:
            raise DrillError(f"a put before the fault raised {errors[0]}")
        collect([r.actor.wait.remote("committed", SETTLE_S) for r in self.ranks], "commit before the fault")
        self.job_before = self.wait_redundant()
        self.report.step_before = int(self.job_before["committed_step"])
        # Processes of the next attempt stand by, as a launcher with warm spares has them.
        self.scene.choose()
        self.report.victims = self.scene.victims()
        gone = {host for host in self.scene.hosts if self.scene.leaves(host)}
        left = [host for host in live if host not in gone]
        # Not to a host that has the copy already, else no byte would need to move; with two hosts there is no other.
        others = [host for host in left if host not in self.scene.holders]
        if gone and not others and not self.options.is_beyond:
            self.promise = replace(self.promise, verdicts=self.promise.verdicts | {"local"}, needs=None)
        others = others or left
        places = [host if host not in gone else others[i % len(others)] for i, host in enumerate(self.hosts)]
        self.spares = self.site.pool.take(places, nodes)
        where = "the drill's own cluster" if self.site.is_own else "scratch job on your cluster"
        name = f"{self.drill.name}{' --beyond' if self.options.is_beyond else ''}"
        self.tell(
            f"drill {name} · seed {self.options.seed} · {where} "
            f"({len(live)} hosts) · victim {', '.join(self.report.victims)} · promised: {self.promise.words}"
        )
        self.timeline.line(
            "before",
            f"step {self.report.step_before} committed, {self.copies_text()} everywhere, "
            f"{len(self.ranks)} ranks of {gib(self.options.nbytes)}",
        )

    def _join(self, ranks: list[Rank], *, fresh: bool) -> None:
        key = secrets.token_hex(8)
        collect(
            [
                r.actor.join.remote(
                    self.job, i, len(ranks), key, self.config, fresh=fresh, seed=self.options.seed,
                    nbytes=self.options.nbytes,
                )
                for i, r in enumerate(ranks)
            ],
            "connect",
        )  # fmt: skip

    def copies_text(self) -> str:
        """How many copies every shard of the newest committed step has."""
        job = self.site.job(self.job)
        return f"{job['copies']} of {job['replicas']} copies"

    def wait_redundant(self) -> dict[str, Any]:
        """Wait until the newest committed step has every copy that the live hosts allow; return the job's status."""

        def look() -> dict[str, Any] | None:
            job, live = self.site.job(self.job), self.site.live_hosts()
            wanted = min(int(job["replicas"]), len(live))
            is_whole = job["committed_step"] is not None and job["copies"] >= wanted
            return job if is_whole and (wanted < job["replicas"] or not job["missing_copies"]) else None

        found: dict[str, Any] = self.site.wait_for("every copy of the newest committed step", look, SETTLE_S)
        return found

    # -- after --------------------------------------------------------------------------------

    def _restart(self) -> list[Restored]:
        """The launcher ends the attempt's processes and starts the next; all ranks get and compare."""
        with contextlib.suppress(MemstoreError):
            committed = self.site.job(self.job)["committed_step"]
            self.report.step_before = max(self.report.step_before or 0, int(committed or 0))
        kill_actors(self.ranks)
        self.ranks, self.spares = self.spares, []
        self.site.wait_hosts_live(sorted({r.host for r in self.ranks}))
        self._join(self.ranks, fresh=False)
        calls = [r.actor.restore.remote(RESTORE_S, is_altered=self.options.is_altered) for r in self.ranks]
        results: list[Restored] = collect(calls, "get", RESTORE_S + CALL_S)
        return results

    def _judge(self, results: list[Restored]) -> None:
        """Hold what every rank got against the promise."""
        errors = {r.error for r in results}
        if errors != {""}:
            self._judge_refusal(results)
            return
        report, first = self.report, results[0]
        report.verdict, report.step_restored = first.verdict, first.step
        report.bytes_by_tier.update(first.bytes_by_tier)
        report.bytes_compared = sum(r.nbytes for r in results)
        tiers = " · ".join(f"{gib(n)} {tier}" for tier, n in report.bytes_by_tier.items())
        moved = f" · {len(first.ranks_moved)} ranks moved" if first.ranks_moved else ""
        plan_s = first.seconds_by_phase["gather"]
        transfer_s, load_s = first.seconds_by_phase["transfer"], max(r.seconds_by_phase["load"] for r in results)
        report.seconds.update(plan=round(plan_s, 3), transfer=round(transfer_s, 3), load=round(load_s, 3))
        self.timeline.line("planned", f"step {first.step} · {first.verdict}{moved}", f"{plan_s:.3f} s")
        self.timeline.line("restored", tiers, f"{transfer_s + load_s:.2f} s")
        self._judge_bytes(results)
        if len({(r.step, r.verdict) for r in results}) != 1:
            self.broken.append(f"ranks got different steps: {sorted({str(r.step) for r in results})}")
        if first.verdict not in self.promise.verdicts:
            allowed = " or ".join(sorted(self.promise.verdicts))
            self.broken.append(f"the verdict is {first.verdict}, promised was {allowed}: {first.reason}")
        if self.promise.is_lossless and report.rpo_steps:
            self.broken.append(f"{report.rpo_steps} committed steps were lost, promised were 0: {first.reason}")
        for tier, nbytes in report.bytes_by_tier.items():
            if nbytes and tier not in self.promise.tiers:
                self.broken.append(f"{gib(nbytes)} came from {tier}, promised were 0")
        if self.promise.needs is not None and not report.bytes_by_tier[self.promise.needs]:
            self.broken.append(f"no byte came from {self.promise.needs}: the fault took nothing away")

    def _judge_bytes(self, results: list[Restored]) -> None:
        equal, whole = sum(r.bytes_equal for r in results), self.report.bytes_compared
        right = sum(not r.differences and r.bytes_equal == r.nbytes > 0 for r in results)
        self.report.is_verified = right == len(results) == len(self.ranks)
        note = "verified" if self.report.is_verified else "DIFFERENT"
        self.timeline.line("compared", f"{equal:,} of {whole:,} bytes equal on {right} of {len(results)} ranks", note)
        if not self.report.is_verified:
            found = [f"rank {r.rank}: {d}" for r in results for d in r.differences]
            self.broken.append(f"restored state differs from the one made anew: {'; '.join(found[:3])}")

    def _judge_refusal(self, results: list[Restored]) -> None:
        """A refusal is a promise too: typed, alike on every rank, and it names what is lost and where it was."""
        report, first = self.report, results[0]
        report.error, report.message = first.error or None, first.message
        kinds = {r.error or f"step {r.step}" for r in results}
        if kinds != {"RecoveryError"}:
            self.broken.append(f"ranks ended differently or wrongly: {', '.join(sorted(kinds))}: {first.message}")
            return
        report.verdict = REFUSED
        self.timeline.line("refused", f"RecoveryError on {len(results)} of {len(self.ranks)} ranks, no byte given out")
        if REFUSED not in self.promise.verdicts:
            self.broken.append(f"get() refused, promised was {self.promise.words}: {first.message}")
        unnamed = [host for host in self.scene.holders if host not in first.message]
        if unnamed or str(self.scene.rank) not in first.message:
            self.broken.append(
                f"the refusal does not name rank {self.scene.rank} and {', '.join(unnamed)}: {first.message}"
            )

    def _redundant(self) -> None:
        """Copies complete again, and training goes on: the next step is committed."""
        started_s = time.monotonic()
        flapping = [h["host"] for h in self.site.status()["hosts"] if h["is_on_probation"]]
        try:
            if not flapping:  # such a host is given no second copy by repair, only by the next put (R29)
                self.wait_redundant()
        except DrillError as exc:
            self.broken.append(f"copies are not complete again: {exc}")
            return
        self.report.seconds["redundant"] = round(time.monotonic() - started_s, 3)
        step = (self.report.step_restored or 0) + 1
        collect([r.actor.put.remote(step, step) for r in self.ranks], "put after the restore")
        collect([r.actor.wait.remote("committed", SETTLE_S) for r in self.ranks], "commit after the restore")
        took = f"{self.report.seconds['redundant']:.1f} s after restore"
        if flapping:
            self.wait_redundant()
            took = f"by the next put ({', '.join(flapping)} died too often lately for repair to trust, R29)"
        self.timeline.line("redundant", f"{self.copies_text()} again, {took}; training went on with step {step}")

    def _pass_words(self) -> str:
        report = self.report
        if report.verdict == REFUSED:
            lines = [line.strip() for line in (report.message or "").splitlines()]
            return f"refused: {lines[1] if len(lines) > 1 else lines[0]}"
        took = sum(s for phase, s in report.seconds.items() if s is not None and phase != "redundant")
        lost = f"{report.rpo_steps} steps lost"
        if self.promise.is_lossless:
            return f"{lost} (promised 0) · {took:.1f} s without the launcher's restart"
        return f"{lost}: durable step {report.step_restored} restored, the newest had been {report.step_before}"

    # -- cleanup ------------------------------------------------------------------------------

    def _clean_up(self) -> None:
        """Leave nothing of the scratch job; idle processes serve the next drill."""
        kill_actors(self.spares)
        try:
            collect([r.actor.leave.remote() for r in self.ranks], "leave", CALL_S / 4)
            self.site.pool.give_back(self.ranks)
        except MemstoreError:
            kill_actors(self.ranks)
        with contextlib.suppress(MemstoreError):
            ask("rm", {"job": self.job, "force": True}, config=self.site.config, timeout_s=CALL_S / 4)
        if self.config.durable is not None:
            shutil.rmtree(Path(self.config.durable) / self.job, ignore_errors=True)
        with contextlib.suppress(MemstoreError):
            self.site.end_drill()


def run_drill(name: str, site: Site, options: Options, tell: Callable[[str], None] = lambda line: None) -> Report:
    """Run one drill; `tell` gets each line as it happens.

    Raises:
        ConfigError: there is no such drill.
    """
    return DrillRun(name, site, options, tell).run()
