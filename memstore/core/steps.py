"""Seals, the commit rule, skips and what a commit does to older steps. Pure (R12, R15, R18, R19)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memstore.core.events import shard_to_wire
from memstore.core.facts import StepAbandoned, StepCommitted
from memstore.core.job import Attempt, Call, Job
from memstore.core.retention import kept_steps
from placement.domains import is_finer
from recovery.inventory import Copy, ShardId, StepId
from recovery.lineage import in_lineage

if TYPE_CHECKING:
    from memstore.core.catalog import Catalog

ADOPTED = "adopted by a restore"  # a whole step without a commit fact that a restore chose
RESUME_GAP_MAX = 64  # steps; the gap doubles with every skip until a commit lands (R12)


class Steps:
    """Decides when steps of the current attempts are committed, abandoned or superseded."""

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog

    # -- events -------------------------------------------------------------------------------

    def sealed(self, now: float, copy: Copy) -> None:
        """A host holds a verified copy of a whole shard."""
        shard = copy.shard
        job = self.catalog.jobs.setdefault(shard.job, Job(shard.job))
        step = StepId(shard.attempt, shard.step)
        attempt = job.attempts.get(shard.attempt)
        if step in job.abandoned or (
            attempt is not None and attempt.steps.get(shard.step) in ("abandoned", "superseded")
        ):
            self.catalog.tell(copy.host, "drop", {"shards": [shard_to_wire(shard)]})
            return
        job.add_copy(copy)
        job.refusals.pop((shard, copy.host), None)
        if attempt is None:
            return
        attempt.has_put = attempt.has_put or attempt is job.newest
        if attempt is job.newest:
            seat = attempt.seats.get(shard.rank)
            if seat is not None:
                seat.last_active_s, seat.step = now, max(seat.step, shard.step)
            attempt.steps.setdefault(shard.step, "open")
        self.evaluate(job, step)

    def adopt(self, job: Job) -> None:
        """After a rebuild: what inventories hold beyond the newest commit of the newest attempt is open again."""
        attempt = job.newest
        if attempt is None:
            return
        newest = max((s.step for s in job.commits if s.attempt == attempt.ordinal), default=-1)
        for step in job.copies:
            if step.attempt == attempt.ordinal and step.step not in attempt.steps:
                attempt.has_put = True
                attempt.steps[step.step] = "open" if step.step > newest else "superseded"
        for rank, seat in attempt.seats.items():
            put = [s.step for s, ranks in job.copies.items() if s.attempt == attempt.ordinal and rank in ranks]
            seat.step = max([seat.step, *put])

    def greet(self, job: Job, host: str) -> None:
        """Tell a host's ranks of the newest commit: the word may have died with a controller or a holder."""
        attempt = job.newest
        fact = max((c for s, c in job.commits.items() if attempt and s.attempt == attempt.ordinal), key=lambda c: c.step, default=None)
        if attempt is not None and fact is not None:
            self.catalog.tell(
                host, "level",
                {
                    "job": job.name, "attempt": attempt.ordinal, "step": fact.step, "level": "committed",
                    "degraded": fact.is_degraded, "reason": fact.reason,
                },
            )  # fmt: skip

    def evaluate_all(self, job: Job) -> None:
        """Look again at every step that is not finished, oldest first, and at degraded commits."""
        attempt = job.newest
        if attempt is not None:
            for number in sorted(attempt.steps):
                if attempt.steps[number] == "open":
                    self.evaluate(job, StepId(attempt.ordinal, number))
        for step, commit in list(job.commits.items()):
            if commit.is_degraded:
                self.evaluate(job, step)

    def evaluate(self, job: Job, step: StepId) -> None:
        """Commit the step if the rule holds now; mend a degraded commit that has become whole."""
        attempt = job.attempts.get(step.attempt)
        if attempt is None:
            return
        commit = job.commits.get(step)
        if commit is not None:
            if commit.is_degraded:
                fact = self.commit_rule(job, attempt, step)
                if fact is not None and not fact.is_degraded and not self.catalog.is_recording(fact):
                    self.catalog.record(fact)
            return
        if attempt is not job.newest or attempt.phase == "closed" or attempt.steps.get(step.step) != "open":
            return
        fact = self.commit_rule(job, attempt, step)
        if fact is not None:
            attempt.steps[step.step] = "committing"
            self.catalog.record(fact)

    # -- the rule -----------------------------------------------------------------------------

    def commit_rule(self, job: Job, attempt: Attempt, step: StepId) -> StepCommitted | None:
        """Return the commit fact if every shard is on as many domains as the cluster now allows (R18)."""
        ranks = job.copies.get(step, {})
        if len(ranks) < attempt.world_size:
            return None
        placement = self.catalog.placement(job)
        if placement is None:
            return None
        topology = self.catalog.hosts.topology(self.catalog.hosts.live_ids())
        digests: list[str] = []
        hosts: list[tuple[str, ...]] = []
        reasons: list[str] = []
        for rank in range(attempt.world_size):
            copies = {h: c for h, c in ranks[rank].items() if self.catalog.hosts.is_live(h) and not c.missing}
            if not copies or len({c.spec.digest for c in copies.values()}) != 1:
                return None
            owner = self.catalog.owner_host(job, attempt, rank)
            shard = ShardId(job.name, step.attempt, step.step, rank)
            wanted = [owner, *placement.targets.get(owner, ())]
            able = [h for h in wanted if h in copies or (shard, h) not in job.refusals]
            have = {topology.hosts[h].domain(placement.level) for h in copies}
            need = {topology.hosts[h].domain(placement.level) for h in able if h in topology.hosts}
            if len(have) < max(len(need), int(attempt.config["min_copies"])):
                return None
            if len(have) < attempt.replicas:
                reasons.append(f"rank {rank} has {len(have)} of {attempt.replicas} copies")
            reasons += [f"{h}: {job.refusals[shard, h]}" for h in wanted if (shard, h) in job.refusals]
            digests.append(next(iter(copies.values())).spec.digest)
            hosts.append(tuple(sorted(copies)))
        if is_finer(placement.level, attempt.level_asked, self.catalog.hosts.failure_domains):
            reasons.insert(0, f"copies are spread over {placement.level}s, not {attempt.level_asked}s")
        return StepCommitted(
            job.name, step.attempt, step.step, attempt.world_size, tuple(digests), tuple(hosts), placement.level,
            bool(reasons), "; ".join(reasons[:3]), self.catalog.wall_s,
        )  # fmt: skip

    # -- facts applied ------------------------------------------------------------------------

    def apply_committed(self, now: float, fact: StepCommitted, *, is_replay: bool) -> None:
        """The commit has spread: tell the ranks, supersede what is older, let retention drop."""
        job = self.catalog.jobs.setdefault(fact.job, Job(fact.job))
        step = StepId(fact.attempt, fact.step)
        job.commits[step] = fact
        job.restores = [r for r in job.restores if r.step > step or fact.reason == ADOPTED]
        attempt = job.attempts.get(fact.attempt)
        if attempt is not None:
            attempt.steps[fact.step] = "committed"
            attempt.has_put, attempt.resume_gap = True, 1
        if is_replay:
            return
        if attempt is not None and attempt is job.newest:
            body = {"degraded": fact.is_degraded, "reason": fact.reason}
            self._tell_level(job, attempt, fact.step, "committed", body)
            for number in [n for n, phase in attempt.steps.items() if n < fact.step and phase == "open"]:
                attempt.steps[number] = "superseded"
                self._forget(job, StepId(attempt.ordinal, number), "superseded", f"step {fact.step} was committed")
        self.retain(job)
        self.catalog.durable.consider(now, job)

    def apply_abandoned(self, fact: StepAbandoned, *, is_replay: bool) -> None:
        """No rank's copy of the step counts any more."""
        job = self.catalog.jobs.setdefault(fact.job, Job(fact.job))
        step = StepId(fact.attempt, fact.step)
        job.abandoned.add(step)
        attempt = job.attempts.get(fact.attempt)
        if attempt is not None:
            attempt.steps[fact.step] = "abandoned"
        if not is_replay:
            self._forget(job, step, "skipped", "another rank had no room for this step")

    def _tell_level(self, job: Job, attempt: Attempt, step: int, level: str, extra: dict[str, object]) -> None:
        body = {"job": job.name, "attempt": attempt.ordinal, "step": step, "level": level, **extra}
        for host in sorted({seat.host_id for seat in attempt.seats.values()}):
            self.catalog.tell(host, "level", body)

    def tell_durable(self, job: Job, step: StepId) -> None:
        """The step is on durable storage; tickets rise to that level."""
        attempt = job.attempts.get(step.attempt)
        if attempt is not None and attempt is job.newest:
            self._tell_level(job, attempt, step.step, "durable", {"degraded": False, "reason": ""})

    def _forget(self, job: Job, step: StepId, level: str, reason: str) -> None:
        attempt = job.attempts.get(step.attempt)
        body = {
            "job": job.name,
            "attempt": step.attempt,
            "step": step.step,
            "level": level,
            "reason": reason,
            "resume": attempt.resume_step if attempt is not None else 0,
        }
        for host in self.catalog.hosts.live_ids():
            self.catalog.tell(host, "abandon", body)
        job.copies.pop(step, None)

    # -- skip ---------------------------------------------------------------------------------

    def skip(self, call: Call) -> None:
        """A rank found no room within its stall budget: the step is abandoned on all ranks alike (R12)."""
        body = call.body
        job = self.catalog.jobs.get(str(body["job"]))
        attempt = job.newest if job is not None else None
        if job is None or attempt is None or attempt.ordinal != body["attempt"]:
            self.catalog.refuse(call, "FencedError", f"job {body['job']!r}: a newer attempt was opened")
            return
        number = int(body["step"])
        phase = attempt.steps.get(number)
        if number >= attempt.resume_step and phase in (None, "open"):
            newest_seen = max([number, *attempt.steps, *(seat.step for seat in attempt.seats.values())])
            attempt.resume_step = newest_seen + attempt.resume_gap
            attempt.resume_gap = min(attempt.resume_gap * 2, RESUME_GAP_MAX)
        if phase in (None, "open"):
            attempt.steps[number] = "abandoned"
            self.catalog.record(StepAbandoned(job.name, attempt.ordinal, number))
        self.retain(job)  # an order to drop may have died with a controller: then its room is still taken
        self.catalog.answer(call, {"resume": attempt.resume_step})

    # -- retention ----------------------------------------------------------------------------

    def retain(self, job: Job) -> None:
        """Drop copies of steps that are no longer kept: only after a newer commit, never a restorable need (R19)."""
        attempt = job.newest
        if attempt is None:
            return
        has_commit = any(s.attempt == attempt.ordinal for s in job.commits)
        spans = job.spans(attempt.ordinal)
        kept = kept_steps(
            [s for s in job.commits if in_lineage(spans, s) and s not in job.retired],
            keep=int(attempt.config["keep_steps"]),
        )
        busy = self.catalog.pinned_steps(job)
        for step in list(job.copies):
            if step in kept or step in busy:
                continue
            is_open = step.attempt == attempt.ordinal and attempt.steps.get(step.step) in ("open", "committing")
            if is_open or not has_commit or not kept or (step.attempt == attempt.ordinal and step > max(kept)):
                continue
            self._drop_step(job, step)
        for step in [s for s in job.commits if s not in job.copies and s not in kept]:
            del job.commits[step]
        for number in [n for n, p in attempt.steps.items() if kept and n < max(kept).step - 1000]:
            del attempt.steps[number]
        self.catalog.compact()

    def shed(self, job: Job) -> None:
        """At an attempt's first put, older steps that no lineage can restore any more make room for it (R10, R22).

        An uncommitted step of an older attempt, or a committed one beyond the restored step that is not whole, would
        otherwise fill the share until the first commit, and the first put could never get slots. Whole committed steps
        beyond the restored one stay until then: a rewind may be taken back.
        """
        attempt = job.newest
        if attempt is None:
            return
        spans, busy = job.spans(attempt.ordinal), self.catalog.pinned_steps(job)
        for step in [s for s in job.copies if s.attempt < attempt.ordinal and s not in busy]:
            commit = job.commits.get(step)
            is_whole = commit is not None and len(job.copies[step]) == commit.world_size
            if commit is None or (not in_lineage(spans, step) and not is_whole):
                self._drop_step(job, step)

    def _drop_step(self, job: Job, step: StepId) -> None:
        """Free every copy of a step in RAM."""
        by_host: dict[str, list[object]] = {}
        for rank, hosts in job.copies[step].items():
            for host in hosts:
                shard = ShardId(job.name, step.attempt, step.step, rank)
                by_host.setdefault(host, []).append(shard_to_wire(shard))
        for host, shards in sorted(by_host.items()):
            self.catalog.tell(host, "drop", {"shards": shards})
        del job.copies[step]
